"""Every picture decoded once, and what is wrong with a set of pictures: damage, duplicates, leaks, odd sizes."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from vit.data.facts import Facts, inspect
from vit.data.header import MAX_PIXELS
from vit.data.source import available_cores
from vit.data.table import SPLITS, DataTable
from vit.data.transforms import Preprocessing

Level = Literal["error", "warning"]

# Suffixes by the format that they promise.
_PROMISED = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jpe": "JPEG",
    ".jfif": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".gif": "GIF",
    ".bmp": "BMP",
    ".dib": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".avif": "AVIF",
    ".jp2": "JPEG2000",
    ".npy": "NumPy",
}

HUGE = 50_000_000
IMBALANCE = 10

# A copy that was saved or resized again differs by about 1 grey level on a 32 x 32 thumbnail; two photographs of
# one series by 5 and more.
_NEAR = 3.0
_FLAT = 6.0
_BANDS = 8
_BUCKET = 1000


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Args:
        level: error (training would fail or numbers would be wrong) or warning.
        kind: short name, the same for all findings of a kind.
        rows: of the table.
        detail: one line.
    """

    level: Level
    kind: str
    rows: tuple[int, ...]
    detail: str


@dataclass
class Audit:
    """All findings and counts of a table; see `audit`."""

    table: DataTable
    preprocessing: Preprocessing
    max_pixels: int
    findings: list[Finding] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)

    @property
    def errors(self) -> int:
        """Number of findings that are errors."""
        return sum(f.level == "error" for f in self.findings)

    def counts(self) -> dict[str, dict[str, int]]:
        """Pictures per class and split."""
        counts = {name: dict.fromkeys(SPLITS, 0) for name in self.table.classes}
        for split in SPLITS:
            for row in self.table.rows(split):
                for name in class_names(self.table, row):
                    counts[name][split] += 1
        return counts

    def leaked_rows(self) -> set[int]:
        """Rows to leave out so that no picture stands in two splits: train's copy goes, the test's stays."""
        leaked: set[int] = set()
        for finding in self.findings:
            if finding.kind.startswith("leak"):
                order = [SPLITS.index(self.table.split(row)) for row in finding.rows]
                leaked |= {row for row, place in zip(finding.rows, order, strict=True) if place < max(order)}
        return leaked


def class_names(table: DataTable, row: int) -> tuple[str, ...]:
    """The class or classes of a row."""
    label = table.label(row)
    return tuple(table.classes[k] for k in (label if isinstance(label, list) else [label]))


def audit(
    table: DataTable,
    *,
    preprocessing: Preprocessing | None = None,
    max_pixels: int = MAX_PIXELS,
    progress: Callable[[Iterable[int], int], Iterable[int]] | None = None,
) -> Audit:
    """Decode every picture of a table, in parallel, and judge.

    Args:
        table: the data table.
        preprocessing: background, value range and whether pictures are turned upright.
        max_pixels: larger pictures are errors, as in training.
        progress: wraps the rows as they are done, given their number.
    """
    result = Audit(table, preprocessing or Preprocessing(), max_pixels)
    facts: list[Facts] = []
    rows: Iterable[int] = range(len(table))
    done = _inspected(result)
    for _ in progress(rows, len(table)) if progress else rows:
        facts.append(next(done))
    for row, fact in enumerate(facts):
        result.findings += _of_one(result, row, fact)
        if fact.error is None:
            result.formats[fact.format] += 1
            result.modes[fact.mode] += 1
            result.widths.append(fact.size[0])
            result.heights.append(fact.size[1])
    result.findings += [*_of_sizes(facts), *_of_channels(facts)]
    exact = _exact(facts)
    result.findings += [finding for rows_ in exact for finding in _of_copies(table, rows_, near=False)]
    # One of each set of equal pictures stands for all in the search for similar ones.
    copies = {rows_[0]: rows_ for rows_ in exact}
    others = {row for rows_ in exact for row in rows_[1:]}
    alone = [row for row, fact in enumerate(facts) if fact.error is None and row not in others]
    for one, two in _near(facts, alone):
        result.findings += _of_copies(table, (*copies.get(one, (one,)), *copies.get(two, (two,))), near=True)
    result.findings += _of_counts(result)
    result.findings.sort(key=lambda f: (f.level != "error", f.kind, f.rows))
    return result


def _inspected(result: Audit) -> Iterator[Facts]:
    table, preprocessing, max_pixels = result.table, result.preprocessing, result.max_pixels
    rows = iter(range(len(table)))
    with ThreadPoolExecutor(available_cores()) as pool:
        while block := list(islice(rows, 256)):
            yield from pool.map(lambda row: inspect(table, row, preprocessing, max_pixels), block)


def _of_one(result: Audit, row: int, fact: Facts) -> Iterator[Finding]:
    if fact.error is not None:
        yield Finding("error", "unreadable", (row,), fact.error)
        return
    suffix = os.path.splitext(result.table.name(row))[1].lower()
    if suffix in _PROMISED and _PROMISED[suffix] != fact.format:
        detail = f"named {suffix}, but its content is {fact.format}; it is read as {fact.format}"
        yield Finding("warning", "mislabelled", (row,), detail)
    if fact.orientation in range(2, 9):
        what = "turned upright" if result.preprocessing.orient else "taken as stored, since orient is off"
        yield Finding("warning", "rotated", (row,), f"EXIF orientation {fact.orientation}; it is {what}")
    if fact.frames > 1:
        yield Finding("warning", "several frames", (row,), f"{fact.frames} frames or pages; the first is taken")
    if fact.thumbnail is not None and np.ptp(fact.thumbnail) == 0:
        yield Finding("warning", "blank", (row,), "a single colour")


def _of_channels(facts: list[Facts]) -> Iterator[Finding]:
    """Pictures that no model can take together with most others."""
    usable = [fact for fact in facts if fact.error is None]

    def fits(fact: Facts, channels: int) -> bool:
        return fact.channels == channels or (not fact.array and channels in (1, 3))

    candidates = [3, *sorted({fact.channels for fact in usable if fact.array})]
    usual = max(candidates, key=lambda channels: sum(fits(fact, channels) for fact in usable))
    for row, fact in enumerate(facts):
        if fact.error is None and not fits(fact, usual):
            yield Finding("error", "channels", (row,), f"{fact.channels} channels, but most pictures fit {usual}")


def _of_sizes(facts: list[Facts]) -> Iterator[Finding]:
    sizes = [fact.size for fact in facts if fact.error is None]
    usual = float(np.median([min(size) for size in sizes])) if sizes else 0.0
    for row, fact in enumerate(facts):
        width, height = fact.size
        if fact.error is not None:
            continue
        if min(width, height) < usual / 4:
            detail = f"{width} x {height} pixels; the usual short side is {usual:.0f}"
            yield Finding("warning", "tiny", (row,), detail)
        if width * height > HUGE or min(width, height) > 8 * usual:
            yield Finding("warning", "huge", (row,), f"{width} x {height} pixels; shrink it once to train faster")


def _of_counts(result: Audit) -> Iterator[Finding]:
    by_class = result.counts()
    for split in SPLITS:
        counts = {name: by_split[split] for name, by_split in by_class.items()}
        empty = [name for name, count in counts.items() if not count]
        if empty and result.table.rows(split):
            listed = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
            yield Finding("warning", "empty class", (), f"{split} has no picture of {listed}")
        names = {count: name for name, count in counts.items()}
        most, least = max(names), min(names)
        if split == "train" and least and most >= IMBALANCE * least:
            detail = f"train has {most} pictures of {names[most]}, but {least} of {names[least]}"
            yield Finding("warning", "imbalance", (), detail)


def _exact(facts: list[Facts]) -> list[tuple[int, ...]]:
    found: dict[bytes, list[int]] = {}
    for row, fact in enumerate(facts):
        if fact.error is None:
            found.setdefault(fact.digest, []).append(row)
    return [tuple(rows) for rows in found.values() if len(rows) > 1]


def _of_copies(table: DataTable, rows: tuple[int, ...], *, near: bool) -> Iterator[Finding]:
    """What is wrong with pictures that are equal, or nearly."""
    level: Level = "warning" if near else "error"
    like, suffix = ("nearly equal", " (near)") if near else ("equal", "")
    classes = sorted({", ".join(class_names(table, row)) for row in rows})
    splits = [name for name in SPLITS if any(table.split(row) == name for row in rows)]
    if len(classes) > 1:
        yield Finding(level, f"conflict{suffix}", rows, f"{like} pictures with different labels: {'; '.join(classes)}")
    if len(splits) > 1:
        yield Finding(level, f"leak{suffix}", rows, f"{like} pictures in {' and '.join(splits)}")
    if len(classes) == len(splits) == 1:
        yield Finding("warning", f"duplicate{suffix}", rows, f"{len(rows)} {like} pictures in {classes[0]}")


def _near(facts: list[Facts], rows: list[int]) -> Iterator[tuple[int, int]]:
    """Pairs whose thumbnails nearly agree; candidates share one of the bands of a difference hash."""
    thumbnails = [(row, facts[row].thumbnail) for row in rows]
    # Flat pictures resemble each other without being copies.
    kept = [row for row, thumbnail in thumbnails if thumbnail is not None and thumbnail.std() >= _FLAT]
    if not kept:
        return
    coarse = np.stack([_coarse(facts[row]) for row in kept])
    across, down = coarse[:, :, 1:] > coarse[:, :, :-1], coarse[:, 1:] > coarse[:, :-1]
    signs = np.concatenate([across.reshape(len(kept), -1), down.reshape(len(kept), -1)], 1)
    # 112 signs of differences in 8 bands of 14: a copy agrees in one of them, whatever happened to the others.
    keys = (signs.reshape(len(kept), _BANDS, -1) @ (1 << np.arange(14))).T
    order = np.argsort(keys, 1, kind="stable")
    place = np.argsort(order, 1)
    start = np.stack([np.searchsorted(key[o], key) for key, o in zip(keys, order, strict=True)])
    start = np.maximum(start, place - _BUCKET)
    values = coarse.reshape(len(kept), -1)
    for this, row in enumerate(kept):
        # Those before it that have the same band.
        candidates = np.concatenate([order[b, start[b, this] : place[b, this]] for b in range(_BANDS)])
        # Means of blocks differ by no more than the pixels do, so that this loses no copy.
        close = candidates[np.abs(values[candidates] - values[this]).mean(1) < _NEAR]
        yield from ((kept[other], row) for other in np.unique(close) if _alike(facts[kept[other]], facts[row]))


def _coarse(fact: Facts) -> Float32[ndarray, "8 8"]:
    assert fact.thumbnail is not None
    return fact.thumbnail.reshape(8, 4, 8, 4).mean((1, 3), dtype=np.float32)


def _alike(one: Facts, two: Facts) -> bool:
    assert one.thumbnail is not None
    assert two.thumbnail is not None
    ratio = (one.size[0] * two.size[1]) / (one.size[1] * two.size[0])
    difference = np.abs(one.thumbnail.astype(np.int16) - two.thumbnail).mean()
    return 0.95 < ratio < 1.05 and bool(difference < _NEAR)
