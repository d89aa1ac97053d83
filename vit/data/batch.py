"""One split of the table as samples, and samples as batches."""

import logging
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from vit.data.decode import DecodeError, decode, decode_view, named, read_header
from vit.data.jpeg import decode_tensor_view, fits_tensors
from vit.data.sampler import Key, mix, seeded
from vit.data.table import DataTable
from vit.data.transforms import Preprocessing, Training, Transform

log = logging.getLogger("vit.data")

# Bad files in a row that one picture is replaced for; a folder of bad files ends here.
_REPLACEMENTS = 8


class Batch(NamedTuple):
    """What the loaders yield and the tasks take.

    Args:
        images: (b, c, h, w) uint8; float32 in [0, 1] only for sources deeper than 8 bits.
        labels: (b,) int64 class index; float (b, k) for several or soft labels; int64 (b, t) for sequences.
        index: (b,) int64 row of the data table, so that a prediction can be traced to its file.
        weight: (b,) float32, in tables with weights.
    """

    images: UInt8[Tensor, "b c h w"] | Float[Tensor, "*v b c h w"]
    labels: Int64[Tensor, "b ..."] | Float[Tensor, "b k"]
    index: Int64[Tensor, " b"]  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    weight: Float[Tensor, " b"] | None = None


class Sample(NamedTuple):
    """One picture before it joins a batch; row as `index` of `Batch`."""

    image: UInt8[Tensor, "c h w"]
    label: Any
    row: int
    weight: float | None


class Pictures(Dataset[Sample]):
    """Pictures of one split, decoded and transformed when asked for.

    Asked by position (`pictures[3]`) or by a `Key`. All that is random comes from the seed and the key.

    Args:
        table: the data table.
        split: name of the split, or None for all rows.
        transform: upright picture → uint8 tensor.
        preprocessing: says channels, background and value range for decoding.
        max_pixels: largest picture that is decoded.
        seed: of what the transform draws; None for a transform that draws nothing.
        max_errors: unreadable files that one process replaces before it stops; None stops at the first.
    """

    def __init__(
        self,
        table: DataTable,
        split: str | None,
        transform: Transform,
        *,
        preprocessing: Preprocessing,
        max_pixels: int,
        seed: int | None = None,
        max_errors: int | None = None,
    ) -> None:
        self.max_errors, self._bad = max_errors, set[int]()
        self.table, self.rows = table, table.rows(split)
        self.transform, self.preprocessing = transform, preprocessing
        self.max_pixels, self.seed = max_pixels, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | Key) -> Sample:
        epoch, repeat, position = key if isinstance(key, tuple) else (0, 0, key)
        row = self.rows[position]
        for attempt in range(_REPLACEMENTS):
            try:
                return self._sample(row, epoch, repeat)
            except DecodeError as error:
                if self.max_errors is None or attempt == _REPLACEMENTS - 1:
                    raise
                self._count(row, error)
            # Drawn from the row alone, so that no number of workers and no resume changes it.
            row = self.rows[mix(row, attempt) % len(self.rows)]
        raise AssertionError("the last attempt returns or raises")

    def _sample(self, row: int, epoch: int, repeat: int) -> Sample:
        with seeded(mix(self.seed, epoch, row, repeat)) if self.seed is not None else nullcontext():
            image = self._image(self._read(row), self.table.path(row))
        return Sample(image, self.table.label(row), row, self.table.weight(row))

    def _count(self, row: int, error: DecodeError) -> None:
        """Say each bad file once, and stop at too many."""
        assert self.max_errors is not None
        if row in self._bad:
            return
        self._bad.add(row)
        if len(self._bad) > self.max_errors:
            raise DecodeError(
                f"{error} It is file {len(self._bad)} that cannot be used, and data.max_errors is {self.max_errors}. "
                "Find them all with: vit check"
            ) from error
        log.warning("skipped, another picture takes its place (%d skipped so far): %s", len(self._bad), error)

    def _image(self, data: bytes, name: str) -> UInt8[Tensor, "c h w"]:
        p, transform, limit = self.preprocessing, self.transform, self.max_pixels
        if not isinstance(transform, Training):
            return transform(
                decode(
                    data,
                    name=name,
                    channels=p.channels,
                    background=p.background,
                    value_range=p.value_range,
                    max_pixels=limit,
                    orient=p.orient,
                )
            )

        def view() -> Image.Image | Tensor:
            header = read_header(data, max_pixels=limit, orient=p.orient)
            wanted = transform.view(*header.size)
            if fits_tensors(header, wanted, transform.resample, p.channels):
                pixels = decode_tensor_view(data, wanted, transform.resample)
                if pixels is not None:
                    return pixels
            return decode_view(
                header,
                wanted,
                transform.resample,
                channels=p.channels,
                background=p.background,
                value_range=p.value_range,
            )

        return transform.finish(named(view, name))

    def _read(self, row: int) -> bytes:
        try:
            return self.table.read(row)
        except OSError as error:
            raise DecodeError(f"{self.table.path(row)}: cannot be read ({error.strerror}).") from error


def collate(samples: list[Sample]) -> Batch:
    """Stack samples; in a worker process the images go straight into shared memory."""
    images, labels, index, weight = zip(*samples, strict=True)
    return Batch(
        images=default_collate(list(images)),
        labels=torch.tensor(labels),
        index=torch.tensor(index),
        weight=None if weight[0] is None else torch.tensor(weight),
    )
