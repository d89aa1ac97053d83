"""Labels as other formats hold them -> class numbers and class names."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from vit.data.stratify import TRAIN
from vit.data.table import UNASSIGNED


def number_labels(
    values: Sequence[Any] | Int[ndarray, " n"],
    splits: Int[ndarray, " n"],
    *,
    given: Sequence[str] | None,
    where: str,
) -> tuple[Any, tuple[str, ...]]:
    """Class numbers of all rows, and the class names.

    Whole numbers are class numbers, from 0; texts are class names; lists hold several of one kind.

    Args:
        values: one label, or a list of labels, per row.
        splits: of the rows; names that are not given come from train, in plain (code point) order.
        given: class names in the order of their numbers.
        where: what holds the labels, for messages.

    Returns:
        (n,) int32, or a list of sorted lists; and the names.

    Raises:
        ValueError: a missing label, -1 included, labels of two kinds or of another, a label that has no class,
            or fewer than two classes.
    """
    if isinstance(values, ndarray):
        names = _names_of_numbers((int(values.min()), int(values.max())), given, where)
        return values.astype(np.int32), names
    several = any(isinstance(value, list) for value in values)
    rows = values if several else [[value] for value in values]
    kind = _kind(rows, where)
    if kind is int:
        names = _names_of_numbers({number for row in rows for number in row}, given, where)
        numbered = [sorted(set(row)) for row in rows]
    else:
        names = _names(rows, splits, given, where)
        number = {name: k for k, name in enumerate(names)}
        numbered = [sorted({number[name] for name in row}) for row in rows]
    return numbered if several else np.array([row[0] for row in numbered], dtype=np.int32), names


def _kind(rows: Sequence[Any], where: str) -> type:
    """The one type of all labels, int or str."""
    for number, row in enumerate(rows):
        listed = row if isinstance(row, list) else [row]
        wrong = [value for value in listed if type(value) not in (int, str) or value == ""]
        if wrong:
            raise ValueError(
                f"expected a class number or a class name as the label of every picture of {where}, but that of "
                f"number {number} is {wrong[0]!r}. Add it there, or leave the split out."
            )
    kinds = {type(value) for row in rows for value in row}
    if len(kinds) > 1:
        raise ValueError(f"expected either class numbers or class names in {where}, but there are both. Use one kind.")
    return kinds.pop() if kinds else int


def _names_of_numbers(numbers: Iterable[int], given: Sequence[str] | None, where: str) -> tuple[str, ...]:
    least, most = min(numbers, default=0), max(numbers, default=0)
    if least < 0:
        raise ValueError(
            f"expected class numbers from 0 in {where}, but there is {least}, which stands for no label. Leave out "
            "the split that has no labels."
        )
    names = tuple(given) if given is not None else tuple(str(k) for k in range(most + 1))
    if most >= len(names):
        raise ValueError(
            f"expected class numbers below {len(names)}, one for each of {', '.join(names[:20])}, but {where} holds "
            f"{most}. Name all classes with data.classes."
        )
    return _at_least_two(names, where)


def _names(rows: Sequence[Any], splits: Int[ndarray, " n"], given: Sequence[str] | None, where: str) -> tuple[str, ...]:
    everywhere = {name for row in rows for name in row}
    pairs = zip(rows, splits.tolist(), strict=True)
    trained = {name for row, code in pairs for name in row if code in (TRAIN, UNASSIGNED)}
    names = tuple(given) if given is not None else tuple(sorted(trained))
    unknown = sorted(everywhere - set(names))
    if unknown:
        of = "train" if given is None else "data.classes"
        raise ValueError(
            f"expected the classes of {of} ({', '.join(names[:20])}), but {where} also holds "
            f"{', '.join(unknown[:10])}. Mend those labels, or name all classes with data.classes."
        )
    return _at_least_two(names, where)


def _at_least_two(names: tuple[str, ...], where: str) -> tuple[str, ...]:
    if len(names) < 2:
        raise ValueError(f"expected at least two classes in {where}, but there is only {', '.join(names) or 'none'}.")
    return names
