"""Data sets of the Hugging Face library `datasets`, from disk or from its hub, without a second copy of them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int
from numpy import ndarray

from vit.data.labels import number_labels
from vit.data.source import Source
from vit.data.split import SPLIT_NAMES
from vit.data.stratify import TEST, TRAIN, VAL
from vit.data.table import Rows

_SAVED = ("state.json", "dataset_dict.json")
_FILES = {".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Source):
    """A data set of the library `datasets`: pip install "vit-toolkit[huggingface]".

    `datasets` keeps a data set as Arrow files (those of `save_to_disk`, or in its own cache, into which it writes
    Parquet and what the hub sends). The table remembers where in them each picture lies, so nothing is written a
    second time; keep the files while you train. A local picture folder is read from its own files.

    Args:
        root: a folder from `save_to_disk`, a folder of pictures or Parquet files as `load_dataset` takes it, or a
            .parquet or .arrow file.
        hub: name on the hub, such as "uoft-cs/cifar10", instead of root.
        subset: configuration of a data set that has several.
        revision: commit, tag or branch on the hub.
        image_column: default the only one with images.
        label_column: default the only one with class labels, or lists of them; else label or labels.
        train_split: the data set's name of the split to train on. Where none of the three is named, the usual
            names count (train, validation, valid, val, test, ...), others are left out; where one is named, only
            those that are named.
        val_split: likewise for validation.
        test_split: likewise for the test, such as a hub's validation split where its test has no labels.
        classes: class names in the order of their numbers, where the data set does not name them.
    """

    root: str | None = None
    hub: str | None = None
    subset: str | None = None
    revision: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    train_split: str | None = None
    val_split: str | None = None
    test_split: str | None = None
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.root is None) == (self.hub is None):
            raise ValueError(f"expected one of data.root and data.hub, but got root={self._where}, hub={self.hub}.")
        if self.revision is not None and self.hub is None:
            raise ValueError("expected data.revision with data.hub alone, but got data.root. Leave revision out.")

    @property
    def _where(self) -> str:
        return self.root if self.root is not None else f"{self.hub} on the hub"

    def scan(self) -> Rows:
        """Open the data set and find where its pictures lie.

        Raises:
            ValueError: the library or the data set is missing, columns or splits are not found, or pictures or
                labels are missing.
        """
        parts = self._open()
        chosen = self._splits(list(parts))
        first = parts[next(iter(chosen.values()))]
        image = self.image_column or _column(first, "image", "data.image_column")
        label = self.label_column or _column(first, "label", "data.label_column")
        found, labels, splits = [], [], []
        for code, name in chosen.items():
            files = _arrow_files(parts[name], name)
            rows = _Part(name, [batch for file in files for batch in _pictures(file, image)])
            if len(rows) != parts[name].num_rows:
                raise ValueError(
                    f"expected {parts[name].num_rows:,} rows in the files of the {name} split of {self._where}, but "
                    f"they hold {len(rows):,}. Save the data set with save_to_disk and give that folder."
                )
            found.append(rows)
            labels.append(_labels(files, label, name))
            splits += [code] * len(rows)
        codes = np.array(splits, dtype=np.int8)
        numbers, classes = number_labels(
            np.concatenate(labels) if all(isinstance(v, ndarray) for v in labels) else [v for p in labels for v in p],
            codes,
            given=self.classes or _class_names(first.features[label]),
            where=f"the column {label} of {self._where}",
        )
        return _rows(found, numbers, codes, classes, info={"dataset": self._where, "splits": list(chosen.values())})

    def _open(self) -> dict[str, Any]:
        """The splits by the data set's own names."""
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                'expected the library datasets, which is missing: pip install "vit-toolkit[huggingface]"'
            ) from error
        # Loading would tell the hub so, for its statistics.
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        try:
            data = self._load(datasets)
        except (datasets.exceptions.DatasetsError, OSError, ValueError, pa.ArrowInvalid) as error:
            raise ValueError(f"expected a data set at {self._where}, but it cannot be opened: {error}") from error
        return dict(data) if isinstance(data, dict) else {"train": data}

    def _load(self, datasets: Any) -> Any:
        if self.root is None:
            return datasets.load_dataset(self.hub, self.subset, revision=self.revision)
        place = Path(self.root).expanduser().absolute()
        if not place.exists():
            raise FileNotFoundError("there is no such file or folder")
        if any((place / name).is_file() for name in _SAVED):
            return datasets.load_from_disk(str(place))
        if place.suffix in _FILES:
            return datasets.load_dataset(_FILES[place.suffix], data_files=str(place))
        return datasets.load_dataset(str(place), self.subset)

    def _splits(self, names: list[str]) -> dict[int, str]:
        """Code and the data set's name of each split that counts, train first."""
        named = {TRAIN: self.train_split, VAL: self.val_split, TEST: self.test_split}
        if any(named.values()):
            chosen = {code: name for code, name in named.items() if name}
        else:
            usual = [(SPLIT_NAMES[name.lower()], name) for name in names if name.lower() in SPLIT_NAMES]
            chosen = dict(sorted(usual))
            if len(chosen) < len(usual):
                raise ValueError(
                    f"expected one split of {self._where} each for train, val and test, but there are "
                    f"{', '.join(names)}. Choose with data.train_split, data.val_split and data.test_split."
                )
        absent = [name for name in chosen.values() if name not in names]
        if absent or TRAIN not in chosen:
            raise ValueError(
                f"expected a split {', '.join(absent) or 'train'} in {self._where}, but there are {', '.join(names)}. "
                "Choose with data.train_split, data.val_split and data.test_split."
            )
        return chosen


class _Part:
    """Pictures of one split, batch by batch."""

    def __init__(self, name: str, batches: list["_Batch"]) -> None:
        self.name, self.batches = name, batches

    def __len__(self) -> int:
        return sum(len(batch.names) for batch in self.batches)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Pictures of one batch of an Arrow file: places in the file, or else paths of files of their own."""

    file: str
    names: list[str | None]
    places: Int[ndarray, "n 2"] | None


def _column(part: Any, kind: str, option: str) -> str:
    """The only column that holds images or class labels, by its type."""
    import datasets

    features = part.features
    wanted = datasets.Image if kind == "image" else datasets.ClassLabel
    found = [n for n, f in features.items() if isinstance(f, wanted) or isinstance(getattr(f, "feature", None), wanted)]
    if not found and kind == "label":
        found = [name for name in ("label", "labels") if name in features]
    if len(found) != 1:
        state = f"there are {', '.join(found)}" if found else "there is none"
        raise ValueError(f"expected one {kind} column, but {state} among {', '.join(features)}. Name it with {option}.")
    return found[0]


def _class_names(feature: Any) -> tuple[str, ...] | None:
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return tuple(names) if names else None


def _arrow_files(part: Any, name: str) -> list[str]:
    files = [entry["filename"] for entry in part.cache_files]
    if not files:
        raise ValueError(f"expected the {name} split in Arrow files, but it is in memory. Save it with save_to_disk.")
    return files


def _batches(file: str, column: str) -> Iterator[tuple[pa.Array, int, int]]:
    """The column in each batch of a mapped file, and the address and size of the mapping."""
    whole = pa.memory_map(file).read_buffer()
    try:
        reader = pa.ipc.open_stream(pa.BufferReader(whole))
    except pa.ArrowInvalid:
        stored = pa.ipc.open_file(pa.BufferReader(whole))
        reader = (stored.get_batch(i) for i in range(stored.num_record_batches))
    for batch in reader:
        if column not in batch.schema.names:
            raise ValueError(f"expected a column {column}, but {file} has {', '.join(batch.schema.names)}.")
        yield batch.column(column), whole.address, whole.size


def _pictures(file: str, column: str) -> Iterator[_Batch]:
    for array, address, size in _batches(file, column):
        data, paths = array, pa.nulls(len(array), pa.string())
        if pa.types.is_struct(array.type):
            data, paths = array.field("bytes"), array.field("path")
        if not (pa.types.is_binary(data.type) or pa.types.is_large_binary(data.type)):
            raise ValueError(
                f"expected images, or their bytes, in the column {column} of {file}, but it holds {array.type}. Name "
                "another with data.image_column."
            )
        names = paths.to_pylist()
        if data.null_count == 0:
            yield _Batch(file=file, names=names, places=_places(data, address, size, file))
        elif data.null_count == len(data) and all(names):
            yield _Batch(file=file, names=names, places=None)
        else:
            raise ValueError(
                f"expected the bytes of every picture, or the path of every picture, in the column {column} of {file}, "
                "but some have neither, or only some have bytes. Save the data set with save_to_disk, which embeds "
                "the files, and leave out rows without pictures."
            )


def _places(data: pa.Array, address: int, size: int, file: str) -> Int[ndarray, "n 2"]:
    """First byte in the file, and number of bytes, of each value."""
    _, ends, values = data.buffers()
    kind = np.int64 if pa.types.is_large_binary(data.type) else np.int32
    edges = np.frombuffer(ends, kind)[data.offset : data.offset + len(data) + 1].astype(np.int64)
    first = (values.address if values is not None else address) - address
    if first < 0 or first + int(edges[-1]) > size:
        raise ValueError(
            f"expected uncompressed Arrow data in {file}, but it is compressed. Save it with save_to_disk of datasets."
        )
    return np.stack([first + edges[:-1], np.diff(edges)], axis=1)


def _labels(files: list[str], column: str, name: str) -> Any:
    """Labels of a split: an array of class numbers, or a list of what there is."""
    array = pa.chunked_array([part for file in files for part, _, _ in _batches(file, column)])
    if pa.types.is_integer(array.type) and array.null_count == 0:
        return array.to_numpy()
    return array.to_pylist()


def _rows(
    parts: list[_Part], labels: Any, splits: Int[ndarray, " n"], classes: tuple[str, ...], info: dict[str, Any]
) -> Rows:
    batches = [batch for part in parts for batch in part.batches]
    own_files = [batch.places is None for batch in batches]
    if any(own_files) and not all(own_files):
        raise ValueError(
            "expected the bytes of all pictures, or the paths of all, but the splits differ. Save the data set with "
            "save_to_disk, which embeds the files."
        )
    common: dict[str, Any] = {"classes": classes, "labels": labels, "splits": splits, "info": info}
    if all(own_files):
        files = [os.path.abspath(str(name)) for batch in batches for name in batch.names]
        lost = next((file for file in files if "://" in file or not os.path.isfile(file)), None)
        if lost is not None or len(set(files)) < len(files):
            state = f"{lost} is none" if lost is not None else "some stand in two rows"
            raise ValueError(f"expected a file for every picture, and each once, but {state}. Mend the data set.")
        root = os.path.commonpath([os.path.dirname(file) for file in files])
        return Rows(root=Path(root), paths=[os.fsencode(os.path.relpath(file, root)) for file in files], **common)
    shards = list(dict.fromkeys(batch.file for batch in batches))
    number = {file: i for i, file in enumerate(shards)}
    root = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in shards])
    ranges = [np.insert(b.places, 0, number[b.file], axis=1) for b in batches if b.places is not None]
    return Rows(
        root=Path(root),
        paths=[name for part in parts for name in _row_names(part)],
        shards=[os.path.relpath(os.path.abspath(file), root) for file in shards],
        ranges=np.concatenate(ranges),
        **common,
    )


def _row_names(part: _Part) -> list[bytes]:
    """Split and row number, and the name of the file that the picture once was, where it is known."""
    names = (name for batch in part.batches for name in batch.names)
    return [
        os.fsencode(f"{part.name}/{row:07d}" + (f"/{os.path.basename(name)}" if name else ""))
        for row, name in enumerate(names)
    ]
