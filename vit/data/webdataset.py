"""WebDataset: pictures and labels in tar shards, read at random where they lie.

The library webdataset streams shards one after the other, and mixes their pictures in a buffer. Here an epoch is
drawn from all pictures by the seed and goes on at any picture, so shards are indexed once, and each picture is read
at its place. The library says which shards a pattern names and which members of a shard belong together.
"""

import hashlib
import json
import mmap
import os
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from vit.data.decode import SUFFIXES
from vit.data.labels import number_labels
from vit.data.source import Source
from vit.data.stratify import TEST, TRAIN, VAL
from vit.data.table import Rows, make_cache_folder

# Members that the library skips: https://github.com/webdataset/webdataset, tariterators.py.
_META = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True, kw_only=True)
class WebDataset(Source):
    """Tar shards of the WebDataset form: pip install "vit-toolkit[streaming]".

    A shard holds `key.jpg` (or another picture) and `key.cls`, `key.txt` or `key.json` one after the other. Shards
    must lie on a disk and be uncompressed. Their index is kept in the cache until a shard changes.

    Args:
        root: folder that patterns are relative to.
        train_shards: pattern, such as "train-{000..146}.tar"; several are joined with "::".
        val_shards: likewise; default a part of train.
        test_shards: likewise.
        picture: extension of the picture, such as "jpg", where a sample has several pictures.
        label: extension of the label: `cls` (whole numbers are class numbers, as for the library, anything else is
            a class name), `txt` (class names), or `json.FIELD` (a number, a name, or a list of them).
        classes: class names in the order of their numbers.
        classes_file: the same as a text file, one name per line, relative to root.

    Source: Aizman, Maltby, Breuel, "High Performance I/O for Large Scale Deep Learning" (2019).
    """

    root: str
    train_shards: str
    val_shards: str | None = None
    test_shards: str | None = None
    picture: str | None = None
    label: str = "cls"
    classes: tuple[str, ...] | None = None
    classes_file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label not in ("cls", "txt") and not re.fullmatch(r"json\..+", self.label):
            raise ValueError(f"expected label cls, txt or json.FIELD, but got {self.label!r}.")
        if self.classes is not None and self.classes_file is not None:
            raise ValueError("expected classes or classes_file, but got both. Leave one of them out.")

    def scan(self) -> Rows:
        """Index the shards.

        Raises:
            ValueError: the library or a shard is missing; a shard is compressed, damaged, or has members that are
                no plain files inside of it; a sample lacks its picture or its label, or comes twice.
        """
        root = Path(self.root).expanduser().absolute()
        shards: list[str] = []
        names: list[bytes] = []
        values: list[Any] = []
        splits: list[int] = []
        places: list[tuple[int, int, int]] = []
        for code, pattern in ((TRAIN, self.train_shards), (VAL, self.val_shards), (TEST, self.test_shards)):
            for shard in _expanded(pattern):
                file = root / shard
                if shard in shards:
                    raise ValueError(f"expected each shard once, but {file} is named twice. Mend the patterns.")
                samples = list(self._samples(file))
                names += [os.fsencode(f"{shard}/{sample.name}") for sample in samples]
                values += [sample.label for sample in samples]
                places += [(len(shards), sample.offset, sample.size) for sample in samples]
                splits += [code] * len(samples)
                shards.append(shard)
        name, count = Counter(names).most_common(1)[0] if names else (b"", 0)
        if count > 1:
            raise ValueError(f"expected each key once in a shard, but {os.fsdecode(name)} comes {count} times.")
        codes = np.array(splits, dtype=np.int8)
        where = f"the {self.label} of the shards in {root}"
        labels, classes = number_labels(values, codes, given=self._class_names(root), where=where)
        return Rows(
            classes=classes,
            root=root,
            paths=names,
            labels=labels,
            splits=codes,
            shards=shards,
            ranges=np.array(places, dtype=np.int64).reshape(-1, 3),
            info={"shards": len(shards)},
        )

    def _class_names(self, root: Path) -> tuple[str, ...] | None:
        if self.classes_file is None:
            return self.classes
        file = root / self.classes_file
        try:
            return tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"expected class names, one per line, in {file}, but it cannot be read: {error}"
            ) from error

    def _samples(self, file: Path) -> Iterator["_Sample"]:
        """Samples of a shard, as the library groups its members."""
        extension, _, entry = self.label.partition(".")
        members = index_shard(file)
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for sample in _grouped(members, file):
                key = sample["__key__"]
                kinds = [kind for kind in sample if not kind.startswith("__") and _is_picture(kind, self.picture)]
                if len(kinds) != 1:
                    state = f"{key} has {', '.join(sorted(set(sample) - {'__key__', '__url__'}))}"
                    raise ValueError(
                        f"expected one picture per sample of {file}, but {state}. Name its extension with data.picture."
                    )
                if extension not in sample:
                    raise ValueError(f"expected {key}.{extension} beside {key}.{kinds[0]} in {file}. See data.label.")
                start, size = sample[extension]
                label = _label(data[start : start + size], extension, entry, f"{key}.{extension} in {file}")
                offset, length = sample[kinds[0]]
                yield _Sample(f"{key}.{kinds[0]}", offset, length, label)


class _Sample(NamedTuple):
    name: str
    offset: int
    size: int
    label: Any


def _library() -> Any:
    try:
        import webdataset.shardlists
        import webdataset.tariterators
    except ImportError as error:
        raise ValueError(
            'expected the library webdataset, which is missing: pip install "vit-toolkit[streaming]"'
        ) from error
    return webdataset


def _expanded(pattern: str | None) -> list[str]:
    """Names of the shards of a pattern, as the library expands it."""
    shards = _library().shardlists.expand_urls(pattern) if pattern else []
    for shard in shards:
        if re.match(r"\w+:", shard) or os.path.isabs(shard) or ".." in Path(shard).parts:
            raise ValueError(
                f"expected shards as files in data.root, but got {shard}. Pictures are read where they lie: fetch the "
                "shards first."
            )
    return shards


def _grouped(members: "Members", file: Path) -> Iterator[dict[str, Any]]:
    """Members of a shard by samples: the library's rule, applied to places in the place of bytes."""
    entries = (
        {"fname": name, "data": (int(offset), int(size)), "__url__": str(file)}
        for name, (offset, size) in zip(members.names, members.places, strict=True)
        if not _META.match(name)
    )
    try:
        yield from _library().tariterators.group_by_keys(entries)
    except ValueError as error:
        if "duplicate file name" not in str(error):
            raise
        raise ValueError(f"expected each member of {file} once, but: {error.args[0]}.") from error


def _is_picture(kind: str, chosen: str | None) -> bool:
    return kind == chosen.lower() if chosen is not None else f".{kind.rpartition('.')[2]}" in SUFFIXES


def _label(data: bytes, extension: str, entry: str, name: str) -> Any:
    try:
        text = data.decode("utf-8").strip()
        if extension == "json":
            return json.loads(text)[entry]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        wanted = f"a field {entry}" if extension == "json" else "text"
        raise ValueError(f"expected {wanted} in {name}, but it cannot be read: {error!r}.") from error
    return int(text) if extension == "cls" and re.fullmatch(r"-?\d+", text) else text


@dataclass(frozen=True, kw_only=True)
class Members:
    """Files in a tar archive.

    Args:
        names: of the members, in the order of the archive.
        places: (n, 2) first byte and number of bytes of each.
    """

    names: list[str]
    places: Int64[ndarray, "n 2"]


def index_shard(file: Path) -> Members:
    """Find the members of a shard, from the cache if it has not changed since.

    Raises:
        ValueError: it is missing, compressed or damaged, or has members that are no plain files inside of it.
    """
    if not file.is_file():
        raise ValueError(f"expected a shard at {file}, but there is no such file. Check data.root and the patterns.")
    status = file.stat()
    identity = f"{file}\0{status.st_size}\0{status.st_mtime_ns}"
    kept = make_cache_folder("shards") / f"{hashlib.sha256(os.fsencode(identity)).hexdigest()[:24]}.npz"
    if kept.is_file():
        with np.load(kept, allow_pickle=False) as stored:
            return Members(names=stored["names"].tolist(), places=stored["places"])
    members = _read_index(file, status.st_size)
    try:
        with tempfile.NamedTemporaryFile(dir=kept.parent, suffix=".tmp", delete=False) as draft:
            np.savez(draft, names=np.array(members.names, dtype=str), places=members.places)
        os.replace(draft.name, kept)
    except OSError as error:
        Path(draft.name).unlink(missing_ok=True)
        raise ValueError(
            f"expected room for the index of {file} in {kept.parent}, but writing failed ({error}). "
            "Free space there or set the environment variable VIT_CACHE."
        ) from error
    return members


def _read_index(file: Path, size: int) -> Members:
    names: list[str] = []
    places: list[tuple[int, int]] = []
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise ValueError(f"expected plain files in {file}, but {member.name} is none (a link or device).")
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise ValueError(f"expected members inside of {file}, but {member.name} climbs out of it.")
                if member.offset_data + member.size > size:
                    raise ValueError(f"expected a whole shard at {file}, but it ends within {member.name}.")
                names.append(member.name)
                places.append((member.offset_data, member.size))
                archive.members = []  # type: ignore[attr-defined]  # as the library does: a shard may hold a million
    except tarfile.ReadError as error:
        raise ValueError(
            f"expected an uncompressed tar archive at {file}, but it cannot be read ({error}). Unpack it if it is "
            "compressed: members of a compressed archive cannot be read at random."
        ) from error
    return Members(names=names, places=np.array(places, dtype=np.int64).reshape(-1, 2))
