"""Labels in a table: CSV, TSV or Parquet with a path and a label per row."""

import logging
import math
import os
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from vit.data.source import Source
from vit.data.split import SPLIT_NAMES
from vit.data.stratify import TRAIN
from vit.data.table import SPLITS, UNASSIGNED, Rows

log = logging.getLogger("vit.data")

_DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Table(Source):
    """Pictures and labels in a CSV, TSV or Parquet file with a header.

    Labels are names, and stay as they are written: "007" is not 7. Classes are in plain (code point) order.
    Spaces around a cell do not count. Rows that are there twice count once, and one line says so.

    Args:
        file: the table; its suffix says how it is read.
        root: folder that paths are relative to; default that of the file.
        path_column: column of the pictures' paths.
        label_column: column of the labels.
        split_column: column with train, val or test (or blank, for train), if there is one; null ignores it.
        group_column: column that names a patient, scene or video, which no split divides, if there is one;
            null ignores it.
        weight_column: column of weights for `sampling: weighted`, if there is one; null ignores it.
        delimiter: between columns, where it is not a comma (.csv) or a tab (.tsv).
        classes: the class names in the order of their labels, where they should not be read from the file.
        separator: divides several labels in a cell; a picture then has all of them.
    """

    file: str
    root: str | None = None
    path_column: str = "path"
    label_column: str = "label"
    split_column: str | None = "split"
    group_column: str | None = "group"
    weight_column: str | None = "weight"
    delimiter: str | None = None
    classes: tuple[str, ...] | None = None
    separator: str | None = None

    def scan(self) -> Rows:
        """Read the table, and look for every file that it names.

        Raises:
            ValueError: the file cannot be read or lacks a column; missing pictures, blank cells, a picture
                with two labels, unknown splits, bad weights: all of them in one message.
        """
        file = Path(self.file).expanduser().absolute()
        root = Path(os.path.abspath(Path(self.root).expanduser())) if self.root is not None else file.parent
        columns = self._columns(file)
        paths = [_relative(text, root) for text in columns["path"]]
        problems = _Problems(file)
        kept = _kept_rows(columns, paths, root, problems)
        splits = _splits(columns, problems)
        weights = _weights(columns, problems)
        problems.refuse()
        labels, classes = self._labels([columns["label"][i] for i in kept], splits[kept], file)
        groups = columns.get("group")
        return Rows(
            classes=classes,
            root=root,
            paths=[os.fsencode(paths[i]) for i in kept],
            labels=labels,
            splits=splits[kept],
            groups=None if groups is None else [groups[i] for i in kept],
            weights=None if weights is None else weights[kept],
            info={"file": str(file), "rows_twice": len(paths) - len(kept)},
        )

    def _columns(self, file: Path) -> dict[str, list[str]]:
        """The columns that count, as texts without spaces around them."""
        wanted = {
            "path": self.path_column,
            "label": self.label_column,
            "split": self.split_column,
            "group": self.group_column,
            "weight": self.weight_column,
        }
        table = _read(file, self.delimiter)
        found: dict[str, list[str]] = {}
        for role, name in wanted.items():
            if name is None:
                continue
            if table.column_names.count(name) != 1:
                if name == role and role not in ("path", "label") and name not in table.column_names:
                    continue
                state = "twice" if name in table.column_names else "not"
                raise ValueError(
                    f"expected a column {name!r} in {file}, but it is {state} among: "
                    f"{', '.join(map(repr, table.column_names[:20]))}. Name it with data.{role}_column, or the "
                    "character between columns with data.delimiter."
                )
            found[role] = _texts(table.column(name), name, file)
        if not found["path"]:
            raise ValueError(f"expected rows in {file}, but it holds a header alone.")
        return found

    def _labels(self, texts: list[str], splits: np.ndarray, file: Path) -> tuple[Any, tuple[str, ...]]:
        """Class indices of the rows, and the class names."""
        forms = {text: unicodedata.normalize("NFC", text) for text in set(texts)}
        rows = [
            [part.strip() for part in forms[text].split(self.separator)] if self.separator else [forms[text]]
            for text in texts
        ]
        everywhere = {name for row in rows for name in row}
        trained = {
            name for row, code in zip(rows, splits.tolist(), strict=True) for name in row if code in (TRAIN, UNASSIGNED)
        }
        names = self.classes or tuple(sorted(trained or everywhere))
        unknown = sorted(everywhere - set(names))
        if unknown:
            of = "train rows" if self.classes is None else "data.classes"
            raise ValueError(
                f"expected the classes of {of} ({', '.join(names[:20])}), but {file} also holds "
                f"{', '.join(unknown[:10])}. Mend those labels, or add them to {of}."
            )
        if len(names) < 2:
            raise ValueError(f"expected at least two classes in {file}, but all rows have the label {names[0]}.")
        absent = [name for name in names if name not in trained]
        if absent and trained:
            raise ValueError(
                f"expected train rows of every class in {file}, but there are none of {', '.join(absent)}."
            )
        number = {name: k for k, name in enumerate(names)}
        if self.separator:
            return [sorted({number[name] for name in row}) for row in rows], names
        return np.array([number[row[0]] for row in rows], dtype=np.int32), names


def _read(file: Path, delimiter: str | None) -> pa.Table:
    suffix = file.suffix.lower()
    if not file.is_file():
        raise ValueError(f"expected a table at {file}, but there is no such file. Check data.file.")
    if suffix not in (*_DELIMITERS, ".parquet") and delimiter is None:
        raise ValueError(
            f"expected a table that ends in {', '.join(_DELIMITERS)} or .parquet, but got {file}. "
            "Rename it, or give data.delimiter."
        )
    try:
        if suffix == ".parquet":
            return pq.read_table(file)
        parse = pa.csv.ParseOptions(delimiter=delimiter or _DELIMITERS[suffix], newlines_in_values=True)
        with pa.csv.open_csv(file, parse_options=parse) as reader:
            names = reader.schema.names
        types = {name: pa.string() for name in names}
        convert = pa.csv.ConvertOptions(column_types=types, strings_can_be_null=False)
        return pa.csv.read_csv(file, parse_options=parse, convert_options=convert)
    except (OSError, pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise ValueError(f"expected a table with a header at {file} (UTF-8), but it cannot be read: {error}") from error


def _texts(column: pa.ChunkedArray, name: str, file: Path) -> list[str]:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    number = pa.types.is_integer(kind) or (pa.types.is_floating(kind) and name not in ("path", "label"))
    if not text and not number:
        raise ValueError(f"expected text or whole numbers in the column {name!r} of {file}, but it holds {kind}.")
    return ["" if value is None else str(value).strip() for value in column.to_pylist()]


class _Problems:
    """What is wrong with the rows of a table, collected for one message; rows count from 1 below the header."""

    def __init__(self, file: Path) -> None:
        self.file, self.lines = file, list[str]()

    def add(self, what: str, examples: list[str]) -> None:
        if examples:
            more = ", ..." if len(examples) > _SHOWN else ""
            self.lines.append(f"  {len(examples):,} {what}: {', '.join(examples[:_SHOWN])}{more}")

    def refuse(self) -> None:
        if self.lines:
            listed = "\n".join(self.lines)
            raise ValueError(
                f"expected a picture that exists and one label in every row of {self.file}, but there are\n{listed}\n"
                "Mend the table; rows count from 1 below the header."
            )


def _relative(text: str, root: Path) -> str:
    """A path as the table keeps it: below the root where it can be, one spelling per file."""
    if not text:
        return ""
    path = os.path.normpath(text)
    if os.path.isabs(path) and path.startswith(str(root) + os.sep):
        path = os.path.relpath(path, root)
    return path.replace(os.sep, "/")


def _kept_rows(columns: dict[str, list[str]], paths: list[str], root: Path, problems: _Problems) -> list[int]:
    """Rows without those that are there twice; what is wrong goes to the problems."""
    first: dict[str, int] = {}
    kept: list[int] = []
    again: list[str] = []
    torn: dict[str, list[str]] = {role: [] for role in columns}
    for row, path in enumerate(paths):
        earlier = first.setdefault(path, row)
        if earlier == row:
            kept.append(row)
            continue
        differing = [role for role in columns if role != "path" and columns[role][row] != columns[role][earlier]]
        for role in differing:
            values = f"{columns[role][earlier]!r} in row {earlier + 1}, {columns[role][row]!r} in row {row + 1}"
            torn[role].append(f"{path} ({values})")
        if not differing:
            again.append(f"{path} (rows {earlier + 1} and {row + 1})")
    for role, texts in columns.items():
        if role != "split":
            problems.add(f"rows with a blank {role}", [f"row {i + 1}" for i, text in enumerate(texts) if not text])
    gone = _missing([path for path in first if path], root)
    hint = "missing files" + (" (paths have /, not \\)" if any("\\" in path for path in gone) else "")
    problems.add(hint, [f"{path} (row {first[path] + 1})" for path in gone])
    for role, examples in torn.items():
        problems.add(f"pictures with two {role}s", examples)
    if again:
        shown = ", ".join(again[:_SHOWN]) + (", ..." if len(again) > _SHOWN else "")
        log.warning("%d rows of %s are there twice and count once: %s", len(again), problems.file, shown)
    return kept


def _missing(paths: list[str], root: Path) -> list[str]:
    """Paths without a file. Folders are listed once, which is quicker than to ask for every file."""
    listed: dict[str, set[str]] = {}
    gone: list[str] = []
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in listed:
            listed[folder] = _files_in(os.path.join(root, folder or ("/" if path.startswith("/") else "")))
        # A file system may know a name in other cases or forms than it lists.
        if name not in listed[folder] and not os.path.isfile(os.path.join(root, path)):
            gone.append(path)
    return gone


def _files_in(folder: str) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file()}
    except OSError:
        return set()


def _splits(columns: dict[str, list[str]], problems: _Problems) -> np.ndarray:
    texts = columns.get("split")
    if texts is None:
        return np.full(len(columns["path"]), UNASSIGNED, dtype=np.int8)
    codes = {"": UNASSIGNED, **SPLIT_NAMES}
    unknown = Counter(text for text in texts if text.lower() not in codes)
    problems.add(f"splits other than {', '.join(SPLITS)}", [f"{text!r} in {n} rows" for text, n in unknown.items()])
    return np.array([codes.get(text.lower(), UNASSIGNED) for text in texts], dtype=np.int8)


def _weights(columns: dict[str, list[str]], problems: _Problems) -> np.ndarray | None:
    texts = columns.get("weight")
    if texts is None:
        return None
    values = [_number(text) for text in texts]
    wrong = [
        f"{text!r} in row {i + 1}"
        for i, (text, v) in enumerate(zip(texts, values, strict=True))
        if text and not 0 <= v < math.inf
    ]
    problems.add("weights that are no numbers of at least 0", wrong)
    return np.array(values)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
