"""Name pictures with a trained model; what is fed to it equals what validation feeds, bit for bit."""

import argparse
import csv
import io
import os
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vit.data.arrays import evaluated
from vit.data.decode import SUFFIXES, check_suffixes, is_picture
from vit.data.header import MAX_PIXELS, DecodeError
from vit.data.transforms import Preprocessing
from vit.models.normalise import Normalise
from vit.models.vit import VisionTransformer
from vit.models.weights import load_weights

Picture = str | os.PathLike[str] | bytes | Image.Image


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the model says of one picture.

    Args:
        path: the picture's file; None for one that came from memory.
        label: name of the likeliest class; None for a picture that cannot be read.
        probability: of that class, in [0, 1].
        top: (class name, probability) of the k likeliest classes, in falling order.
        labels: the classes that the picture has, of a model of several labels: those with probability 0.5 or more.
        error: why the picture cannot be read; None for one that can.
    """

    path: str | None
    label: str | None = None
    probability: float | None = None
    top: tuple[tuple[str, float], ...] = ()
    labels: tuple[str, ...] = ()
    error: str | None = None


class Predictor:
    """A trained model with its class names and its way to prepare pictures.

    Args:
        model: on any device.
        classes: names in the order of the logits.
        preprocessing: how the model wants its pictures.
        several: a picture can have several classes: probabilities are those of yes for each, and need not sum to 1.
        max_pixels: largest width times height that is decoded.
    """

    def __init__(
        self,
        model: VisionTransformer,
        *,
        classes: Sequence[str],
        preprocessing: Preprocessing,
        several: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.classes, self.several = tuple(classes), several
        self.preprocessing, self.max_pixels = preprocessing, max_pixels
        self._net = Normalise(model, mean=preprocessing.mean, std=preprocessing.std).eval()
        self._device = next(model.parameters()).device

    @classmethod
    def load(cls, source: str | os.PathLike[str], *, max_pixels: int = MAX_PIXELS) -> "Predictor":
        """From a run folder, a model folder or a checkpoint; nothing else is needed.

        Args:
            source: its path.
            max_pixels: largest width times height that is decoded.

        Raises:
            ValueError: there is no model at `source`, or one without classes.
        """
        loaded = load_weights(os.fspath(source))
        if not loaded.classes:
            raise ValueError(
                f"expected a model that names pictures, but {source} was pre-trained without labels and has no "
                f"classes. Fine-tune it first: vit fit --config finetune_folder --model.weights {source}"
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        prepared = Preprocessing.from_dict(loaded.preprocessing)
        return cls(
            loaded.model.to(device),
            classes=loaded.classes,
            preprocessing=prepared,
            several=loaded.several,
            max_pixels=max_pixels,
        )

    def prepare(self, picture: Picture) -> UInt8[Tensor, "c h w"]:
        """Decode and resize a picture as in validation.

        Raises:
            DecodeError: the picture cannot be read.
        """
        if isinstance(picture, Image.Image):
            # Through a lossless file, so that pictures in memory take the one way of decoding too.
            file = io.BytesIO()
            picture.save(file, "TIFF" if picture.mode in ("F", "I", "CMYK") else "PNG")
            picture = file.getvalue()
        return evaluated(picture, self.preprocessing, max_pixels=self.max_pixels)

    @torch.inference_mode()
    def logits(self, images: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        """Scores of prepared pictures, on the CPU."""
        return self._net(images.to(self._device)).float().cpu()

    def probabilities(self, images: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        """Probabilities of the classes of prepared pictures, on the CPU."""
        logits = self.logits(images)
        return logits.sigmoid() if self.several else logits.softmax(1)

    def predict(
        self, pictures: Picture | Iterable[Picture], *, top_k: int = 3, batch_size: int = 32
    ) -> list[Prediction]:
        """Name pictures, in input order.

        Args:
            pictures: paths, file contents or PIL pictures; one or many.
            top_k: how many classes to tell for each.
            batch_size: pictures at once.
        """
        if isinstance(pictures, (str, os.PathLike, bytes, Image.Image)):
            pictures = [pictures]
        return list(self.stream(pictures, top_k=top_k, batch_size=batch_size))

    def stream(self, pictures: Iterable[Picture], *, top_k: int = 3, batch_size: int = 32) -> Iterator[Prediction]:
        """As `predict`, a batch at a time; a picture that cannot be read gives a prediction with its error.

        Raises:
            ValueError: top_k or batch_size below 1.
        """
        if top_k < 1 or batch_size < 1:
            raise ValueError(f"expected top_k and batch_size of at least 1, but got {top_k} and {batch_size}.")
        batch: list[Picture] = []
        for picture in pictures:
            batch.append(picture)
            if len(batch) == batch_size:
                yield from self._predict_batch(batch, top_k)
                batch = []
        if batch:
            yield from self._predict_batch(batch, top_k)

    def _predict_batch(self, pictures: Sequence[Picture], top_k: int) -> list[Prediction]:
        images: list[Tensor] = []
        errors: list[str | None] = []
        for picture in pictures:
            try:
                images.append(self.prepare(picture))
                errors.append(None)
            except DecodeError as failure:
                errors.append(str(failure))
        scores = iter(self.probabilities(torch.stack(images))) if images else iter(())
        made = []
        for picture, error in zip(pictures, errors, strict=True):
            path = None if isinstance(picture, (bytes, Image.Image)) else os.fspath(picture)
            if error is not None:
                made.append(Prediction(path=path, error=error))
                continue
            each = next(scores)
            values, numbers = each.topk(min(top_k, len(self.classes)))
            top = tuple((self.classes[n], float(v)) for n, v in zip(numbers.tolist(), values, strict=True))
            labels = tuple(name for name, v in zip(self.classes, each, strict=True) if self.several and v >= 0.5)
            made.append(Prediction(path=path, label=top[0][0], probability=top[0][1], top=top, labels=labels))
        return made


def find_pictures(paths: Sequence[str], suffixes: Collection[str] = SUFFIXES) -> list[str]:
    """Files as they are given; folders give the pictures below them, sorted.

    Args:
        paths: files and folders.
        suffixes: endings of the files in folders that are pictures, in lower case.

    Raises:
        ValueError: a path that does not exist, no picture at all, or suffixes of another form.
    """
    check_suffixes(suffixes)
    found: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = (p for p in path.rglob("*") if p.is_file() and is_picture(p.name, suffixes))
            found += sorted(str(p) for p in below if not p.name.startswith("."))
        elif path.exists():
            found.append(str(path))
        else:
            raise ValueError(f"expected pictures or folders, but there is nothing at {path}.")
    if not found:
        raise ValueError(
            f"expected at least one picture in {', '.join(paths)}, but found none. Other endings, such as .npy, are "
            "given with --suffixes."
        )
    return found


def write_csv(predictions: Iterable[Prediction], file: TextIO, *, top_k: int, several: bool = False) -> int:
    """Write one row per picture: path, class, probability, the next classes, all labels where there can be several.

    Returns:
        How many pictures could not be read.
    """
    more = [name for k in range(2, top_k + 1) for name in (f"class_{k}", f"probability_{k}")]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["path", "class", "probability", *more, *(["labels"] if several else []), "error"])
    failed = 0
    for p in predictions:
        cells: list[Any] = [cell for name, value in p.top for cell in (name, f"{value:.6f}")]
        cells += [""] * (2 * top_k - len(cells))
        cells += ["|".join(p.labels)] if several else []
        writer.writerow([p.path, *cells, p.error or ""])
        failed += p.error is not None
    return failed


def command(words: Sequence[str]) -> int:
    """`vit predict RUN PICTURE ...`; 1 if a picture could not be read."""
    parser = argparse.ArgumentParser(
        prog="vit predict", description="Name pictures; prints CSV in input order.", allow_abbrev=False
    )
    parser.add_argument("run", help="a run folder, a model folder or a checkpoint")
    parser.add_argument("pictures", nargs="+", help="files, or folders that hold them")
    parser.add_argument("--out", help="file for the CSV; default is the screen")
    parser.add_argument("--top_k", type=int, default=3, help="classes to tell for each picture (default 3)")
    parser.add_argument("--batch_size", type=int, default=32, help="pictures at once (default 32)")
    parser.add_argument("--max_pixels", type=int, default=MAX_PIXELS, help="largest width times height that is decoded")
    parser.add_argument("--suffixes", nargs="+", default=SUFFIXES, help="endings of pictures in folders, such as .npy")
    options = parser.parse_args(words)
    predictor = Predictor.load(options.run, max_pixels=options.max_pixels)
    top_k = min(options.top_k, len(predictor.classes))
    pictures = find_pictures(options.pictures, options.suffixes)
    predictions = predictor.stream(pictures, top_k=options.top_k, batch_size=options.batch_size)
    if options.out is None:
        failed = write_csv(predictions, sys.stdout, top_k=top_k, several=predictor.several)
    else:
        failed = _write_file(predictions, Path(options.out), top_k=top_k, several=predictor.several)
    if failed:
        print(f"{failed} pictures could not be read; the column `error` says why.", file=sys.stderr)
    return 1 if failed else 0


def _write_file(predictions: Iterable[Prediction], file: Path, *, top_k: int, several: bool) -> int:
    """Write beside the file and rename, so that a broken run leaves no half table."""
    try:
        handle, beside = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
    except OSError as error:
        raise ValueError(f"expected a place to write {file}, but it cannot be written: {error}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as opened:
            failed = write_csv(predictions, opened, top_k=top_k, several=several)
        os.replace(beside, file)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    print(f"wrote {file}")
    return failed
