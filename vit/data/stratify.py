"""Which rows are held out: each class by its share, whole groups together, decided by names and a seed only."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt64
from numpy import ndarray

TRAIN, VAL, TEST = range(3)
_PIECE = 65_536


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
    labels: Any,
    names: Sequence[bytes],
    *,
    val: float,
    test: float,
    seed: int,
    groups: Sequence[str] | None = None,
) -> Int[ndarray, " n"]:
    """Split of every row (`TRAIN`, `VAL`, `TEST`); each class is split by itself.

    A class's pictures are ordered by a hash of (seed, name): test takes the first, val the last. So the
    result does not depend on the order of the rows, and a picture that is added later moves hardly any other.
    Groups, and pictures with several labels, are shared out as in `share_out`.

    Args:
        labels: (n,) class index of each row, or a list of class indices per row.
        names: a unique name of each row, such as its path below the root.
        val: share of each class for val, in [0, 1).
        test: share of each class for test, in [0, 1).
        seed: another seed gives another split.
        groups: name of each row's group; a group is never divided.

    Raises:
        ValueError: the shares leave nothing to train on, or no group can be held out.
    """
    if not (0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise ValueError(
            f"expected shares with 0 <= val, 0 <= test and val + test < 1, but got val={val}, test={test}."
        )
    if groups is not None or not _is_flat(labels):
        wanted = [(TRAIN, 1 - val - test), *((code, share) for code, share in ((VAL, val), (TEST, test)) if share > 0)]
        units = _units(labels, names, groups, seed)
        part = share_out(units, np.array([share for _, share in wanted], dtype=np.float64), every=True)
        codes = np.array([code for code, _ in wanted], dtype=np.int8)[part][units.of_row]
        if groups is not None and len(wanted) > 1 and len(codes) and (codes == TRAIN).all():
            raise ValueError(
                f"expected classes that lie in two groups or more, but each of the {len(units.keys)} groups holds "
                "whole classes, so none can be held out. Choose finer groups, or set val and test to 0."
            )
        return codes
    keys = hashed(names, seed)
    splits = np.full(len(labels), TRAIN, dtype=np.int8)
    order = np.lexsort((keys, labels))
    classes, starts = np.unique(labels[order], return_index=True)
    for rows in np.split(order, starts[1:]) if len(classes) else []:
        val_count, test_count = held_out(len(rows), val, test)
        splits[rows[:test_count]] = TEST
        splits[rows[len(rows) - val_count :]] = VAL
    return splits


def fold_numbers(
    labels: Any, names: Sequence[bytes], *, folds: int, seed: int, groups: Sequence[str] | None = None
) -> Int[ndarray, " n"]:
    """Fold of every row, 0 to `folds` - 1: equally large, each class shared out equally, no group divided.

    Args:
        labels: as for `stratified_split`, like names, seed and groups.
        folds: number of parts.

    Raises:
        ValueError: fewer pictures or groups than folds.
    """
    count = len(names) if groups is None else len(set(groups))
    if count < folds:
        raise ValueError(
            f"expected at least {folds} {'pictures' if groups is None else 'groups'} for {folds} folds, "
            f"but there are {count}. Ask for fewer folds."
        )
    if groups is None and _is_flat(labels):
        folded = np.empty(len(names), dtype=np.int64)
        folded[np.lexsort((hashed(names, seed), labels))] = np.arange(len(names)) % folds
        return folded
    units = _units(labels, names, groups, seed)
    return share_out(units, np.full(folds, 1 / folds), every=False)[units.of_row]


def hashed(names: Sequence[bytes], seed: int) -> UInt64[ndarray, " n"]:
    """A number per name, the same on every machine; another seed gives other numbers."""
    salt = seed.to_bytes(8, "little", signed=True)
    keys = np.empty(len(names), dtype=np.uint64)
    for start in range(0, len(names), _PIECE):  # in pieces, since digests are larger than their numbers
        piece = names[start : start + _PIECE]
        digests = b"".join(hashlib.blake2b(name, digest_size=8, key=salt).digest() for name in piece)
        keys[start : start + len(piece)] = np.frombuffer(digests, dtype=">u8")
    return keys


@dataclass(frozen=True, kw_only=True)
class _Units:
    """What is shared out whole, and how often each holds a class: those of unit u lie at starts[u]:starts[u + 1]."""

    of_row: Int[ndarray, " n"]
    keys: UInt64[ndarray, " u"]
    starts: Int[ndarray, " u1"]
    classes: Int[ndarray, " m"]
    counts: Float[ndarray, " m"]


def _is_flat(labels: Any) -> bool:
    return isinstance(labels, ndarray) and labels.ndim == 1


def _units(labels: Any, names: Sequence[bytes], groups: Sequence[str] | None, seed: int) -> _Units:
    if groups is None:
        of_row, unit_names = np.arange(len(names)), names
    else:
        numbers: dict[str, int] = {}
        of_row = np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.int64)
        unit_names = [group.encode("utf-8", "surrogateescape") for group in numbers]
    if _is_flat(labels):
        rows, flat = np.arange(len(labels)), labels.astype(np.int64)
    else:
        rows = np.repeat(np.arange(len(labels)), [len(several) for several in labels])
        flat = np.array([label for several in labels for label in several], dtype=np.int64)
    width = int(flat.max(initial=0)) + 1
    pairs, counts = np.unique(of_row[rows] * width + flat, return_counts=True)
    return _Units(
        of_row=of_row,
        keys=hashed(unit_names, seed),
        starts=np.searchsorted(pairs // width, np.arange(len(unit_names) + 1)),
        classes=pairs % width,
        counts=counts.astype(np.float64),
    )


def share_out(units: _Units, shares: Float[ndarray, " s"], *, every: bool) -> Int[ndarray, " u"]:
    """Part of every unit, so that each class is shared out as nearly as whole units allow.

    Large units go first, each to the part that lacks its classes most; equally large ones in the order of
    their keys.

    Args:
        units: groups, or pictures with several labels.
        shares: of each part; they sum to 1.
        every: while a class has only as many units left as parts without it, those parts get one each, the
            first parts first.
    """
    size = int(units.classes.max(initial=0)) + 1
    total = np.maximum(np.bincount(units.classes, units.counts, size), 1)
    left = np.bincount(units.classes, minlength=size)
    target, have = shares[:, None] * total, np.zeros((len(shares), size))
    owner = np.repeat(np.arange(len(units.keys)), np.diff(units.starts))
    sizes = np.bincount(owner, units.counts, len(units.keys))
    filled, part = np.zeros(len(shares)), np.zeros(len(units.keys), dtype=np.int64)
    for unit in np.lexsort((units.keys, -sizes)).tolist():
        span = slice(units.starts[unit], units.starts[unit + 1])
        classes, counts = units.classes[span], units.counts[span]
        lacking = have[:, classes] == 0
        forced = np.flatnonzero((left[classes] <= lacking.sum(0)) & every & lacking.any(0))
        if len(forced):
            scarce = forced[np.argmin(left[classes[forced]])]
            chosen = int(np.argmax(lacking[:, scarce]))
        else:
            over = ((have[:, classes] - target[:, classes]) / total[classes] * counts).sum(1)
            chosen = int(np.argmin(over + 1e-6 * (filled / sizes.sum() - shares)))
        part[unit] = chosen
        have[chosen, classes] += counts
        filled[chosen] += sizes[unit]
        left[classes] -= 1
    return part
