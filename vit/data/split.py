"""Train, val and test: an exact, stratified split that depends on names and a seed only."""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int
from numpy import ndarray

from vit.data.table import SPLITS, UNASSIGNED, DataTable, Rows

log = logging.getLogger("vit.data")

TRAIN, VAL, TEST = range(3)


def held_out(size: int, val: float, test: float) -> tuple[int, int]:
    """Pictures of a class of `size` that go to val and to test.

    A share rounded to the nearest whole number, but at least one picture where a share is asked for and the
    class is large enough: the first picture is train's, the second val's, the third test's.
    """
    val_count = max(1, int(val * size + 0.5)) if val > 0 and size >= 2 else 0
    test_count = max(1, int(test * size + 0.5)) if test > 0 and size >= (3 if val > 0 else 2) else 0
    while val_count + test_count >= size:
        if test_count >= val_count:
            test_count -= 1
        else:
            val_count -= 1
    return val_count, test_count


def stratified_split(
    labels: Int[ndarray, " n"],
    names: Sequence[bytes],
    *,
    val: float,
    test: float,
    seed: int,
) -> Int[ndarray, " n"]:
    """Split of every row, as positions in `SPLITS`; each class is split by itself.

    A class's pictures are ordered by a hash of (seed, name): test takes the first, val the last. So the
    result does not depend on the order of the rows, and a picture that is added later moves hardly any other.

    Args:
        labels: (n,) class index of each row.
        names: a unique name of each row, such as its path below the root.
        val: share of each class for val, in [0, 1).
        test: share of each class for test, in [0, 1).
        seed: another seed gives another split.

    Raises:
        ValueError: the shares leave nothing to train on.
    """
    if not (0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise ValueError(
            f"expected shares with 0 <= val, 0 <= test and val + test < 1, but got val={val}, test={test}."
        )
    salt = seed.to_bytes(8, "little", signed=True)
    digests = [hashlib.blake2b(name, digest_size=8, key=salt).digest() for name in names]
    keys = np.frombuffer(b"".join(digests), dtype=">u8")
    splits = np.full(len(labels), TRAIN, dtype=np.int8)
    order = np.lexsort((keys, labels))
    classes, starts = np.unique(labels[order], return_index=True)
    for rows in np.split(order, starts[1:]) if len(classes) else []:
        val_count, test_count = held_out(len(rows), val, test)
        splits[rows[:test_count]] = TEST
        splits[rows[len(rows) - val_count :]] = VAL
    return splits


def fill_splits(rows: Rows, *, val: float, test: float, seed: int) -> Int[ndarray, " n"]:
    """Splits of all rows, where the source names none or only some.

    Nothing named, or train alone: val and test are split off. Test without val: val is split off train, test
    is never touched. Val without test: there is no test split. A row without a split counts as train's.

    Raises:
        ValueError: the shares leave nothing to train on.
    """
    splits = np.where(rows.splits == UNASSIGNED, TRAIN, rows.splits).astype(np.int8)
    if (splits == VAL).any():
        return splits
    shares = {"val": val, "test": 0.0 if (splits == TEST).any() else test}
    where = np.flatnonzero(splits == TRAIN)
    names = [rows.paths[i] for i in where]
    splits[where] = stratified_split(rows.labels[where], names, **shares, seed=seed)
    if len(where):
        _say_small_classes(rows, splits, [name for name, share in shares.items() if share > 0])
    return splits


def _say_small_classes(rows: Rows, splits: Int[ndarray, " n"], wanted: list[str]) -> None:
    for name in wanted:
        present = np.bincount(rows.labels[splits == SPLITS.index(name)], minlength=len(rows.classes))
        missing = [rows.classes[i] for i in np.flatnonzero(present == 0).tolist()]
        if missing:
            log.warning(
                "%d %s too few pictures for the %s split and stay%s out of it: %s",
                len(missing),
                "class has" if len(missing) == 1 else "classes have",
                name,
                "s" if len(missing) == 1 else "",
                ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else ""),
            )


def write_split(table: DataTable, file: str | Path) -> None:
    """Write which row stands in which split, as Parquet with the columns index, path, label (name), split.

    Args:
        table: the data table.
        file: where to; written beside and renamed.
    """
    index = table.rows()
    columns = {
        "index": pa.array(np.arange(len(table))),
        "path": pa.array([table.name(i) for i in index]),
        "label": pa.DictionaryArray.from_arrays(pa.array(table.labels()), pa.array(list(table.classes))),
        "split": pa.array([name for name in SPLITS for _ in table.rows(name)]),
    }
    draft = f"{file}.tmp"
    pq.write_table(pa.table(columns), draft)
    os.replace(draft, file)


def read_split(file: str | Path) -> dict[str, str]:
    """Split by path, from a file of `write_split`.

    Raises:
        ValueError: the file is missing or has no path and split columns.
    """
    try:
        columns = pq.read_table(file, columns=["path", "split"])
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"expected a Parquet file with the columns path and split at {file}, but: {error}") from error
    return dict(zip(columns["path"].to_pylist(), columns["split"].to_pylist(), strict=True))
