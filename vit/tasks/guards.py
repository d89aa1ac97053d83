"""What is watched while a model trains, and said before hours are lost."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from vit.data.batch import Batch

log = logging.getLogger("vit.tasks")


class NonFiniteError(ValueError):
    """Training met a loss or gradient that is no finite number, before any weight was changed by it."""


def check_finite(loss: Tensor, norm: Tensor, *, step: int, lr: float, skips: bool = False) -> None:
    """Stop before an optimizer step that would make weights useless.

    Args:
        loss: of the last batch, or of one before it in the window that is not finite, a scalar.
        norm: of the gradients, all together.
        step: optimizer steps before this one.
        lr: highest learning rate of the step.
        skips: a loss scaler skips steps whose gradients are not finite by itself, and lowers its factor.

    Raises:
        NonFiniteError: names all four.
    """
    if torch.isfinite(loss) and (skips or torch.isfinite(norm)):
        return
    raise NonFiniteError(
        f"expected finite numbers, but at step {step} the loss is {float(loss):.3g}, the gradient norm "
        f"{float(norm):.3g}, with lr {lr:.3g}. "
        "Lower model.optim.lr or set trainer.precision to 32-true; vit check finds pictures that are damaged."
    )


class OneClass(Callback):
    """Say when a classifier gives one answer to every val picture."""

    def __init__(self) -> None:
        self._answers: Tensor | None = None
        self._labels: Tensor | None = None
        self._said = False

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last epoch."""
        self._answers = self._labels = None

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        """Count answers and labels of a batch."""
        if not isinstance(batch, Batch) or not isinstance(outputs, Tensor) or batch.labels.dtype != torch.int64:
            return
        counts = [torch.bincount(v.cpu(), minlength=outputs.shape[1]) for v in (outputs.argmax(1), batch.labels)]
        self._answers = counts[0] if self._answers is None else self._answers + counts[0]
        self._labels = counts[1] if self._labels is None else self._labels + counts[1]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it once."""
        if self._answers is None or self._labels is None or trainer.sanity_checking or self._said:
            return
        only = (self._answers > 0).nonzero()
        # A model that starts at zero gives one answer for a while; 30 steps are more than a warm-up of a short run.
        patience = min(30, trainer.estimated_stepping_batches)
        if len(only) != 1 or (self._labels > 0).sum() < 2 or trainer.global_step < patience:
            return
        self._said = True
        name = pl_module.classes[int(only)] if isinstance(pl_module.classes, tuple) else int(only)
        log.warning(
            "every val picture is named %s after %d steps: the learning rate may be too high (lower model.optim.lr), "
            "or too low, or one class is far larger than the others (data.sampling balanced)",
            name,
            trainer.global_step,
        )


def check_directions(callbacks: Iterable[Callback], logged: Mapping[str, str], *, validates: bool = True) -> None:
    """Refuse callbacks that watch a value which is never logged, or in the wrong direction.

    Args:
        callbacks: of the Trainer.
        logged: the values that a task logs, with min or max.
        validates: whether val pictures are looked at.

    Raises:
        ValueError: names the callback, the value and what to write.
    """
    known = {name: way for name, way in logged.items() if validates or not name.startswith("val_")}
    for callback in callbacks:
        if not isinstance(callback, (EarlyStopping, ModelCheckpoint)) or callback.monitor is None:
            continue
        name, monitor = type(callback).__name__, callback.monitor
        if isinstance(callback, ModelCheckpoint) and monitor in ("step", "epoch"):
            continue  # Lightning's own: the last or the first checkpoints
        if monitor not in known:
            raise ValueError(
                f"expected {name} to monitor one of {', '.join(known)}, but got {monitor!r}, which is never logged."
            )
        if callback.mode != known[monitor]:
            better = {"min": "smaller", "max": "larger"}[known[monitor]]
            raise ValueError(
                f"expected {name} with mode {known[monitor]} for {monitor}, whose {better} values are better, but got "
                f"{callback.mode}. Set mode: {known[monitor]}."
            )
