"""Every picture decoded once, and what is wrong with a set of pictures: damage, duplicates, leaks, odd sizes."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray
from PIL import Image

from vit.data.decode import MAX_PIXELS, WHITE, DecodeError, decode, read_header
from vit.data.source import available_cores
from vit.data.table import SPLITS, DataTable

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
}

HUGE = 50_000_000
IMBALANCE = 10

# A copy that was saved or resized again differs by about 1 grey level on a 32 x 32 thumbnail; two photographs of
# one series by 5 and more.
_NEAR = 3.0
_FLAT = 6.0
_BANDS = 8


class Facts(NamedTuple):
    """What decoding told about a row.

    Args:
        error: why it cannot be used, or None; then the rest is empty.
        format: of the content, such as JPEG.
        mode: Pillow's, as stored.
        size: upright width and height.
        orientation: EXIF orientation.
        digest: of the decoded upright pixels.
        thumbnail: (32, 32) grey.
    """

    error: str | None
    format: str = ""
    mode: str = ""
    size: tuple[int, int] = (0, 0)
    orientation: int = 1
    digest: bytes = b""
    thumbnail: UInt8[ndarray, "32 32"] | None = None


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


def inspect(table: DataTable, row: int, max_pixels: int = MAX_PIXELS) -> Facts:
    """Decode a row fully and measure it."""
    name = table.name(row)
    try:
        data = table.read(row)
        header = read_header(data, max_pixels=max_pixels)
        orientation = header.picture.getexif().get(0x0112, 1)
        kind, mode = header.picture.format or "", header.picture.mode
        picture = decode(data, name=name, background=WHITE, max_pixels=max_pixels)
    except OSError as error:
        return Facts(f"cannot be read ({error.strerror})")
    except DecodeError as error:
        return Facts(str(error).removeprefix(f"{name}: "))
    digest = hashlib.blake2b(repr(picture.size).encode() + picture.tobytes(), digest_size=16).digest()
    # Two steps, so that a picture of any size costs little.
    small = np.asarray(picture.resize((32, 32), Image.Resampling.BOX, reducing_gap=2.0).convert("L"))
    return Facts(None, "JPEG" if kind == "MPO" else kind, mode, picture.size, orientation, digest, small)


def audit(
    table: DataTable,
    *,
    max_pixels: int = MAX_PIXELS,
    progress: Callable[[Iterable[int], int], Iterable[int]] | None = None,
) -> Audit:
    """Decode every picture of a table, in parallel, and judge.

    Args:
        table: the data table.
        max_pixels: larger pictures are errors, as in training.
        progress: wraps the rows as they are done, given their number.
    """
    result = Audit(table)
    facts: list[Facts] = []
    rows: Iterable[int] = range(len(table))
    done = _inspected(table, max_pixels)
    for _ in progress(rows, len(table)) if progress else rows:
        facts.append(next(done))
    for row, fact in enumerate(facts):
        result.findings += _of_one(table, row, fact)
        if fact.error is None:
            result.formats[fact.format] += 1
            result.modes[fact.mode] += 1
            result.widths.append(fact.size[0])
            result.heights.append(fact.size[1])
    result.findings += _of_sizes(facts)
    exact = _exact(facts)
    result.findings += [finding for rows_ in exact for finding in _of_copies(table, rows_, near=False)]
    # One of each set of equal pictures stands for all in the search for similar ones.
    first = {row: rows_[0] for rows_ in exact for row in rows_}
    alone = [row for row in range(len(facts)) if first.get(row, row) == row and facts[row].error is None]
    for pair in _near(facts, alone):
        result.findings += _of_copies(table, pair, near=True)
    result.findings += _of_counts(result)
    result.findings.sort(key=lambda f: (f.level != "error", f.kind, f.rows))
    return result


def _inspected(table: DataTable, max_pixels: int) -> Iterator[Facts]:
    rows = iter(range(len(table)))
    with ThreadPoolExecutor(available_cores()) as pool:
        while block := list(islice(rows, 256)):
            yield from pool.map(lambda row: inspect(table, row, max_pixels), block)


def _of_one(table: DataTable, row: int, fact: Facts) -> Iterator[Finding]:
    if fact.error is not None:
        yield Finding("error", "unreadable", (row,), fact.error)
        return
    suffix = os.path.splitext(table.name(row))[1].lower()
    if suffix in _PROMISED and _PROMISED[suffix] != fact.format:
        yield Finding("warning", "mislabelled", (row,), f"named {suffix}, but it is {fact.format}; it is read as that")
    if fact.orientation in range(2, 9):
        yield Finding("warning", "rotated", (row,), f"EXIF orientation {fact.orientation}; it is turned upright")
    if fact.thumbnail is not None and np.ptp(fact.thumbnail) == 0:
        yield Finding("warning", "blank", (row,), "a single colour")


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
    counts = {name: by_split["train"] for name, by_split in result.counts().items()}
    most, least = max(counts.values()), min(counts.values())
    if least and most >= IMBALANCE * least:
        names = {count: name for name, count in counts.items()}
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
    buckets: dict[tuple[int, bytes], list[int]] = {}
    seen: set[tuple[int, int]] = set()
    for row in rows:
        thumbnail = facts[row].thumbnail
        if thumbnail is None or thumbnail.std() < _FLAT:
            continue  # flat pictures resemble each other without being copies
        coarse = thumbnail.reshape(8, 4, 8, 4).mean((1, 3))
        # 112 signs of differences in 8 bands of 14: a copy agrees in one of them, whatever happened to the others.
        signs = np.concatenate([(coarse[:, 1:] > coarse[:, :-1]).ravel(), (coarse[1:] > coarse[:-1]).ravel()])
        for band, part in enumerate(signs.reshape(_BANDS, -1)):
            bucket = buckets.setdefault((band, part.tobytes()), [])
            for other in bucket:
                if (other, row) not in seen and _alike(facts[other], facts[row]):
                    seen.add((other, row))
                    yield other, row
            if len(bucket) < 200:  # a set of pictures that all agree here says nothing
                bucket.append(row)


def _alike(one: Facts, two: Facts) -> bool:
    assert one.thumbnail is not None
    assert two.thumbnail is not None
    ratio = (one.size[0] * two.size[1]) / (one.size[1] * two.size[0])
    difference = np.abs(one.thumbnail.astype(np.int16) - two.thumbnail).mean()
    return 0.95 < ratio < 1.05 and bool(difference < _NEAR)
