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
from vit.data.facts import look
from vit.data.header import DecodeError
from vit.data.source import Source
from vit.data.split import write_split
from vit.data.table import SPLITS

_SHOWN = 100
_PICTURES = 6
_CLASSES = 20

# What each kind of finding means and what to do.
ADVICE = {
    "unreadable": "Training stops at these files. Replace or remove them.",
    "channels": "No model takes these together with the others. Save them alike, or remove them.",
    "conflict": "The same picture has several labels; one of them is wrong. Correct the labels or remove the copies.",
    "leak": "The same picture is in several splits, so the scores are better than they should be. "
    "Remove the copies, or write splits without them: --write_split FILE.",
    "conflict (near)": "Pictures that look the same have several labels. Look whether one of them is wrong.",
    "leak (near)": "Pictures that look the same are in several splits. Look whether they are copies, and remove "
    "them, or write splits without them: --write_split FILE.",
    "duplicate": "The same picture counts several times in training. Usually harmless.",
    "duplicate (near)": "Pictures that look the same. Usually harmless.",
    "mislabelled": "Pictures are read by their content, so training works; other programs may fail. Rename them.",
    "rotated": "The camera noted how to turn these. Nothing to do if they look upright on the page.",
    "several frames": "Animations or documents of several pages. Nothing to do if their first picture will do.",
    "blank": "Pictures that show nothing. Remove them, unless they are meant.",
    "tiny": "Much smaller than the others. Look whether they are thumbnails or icons that do not belong here.",
    "huge": "Much larger than the others; they make training slow. Save them smaller.",
    "imbalance": "Rare classes are learnt badly. Collect more of them, or try --data.sampling balanced.",
    "empty class": "Nothing is learnt or measured about these classes. Add pictures, or choose other splits.",
}


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
    result = audit(table, preprocessing=source.declared(), max_pixels=source.max_pixels, progress=_bar)
    rate = len(table) / max(1e-9, time.monotonic() - started)
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(result, folder / "check.csv")
        (folder / "check.html").write_text(page(result), encoding="utf-8")
        if write_manifest is not None:
            write_without_leaks(result, Path(write_manifest))
    except OSError as error:
        raise ValueError(f"expected a place to write to, but {error.filename}: {error.strerror}.") from error
    print("\n".join([f"{table.root}", *_facts(result), "", *_findings(result)]))
    print(f"Every finding with its pictures: {folder / 'check.html'}. As a table: {folder / 'check.csv'}.")
    if write_manifest is not None:
        left_out = len(result.leaked_rows())
        print(f"Splits with {left_out} leaked pictures left out: {write_manifest} (use it: --data.split_file).")
    print(f"{_summary(result)} {rate:,.0f} pictures per second.")
    return result


def _bar(rows: Iterable[int], total: int) -> Iterator[int]:
    from rich.console import Console
    from rich.progress import track

    yield from track(rows, "decoding", total=total, console=Console(stderr=True))


def _summary(result: Audit) -> str:
    def counted(number: int, word: str) -> str:
        return f"{number:,} {word}{'' if number == 1 else 's'}"

    warnings = len(result.findings) - result.errors
    sizes = (counted(len(result.table), "picture"), counted(result.errors, "error"), counted(warnings, "warning"))
    return "{}: {}, {}.".format(*sizes)


def _facts(result: Audit) -> list[str]:
    """What there is, a line for each thing."""
    table = result.table
    sizes = ", ".join(f"{split} {len(table.rows(split)):,}" for split in SPLITS)
    lines = [f"pictures: {sizes}; {len(table.classes):,} classes"]
    if len(table.classes) <= _CLASSES:
        counts = ((name, sum(by_split.values())) for name, by_split in result.counts().items())
        lines.append("classes: " + ", ".join(f"{_plain(name)} {count:,}" for name, count in counts))
    if result.widths:
        for name, sides in (("widths", result.widths), ("heights", result.heights)):
            lines.append(f"{name}: {min(sides)} to {max(sides)} pixels, median {np.median(sides):.0f}")
    for name, counter in (("formats", result.formats), ("modes", result.modes)):
        if counter:
            lines.append(f"{name}: " + ", ".join(f"{key} {count:,}" for key, count in counter.most_common()))
    left_out = [f"{count:,} {_plain(key)}" for key, count in table.info.get("skipped", {}).items()]
    left_out += [f"{count:,} hidden ({_plain(key)})" for key, count in table.info.get("hidden", {}).items()]
    if left_out:
        lines.append("not used: " + ", ".join(left_out))
    return lines


def _findings(result: Audit) -> list[str]:
    """Every kind of finding with an example and what to do; errors first."""
    lines = []
    for kind, group in _by_kind(result).items():
        first = group[0]
        names = [_plain(result.table.name(row)) for row in first.rows[:2]]
        example = ("for example " if len(group) > 1 else "") + " and ".join(names) + (": " if names else "")
        lines.append(f"{first.level.upper()}: {len(group):,} x {kind}. {ADVICE[kind]}")
        lines.append(f"    {example}{_plain(first.detail)}")
    return lines or ["Nothing wrong was found."]


def _plain(text: str) -> str:
    """A name fit for a terminal: control characters, which could do anything there, are spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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


def page(result: Audit) -> str:
    """The page, with thumbnails inside."""
    from jinja2 import Environment, PackageLoader

    template = Environment(loader=PackageLoader("vit.data", "."), autoescape=True).get_template("audit_page.html")
    groups = [
        {
            "kind": kind,
            "level": group[0].level,
            "advice": ADVICE[kind],
            "total": len(group),
            "shown": [_shown(result, finding) for finding in group[:_SHOWN]],
        }
        for kind, group in _by_kind(result).items()
    ]
    return template.render(
        root=str(result.table.root),
        summary=_summary(result),
        splits=SPLITS,
        counts=result.counts(),
        facts=[line.split(": ", 1) for line in _facts(result) if not line.startswith("classes")],
        groups=groups,
    )


def _shown(result: Audit, finding: Finding) -> dict[str, Any]:
    pictures = [_picture(result, row) for row in finding.rows[:_PICTURES]]
    more = len(finding.rows) - len(pictures)
    detail = finding.detail + (f" (and {more} more)" if more > 0 else "")
    return {"detail": detail, "pictures": pictures}


def _picture(result: Audit, row: int) -> dict[str, str]:
    table, name = result.table, result.table.name(row)
    shown = {"image": "", "name": name, "place": f"{table.split(row)}, {', '.join(class_names(table, row))}"}
    try:
        data = table.read(row)
        picture = look(data, result.preprocessing, name=name, max_pixels=result.max_pixels).picture
    except (OSError, DecodeError):
        return shown
    picture.thumbnail((160, 160), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=80)
    return shown | {"image": base64.b64encode(stream.getvalue()).decode()}
