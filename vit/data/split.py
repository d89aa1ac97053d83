"""Train, val and test of a source's rows: by shares, by folds, by a split file; and that file."""

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from jaxtyping import Int
from numpy import ndarray

from vit.data.stratify import TEST, TRAIN, VAL, fold_numbers, stratified_split
from vit.data.table import SPLITS, UNASSIGNED, DataTable, Rows

log = logging.getLogger("vit.data")

SPLIT_NAMES = {
    "train": TRAIN,
    "training": TRAIN,
    "val": VAL,
    "valid": VAL,
    "validation": VAL,
    "test": TEST,
    "testing": TEST,
}


def fill_splits(
    rows: Rows, *, val: float, test: float, seed: int, folds: int | None = None, fold: int = 0
) -> Int[ndarray, " n"]:
    """Splits of all rows, where the source names none or only some.

    Nothing named, or train alone: val and test are split off. Test without val: val is split off train, test
    is never touched. Val without test: there is no test split. A row without a split counts as train's.

    Args:
        rows: their groups, if any, stay whole.
        val: share of each class for val.
        test: share of each class for test.
        seed: of the split.
        folds: instead of by `val`, what is not test is cut into so many parts; test is the same for all.
        fold: the part that is val, from 0.

    Raises:
        ValueError: the shares leave nothing to train on, a group stands in two splits that the source names,
            or folds are asked of a source that names its val split.
    """
    splits = np.where(rows.splits == UNASSIGNED, TRAIN, rows.splits).astype(np.int8)
    refuse_divided_groups(rows, splits)
    if (splits == VAL).any():
        if folds is not None:
            raise ValueError(
                f"expected a source that leaves val open for {folds} folds, but {rows.root} names its val pictures. "
                "Leave folds out, or name them train."
            )
        return splits
    shares = {"val": val if folds is None else 0.0, "test": 0.0 if (splits == TEST).any() else test}
    _stratify(rows, splits, **shares, seed=seed)
    if folds is not None:
        where = np.flatnonzero(splits == TRAIN)
        numbers = fold_numbers(*_part(rows, where), folds=folds, seed=seed, groups=_groups(rows, where))
        splits[where[numbers == fold]] = VAL
    _say_small_classes(rows, splits, [name for name, share in shares.items() if share > 0])
    return splits


def _stratify(rows: Rows, splits: Int[ndarray, " n"], *, val: float, test: float, seed: int) -> None:
    where = np.flatnonzero(splits == TRAIN)
    splits[where] = stratified_split(*_part(rows, where), val=val, test=test, seed=seed, groups=_groups(rows, where))


def _part(rows: Rows, where: Int[ndarray, " m"]) -> tuple[Any, list[bytes]]:
    labels = rows.labels[where] if isinstance(rows.labels, ndarray) else [rows.labels[i] for i in where]
    return labels, [rows.paths[i] for i in where]


def _groups(rows: Rows, where: Int[ndarray, " m"]) -> list[str] | None:
    return None if rows.groups is None else [rows.groups[i] for i in where]


def groups_by_pattern(pattern: str, paths: Sequence[bytes]) -> list[str]:
    """Group of each path: what the pattern's first parenthesis matches, or else the whole match.

    Args:
        pattern: regular expression, searched anywhere in a path ("/" between its parts).
        paths: below the root.

    Raises:
        ValueError: it is no regular expression, or does not match some path.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"expected a regular expression as group_pattern, but got {pattern!r}: {error}.") from error
    names = [os.fsdecode(path) for path in paths]
    found = [compiled.search(name) for name in names]
    missed = [name for name, match in zip(names, found, strict=True) if match is None]
    if missed:
        shown = ", ".join(missed[:3])
        raise ValueError(
            f"expected group_pattern {pattern!r} to match every path, but {len(missed):,} of {len(names):,} do not, "
            f"such as {shown}."
        )
    which = 1 if compiled.groups else 0
    return [match[which] or "" for match in found if match is not None]


def refuse_divided_groups(rows: Rows, splits: Int[ndarray, " n"]) -> None:
    """Refuse a group on two sides.

    Raises:
        ValueError: names such groups.
    """
    if rows.groups is None:
        return
    seen: dict[str, int] = {}
    divided: dict[str, set[int]] = {}
    for group, code in zip(rows.groups, splits.tolist(), strict=True):
        first = seen.setdefault(group, code)
        if first != code:
            divided.setdefault(group, {first}).add(code)
    if divided:
        shown = ", ".join(
            f"{name} in {' and '.join(SPLITS[c] for c in sorted(codes))}" for name, codes in list(divided.items())[:5]
        )
        raise ValueError(
            f"expected every group in one split, but {len(divided)} stand in more: {shown}. "
            "Mend the splits, or leave the groups out."
        )


def _say_small_classes(rows: Rows, splits: Int[ndarray, " n"], wanted: list[str]) -> None:
    for name in wanted:
        labels, _ = _part(rows, np.flatnonzero(splits == SPLITS.index(name)))
        flat = labels if isinstance(labels, ndarray) else [label for several in labels for label in several]
        present = np.bincount(np.asarray(flat, dtype=np.int64), minlength=len(rows.classes))
        missing = [rows.classes[i] for i in np.flatnonzero(present == 0).tolist()]
        if missing:
            log.warning(
                "%d %s too few %s for the %s split and stay%s out of it: %s",
                len(missing),
                "class has" if len(missing) == 1 else "classes have",
                "pictures" if rows.groups is None else "groups",
                name,
                "s" if len(missing) == 1 else "",
                ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else ""),
            )


def apply_split_file(rows: Rows, file: str | Path) -> Rows:
    """Rows as a split file divides them; what it does not name, or names without a split, is left out.

    Raises:
        ValueError: the file cannot be read, names pictures that are not there, or divides a group.
    """
    codes, missing, count = _looked_up(rows, file)
    if missing:
        raise ValueError(
            f"expected the pictures of {file} below {rows.root}, but {len(missing):,} of {count:,} are not there, "
            f"such as {', '.join(missing[:3])}. Its paths are relative to the root of the run that wrote it."
        )
    left_out = int((codes == UNASSIGNED).sum())
    if left_out:
        log.warning("%d of %d pictures are not in %s and are left out", left_out, len(codes), file)
    return _divided(rows, codes, file)


def split_as_in_run(rows: Rows, file: str | Path) -> Rows:
    """Rows in the splits that they had in an earlier run, also where pictures have changed since; a line says so.

    Pictures that are new stay in the split that the source names; those of train go with their group. Where the source
    names none, they are left out.

    Args:
        rows: of a scan.
        file: the run's `split.parquet`.

    Raises:
        ValueError: the file cannot be read, or a new picture divides a group.
    """
    codes, missing, _ = _looked_up(rows, file)
    new = codes == UNASSIGNED
    moved = ~new & np.isin(rows.splits, (VAL, TEST)) & (codes != rows.splits)
    with_group = {} if rows.groups is None else {rows.groups[i]: codes[i] for i in np.flatnonzero(~new).tolist()}
    for i in np.flatnonzero(new).tolist():
        codes[i] = rows.splits[i]
        if codes[i] == TRAIN and rows.groups is not None:
            codes[i] = with_group.get(rows.groups[i], TRAIN)
    counts = {
        "are gone": len(missing),
        "are new and left out": int((codes == UNASSIGNED).sum()),
        "are new, in the split that the data name": int((new & (codes != UNASSIGNED)).sum()),
        "stand in another split by now, and count where they stood": int(moved.sum()),
    }
    if any(counts.values()):
        told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        log.warning("the pictures have changed since the run, whose split is kept: %s", told)
    return _divided(rows, codes, file)


def _looked_up(rows: Rows, file: str | Path) -> tuple[Int[ndarray, " n"], list[str], int]:
    """The split of each row in a file (-1 where it has none), the names there that are no row, and how many it has."""
    named = read_split(file)
    names = [name.decode("utf-8", "backslashreplace") for name in rows.paths]
    codes = np.array([SPLIT_NAMES[split] if (split := named.get(name)) else UNASSIGNED for name in names], np.int8)
    return codes, sorted(set(named) - set(names)), len(named)


def _divided(rows: Rows, codes: Int[ndarray, " n"], file: str | Path) -> Rows:
    """Rows in the splits of a file, without those that have none."""
    rows.splits = codes
    kept = np.flatnonzero(codes != UNASSIGNED)
    chosen = rows.select(kept)
    refuse_divided_groups(chosen, chosen.splits)
    left_out = len(codes) - len(kept)
    chosen.info = {**chosen.info, "split_file": str(Path(file).absolute()), "left_out_by_split_file": left_out}
    return chosen


def write_split(table: DataTable, file: str | Path) -> None:
    """Write which row stands in which split, with the columns index, path, label (name), split.

    Args:
        table: the data table.
        file: where to, as CSV if it ends so, else Parquet; written beside and renamed.
    """
    index = table.rows()
    columns: dict[str, Any] = {
        "index": pa.array(np.arange(len(table))),
        "path": pa.array([table.name(i) for i in index]),
        "label": _label_names(table),
        "split": pa.array([name for name in SPLITS for _ in table.rows(name)]),
    }
    draft = f"{file}.tmp"
    write = pa.csv.write_csv if Path(file).suffix.lower() == ".csv" else pq.write_table
    write(pa.table(columns), draft)
    os.replace(draft, file)


def _label_names(table: DataTable) -> pa.Array:
    if table.several:
        return pa.array([";".join(table.classes[k] for k in table.label(i)) for i in table.rows()])
    names = pa.DictionaryArray.from_arrays(pa.array(table.labels()), pa.array(list(table.classes)))
    return names


def read_split(file: str | Path) -> dict[str, str]:
    """Split by path, from a file of `write_split` or one of the same columns path and split (CSV or Parquet).

    Raises:
        ValueError: the file is missing, has no path and split columns, an unknown split, or a path twice.
    """
    try:
        if Path(file).suffix.lower() == ".csv":
            types = {"path": pa.string(), "split": pa.string()}
            convert = pa.csv.ConvertOptions(
                include_columns=["path", "split"], column_types=types, strings_can_be_null=False
            )
            columns = pa.csv.read_csv(file, convert_options=convert)
        else:
            columns = pq.read_table(file, columns=["path", "split"])
        names, splits = (columns[name].to_pylist() for name in ("path", "split"))
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"expected a CSV or Parquet file with the columns path and split at {file}, but: {error}"
        ) from error
    splits = [(split or "").strip().lower() for split in splits]
    unknown = sorted(set(splits) - set(SPLIT_NAMES) - {""})
    if unknown:
        raise ValueError(f"expected the splits {', '.join(SPLITS)} in {file}, but got {', '.join(unknown[:5])}.")
    named = {name: SPLITS[SPLIT_NAMES[split]] if split else "" for name, split in zip(names, splits, strict=True)}
    if len(named) != len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        raise ValueError(
            f"expected every path once in {file}, but {twice[0]} stands there {names.count(twice[0])} times."
        )
    return named
