"""Before a run: the largest batch that fits, and a learning rate that is high but safe. Neither changes the task.

Both train a copy of the task for a few steps, as the run would: with its loss, its optimizer, its precision, its data.
"""

import copy
import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vit.data.module import ImageDataModule
from vit.tasks.base import Task
from vit.tasks.guards import NonFiniteError
from vit.tasks.optim import ScheduleConfig

_HARDWARE = ("accelerator", "precision", "default_root_dir", "deterministic")


class BatchSize(NamedTuple):
    """What the search for a batch size found.

    Args:
        batch_size: what to use, after the safety factor; it was tried itself.
        largest: the largest that was tried and fitted.
        tried: every size that was tried, and whether it fitted.
    """

    batch_size: int
    largest: int
    tried: tuple[tuple[int, bool], ...]


class LearningRate(NamedTuple):
    """What the search for a learning rate found.

    Args:
        lr: a tenth of the rate at which the smoothed loss was lowest.
        rates: that were tried, one per step.
        losses: of the same steps, smoothed.
    """

    lr: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]


def find_batch_size(
    task: Task, data: ImageDataModule, trainer: Mapping[str, Any], *, largest: int | None = None, safety: float = 0.8
) -> BatchSize:
    """The largest batch that two whole training steps fit into, with room to spare.

    Args:
        task: what will be trained; a copy is.
        data: where the pictures come from; no batch is larger than its train split.
        trainer: options of the run's Trainer; those of its hardware are used, on one device.
        largest: where to stop; None is 1024, and 256 on the CPU, where larger batches gain nothing.
        safety: share of the largest size that is used, where a larger one did not fit.

    Raises:
        ValueError: not even one picture fits.
    """
    pictures = len(data.table.rows("train"))

    def fits(size: int) -> bool:
        with _trial(task, data, batch_size=size) as (trained, pictures_of_trial):
            made = _trainer(trainer, max_steps=2)
            try:
                made.fit(trained, datamodule=pictures_of_trial)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return False
        return True

    with _same_randomness():
        on_cpu = _trainer(trainer, max_steps=1).strategy.root_device.type == "cpu"
        limit = min(pictures, largest or (256 if on_cpu else 1024))
        return search_batch_size(fits, limit=limit, safety=safety)


def search_batch_size(fits: Callable[[int], bool], *, limit: int, safety: float = 0.8) -> BatchSize:
    """Double until a size does not fit or the limit is reached, look between the last two, and step back.

    Args:
        fits: tries a size.
        limit: no size is larger.
        safety: share of the largest size that fits, where a larger one does not.

    Raises:
        ValueError: not even 1 fits.
    """
    tried: dict[int, bool] = {}

    def attempt(size: int) -> bool:
        if size not in tried:
            tried[size] = fits(size)
        return tried[size]

    good, bad, size = 0, limit + 1, min(8, limit)
    while good < limit and bad == limit + 1:
        good, bad = (size, bad) if attempt(size) else (good, size)
        size = min(2 * size, limit)
    while bad <= limit and bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if attempt(middle) else (good, middle)
    if good == 0:
        raise ValueError(
            "expected memory for one training picture at least, but it does not fit: choose a smaller model or image "
            "size, optim.gradient_checkpointing, or bf16-mixed precision."
        )
    chosen = good if bad > limit else max(1, int(good * safety))
    chosen -= chosen % 8 if chosen >= 16 else 0
    while chosen > 1 and not attempt(chosen):
        chosen = max(1, int(chosen * safety))
    return BatchSize(chosen, good, tuple(tried.items()))


def find_lr(
    task: Task,
    data: ImageDataModule,
    trainer: Mapping[str, Any],
    *,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
) -> LearningRate:
    """A tenth of the rate at which the loss was lowest, while the rate rose geometrically (Smith 2017).

    The loss is smoothed exponentially over about ten steps; the sweep ends where it is four times the lowest or not
    finite. Layer-wise decay, clipping and all else are as in the run; batches are not accumulated.

    Args:
        task: what will be trained; a copy is.
        data: where the pictures come from.
        trainer: options of the run's Trainer; those of its hardware are used, on one device.
        lowest: first rate.
        highest: last rate.
        steps: optimizer steps.

    Raises:
        ValueError: no rate lowers the loss.
    """
    sweep = _Sweep(lowest, highest, steps)
    with _same_randomness(), _trial(task, data) as (trained, pictures):
        made = _trainer(trainer, max_steps=steps, callbacks=[sweep])
        with suppress(NonFiniteError):  # the end of a sweep that goes high enough
            made.fit(trained, datamodule=pictures)
    losses = sweep.losses
    best = min(range(len(losses)), key=losses.__getitem__, default=0)
    if best == 0:
        raise ValueError(
            f"expected the loss to fall at some learning rate from {lowest:g} to {highest:g}, but it did not in "
            f"{len(losses)} steps: set optim.lr by hand."
        )
    return LearningRate(sweep.rate(best) / 10, tuple(sweep.rate(i) for i in range(len(losses))), tuple(losses))


class _Sweep(Callback):
    """Raises the rate from step to step and keeps the smoothed losses."""

    def __init__(self, lowest: float, highest: float, steps: int) -> None:
        self.lowest, self.ratio, self.steps = lowest, highest / lowest, steps
        self.losses: list[float] = []
        self._mean = 0.0

    def rate(self, step: int) -> float:
        return self.lowest * self.ratio ** (step / max(1, self.steps - 1))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Task)
        highest = pl_module.resolved.optim.lr
        assert highest is not None
        factors: Any = _Factors(self, highest)
        pl_module.lr_factor = factors

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._mean = 0.9 * self._mean + 0.1 * float(outputs["loss"])
        smoothed = self._mean / (1 - 0.9 ** (len(self.losses) + 1))
        if math.isfinite(smoothed):
            self.losses.append(smoothed)
        if not math.isfinite(smoothed) or (len(self.losses) > 10 and smoothed > 4 * min(self.losses)):
            trainer.should_stop = True


class _Factors:
    """The sweep's rates in the place of a `Schedule`, for tasks that ask for the run's length too."""

    def __init__(self, sweep: _Sweep, highest: float) -> None:
        self.sweep, self.highest, self.total = sweep, highest, sweep.steps

    def __call__(self, step: int) -> float:
        return self.sweep.rate(step) / self.highest


@contextmanager
def _same_randomness() -> Iterator[None]:
    """All generators are then as they were before; Lightning's Trainer draws too, when it is made."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)


@contextmanager
def _trial(task: Task, data: ImageDataModule, *, batch_size: int | None = None) -> Iterator[tuple[Task, Any]]:
    """A copy of the task and of its data to train with; their memory is free afterwards."""
    attached, task._trainer = task._trainer, None
    try:
        trained = copy.deepcopy(task)
    finally:
        task._trainer = attached
    # A few steps have no room for the warm-up of a run.
    trained.resolved = trained.resolved._replace(schedule=ScheduleConfig(name="constant", warmup=0.0))
    source = data.source if batch_size is None else replace(data.source, batch_size=batch_size)
    pictures = ImageDataModule(source)
    pictures.__dict__["table"] = data.table  # scanned already
    try:
        yield trained, pictures
    finally:
        del trained, pictures
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _trainer(options: Mapping[str, Any], *, max_steps: int, callbacks: list[Callback] | None = None) -> Trainer:
    ours: dict[str, Any] = {
        "devices": 1,
        "num_nodes": 1,
        "max_steps": max_steps,
        "max_epochs": -1,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    hardware = {name: options[name] for name in _HARDWARE if options.get(name) is not None}
    return Trainer(**hardware, **ours, callbacks=callbacks or [])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device; the CPU's allocator and cuBLAS have words of their own."""
    words = ("out of memory", "can't allocate memory", "alloc_failed")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
