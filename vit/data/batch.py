"""One split of the table as samples, and samples as batches."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms.v2.functional import pil_to_tensor

from vit.data.arrays import decode_channels, evaluated, is_array
from vit.data.cache import PictureCache
from vit.data.decode import View, decode, decode_view, named
from vit.data.header import DecodeError, read_header
from vit.data.jpeg import decode_tensor_view, fits_tensors, part_of
from vit.data.sampler import Key, mix, seeded
from vit.data.table import DataTable
from vit.data.transforms import Preprocessing, Still, Training

log = logging.getLogger("vit.data")

# Bad files in a row that one picture is replaced for; a folder of bad files ends here.
_REPLACEMENTS = 8


class Batch(NamedTuple):
    """What the loaders yield and the tasks take.

    Args:
        images: (b, c, h, w) uint8; or stored features in their place, (b, d) float32.
        labels: (b,) int64 class index; float (b, k) for several or soft labels.
        index: (b,) int64 row of the data table, so that a prediction can be traced to its file.
        weight: (b,) float32, in tables with weights.
    """

    images: UInt8[Tensor, "b c h w"] | Float[Tensor, "*v b c h w"]
    labels: Int64[Tensor, "b ..."] | Float[Tensor, "b k"]
    index: Int64[Tensor, " b"]  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    weight: Float[Tensor, " b"] | None = None


class Sample(NamedTuple):
    """One picture, or its views, before it joins a batch; row as `index` of `Batch`."""

    image: UInt8[Tensor, "c h w"] | tuple[Tensor, ...]
    label: Any
    row: int
    weight: float | None


class Pictures(Dataset[Sample]):
    """Pictures of one split, decoded and transformed when asked for.

    Asked by position (`pictures[3]`) or by a `Key`. All that is random comes from the seed and the key.

    Args:
        table: the data table.
        split: name of the split, or None for all rows.
        transform: upright picture → uint8 tensor; None shows pictures as they are evaluated.
        preprocessing: says channels, background and value range for decoding.
        max_pixels: largest picture that is decoded.
        seed: of what the transform draws; None for a transform that draws nothing.
        max_errors: unreadable files that one process replaces before it stops; None stops at the first.
        cache: keeps what is shown of training pictures; crops are then taken from shrunken ones.
    """

    def __init__(
        self,
        table: DataTable,
        split: str | None,
        transform: Callable[[Image.Image], Any] | None,
        *,
        preprocessing: Preprocessing,
        max_pixels: int,
        seed: int | None = None,
        max_errors: int | None = None,
        cache: PictureCache | None = None,
    ) -> None:
        if cache is not None and not isinstance(transform, Training | Still):
            raise ValueError(
                "expected training with one view per picture with data.cache, but it has others. Use none."
            )
        self.cache = cache
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
            image = self._image(row)
        return Sample(image, self.table.target(row), row, self.table.weight(row))

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

    def _image(self, row: int) -> UInt8[Tensor, "c h w"] | tuple[UInt8[Tensor, "v c _ _"], ...]:
        transform, cache = self.transform, self.cache
        if isinstance(transform, Training):
            return transform.finish(self._crop(row, transform))
        if transform is not None and not isinstance(transform, Still):
            return transform(self._whole(row))
        shown = (
            self._evaluated(row) if cache is None else cache.pixels(self._identity(row), lambda: self._evaluated(row))
        )
        return shown if transform is None else transform.rest(shown)

    def _crop(self, row: int, transform: Training) -> Image.Image | UInt8[Tensor, "c h w"]:
        """The crop that training draws, from as few pixels as it needs, or from the picture in the cache."""
        cache = self.cache
        if cache is None:
            return self._view(row, transform, transform.view)

        def kept() -> UInt8[Tensor, "c h w"]:
            picture = self._view(row, transform, cache.view)
            return picture if isinstance(picture, Tensor) else pil_to_tensor(picture)

        pixels = cache.pixels(self._identity(row), kept)
        return part_of(pixels, transform.view(pixels.shape[2], pixels.shape[1]), transform.resample)

    def _evaluated(self, row: int) -> UInt8[Tensor, "c h w"]:
        return evaluated(self._read(row), self.preprocessing, name=self.table.path(row), max_pixels=self.max_pixels)

    def _whole(self, row: int) -> Image.Image:
        p = self.preprocessing
        return decode(
            self._read(row),
            name=self.table.path(row),
            channels=p.channels,
            background=p.background,
            value_range=p.value_range,
            max_pixels=self.max_pixels,
            orient=p.orient,
        )

    def _view(
        self, row: int, transform: Training, choose: Callable[[int, int], View]
    ) -> Image.Image | UInt8[Tensor, "c h w"]:
        """The part of a picture that is chosen once its width and height are known."""
        data, p = self._read(row), self.preprocessing
        if is_array(data, p.channels):
            name = self.table.path(row)
            pixels = torch.from_numpy(decode_channels(data, p, name=name, max_pixels=self.max_pixels))
            return part_of(pixels, choose(pixels.shape[2], pixels.shape[1]), transform.resample)

        def view() -> Image.Image | Tensor:
            header = read_header(data, max_pixels=self.max_pixels, orient=p.orient)
            wanted = choose(*header.size)
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

        return named(view, lambda: self.table.path(row))

    def _identity(self, row: int) -> bytes:
        try:
            return self.table.identity(row)
        except OSError as error:
            raise DecodeError(f"{self.table.path(row)}: cannot be read ({error.strerror}).") from error

    def _read(self, row: int) -> bytes:
        try:
            return self.table.read(row)
        except OSError as error:
            raise DecodeError(f"{self.table.path(row)}: cannot be read ({error.strerror}).") from error


def collate(samples: list[Sample]) -> Batch:
    """Stack samples; in a worker process the images go straight into shared memory."""
    images, labels, index, weight = zip(*samples, strict=True)
    return Batch(
        images=_stack(list(images)),
        labels=torch.tensor(labels),
        index=torch.tensor(index),
        weight=None if weight[0] is None else torch.tensor(weight),
    )


def _stack(images: list[Any]) -> Any:
    """Stack in the memory order that pictures come in: decoders give interleaved ones, whose copying apart is slow."""
    if all(isinstance(i, Tensor) and i.ndim == 3 and i.permute(1, 2, 0).is_contiguous() for i in images):
        return default_collate([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return default_collate(images)
