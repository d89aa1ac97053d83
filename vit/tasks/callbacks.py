"""What happens around training steps: checkpoints, the log of epochs, the table of predictions."""

import csv
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor

from vit.data.batch import Batch
from vit.data.module import ImageDataModule


class RunCheckpoint(ModelCheckpoint):
    """Lightning's checkpoint callback for a run folder that may be moved; every n steps it saves only between them.

    Lightning forgets the best score when the folder's path has changed, and would save in the middle of
    accumulated gradients, which no checkpoint holds.
    """

    _due = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the score, with paths in the folder as it is named now."""
        here = str(self.dirpath)
        moved = dict(state_dict)
        for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
            if moved.get(key):
                moved[key] = str(Path(here) / Path(moved[key]).name)
        moved["best_k_models"] = {
            str(Path(here) / Path(path).name): score for path, score in moved.get("best_k_models", {}).items()
        }
        super().load_state_dict({**moved, "dirpath": here})

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        save_whole(trainer, Path(filepath))
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Save every n steps, but only where a run can go on from; after the validation, where one follows."""
        if self._ends_inside_epoch(trainer) and not _validates_now(trainer):
            self._save(trainer)
        elif may_save(trainer):
            super().on_train_batch_end(trainer, *args, **kwargs)
        elif _ends_step_inside_epoch(trainer) and self._every_n_train_steps:
            self._due = trainer.global_step % self._every_n_train_steps == 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what came due before the validation."""
        super().on_validation_end(trainer, pl_module)
        if self._due or self._ends_inside_epoch(trainer):
            self._due = False
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after a whole epoch; of a run that ends inside one, what was saved there goes on where it stopped."""
        whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self.monitor is not None or whole or self._last_global_step_saved != trainer.global_step:
            super().on_train_epoch_end(trainer, pl_module)

    def _ends_inside_epoch(self, trainer: Trainer) -> bool:
        ends = (
            self.monitor is None and self._every_n_epochs and trainer.should_stop and trainer.fit_loop._can_stop_early
        )
        return bool(ends) and not trainer.sanity_checking and _ends_step_inside_epoch(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


def may_save(trainer: Trainer) -> bool:
    """Whether a run can go on from here, after a training batch, and lose nothing.

    Not between the batches of one optimizer step, and not between a step and its validation, as after an epoch's last
    batch: it would be missed.
    """
    return _ends_step_inside_epoch(trainer) and not _validates_now(trainer)


def _ends_step_inside_epoch(trainer: Trainer) -> bool:
    loop = trainer.fit_loop.epoch_loop
    return not (loop._should_accumulate() or loop.batch_progress.is_last_batch)


def _validates_now(trainer: Trainer) -> bool:
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def save_whole(trainer: Trainer, file: Path) -> None:
    """Write a checkpoint beside its place, then rename it, so that a kill leaves the old one or the new one.

    Lightning writes to the temporary folder first, and moving from there to another disk is a copy. A sharded
    checkpoint is a folder.
    """
    beside = file.with_name(f".{file.name}.new")
    trainer.save_checkpoint(beside)
    if trainer.is_global_zero:
        if beside.is_dir() and file.exists():
            shutil.rmtree(file)
        beside.replace(file)
    trainer.strategy.barrier("checkpoint is in its place")


class SoupCheckpoint(RunCheckpoint):
    """The k best checkpoints of a run, `soup-*.ckpt`, for a greedy soup.

    A class of its own, because Lightning tells the states of callbacks apart by class and monitor.
    """


def checkpoint_callbacks(
    folder: Path, *, monitor: str | None, mode: str, every_n_steps: int | None, keep: int = 1
) -> list[RunCheckpoint]:
    """`best.ckpt` by the monitored value, and `last.ckpt` after each epoch and every n optimizer steps.

    Args:
        folder: where both lie.
        monitor: name of a logged value; None leaves out `best`.
        mode: min or max.
        every_n_steps: distance of further saves of `last`.
        keep: above 1, the so many best checkpoints are kept too, as `soup-*.ckpt`.
    """
    common: dict[str, Any] = {"dirpath": folder, "save_top_k": 1, "enable_version_counter": False}
    made: list[RunCheckpoint] = []
    if monitor is not None:
        by_value: dict[str, Any] = {"monitor": monitor, "mode": mode, "save_on_train_epoch_end": False}
        made.append(RunCheckpoint(filename="best", **by_value, **common))
        if keep > 1:
            made.append(SoupCheckpoint(filename="soup-{epoch}-{step}", **by_value, **{**common, "save_top_k": keep}))
    made.append(RunCheckpoint(filename="last", every_n_epochs=1, save_on_train_epoch_end=True, **common))
    if every_n_steps is not None:
        made.append(RunCheckpoint(filename="last", every_n_train_steps=every_n_steps, **common))
    return made


class LastStep(Callback):
    """End a run whose length is given in steps as Lightning ends others: with a validation, and ready to go on.

    By itself Lightning stops there without one, and takes every checkpoint of such a run for one inside an epoch: going
    on from the end of an epoch, it counts that twice.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before a checkpoint is read."""
        loop: Any = trainer.fit_loop
        loop._iteration_based_training = lambda: False

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Ask for the end, which validates first."""
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True


class EpochLog(Checkpoint):
    """One line per epoch on the screen and in `metrics.csv`, which a run that goes on continues.

    A `Checkpoint` in name only: Lightning calls those after the module has logged the epoch's values.

    Args:
        file: the CSV file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.started = time.monotonic()
        self._validated = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the epoch."""
        self.started, self._validated = time.monotonic(), False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Values of val pictures belong to the epoch."""
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the epoch's line; every other callback has logged its values before."""
        if not trainer.is_global_zero:
            return
        found = sorted(trainer.callback_metrics.items())
        # Lightning keeps those of the last validation, however long ago.
        values = {k: float(v) for k, v in found if self._validated or not k.startswith("val_")}
        seconds = time.monotonic() - self.started
        rate = trainer.optimizers[0].param_groups[-1]["lr"]
        row = {"epoch": trainer.current_epoch + 1, "step": trainer.global_step, "lr": rate, **values}
        self._append({**row, "seconds": round(seconds, 3)})
        last = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "?"
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items() if name in _SHOWN)
        line = f"epoch {row['epoch']:>3}/{last}  {shown}  {seconds:.1f} s"
        if trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.print(line)
        else:
            print(line, flush=True)

    def _append(self, row: dict[str, Any]) -> None:
        earlier: list[dict[str, Any]] = []
        if self.file.exists():
            with self.file.open(newline="", encoding="utf-8") as file:
                earlier = [r for r in csv.DictReader(file) if int(r["epoch"]) < row["epoch"]]
        columns = list(dict.fromkeys([*(name for r in earlier for name in r), *row]))
        with self.file.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows([*earlier, row])


_SHOWN = ("train_loss", "train_acc", "val_loss", "val_acc", "val_balanced_acc", "val_map", "val_f1")


class Predictions(Callback):
    """Logits of every picture of a pass, by its row in the data table, kept for the record and written as Parquet."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def _keep(self, outputs: Tensor, batch: Batch) -> None:
        self._parts.append((batch.index.cpu(), outputs.detach().float().cpu(), batch.labels.cpu()))

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        """Keep a batch."""
        self._keep(outputs, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        """Keep a batch."""
        self._keep(outputs, batch)

    def collected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Index, logits and labels, in the order of the data table, each picture once."""
        index, logits, labels = (torch.cat(part) for part in zip(*self._parts, strict=True))
        order = index.argsort()
        return index[order], logits[order], labels[order]

    def write(self, file: Path, data: ImageDataModule) -> None:
        """Write index, path, label and logits."""
        index, logits, labels = self.collected()
        columns = {
            "index": pa.array(index.numpy()),
            "path": pa.array([data.table.name(i) for i in index.tolist()]),
            "label": pa.array(labels.numpy() if labels.ndim == 1 else labels.tolist()),
            "logits": pa.array(logits.tolist(), type=pa.list_(pa.float32(), logits.shape[1])),
        }
        table = pa.table(columns)
        names = {b"classes": "\n".join(data.classes).encode()}
        beside = file.with_name(f".{file.name}")
        pq.write_table(table.replace_schema_metadata(names), beside)
        beside.replace(file)
