"""`vit fit`: options in, a finished run folder out."""

import contextlib
import importlib.metadata
import itertools
import os
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.loggers import Logger

from vit.data.module import ImageDataModule
from vit.data.split import write_split
from vit.models.artifact import save_model
from vit.models.weights import read_checkpoint
from vit.run.finding import find, make_soup
from vit.run.folder import CHOSEN_FOLDER, RunFolder, new_run_folder, open_run_folder, write_text
from vit.run.options import Options
from vit.run.plan import choose_precision, make_plan
from vit.run.recipes import apply_recipe, val_pictures
from vit.run.record import environment, now
from vit.run.score import keep_split, score_split, trainer_options
from vit.run.screen import quiet_lightning, say_next
from vit.run.stop import StopAtStep, stoppable
from vit.tasks.base import Task
from vit.tasks.callbacks import EpochLog, LastStep, checkpoint_callbacks
from vit.tasks.classify import Classifier
from vit.tasks.guards import OneClass, check_directions
from vit.tasks.pretrain import Pretraining
from vit.tasks.reconstructions import Reconstructions

FORMAT = 1


def fit(args: Sequence[str], *, dry_run: bool = False, resume: str | None = None) -> RunFolder | None:
    """Train, keep the best checkpoint, evaluate it on the val split, and write its model folder.

    Args:
        args: options as on the command line.
        dry_run: stop after the plan; nothing is written.
        resume: a run to go on with, in its own folder.

    Returns:
        The run's folder; None after a dry run.

    Raises:
        ValueError: bad options or data, or numbers that are not finite; a new run without a checkpoint leaves nothing.
        Stopped: Ctrl-C or SIGTERM.
    """
    run = open_run_folder(resume) if resume is not None else None
    if run is not None:
        args = ["--config", str(run.config), *args]
        if not run.last.exists():
            raise ValueError(f"expected {run.last} to go on from, but it is not there; start a new run.")
    options = Options("fit", args)
    config = options.config
    _check_single(config)
    with quiet_lightning():
        # A run that goes on has chosen already.
        recipe = apply_recipe(options) if run is None else []
        reasons = _resolve(options)
        recipe = find(options, recipe) if run is None else []
        changes = [] if run is None else _changes(run, options)
        seed_everything(config.seed, workers=True, verbose=False)
        data, model = options.build() if run is None else _build_to_go_on(options, run)
        limit = config.trainer.limit_val_batches
        has_val = bool(val_pictures(data, limit)) if isinstance(data, ImageDataModule) else limit != 0
        _check_monitor(config, model, has_val=has_val, resumed=run is not None)
        name = config.name or _name(args, config)
        title = f"{name}, seed {config.seed}" + (f", goes on in {run.path}" if run else "")
        plan = make_plan(data, model, config.trainer.as_dict(), reasons, title=title, recipe=recipe, changes=changes)
        first_process = os.environ.get("LOCAL_RANK", "0") == "0"
        if first_process:
            print(plan, flush=True)
        if dry_run or config.dry_run:
            return None
        if run is None:
            run = new_run_folder(config.trainer.default_root_dir, name)
        os.environ[CHOSEN_FOLDER] = str(run.path)
        try:
            trainer = _trainer(options, model, run, has_val=has_val)
            begin = partial(_write_start, run, options, model, data, str(plan), args, resumed=resume is not None)
            # Only after a checkpoint was read: one that does not fit must not change the record of its run.
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            callbacks.append(LambdaCallback(on_train_start=lambda *_: begin() if first_process else None))
            stop = StopAtStep(run)
            callbacks.append(stop)
            started = time.monotonic()
            with stoppable(trainer, stop):
                trainer.fit(model, datamodule=data, ckpt_path=str(run.last) if resume else None, weights_only=True)
            seconds = time.monotonic() - started
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                # What follows is one process's work.
                torch.distributed.destroy_process_group()
            if trainer.is_global_zero:
                _finish(options, run, trainer, model, data, seconds, has_val=has_val)
        except ValueError:
            # Bad input that only training could find, such as an unreadable picture: the start leaves nothing behind.
            if resume is None and not run.checkpoints.exists():
                shutil.rmtree(run.path)
            raise
        finally:
            del os.environ[CHOSEN_FOLDER]
            _remove_if_empty(run.path)
    return run


def _check_single(config: Namespace) -> None:
    """Options that ask for other runs than this one are read where they are typed, never passed over."""
    for name, default, instead in (("seeds", 1, "vit.fit_many"), ("folds", None, "vit.fit_many"), ("resume", None, "")):
        if config[name] != default:
            raise ValueError(
                f"expected --{name} among the words of vit fit" + (f", or {instead} in Python" if instead else "")
                + f", but a configuration or another verb sets {name} to {config[name]}. Leave it out there."
            )  # fmt: skip


# What only a new run looks at, and what says nothing about how this one goes on.
_AT_THE_START = ("model.weights", "model.tuning.head_init", "recipe", "find_batch_size", "find_lr")
_ASIDE = {"name", "trainer.default_root_dir", "trainer.enable_progress_bar", "model.encoder.size"}


def _changes(run: RunFolder, options: Options) -> list[str]:
    """A line for each option that is not what the run had; one that a run cannot take when it goes on is refused."""
    before, now = (_flat(yaml.safe_load(text)) for text in (run.config.read_text(encoding="utf-8"), options.dump()))
    typed = _flat(yaml.safe_load(run.typed.read_text(encoding="utf-8"))) if run.typed.exists() else {}
    changed = {name: value for name, value in now.items() if name in before and before[name] != value}
    for name in (name for name in _AT_THE_START if name in changed):
        if changed[name] != typed.get(name):  # the words that the run was started with may stand there again
            raise ValueError(
                f"expected {name} as the run had it ({before[name]}), but got {changed[name]}: a run that goes on "
                f"takes weights and choices from {run.path}. Leave it out, or start a new run."
            )
        of, key = (options.of_model, name[len("model.") :]) if name.startswith("model.") else (options.config, name)
        of[key] = before[name]
    aside = _ASIDE | set(_AT_THE_START)
    return [f"{name} {value} (was {before[name]})" for name, value in changed.items() if name not in aside]


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by dotted name, without the level that names their class."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        inner = prefix if name == "init_args" else f"{prefix}{name}."
        flat |= _flat(value, inner) if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _build_to_go_on(options: Options, run: RunFolder) -> tuple[LightningDataModule, LightningModule]:
    """The checkpoint holds all weights; what the run started from need not be there any more, but stays on record."""
    keep_split(options, run)
    if options.own_model:
        return options.build()
    weights, options.of_model.weights = options.of_model.weights, None
    data, model = options.build()
    options.of_model.weights = weights
    if isinstance(model, Task):
        model.weights = weights
    return data, model


def _resolve(options: Options) -> dict[str, str]:
    """Fill in the Trainer's open options and make paths absolute; says why."""
    config = options.config
    trainer, reasons = config.trainer, {}
    if trainer.precision is None:
        trainer.precision, reasons["trainer.precision"] = choose_precision(str(trainer.accelerator))
    if trainer.max_epochs is None and trainer.max_steps in (-1, None) and trainer.max_time is None:
        trainer.max_epochs = 20
    if trainer.enable_progress_bar is None and not sys.stderr.isatty():
        trainer.enable_progress_bar = False
    trainer.default_root_dir = str(Path(trainer.default_root_dir).expanduser().absolute())
    data = config.data.get("init_args") or Namespace()
    for name in ("root", "file", "split_file"):
        if isinstance(data.get(name), str):
            data[name] = str(Path(data[name]).expanduser().absolute())
    model = options.of_model
    for name in ("weights", "loss.teacher"):
        named = model.get(name)
        if isinstance(named, str) and Path(named).expanduser().exists():
            model[name] = str(Path(named).expanduser().absolute())
    return reasons


def _name(args: Sequence[str], config: Namespace) -> str:
    """A name for the run's parent folder: that of the configuration, or of the data."""
    files = [value for flag, value in itertools.pairwise(args) if flag in ("--config", "-c")]
    files += [word.partition("=")[2] for word in args if word.startswith("--config=")]
    return Path(files[0]).stem if files else config.data.class_path.rpartition(".")[2].lower()


def _check_monitor(config: Namespace, model: LightningModule, *, has_val: bool, resumed: bool) -> None:
    if config.soup > 1 and not (isinstance(model, Classifier) and has_val):
        raise ValueError(
            f"expected classification with a val split for --soup {config.soup}, since val pictures choose what goes "
            "into it. Leave it out, or give --data.val a share."
        )
    if not isinstance(model, Task):
        return
    if config.monitor is not None and model.monitors and not has_val:
        if resumed:  # the split of a run never changes: what was written down has chosen nothing
            config.monitor = None
            return
        raise ValueError(
            f"expected a val split for --monitor {config.monitor}, but no val picture is looked at. Leave it out, or "
            "give --data.val a share."
        )
    if config.monitor is None and has_val:
        config.monitor = next(iter(model.monitors), None)
    if config.monitor is not None and config.monitor not in model.monitors:
        from vit.run.messages import did_you_mean

        near = did_you_mean(config.monitor, list(model.monitors))
        if not model.monitors:
            name = type(model).__name__
            raise ValueError(f"expected no --monitor, as {name} keeps its last checkpoint, but got {config.monitor!r}.")
        raise ValueError(
            f"expected --monitor to be one of {', '.join(model.monitors)}, but got {config.monitor!r}.{near}"
        )


def _trainer(options: Options, model: LightningModule, run: RunFolder, *, has_val: bool) -> Trainer:
    config = options.config
    known = model.monitors if isinstance(model, Task) else {}
    monitor = config.monitor if known and has_val else None
    callbacks: list[Callback] = [
        LastStep(),
        EpochLog(run.path / "metrics.csv"),
        *checkpoint_callbacks(
            run.checkpoints,
            monitor=monitor,
            mode=known.get(config.monitor, "max"),
            every_n_steps=config.save_every_n_steps,
            keep=config.soup,
        ),
    ]
    if isinstance(model, Pretraining):
        callbacks.append(Reconstructions(run.path / "reconstructions", every=model.pictures_every))
    if config.patience is not None:
        if monitor is None:
            why = f"{type(model).__name__} monitors nothing" if has_val and not known else "no val picture is looked at"
            raise ValueError(
                f"expected a value of val pictures for --patience {config.patience}, but {why}: leave it out."
            )
        callbacks.append(EarlyStopping(monitor, mode=known[monitor], patience=config.patience, check_finite=False))
    if known:
        callbacks.append(OneClass())
    logger = options.made.trainer.logger
    trainer = Trainer(**trainer_options(options, callbacks=callbacks, logger=_loggers(logger, run)))
    if isinstance(model, Task):
        check_directions(trainer.callbacks, model.logged, validates=has_val)  # type: ignore[attr-defined]
    return trainer


def _loggers(asked: Any, run: RunFolder) -> list[Logger] | bool:
    """The user's loggers; otherwise TensorBoard's where it is installed. `metrics.csv` is always written."""
    if asked is not None and not isinstance(asked, bool):
        return asked if isinstance(asked, list) else [asked]
    try:
        importlib.metadata.version("tensorboard")
    except importlib.metadata.PackageNotFoundError:
        return False
    from lightning.pytorch.loggers import TensorBoardLogger

    return False if asked is False else [TensorBoardLogger(run.path, name="", version="tensorboard")]


def _write_start(
    run: RunFolder,
    options: Options,
    model: LightningModule,
    data: LightningDataModule,
    plan: str,
    args: Sequence[str],
    *,
    resumed: bool,
) -> None:
    """Everything that is known before the first step."""
    if not resumed:
        write_text(run.typed, yaml.safe_dump({"command": ["vit", "fit", *args]}, sort_keys=False) + options.typed())
        run.update_record({"format": FORMAT, "name": run.path.parent.name, "started": now()})
    if isinstance(model, Task):
        for name, values in model.shared_options.items():
            options.of_model[name] = Namespace(**values)
        options.of_model.encoder.size = None
    options.config.name = run.path.parent.name
    write_text(run.config, options.dump())
    write_text(run.plan, plan + "\n")
    if isinstance(data, ImageDataModule):
        write_split(data.table, run.split)
        described = {k: v for k, v in data.describe().items() if k != "pictures_per_class"}
        run.update_record({"data": described})
    seeds = {"run": options.config.seed, "split": getattr(getattr(data, "source", None), "split_seed", None)}
    config = yaml.safe_load(options.dump())
    run.update_record({"config": config, "seeds": seeds, "environment": environment()})


def _finish(
    options: Options,
    run: RunFolder,
    trainer: Trainer,
    model: LightningModule,
    data: LightningDataModule,
    seconds: float,
    *,
    has_val: bool,
) -> None:
    """Evaluate the best checkpoint, write predictions, the model folder and the record, say what comes next."""
    if not (run.best.exists() or run.last.exists()):
        print("\nno checkpoint was written, as with trainer.fast_dev_run; there is nothing to evaluate")
        return
    best = run.best if run.best.exists() else run.last
    chosen: dict[str, Any] = {"file": best.name, "chosen_by": None, "split": None}
    if best == run.best:
        chosen |= {"chosen_by": options.config.monitor, "split": "val"}
    record: dict[str, Any] = {
        "finished": now(),
        "fit_seconds": round(seconds, 2),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "checkpoint": chosen,
    }
    values, has_test = None, False
    if isinstance(model, Classifier) and options.config.soup > 1 and best == run.best:
        higher = model.monitors[options.config.monitor] == "max"
        score = partial(score_split, options, run, "val", model, data)
        chosen["soup"] = make_soup(run, score, options.config.monitor, higher_is_better=higher)
    if isinstance(model, Task):
        if isinstance(data, ImageDataModule):
            has_test = isinstance(model, Classifier) and bool(data.table.rows("test"))
            if has_val:
                values = score_split(options, run, "val", model, data, best)
                record["val"] = {**values, "checkpoint": best.name}
        scored, preprocessing, classes = read_checkpoint(best)
        provenance = {"run": run.path.name, "name": run.path.parent.name, "weights": model.weights}
        several = isinstance(model, Classifier) and model.several
        save_model(
            run.model, scored, classes=classes, preprocessing=preprocessing, provenance=provenance, several=several
        )
    run.update_record(record)
    say_next(
        run,
        values,
        seconds,
        chosen_by=chosen["chosen_by"],
        has_test=has_test,
        has_classes=isinstance(model, Classifier),
        by_steps=trainer.max_steps != -1,
    )


def _remove_if_empty(folder: Path) -> None:
    """A run that failed before it wrote anything leaves no folder behind."""
    with contextlib.suppress(OSError):
        if folder.exists():
            folder.rmdir()
        folder.parent.rmdir()
        folder.parent.parent.rmdir()
