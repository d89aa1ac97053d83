"""CIFAR-10 and CIFAR-100 from their official archives, Python or binary, read without running code in them."""

import hashlib
import io
import os
import pickle
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray
from torchvision.datasets import cifar as published
from torchvision.datasets.utils import download_url

from vit.data.cifar_binary import BINARY_10, BINARY_100, BinaryForm, check_official, read_binary
from vit.data.source import Source
from vit.data.stratify import TEST, TRAIN
from vit.data.table import Rows, cache_folder

_SIDE = 32
_Batch: TypeAlias = tuple[str, int, UInt8[ndarray, "n h w c"], list[int]]
_MOST_BYTES = 200_000_000  # the largest official file, CIFAR-100's train, has 155 MB


@dataclass(frozen=True, kw_only=True)
class CIFAR10(Source):
    """CIFAR-10: 60,000 pictures of 32x32 pixels, 10 classes.

    The official test set is test; val is split off train. Python or binary form, packed or unpacked, nothing is
    written but the table.

    Args:
        root: folder of the archive or of the unpacked batches, or the archive itself; default a folder in the
            cache.
        download: fetch the archive (170 MB) if it is not there.
        checksum: compare every file with its published MD5 sum before it is read. Either way the reader
            admits arrays of bytes, lists, texts and numbers only.
    """

    _published: ClassVar[type[published.CIFAR10]] = published.CIFAR10
    _binary: ClassVar[BinaryForm] = BINARY_10

    root: str | None = None
    download: bool = True
    checksum: bool = True

    def scan(self) -> Rows:
        """Read the archive.

        Raises:
            ValueError: it is missing and cannot be fetched, or holds anything but pictures and labels.
        """
        place, binary = self._found()
        classes, batches = self._binary_batches(place) if binary else self._python_batches(place)
        images: list[bytes] = []
        paths: list[bytes] = []
        labels: list[int] = []
        splits: list[int] = []
        for name, split, pixels, batch_labels in batches:
            _check_labels(batch_labels, len(pixels), len(classes), name)
            images += as_ppm(pixels)
            labels += batch_labels
            paths += [f"{name}/{number:05d}".encode() for number in range(len(pixels))]
            splits += [split] * len(pixels)
        return Rows(
            classes=classes,
            root=place,
            paths=paths,
            labels=np.array(labels, dtype=np.int32),
            splits=np.array(splits, dtype=np.int8),
            images=images,
        )

    def _keys(self) -> tuple[bytes, bytes]:
        """Names of the class list in the meta file and of the labels in a batch."""
        return b"label_names", b"labels"

    def _label_byte(self) -> int:
        """Which label byte of the binary form counts."""
        return 0

    def _found(self) -> tuple[Path, bool]:
        """Where the data lie, and whether in binary form."""
        official = self._published
        root = Path(self.root).expanduser().absolute() if self.root else cache_folder() / "downloads"
        place = self._place(root)
        if place is None and self.download:
            _download(official, root)
            place = self._place(root)
        if place is None:
            raise ValueError(
                f"expected {official.filename}, {self._binary.archive} or an unpacked folder {official.base_folder}/ "
                f"or {self._binary.base}/ in {root}, but none is there. Put the archive there (from {official.url}), "
                "or set data.download to true."
            )
        return place

    def _place(self, root: Path) -> tuple[Path, bool] | None:
        forms = (
            (False, self._published.base_folder, self._published.test_list[0][0], self._published.filename),
            (True, self._binary.base, self._binary.test[0], self._binary.archive),
        )
        if root.is_file():
            return root, "binary" in root.name
        for binary, base, first, _ in forms:
            for folder in (root, root / base):
                if (folder / first).is_file():
                    return folder, binary
        return next(((root / name, binary) for binary, _, _, name in forms if (root / name).is_file()), None)

    def _python_batches(self, place: Path) -> tuple[tuple[str, ...], list[_Batch]]:
        """Class names, and each batch as name, split, pixels, labels."""
        official = self._published
        sums = {name: md5 for name, md5 in official.train_list + official.test_list}
        sums[official.meta["filename"]] = official.meta["md5"]
        read = _read_folder if place.is_dir() else _read_archive
        files = read(place, official.base_folder, list(sums))
        for name, data in files.items():
            if self.checksum and hashlib.md5(data, usedforsecurity=False).hexdigest() != sums[name]:
                raise ValueError(
                    f"expected the published checksum {sums[name]} for {name}, but {place} holds another "
                    "file of that name. Fetch the archive again, or set data.checksum to false for "
                    "one of your own."
                )
        names_key, label_key = self._keys()
        meta = official.meta["filename"]
        classes = tuple(name.decode() for name in _entry(read_plain(files[meta], meta), names_key, list, meta))
        batches: list[_Batch] = []
        for names, split in ((official.train_list, TRAIN), (official.test_list, TEST)):
            for name, _ in names:
                batch = read_plain(files[name], name)
                pixels = _pixels(_entry(batch, b"data", ndarray, name), name)
                batches.append((name, split, pixels, _entry(batch, label_key, list, name)))
        return classes, batches

    def _binary_batches(self, place: Path) -> tuple[tuple[str, ...], list[_Batch]]:
        """The same from the binary form."""
        form, which = self._binary, self._label_byte()
        read = _read_folder if place.is_dir() else _read_archive
        files = read(place, form.base, form.files)
        if self.checksum:
            check_official(form, place, files)
        classes = tuple(files[form.names[which]].decode("ascii", "replace").split())
        batches: list[_Batch] = []
        for names, split in ((form.train, TRAIN), (form.test, TEST)):
            for name in names:
                rows, labels = read_binary(files[name], len(form.names), which, name)
                batches.append((name, split, _pixels(rows, name), labels))
        return classes, batches


@dataclass(frozen=True, kw_only=True)
class CIFAR100(CIFAR10):
    """CIFAR-100: 60,000 pictures of 32x32 pixels; 100 classes (fine) or their 20 groups (coarse).

    Args:
        labels: `fine` or `coarse`.
    """

    _published: ClassVar[type[published.CIFAR10]] = published.CIFAR100
    _binary: ClassVar[BinaryForm] = BINARY_100

    labels: Literal["fine", "coarse"] = "fine"

    def _keys(self) -> tuple[bytes, bytes]:
        return f"{self.labels}_label_names".encode(), f"{self.labels}_labels".encode()

    def _label_byte(self) -> int:
        return ("coarse", "fine").index(self.labels)


def _download(official: type[published.CIFAR10], root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as draft:
            download_url(official.url, draft, official.filename, official.tgz_md5)
            os.replace(Path(draft) / official.filename, root / official.filename)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"expected to fetch {official.url}, but that failed ({error}). Put the file {official.filename} "
            f"into {root} by hand."
        ) from error


def _read_folder(folder: Path, base: str, names: list[str]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name in names:
        file = folder / name
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            state = "is too large" if file.is_file() else "is missing"
            raise ValueError(f"expected the official file {file}, but it {state}. Unpack the archive again.")
        files[name] = file.read_bytes()
    return files


def _read_archive(archive: Path, base: str, names: list[str]) -> dict[str, bytes]:
    """Read the named members; nothing is written to disk.

    An archive with a member that climbs out of it, with a link or with a huge member is refused as a whole: it is
    not the official one.
    """
    wanted = {f"{base}/{name}": name for name in names}
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                _refuse_member(member, archive)
                stream = tar.extractfile(member) if member.name in wanted else None
                if stream is not None:
                    files[wanted[member.name]] = stream.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(
            f"expected a tar archive at {archive}, but it is damaged ({error}). Fetch it again."
        ) from error
    missing = sorted(set(names) - set(files))
    if missing:
        raise ValueError(
            f"expected the official archive at {archive}, but it lacks {', '.join(missing)} in {base}/. Fetch it again."
        )
    return files


def _refuse_member(member: tarfile.TarInfo, archive: Path) -> None:
    name = member.name
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
        came = f"{name}, which lies outside of it"
    elif not (member.isreg() or member.isdir()):
        came = f"{name}, which is no file but a link or device"
    elif member.size > _MOST_BYTES:
        came = f"{name} with {member.size:,} bytes"
    else:
        return
    raise ValueError(f"expected the files of the official archive in {archive}, but it holds {came}. Fetch it again.")


class _Array:
    """A byte array in a pickle, rebuilt by hand: numpy's unpickling is not trusted with a stranger's file."""

    __slots__ = ("values",)

    def __setstate__(self, state: tuple[int, tuple[int, ...], "_ByteType", bool, bytes]) -> None:
        _, shape, kind, column_major, data = state
        if not (isinstance(kind, _ByteType) and isinstance(data, bytes)):
            raise pickle.UnpicklingError("an array of anything but bytes")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if column_major else "C")


class _ByteType:
    """The dtype uint8 in a pickle."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class _Named:
    """A name that a pickle may look up: the class ndarray, which is only ever an argument."""

    __slots__ = ()


class _MakeArray:
    __slots__ = ()

    def __call__(self, kind: object, shape: object, code: object) -> _Array:
        return _Array()


class _MakeType:
    __slots__ = ()

    def __call__(self, code: object, align: object = False, copy: object = True) -> _ByteType:
        if code not in (b"u1", "u1"):
            raise pickle.UnpicklingError(f"an array of dtype {code!r}")
        return _ByteType()


class _Encode:
    """Bytes as Python 3 writes them in old protocols."""

    __slots__ = ()

    def __call__(self, text: object, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding not in (b"latin1", "latin1"):
            raise pickle.UnpicklingError("a text in an unknown encoding")
        return text.encode("latin1")


class _PlainReader(pickle.Unpickler):
    """Admits containers, numbers, texts, byte arrays. Nothing else can be named, so nothing can be run."""

    _ADMITTED: ClassVar[dict[tuple[str, str], type]] = {
        ("numpy.core.multiarray", "_reconstruct"): _MakeArray,
        ("numpy._core.multiarray", "_reconstruct"): _MakeArray,
        ("numpy", "ndarray"): _Named,
        ("numpy", "dtype"): _MakeType,
        ("_codecs", "encode"): _Encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self._ADMITTED[module, name]()


def read_plain(data: bytes, name: str) -> dict[bytes, Any]:
    """Read a pickled dictionary of plain values and byte arrays.

    Args:
        data: the pickle, as Python 2 or 3 wrote it.
        name: what an error calls it.

    Raises:
        ValueError: it is damaged or holds anything else.
    """
    try:
        values = _PlainReader(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(values, dict):
            raise pickle.UnpicklingError(f"it is a {type(values).__name__}, not a dictionary")
        return {key: v.values if isinstance(v, _Array) else v for key, v in values.items()}
    except Exception as error:  # a hostile pickle raises nearly anything
        raise ValueError(
            f"expected only arrays of bytes, lists, texts and numbers in {name}, but: {error}. "
            "The file is damaged or made to run code; fetch the official one."
        ) from error


def _entry(batch: dict[bytes, Any], key: bytes, kind: type, name: str) -> Any:
    if not isinstance(batch.get(key), kind):
        raise ValueError(
            f"expected {key.decode()} as a {kind.__name__} in {name}, but got "
            f"{type(batch.get(key)).__name__}. Fetch the official archive."
        )
    return batch[key]


def _pixels(data: UInt8[ndarray, "..."], name: str) -> UInt8[ndarray, "n h w c"]:
    if data.ndim != 2 or data.shape[1] != 3 * _SIDE * _SIDE:
        raise ValueError(f"expected rows of 3,072 bytes in {name}, but got an array of shape {data.shape}.")
    return data.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)


def _check_labels(labels: list[Any], count: int, classes: int, name: str) -> None:
    if len(labels) != count or not all(isinstance(v, int) and 0 <= v < classes for v in labels):
        raise ValueError(
            f"expected {count} labels from 0 to {classes - 1} in {name}, but they do not fit. "
            "Fetch the official archive."
        )


def as_ppm(pixels: UInt8[ndarray, "n h w c"]) -> list[bytes]:
    """Each picture as a PPM file: lossless, cheap to make, and read by the decoder like any other file."""
    header = f"P6 {pixels.shape[2]} {pixels.shape[1]} 255\n".encode()
    return [header + picture.tobytes() for picture in pixels]
