"""What every source of pictures has in common: how its table is split and how its pictures are loaded."""

import logging
import math
import os
import shutil
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from vit.data.header import MAX_PIXELS
from vit.data.sampler import TrainSampler
from vit.data.split import apply_split_file, fill_splits, groups_by_pattern, split_as_in_run
from vit.data.table import DataTable, Rows, write_table
from vit.data.transforms import Augmentation, Preprocessing

log = logging.getLogger("vit.data")

_AUGMENT = Augmentation()
_LEAST = {
    "batch_size": 1,
    "eval_batch_size": 1,
    "num_workers": 0,
    "max_pixels": 1,
    "folds": 2,
    "fold": 0,
    "repeats": 1,
    "max_errors": 0,
    "cache_size": 1,
}


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A source of pictures: where they lie, how they are split, how they are loaded.

    A source of one's own derives from this class, adds fields, and writes `scan`.

    Args:
        batch_size: training pictures per step and process; default 32, fewer where there are not so many.
        eval_batch_size: pictures per evaluation step and process; default as batch_size.
        num_workers: worker processes that decode, 0 for none; default by cores and amount of data.
        multiprocessing_context: how workers start; default the platform's way.
        persistent_workers: keep workers from epoch to epoch.
        pin_memory: page-locked batches; default on a GPU.
        drop_last: leave out the last, smaller batch of a training epoch (its pictures differ in every epoch).
        seed: of order and augmentation; default that of `seed_everything`, else 0.
        split_seed: of the split.
        val: share of each class that is split off for validation, where the source has no val split.
        test: share of each class that is split off for the test, where the source has no splits at all.
        folds: cross-validation: what is not test is cut into so many parts; `val` does not count then.
        fold: the part that validates, from 0 to `folds` - 1.
        group_pattern: regular expression on a picture's path below the root; what its first parenthesis (or
            else all of it) matches names a patient, scene or video, which is never divided by a split.
        split_file: Parquet or CSV with the columns path and split, such as the `split.parquet` of another run;
            it alone decides, and pictures it does not name are left out.
        sampling: training pictures per epoch: `shuffle` shows each once; `balanced` shows every class equally
            often; `weighted` shows each by its weight in the table. An epoch is equally long in all three.
        repeats: copies of a training picture that follow each other, each augmented in its own way; an epoch
            stays as long and shows fewer pictures.
        augment: what training draws at random.
        background: red, green, blue (0-255) behind transparent pixels; default the preprocessing's (white).
        value_range: values of 16-bit, 32-bit and float pictures that stand for black and white.
        max_pixels: largest width times height that is decoded.
        orient: turn pictures upright by their EXIF orientation, unless the preprocessing says no.
        on_error: what an unreadable training picture does: `raise` ends the run; `skip` puts another in its
            place, the same in every run, and says so. Evaluation always ends, as its numbers would be others.
        max_errors: unreadable files that one process skips before the run ends all the same.
        cache: decode and shrink each training picture once and read it back in later epochs, from a folder on
            `disk`, or in `ram` (shared by the workers, gone at the end; each training process keeps its own). The
            pixels are the same in every epoch, but softer in small crops than with `none`: see `PictureCache`.
            Evaluation is never cached.
        cache_size: megabytes that the cache may hold; default half of the memory that is free, or half of the free
            disk beyond what it holds.
        cache_dir: folder of the disk cache; default pictures/ in vit-toolkit's cache folder.

    Raises:
        ValueError: a value out of its range.
    """

    batch_size: int | None = None
    eval_batch_size: int | None = None
    num_workers: int | None = None
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    persistent_workers: bool = True
    pin_memory: bool | None = None
    drop_last: bool = True
    seed: int | None = None
    split_seed: int = 0
    val: float = 0.1
    test: float = 0.1
    folds: int | None = None
    fold: int = 0
    group_pattern: str | None = None
    split_file: str | None = None
    sampling: Literal["shuffle", "balanced", "weighted"] = "shuffle"
    repeats: int = 1
    augment: Augmentation = _AUGMENT
    background: tuple[int, int, int] | None = None
    value_range: tuple[float, float] | None = None
    max_pixels: int = MAX_PIXELS
    orient: bool = True
    on_error: Literal["raise", "skip"] = "raise"
    max_errors: int = 100
    cache: Literal["none", "ram", "disk"] = "none"
    cache_size: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"expected {name} of at least {least}, but got {value}.")
        if min(self.val, self.test) < 0 or self.val + self.test >= 1:
            raise ValueError(
                "expected shares with 0 <= val, 0 <= test and val + test < 1, "
                f"but got val={self.val}, test={self.test}."
            )
        if self.fold >= (self.folds or 1):
            came = f"fold={self.fold} of {self.folds} folds" if self.folds else f"fold={self.fold} without folds"
            raise ValueError(f"expected a fold from 0 to folds - 1, but got {came}.")
        if self.split_file is not None and self.folds is not None:
            raise ValueError("expected split_file or folds, but got both. Leave one of them out.")
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"expected on_error raise or skip, but got {self.on_error!r}.")
        if self.cache not in ("none", "ram", "disk"):
            raise ValueError(f"expected cache none, ram or disk, but got {self.cache!r}.")
        if self.cache_dir is not None and self.cache != "disk":
            raise ValueError(f"expected cache_dir with cache disk alone, but got cache {self.cache}. Leave one out.")
        if self.cache_size is not None and self.cache == "none":
            raise ValueError("expected cache_size with cache ram or disk, but got cache none. Leave cache_size out.")
        if self.sampling not in ("shuffle", "balanced", "weighted"):
            raise ValueError(f"expected sampling shuffle, balanced or weighted, but got {self.sampling!r}.")
        if self.repeats > 1 and self.sampling != "shuffle":
            raise ValueError(f"expected repeats with sampling shuffle alone, but got sampling {self.sampling}.")

    @abstractmethod
    def scan(self) -> Rows:
        """Find the rows; splits may be left open (-1)."""

    def table(self, as_in: str | Path | None = None) -> DataTable:
        """Scan, split where the source leaves it open, and write the data table.

        Args:
            as_in: split file of an earlier run of the same source, which then goes over the options.

        Raises:
            ValueError: the pictures are not there or not laid out as expected.
        """
        rows = self.scan()
        if self.group_pattern is not None:
            if rows.groups is not None:
                raise ValueError(
                    f"expected one kind of groups, but the rows of {rows.root} name theirs. Leave group_pattern out."
                )
            rows.groups = groups_by_pattern(self.group_pattern, rows.paths)
        if as_in is not None:
            rows = split_as_in_run(rows, as_in)
        elif self.split_file is not None:
            rows = apply_split_file(rows, self.split_file)
        else:
            rows.splits = fill_splits(
                rows, val=self.val, test=self.test, seed=self.split_seed, folds=self.folds, fold=self.fold
            )
            if self.folds is not None:
                rows.info = {**rows.info, "folds": self.folds, "fold": self.fold}
        return write_table(rows)

    def declared(self, chosen: Preprocessing | None = None) -> Preprocessing:
        """A preprocessing with what this source says about its pictures, which goes first.

        Args:
            chosen: of the model; None before one is known.
        """
        chosen = chosen or Preprocessing()
        return replace(
            chosen,
            background=self.background or chosen.background,
            value_range=self.value_range or chosen.value_range,
            orient=self.orient and chosen.orient,
        )

    def sampler(self, table: DataTable, *, seed: int, rank: int = 0, world: int = 1) -> TrainSampler:
        """Order of the training pictures.

        Args:
            table: its train split is sampled.
            seed: of the order.
            rank: this process, from 0.
            world: number of processes.

        Raises:
            ValueError: fewer pictures than processes, a table without the weights that are asked for, or one
                of several labels per picture that should be balanced.
        """
        weights, strata = None, None
        if self.sampling == "balanced":
            if table.several:
                raise ValueError(
                    "expected no data.sampling balanced with several labels per picture, which count for several "
                    "classes at once: leave it out, or set loss.class_weights balanced."
                )
            strata = table.labels("train")
            counts = np.bincount(strata, minlength=len(table.classes))
            weights = 1 / counts[strata]
        elif self.sampling == "weighted":
            weights = table.weights("train")
            if weights is None:
                raise ValueError(
                    "expected a weight for every picture with sampling weighted, but the source has none. "
                    "Give a table with a weight column, or choose balanced."
                )
        size = len(table.rows("train"))
        return TrainSampler(
            size, seed=seed, rank=rank, world=world, weights=weights, strata=strata, repeats=self.repeats
        )


def available_cores() -> int:
    """Processor cores that this process may use, by its affinity and a container's quota (rounded down)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, min(cores, math.floor(quota))) if quota else cores


def available_memory() -> int:
    """Bytes of memory that are free to use, by the system and a container's limit."""
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except OSError:  # only Linux has the file
        return _other_memory()
    room = _cgroup_room(Path("/sys/fs/cgroup"))
    return free if room is None else min(free, room)


def _other_memory() -> int:
    """Half of all memory where the system tells how much there is, otherwise 4 GB: of what is free it tells nothing."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30


def _cgroup_room(folder: Path) -> int | None:
    """Bytes up to a container's memory limit, by control groups of version 2 or 1; None without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # ValueError: the limit "max"
            return max(0, int((folder / limit).read_text()) - int((folder / used).read_text()))
    return None


def _cgroup_quota(folder: Path) -> float | None:
    """Cores of a container's CPU quota, by control groups of version 2 or 1; None without a quota."""
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit = (folder / "cpu/cpu.cfs_quota_us").read_text()
            period = (folder / "cpu/cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError):  # ValueError: the limit "max"
        return None


def choose_workers(table: DataTable, *, on_gpu: bool, processes: int) -> tuple[int, str]:
    """Number of worker processes per training process, and why.

    Args:
        table: its training pictures are measured by a sample of their file sizes.
        on_gpu: whether the model trains on a GPU, which leaves the cores to the workers.
        processes: training processes on this machine.
    """
    rows = table.rows("train") or table.rows()
    sample = rows[:: max(1, len(rows) // 32)]
    megabytes = sum(_size(table, row) for row in sample) / len(sample) * len(rows) / 1e6
    if megabytes < 16:
        return 0, f"training pictures are {megabytes:.1f} MB in all, too little to share out"
    cores = available_cores()
    if on_gpu:
        return max(1, min(16, cores // processes)), f"{cores} cores for {processes} process(es) on GPU"
    return max(1, min(16, cores // (4 * processes))), f"a quarter of {cores} cores; the others train"


PREFETCH = 2
"""Batches that each worker makes in advance; torch's default."""


def scarce_memory(
    workers: int, batch_bytes: int, *, processes: int = 1, folder: Path = Path("/dev/shm"), free: int | None = None
) -> str | None:
    """What to say where shared memory may not hold the batches that workers make in advance; None where it does.

    Workers hand over batches in shared memory. A worker that finds none left is killed by the system ("bus error"),
    or waits for ever.

    Args:
        workers: per training process.
        batch_bytes: of one batch's images.
        processes: training processes on this machine.
        folder: where the system keeps shared memory; one that is not there has no bound.
        free: bytes free there; default as the system says.
    """
    if not workers or (free is None and not folder.is_dir()):
        return None
    free = shutil.disk_usage(folder).free if free is None else free
    needed = processes * workers * PREFETCH * batch_bytes
    if needed <= free:
        return None
    return (
        f"{processes * workers} workers with {PREFETCH} batches of {batch_bytes / 1e6:,.1f} MB each need "
        f"{needed / 1e6:,.0f} MB of shared memory, but {folder} has {free / 1e6:,.0f} MB free: they may die with a bus "
        "error. Lower data.num_workers or data.batch_size (0 workers need none), or give the container more: "
        "docker run --shm-size=8g, or --ipc=host."
    )


def _size(table: DataTable, row: int) -> int:
    try:
        return table.size(row)
    except OSError:  # the picture is gone: reading it will say so
        return 0
