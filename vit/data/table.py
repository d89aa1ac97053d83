"""The data table: the one thing that every source of pictures becomes.

An Arrow IPC file in the cache folder, memory-mapped and pickled as its path, so that many millions of rows
and spawned workers cost little. Rows are ordered train, val, test: a split is a range, not a list of numbers.

Columns: `path` (bytes of the file system's encoding, relative to the root, "/" between parts), `image`
(encoded picture; only in tables that carry their pictures), `file`, `offset`, `length` (where the encoded picture
lies in a larger file; only in tables of shards), `label`, `split`, `group`, `weight` (the last two optional). The
schema's metadata holds the ordered class names, the root, the shards and what the source wants to remember.
"""

import errno
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray

SPLITS = ("train", "val", "test")
UNASSIGNED = -1

_METADATA = b"vit_toolkit"
_RANGE = ("file", "offset", "length")
_VERSION = 1


def cache_folder() -> Path:
    """Folder for tables and prepared data: `VIT_CACHE`, else vit-toolkit in the user's cache folder."""
    chosen = os.environ.get("VIT_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "vit-toolkit"


def make_cache_folder(*parts: str) -> Path:
    """Create a folder below the cache folder.

    Raises:
        ValueError: it cannot be written.
    """
    folder = cache_folder().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"expected a cache folder that can be written, but {folder} cannot be made ({error.strerror}). "
            "Set the environment variable VIT_CACHE to a folder with room."
        ) from error
    return folder


@dataclass(kw_only=True)
class Rows:
    """What a source found, row by row and in any order, before it is written as a table.

    Args:
        classes: class names; a label is a position in this list.
        root: absolute folder or archive that `paths` are relative to.
        paths: one name per row, unique, as bytes (`os.fsencode`), "/" between parts.
        labels: (n,) class index per row; later also lists (several labels) or vectors (soft labels).
        splits: (n,) position in `SPLITS`, or -1 where the source leaves the choice to the split rule.
        images: encoded pictures, for sources without files.
        shards: larger files that hold the pictures, relative to root.
        ranges: (n, 3) int64 per row: position in `shards`, first byte, number of bytes.
        groups: name of the patient, scene or video of each row.
        weights: (n,) sampling or loss weight of each row.
        info: plain values for the plan (what was skipped, where a split came from).
    """

    classes: Sequence[str]
    root: Path
    paths: list[bytes]
    labels: Any
    splits: Int[ndarray, " n"]
    images: list[bytes] | None = None
    shards: list[str] | None = None
    ranges: Int[ndarray, "n 3"] | None = None
    groups: list[str] | None = None
    weights: Float[ndarray, " n"] | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def select(self, where: Int[ndarray, " m"]) -> "Rows":
        """The rows at these positions, in their order."""

        def part(values: Any) -> Any:
            if values is None or isinstance(values, ndarray):
                return None if values is None else values[where]
            return [values[i] for i in where]

        names = ("paths", "labels", "splits", "images", "ranges", "groups", "weights")
        return replace(self, **{name: part(getattr(self, name)) for name in names})


class DataTable:
    """Rows of a table file.

    Args:
        file: an Arrow file written by `write_table`.

    Raises:
        ValueError: the file is not such a table.
    """

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(self.file)))
            meta = json.loads((reader.schema.metadata or {})[_METADATA])
            batch = reader.get_batch(0)
        except (OSError, KeyError, pa.ArrowInvalid) as error:
            raise ValueError(
                f"expected a data table of vit-toolkit at {self.file}, but it cannot be read ({error}). "
                "Delete the file; it is made again from the pictures."
            ) from error
        self.root = Path(meta["root"])
        self.classes: tuple[str, ...] = tuple(meta["classes"])
        self.info: dict[str, Any] = meta["info"]
        self._ranges = {name: range(*bounds) for name, bounds in meta["ranges"].items()}
        columns = {name: batch.column(name) for name in batch.schema.names}
        self._length = batch.num_rows
        self._paths = columns["path"]
        self._images = columns.get("image")
        self._places: list[Int[ndarray, " n"]] | None = None
        if "offset" in columns:
            self._shards = [os.path.join(self.root, name) for name in meta["shards"]]
            self._places = [columns[name].to_numpy(zero_copy_only=True) for name in _RANGE]
        self._label_column = columns["label"]
        flat = pa.types.is_integer(self._label_column.type)
        self._labels = self._label_column.to_numpy(zero_copy_only=True) if flat else None
        self._groups = columns.get("group")
        weights = columns.get("weight")
        self._weights = None if weights is None else weights.to_numpy(zero_copy_only=True)

    def __reduce__(self) -> tuple[type["DataTable"], tuple[str]]:
        return DataTable, (str(self.file),)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(rows):,}" for name, rows in self._ranges.items())
        return f"DataTable({self.root}: {len(self.classes)} classes, {sizes})"

    def rows(self, split: str | None = None) -> range:
        """Row numbers of a split (empty where the table lacks it), or of the whole table."""
        if split is None:
            return range(len(self))
        if split not in SPLITS:
            raise ValueError(f"expected a split out of {', '.join(SPLITS)}, but got {split!r}.")
        return self._ranges[split]

    def split(self, index: int) -> str:
        """Name of the split that a row belongs to."""
        return next(name for name, rows in self._ranges.items() if self._checked(index) in rows)

    def name(self, index: int) -> str:
        """Path of a row below the root, fit for printing and for text columns."""
        return self._paths[self._checked(index)].as_py().decode("utf-8", "backslashreplace")

    def path(self, index: int) -> str:
        """Absolute path of a row's file (for pictures in archives, shards or the table: archive and name in it)."""
        return os.path.join(self.root, os.fsdecode(self._paths[self._checked(index)].as_py()))

    def read(self, index: int) -> bytes:
        """Encoded picture of a row.

        Raises:
            OSError: the file cannot be read.
        """
        if self._images is not None:
            return self._images[self._checked(index)].as_py()
        if self._places is not None:
            shard, offset, length = self._place(index)
            with open(shard, "rb") as file:
                file.seek(offset)
                data = file.read(length)
            if len(data) != length:
                raise OSError(errno.EIO, "the shard ends before the picture does", shard)
            return data
        with open(self.path(index), "rb") as file:
            return file.read()

    def size(self, index: int) -> int:
        """Bytes of a row's encoded picture, without reading it."""
        if self._images is not None:
            return len(self._images[self._checked(index)].as_buffer())
        if self._places is not None:
            return self._place(index)[2]
        return os.stat(self.path(index)).st_size

    def identity(self, index: int) -> bytes:
        """What changes when a row's picture changes: its file's path, size and time, or else its bytes.

        Raises:
            OSError: the file is not there.
        """
        if self._images is not None:
            return self.read(index)
        path = self.path(index) if self._places is None else self._place(index)[0]
        status = os.stat(path)
        return os.fsencode(f"{self.path(index)}\0{status.st_size}\0{status.st_mtime_ns}")

    def label(self, index: int) -> Any:
        """Label of a row: an int, or a list for several or soft labels."""
        if self._labels is not None:
            return int(self._labels[self._checked(index)])
        return self._label_column[self._checked(index)].as_py()

    def target(self, index: int) -> int | list[float]:
        """What a loss wants for a row: its class number, or 0 and 1 per class where rows hold several labels."""
        label = self.label(index)
        if not self.several:
            return label
        hot = [0.0] * len(self.classes)
        for number in label:
            hot[number] = 1.0
        return hot

    @property
    def several(self) -> bool:
        """Whether a row holds a list of labels."""
        return self._labels is None

    def labels(self, split: str | None = None) -> Int[ndarray, " n"]:
        """Class index of every row of a split, as a view of the file.

        Raises:
            ValueError: the rows hold several labels each.
        """
        if self._labels is None:
            raise ValueError(
                "expected one label per picture, but the rows of this table hold several, which classification "
                "with one answer cannot learn. Give one label per picture."
            )
        rows = self.rows(split)
        return self._labels[rows.start : rows.stop]

    def counts(self, split: str | None = None) -> Int[ndarray, " k"]:
        """Pictures of each class in a split; one with several labels counts in each of them."""
        if self._labels is not None:
            return np.bincount(self.labels(split), minlength=len(self.classes))
        rows = self.rows(split)
        flat = self._label_column.slice(rows.start, len(rows)).flatten().to_numpy(zero_copy_only=False)
        return np.bincount(flat.astype(np.int64), minlength=len(self.classes))

    def weights(self, split: str | None = None) -> Float[ndarray, " n"] | None:
        """Weight of every row of a split, as a view of the file; None in a table without weights."""
        rows = self.rows(split)
        return None if self._weights is None else self._weights[rows.start : rows.stop]

    def weight(self, index: int) -> float | None:
        """Weight of a row; None in a table without weights."""
        return None if self._weights is None else float(self._weights[self._checked(index)])

    def group(self, index: int) -> str | None:
        """Group of a row; None in a table without groups."""
        return None if self._groups is None else self._groups[self._checked(index)].as_py()

    def _place(self, index: int) -> tuple[str, int, int]:
        """Shard, first byte and number of bytes of a row's picture."""
        assert self._places is not None
        shard, offset, length = (int(values[self._checked(index)]) for values in self._places)
        return self._shards[shard], offset, length

    def _checked(self, index: int) -> int:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of a table with {self._length} rows")
        return index


def write_table(rows: Rows) -> DataTable:
    """Write rows as a table file in the cache folder, named after its content, and open it.

    Rows are put in the order train, val, test; within a split they keep the order they came in. Written
    beside and renamed, so that a reader, a second process or a kill never meets half a file.

    Raises:
        ValueError: there are no rows, a row has no split, or the cache folder cannot be written.
    """
    if not rows.paths:
        raise ValueError(f"expected at least one picture below {rows.root}, but there is none.")
    if (rows.splits == UNASSIGNED).any():
        raise ValueError("expected a split for every row, but some have none. Split the rows first.")
    order = np.argsort(rows.splits, kind="stable")
    bounds = np.searchsorted(rows.splits[order], range(len(SPLITS) + 1))
    meta = {
        "version": _VERSION,
        "root": str(rows.root),
        "classes": list(rows.classes),
        "ranges": {name: [int(bounds[i]), int(bounds[i + 1])] for i, name in enumerate(SPLITS)},
        "info": rows.info,
    }
    codes = pa.array(rows.splits[order].astype(np.int8))
    columns = {
        "path": _bytes_array(rows.paths, order),
        "label": _label_array(rows.labels, order),
        "split": pa.DictionaryArray.from_arrays(codes, pa.array(SPLITS)),
    }
    if rows.images is not None:
        columns["image"] = _bytes_array(rows.images, order)
    if rows.ranges is not None:
        kinds = (pa.int32(), pa.int64(), pa.int64())
        columns |= {n: pa.array(rows.ranges[order, i], kinds[i]) for i, n in enumerate(_RANGE)}
        meta["shards"] = rows.shards
    if rows.groups is not None:
        columns["group"] = pa.array([rows.groups[i] for i in order], pa.string())
    if rows.weights is not None:
        columns["weight"] = pa.array(rows.weights[order], pa.float32())
    batch = pa.RecordBatch.from_pydict(columns).replace_schema_metadata({_METADATA: json.dumps(meta)})
    del columns
    file = _write(batch)
    del batch
    pa.default_memory_pool().release_unused()
    return DataTable(file)


def _bytes_array(values: list[bytes], order: Int[ndarray, " n"]) -> pa.Array:
    """Values as one Arrow array; joined at once, since a growing one takes twice the memory."""
    ends = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(np.fromiter((len(values[i]) for i in order), np.int64, len(order)), out=ends[1:])
    data = pa.py_buffer(b"".join([values[i] for i in order]))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(order), [None, pa.py_buffer(ends), data])


def _label_array(labels: Any, order: Int[ndarray, " n"]) -> pa.Array:
    if isinstance(labels, ndarray) and labels.ndim == 1:
        return pa.array(labels[order].astype(np.int32))
    return pa.array([labels[i] for i in order])


def _write(batch: pa.RecordBatch) -> Path:
    folder = make_cache_folder("tables")
    handle, draft = tempfile.mkstemp(dir=folder, suffix=".tmp")
    os.close(handle)
    try:
        with pa.OSFile(draft, "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        os.chmod(draft, 0o644)  # a cache may be shared; temporary files are private
        with open(draft, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:20]
        target = folder / f"{digest}.arrow"
        # An equal table may be mapped by another process: Windows refuses to replace a mapped file.
        if target.exists() and target.stat().st_size == os.stat(draft).st_size:
            os.unlink(draft)
        else:
            os.replace(draft, target)
    except OSError as error:
        Path(draft).unlink(missing_ok=True)
        raise ValueError(
            f"expected room for the data table in {folder}, but writing failed ({error}). "
            "Free space there or set the environment variable VIT_CACHE."
        ) from error
    return target
