"""Pictures per second of `vit check`, beside bare loops that only open and decode the same files with Pillow.

`vit check` is timed from the folder to the written page: it scans, decodes in parallel, hashes, compares, writes. The
bare loops decode to RGB and drop the pixels, in one process and in as many as `vit check` has threads; these processes
are started before the clock is. Everything takes its turns in one run, on the same files in the system's page cache.

Run: python benchmarks/check.py        Writes docs/records/check.json.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from input_pipeline import make_files
from PIL import Image
from records import keep

from vit.data import Folder
from vit.data.audit_report import check
from vit.data.source import available_cores

SIZES = {(64, 64): 2000, (500, 375): 600, (1600, 1200): 80}


def decode(file: Path) -> int:
    """What the bare loops do with a file."""
    with Image.open(file) as picture:
        return picture.convert("RGB").width


def checked(root: Path) -> None:
    """`vit check`, without its words."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        check(Folder(root=str(root)), out=root.parent)


def measure(root: Path, rounds: int, cores: int) -> dict[str, Any]:
    """Pictures per second of all three, and the median ratios of neighbouring turns."""
    files = sorted(root.rglob("*.jpg"))
    times: dict[str, list[float]] = {}
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(decode, files, chunksize=16)
        turns: dict[str, Callable[[], Any]] = {
            "vit check": lambda: checked(root),
            "Pillow, 1 process": lambda: [decode(file) for file in files],
            f"Pillow, {cores} processes": lambda: pool.map(decode, files, chunksize=16),
        }
        for number in range(rounds + 1):
            for name, turn in turns.items():
                started = time.perf_counter()
                turn()
                if number:  # the first round imports and fills the page cache
                    times.setdefault(name, []).append(time.perf_counter() - started)
    ours = times["vit check"]
    return {
        "files": len(files),
        "per_second": {name: round(len(files) / median(spent), 1) for name, spent in times.items()},
        "vit_over": {
            name: round(median(theirs / spent for theirs, spent in zip(other, ours, strict=True)), 3)
            for name, other in times.items()
            if name != "vit check"
        },
    }


def main() -> None:
    """Print the ratios and keep them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="share of the files, for a quick look")
    parser.add_argument("--dry_run", action="store_true", help="measure and print, but keep no record")
    arguments = parser.parse_args()
    cores = available_cores()
    record: dict[str, Any] = {"threads": cores, "rounds": arguments.rounds, "sizes": {}}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VIT_CACHE"] = f"{folder}/cache"
        for (width, height), count in SIZES.items():
            root = Path(folder) / f"{width}x{height}" / "pictures"
            make_files(root, width, height, max(20, round(count * arguments.share)))
            result = measure(root, arguments.rounds, cores)
            record["sizes"][f"{width}x{height}"] = result
            print(f"{width} x {height}, {result['files']} files: {result['per_second']} pictures per second")
            print(f"    vit check over: {result['vit_over']}", flush=True)
    if not arguments.dry_run:
        keep("check", record)


if __name__ == "__main__":
    main()
