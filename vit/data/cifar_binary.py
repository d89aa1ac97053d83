"""The binary form of the CIFAR archives: label bytes and 3,072 pixel bytes per picture, no pickles."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class BinaryForm:
    """What the binary archive of a data set is called and holds.

    Args:
        archive: file name of the archive.
        md5: its published sum.
        base: folder in it.
        train: files of training pictures.
        test: files of test pictures.
        names: file of the class names, for each label byte.
        pictures: pictures in all train files, and in all test files.
    """

    archive: str
    md5: str
    base: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: tuple[str, ...]
    pictures: tuple[int, int]

    @property
    def files(self) -> list[str]:
        """All files."""
        return [*self.names, *self.train, *self.test]


BINARY_10 = BinaryForm(
    archive="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    base="cifar-10-batches-bin",
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test=("test_batch.bin",),
    names=("batches.meta.txt",),
    pictures=(50_000, 10_000),
)
BINARY_100 = BinaryForm(
    archive="cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    base="cifar-100-binary",
    train=("train.bin",),
    test=("test.bin",),
    names=("coarse_label_names.txt", "fine_label_names.txt"),
    pictures=(50_000, 10_000),
)


def check_official(form: BinaryForm, place: Path, files: dict[str, bytes]) -> None:
    """Compare the packed archive with its published sum, unpacked files with their official length.

    Raises:
        ValueError: they differ.
    """
    if place.is_file():
        with place.open("rb") as stream:
            found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        wrong = None if found == form.md5 else f"the published checksum {form.md5} for {place}, but it has {found}"
    else:
        record = len(form.names) + _PIXELS
        wrong = None
        for names, pictures in ((form.train, form.pictures[0]), (form.test, form.pictures[1])):
            length = record * pictures // len(names)
            for name in names:
                if len(files[name]) != length:
                    wrong = f"the official {length:,} bytes in {place / name}, but it has {len(files[name]):,}"
    if wrong:
        raise ValueError(
            f"expected {wrong}. Fetch the archive again, or set data.checksum to false for one of your own."
        )


def read_binary(data: bytes, labels: int, which: int, name: str) -> tuple[UInt8[ndarray, "n 3072"], list[int]]:
    """Pixel rows and labels of a binary file.

    Args:
        data: the whole file.
        labels: label bytes before the pixels of each picture.
        which: the label byte to take.
        name: what an error calls the file.

    Raises:
        ValueError: not a whole number of pictures.
    """
    record = labels + _PIXELS
    if not data or len(data) % record:
        raise ValueError(
            f"expected a multiple of {record:,} bytes in {name}, but it has {len(data):,}. Fetch the official archive."
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    return rows[:, labels:], rows[:, which].tolist()
