"""IDX files: MNIST, Fashion-MNIST and others in their form, packed or not."""

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray

from vit.data.augment import Augmentation
from vit.data.source import Source
from vit.data.stratify import TEST, TRAIN
from vit.data.table import Rows

_BYTES = 0x08  # the type code of unsigned bytes
_MOST_BYTES = 2_000_000_000
_AUGMENT = Augmentation(preset="light", flip=0.0)
_KINDS = {"train": TRAIN, "t10k": TEST}


@dataclass(frozen=True, kw_only=True)
class IDX(Source):
    """Grey pictures and labels in IDX files, as MNIST's; the files t10k-* are test, val is split off train.

    The files are named train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
    t10k-labels-idx1-ubyte, or with a dot before idx, each with or without .gz. Nothing is flipped: a mirrored
    digit is another sign. Nothing is written but the table.

    Args:
        root: folder of the files.
        classes: the class names in the order of their labels; default those of the data set, else numbers.

    Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits" (1998), section on the format.
    """

    _names: ClassVar[tuple[str, ...] | None] = None

    root: str
    classes: tuple[str, ...] | None = None
    augment: Augmentation = _AUGMENT

    def scan(self) -> Rows:
        """Read the files.

        Raises:
            ValueError: one is missing, damaged, longer or shorter than its header says, or holds labels
                without a name.
        """
        root = Path(self.root).expanduser().absolute()
        images: list[bytes] = []
        paths: list[bytes] = []
        labels: list[UInt8[ndarray, " n"]] = []
        splits: list[int] = []
        sums: list[str] = []
        for kind, split in _KINDS.items():
            picture_file = _find(root, f"{kind}-images", 3)
            label_file = _find(root, f"{kind}-labels", 1)
            pixels, numbers = read_idx(picture_file, 3), read_idx(label_file, 1)
            if len(pixels) != len(numbers) or not pixels.size:
                raise ValueError(
                    f"expected as many pictures as labels, and some, but {picture_file} holds {len(pixels)} and "
                    f"{label_file} {len(numbers)}. Fetch both again."
                )
            header = f"P5 {pixels.shape[2]} {pixels.shape[1]} 255\n".encode()
            images += [header + picture.tobytes() for picture in pixels]
            paths += [f"{kind}/{number:05d}".encode() for number in range(len(pixels))]
            labels.append(numbers)
            splits += [split] * len(pixels)
            sums.append(hashlib.sha256(numbers.tobytes()).hexdigest()[:16])
        together = np.concatenate(labels).astype(np.int32)
        return Rows(
            classes=self._classes(int(together.max())),
            root=root,
            paths=paths,
            labels=together,
            splits=np.array(splits, dtype=np.int8),
            images=images,
            info={"labels_sha256": sums},
        )

    def _classes(self, highest: int) -> tuple[str, ...]:
        names = self.classes or self._names or tuple(str(k) for k in range(highest + 1))
        if highest >= len(names):
            raise ValueError(
                f"expected labels below {len(names)}, one for each of {', '.join(names[:20])}, but the files hold "
                f"{highest}. Name all classes with data.classes."
            )
        return names


@dataclass(frozen=True, kw_only=True)
class MNIST(IDX):
    """Handwritten digits: 70,000 pictures of 28x28 pixels, from IDX files."""

    _names: ClassVar[tuple[str, ...] | None] = tuple("0123456789")


@dataclass(frozen=True, kw_only=True)
class FashionMNIST(IDX):
    """Pieces of clothing: 70,000 pictures of 28x28 pixels, 10 classes, from IDX files.

    Source: Xiao, Rasul, Vollgraf, "Fashion-MNIST" (2017).
    """

    _names: ClassVar[tuple[str, ...] | None] = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )


def _find(root: Path, start: str, dimensions: int) -> Path:
    names = [f"{start}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for name in names:
        if (root / name).is_file():
            return root / name
    came = ", ".join(sorted(p.name for p in root.iterdir())[:10]) or "nothing" if root.is_dir() else "no such folder"
    raise ValueError(f"expected {names[0]} or {names[1]} in {root}, but there is: {came}. Put the file there.")


def read_idx(file: Path, dimensions: int) -> UInt8[ndarray, "..."]:
    """An array of bytes from an IDX file, checked against its header (and a packed one against its checksum).

    Args:
        file: the file; packed if it ends in .gz.
        dimensions: number of dimensions that it must have.

    Raises:
        ValueError: damaged, of another type, or not as long as its header says.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            head = stream.read(4 + 4 * dimensions)
            if len(head) < 4 + 4 * dimensions or head[:4] != bytes([0, 0, _BYTES, dimensions]):
                raise ValueError(
                    f"expected an IDX file of bytes in {dimensions} dimension(s) at {file}, but it begins with "
                    f"{head[:4].hex() or 'nothing'}. Fetch it again."
                )
            shape = tuple(int.from_bytes(head[4 + 4 * d : 8 + 4 * d], "big") for d in range(dimensions))
            length = int(np.prod([float(side) for side in shape]))
            if length > _MOST_BYTES:
                raise ValueError(f"expected at most {_MOST_BYTES:,} bytes in {file}, but its header says {shape}.")
            data = stream.read(length + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"expected a whole IDX file at {file}, but it is damaged ({error}). Fetch it again."
        ) from error
    if len(data) != length:
        state = "more" if len(data) > length else f"only {len(data):,}"
        raise ValueError(
            f"expected {length:,} bytes after the header of {file}, but there are {state}. Fetch it again."
        )
    return np.frombuffer(data, np.uint8).reshape(shape)
