"""What a large data set costs before its first picture is read: scanning, memory, workers.

Run: python benchmarks/index.py        Writes docs/records/index.json.
"""

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from records import keep
from torch.utils.data import DataLoader, Dataset

from vit.data.folder import Folder, scan_folder
from vit.data.split import fill_splits
from vit.data.table import UNASSIGNED, DataTable, Rows, write_table

CLASSES = 1000
PICTURES = 100_000
MB = 1e6


def memory(name: str, of: str = "smaps_rollup") -> int:
    """Bytes of this process, as Linux counts them: Rss, Private_Dirty, VmHWM (the peak, of status)."""
    for line in Path(f"/proc/self/{of}").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"expected {name} in /proc/self/{of}, but it is not there.")


def synthetic_paths(count: int) -> Iterator[bytes]:
    """Paths as ImageNet's: train/n01440764/n01440764_10026.JPEG."""
    for i in range(count):
        synset = b"n%08d" % (1_440_764 + i % CLASSES * 1000)
        yield b"train/%s/%s_%d.JPEG" % (synset, synset, i // CLASSES)


def build(count: int, sink: Any) -> None:
    """Make a table of so many rows; run in a process of its own, for its peak."""
    before = memory("Rss")
    started = time.perf_counter()
    paths = list(synthetic_paths(count))
    path_bytes = sum(map(len, paths))
    labels = (np.arange(count) % CLASSES).astype(np.int32)
    names = [f"class {k}" for k in range(CLASSES)]
    splits = np.full(count, UNASSIGNED, dtype=np.int8)
    rows = Rows(classes=names, root=Path("/pictures"), paths=paths, labels=labels, splits=splits)
    rows.splits = fill_splits(rows, val=0.05, test=0.05, seed=0)
    table = write_table(rows)
    seconds = time.perf_counter() - started
    peak = memory("VmHWM", "status")
    del rows, paths, labels, splits
    for row in range(0, count, 997):
        table.path(row)
    sink.put(
        {
            "rows": count,
            "path_bytes_per_row": round(path_bytes / count, 1),
            "seconds": round(seconds, 1),
            "peak_mb": round((peak - before) / MB, 1),
            "peak_bytes_per_row_beyond_path": round((peak - before - path_bytes) / count, 1),
            "then_mb": round((memory("Rss") - before) / MB, 1),
            "then_bytes_per_row_beyond_path": round((memory("Rss") - before - path_bytes) / count, 1),
            "file": str(table.file),
            "file_mb": round(table.file.stat().st_size / MB, 1),
        }
    )


class Asked(Dataset):
    """Looks up what a picture needs from the table, without a picture; the last answer is the memory used."""

    def __init__(self, table: DataTable) -> None:
        self.table = table

    def __len__(self) -> int:
        return 50_001

    def __getitem__(self, i: int) -> int:
        if i == 50_000:
            return memory("Private_Dirty")
        row = (i * 7919) % len(self.table)
        return len(self.table.path(row)) + self.table.label(row)


def worker_memory(file: str, context: str) -> int:
    """Memory that a loader's worker has for itself, after it asked for many rows."""
    table = DataTable(file)
    loader = DataLoader(Asked(table), batch_size=None, num_workers=1, multiprocessing_context=context)
    last = 0
    for value in loader:
        last = int(value)
    return last


def in_process(function: Any, *args: Any) -> Any:
    """Run in a fresh process and return what it puts."""
    context = multiprocessing.get_context("spawn")
    sink = context.Queue()
    process = context.Process(target=function, args=(*args, sink))
    process.start()
    result = sink.get()
    process.join()
    return result


def scanning(folder: Path) -> dict[str, Any]:
    """Ours against torchvision's, alternating, so that both meet the same machine."""
    from torchvision.datasets import ImageFolder

    for k in range(100):
        (folder / f"class{k:03d}").mkdir()
        for i in range(PICTURES // 100):
            (folder / f"class{k:03d}" / f"picture_{i:05d}.jpg").touch()
    ways = {
        "vit": lambda: scan_folder(folder),
        "vit, with split and table": lambda: Folder(root=str(folder)).table(),
        "torchvision": lambda: ImageFolder(str(folder)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(7):
        for name, way in ways.items():
            started = time.perf_counter()
            assert len(way().paths if name == "vit" else way()) == PICTURES
            times[name].append(time.perf_counter() - started)
    ratios = [a / b for a, b in zip(times["vit"], times["torchvision"], strict=True)]
    return {
        "files": PICTURES,
        "seconds": {name: round(median(values), 3) for name, values in times.items()},
        "vit_over_torchvision": round(median(ratios), 3),
    }


def main() -> None:
    """Print the figures and keep them."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["VIT_CACHE"] = cache
        with tempfile.TemporaryDirectory() as folder:
            scan = scanning(Path(folder))
        print("scanning", json.dumps(scan, indent=2))
        small, large = in_process(build, 10), in_process(build, 1_300_000)
        workers = {}
        for context in ("fork", "spawn"):
            least, most = (worker_memory(t["file"], context) for t in (small, large))
            workers[context] = {
                "worker_mb": round(most / MB, 1),
                "more_than_for_10_rows_mb": round((most - least) / MB, 1),
            }
        huge = in_process(build, 14_000_000)
    for table in (large, huge):
        del table["file"]
        print(json.dumps(table, indent=2))
    print("workers", json.dumps(workers, indent=2))
    keep("index", {"scanning": scan, "table": large, "large_table": huge, "workers": workers})


if __name__ == "__main__":
    main()
