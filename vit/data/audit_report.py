"""`vit check`: the findings of an audit as a summary, a table and a page that needs no network."""

import base64
import csv
import io
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from PIL import Image

from vit.data.audit import Audit, Finding, audit, class_names
from vit.data.decode import DecodeError, decode
from vit.data.source import Source
from vit.data.split import write_split
from vit.data.table import SPLITS, DataTable

_SHOWN = 100
_PICTURES = 6


def check(source: Source, *, out: str | Path = ".", write_manifest: str | Path | None = None) -> Audit:
    """Decode every picture of a source once; print a summary, write `check.csv` and `check.html`.

    Args:
        source: where the pictures are.
        out: folder of both files.
        write_manifest: file for the splits without leaks (.csv or .parquet), which other runs can take.

    Raises:
        ValueError: the source cannot be scanned, or a file cannot be written.
    """
    table = source.table()
    started = time.monotonic()
    result = audit(table, max_pixels=source.max_pixels, progress=_bar)
    rate = len(table) / max(1e-9, time.monotonic() - started)
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(result, folder / "check.csv")
        (folder / "check.html").write_text(page(result, max_pixels=source.max_pixels), encoding="utf-8")
        if write_manifest is not None:
            write_without_leaks(result, Path(write_manifest))
    except OSError as error:
        raise ValueError(f"expected a place to write to, but {error.filename}: {error.strerror}.") from error
    print("\n".join(_lines(result)))
    print(f"{_summary(result)} {rate:.0f} pictures per second. See {folder / 'check.html'} and check.csv.")
    if write_manifest is not None:
        print(f"wrote {write_manifest}, {len(result.leaked_rows())} pictures left out")
    return result


def _bar(rows: Iterable[int], total: int) -> Iterator[int]:
    from rich.console import Console
    from rich.progress import track

    yield from track(rows, "decoding", total=total, console=Console(stderr=True))


def _summary(result: Audit) -> str:
    warnings = len(result.findings) - result.errors
    return f"{len(result.table):,} pictures: {result.errors} errors, {warnings} warnings."


def _lines(result: Audit) -> list[str]:
    table = result.table
    lines = [f"{split}: {len(table.rows(split)):,} pictures" for split in SPLITS]
    if result.widths:
        for name, sides in (("widths", result.widths), ("heights", result.heights)):
            lines.append(f"{name}: {min(sides)} to {max(sides)}, median {np.median(sides):.0f} pixels")
    for name, counter in (("formats", result.formats), ("modes", result.modes)):
        lines.append(f"{name}: " + ", ".join(f"{key} {count:,}" for key, count in counter.most_common()))
    skipped = table.info.get("skipped", {})
    hidden = table.info.get("hidden", {})
    if skipped or hidden:
        lines.append("not used: " + ", ".join(f"{count} {key}" for key, count in {**skipped, **hidden}.items()))
    for kind, group in _by_kind(result).items():
        lines.append(f"{group[0].level}: {len(group)} x {kind}, such as: {_where(table, group[0])}{group[0].detail}")
    return lines


def _where(table: DataTable, finding: Finding) -> str:
    return f"{table.name(finding.rows[0])}: " if finding.rows else ""


def _by_kind(result: Audit) -> dict[str, list[Finding]]:
    groups: dict[str, list[Finding]] = {}
    for finding in result.findings:
        groups.setdefault(finding.kind, []).append(finding)
    return groups


def write_csv(result: Audit, file: Path) -> None:
    """One line per finding and picture: finding, level, kind, path, split, class, detail."""
    table = result.table
    with open(file, "w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["finding", "level", "kind", "path", "split", "class", "detail"])
        for number, f in enumerate(result.findings, 1):
            places = [(table.name(r), table.split(r), ";".join(class_names(table, r))) for r in f.rows]
            for place in places or [("", "", "")]:
                writer.writerow([number, f.level, f.kind, *place, f.detail])


def write_without_leaks(result: Audit, file: Path) -> None:
    """The splits as `write_split` writes them, without the rows that leak."""
    write_split(result.table, file)
    as_csv = file.suffix.lower() == ".csv"
    columns = pyarrow.csv.read_csv(file) if as_csv else pq.read_table(file)
    leaked = result.leaked_rows()
    kept = columns.filter(pa.array([row not in leaked for row in range(len(columns))]))
    (pyarrow.csv.write_csv if as_csv else pq.write_table)(kept, file)


def page(result: Audit, *, max_pixels: int) -> str:
    """The page, with thumbnails inside."""
    from jinja2 import Environment, PackageLoader

    template = Environment(loader=PackageLoader("vit.data", "."), autoescape=True).get_template("audit_page.html")
    groups: dict[str, Any] = {
        kind: {"total": len(group), "shown": [_shown(result.table, f, max_pixels) for f in group[:_SHOWN]]}
        for kind, group in _by_kind(result).items()
    }
    return template.render(
        root=str(result.table.root),
        summary=_summary(result),
        splits=SPLITS,
        counts=result.counts(),
        lines=_lines(result)[len(SPLITS) :],
        groups=groups,
    )


def _shown(table: DataTable, finding: Finding, max_pixels: int) -> dict[str, Any]:
    pictures = [_picture(table, row, max_pixels) for row in finding.rows[:_PICTURES]]
    more = len(finding.rows) - len(pictures)
    detail = finding.detail + (f" (and {more} more)" if more > 0 else "")
    return {"level": finding.level, "detail": detail, "pictures": pictures}


def _picture(table: DataTable, row: int, max_pixels: int) -> dict[str, str]:
    labels = ", ".join(class_names(table, row))
    caption = f"{table.name(row)} ({table.split(row)}, {labels})"
    try:
        picture = decode(table.read(row), max_pixels=max_pixels)
    except (OSError, DecodeError):
        return {"image": "", "alt": "", "caption": caption}
    picture.thumbnail((160, 160), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=80)
    return {"image": base64.b64encode(stream.getvalue()).decode(), "alt": f"{labels}: {caption}", "caption": caption}
