"""What a run is going to do, worked out and printed before it starts, with reasons."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule

from vit.data.module import ImageDataModule
from vit.data.transforms import Preprocessing
from vit.models.attention import cpu_computes_bf16
from vit.run.recipes import advice, val_pictures
from vit.tasks.accumulate import epoch_batches, planned_steps
from vit.tasks.base import Task
from vit.tasks.optim import OptimConfig, make_schedule, steps_of


def choose_precision(accelerator: str) -> tuple[str, str]:
    """Precision where none was asked for, and why.

    Args:
        accelerator: as given to the Trainer: auto, cpu, gpu, cuda, mps, ...
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16-mixed", f"{torch.cuda.get_device_name()} computes bfloat16 natively"
        return "32-true", f"{torch.cuda.get_device_name()} does not compute bfloat16 natively"
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return "32-true", "Apple's GPU"
    if accelerator in ("auto", "cpu"):
        if cpu_computes_bf16():
            return "bf16-mixed", "this processor computes bfloat16 natively"
        return "32-true", "this processor does not compute bfloat16 natively"
    return "32-true", f"nothing is known about {accelerator}"


@dataclass
class Plan:
    """The plan as titled lines.

    Args:
        lines: what each title is followed by.
    """

    lines: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max(len(title) for title in self.lines)
        text = [f"  {t if i == 0 else '':<{width}}  {x}" for t, xs in self.lines.items() for i, x in enumerate(xs)]
        return "\n".join(["Plan", *text])


def make_plan(
    data: Any,
    model: LightningModule,
    trainer: dict[str, Any],
    reasons: dict[str, str],
    *,
    title: str,
    recipe: Sequence[str] = (),
    changes: Sequence[str] = (),
) -> Plan:
    """Work out the plan of a fit.

    Args:
        data: the datamodule.
        model: the task.
        trainer: resolved options of the Trainer.
        reasons: why resolved options are what they are, by dotted name.
        title: the run's name and seed.
        recipe: what the recipe chose, a line each.
        changes: what a run that goes on does otherwise than before, a line each.

    Raises:
        ValueError: a warm-up longer than the run, or no training pictures.
    """
    plan = Plan({"run": [title]})
    plan.lines |= {"changed": list(changes)} if changes else {}
    if isinstance(data, ImageDataModule):
        plan.lines |= _data_lines(data)
    else:
        plan.lines["data"] = [f"{type(data).__module__}.{type(data).__name__}"]
    if recipe:
        plan.lines["recipe"] = list(recipe)
    plan.lines["model"] = _model_lines(model)
    if isinstance(model, Task):
        if model.weights_report:
            plan.lines["weights"] = list(model.weights_report)
        data.preprocessing = model.preprocessing
        plan.lines["pictures"] = [_preparation(data.preprocessing)]
        if isinstance(data, ImageDataModule):
            if model.views is not None:
                plan.lines["augment"] = [
                    f"{model.views.describe()}, each on its own; otherwise:",
                    *plan.lines["augment"],
                ]
            plan.lines |= _training_lines(model, trainer, _batches(data, trainer))
            val = val_pictures(data, trainer["limit_val_batches"])
            notes = advice(model, len(data.table.rows("train")), val, trainer["max_epochs"])
            plan.lines |= {"note": notes} if notes else {}
    plan.lines["precision"] = [_with_reason(str(trainer["precision"]), reasons.get("trainer.precision"))]
    return plan


def _batches(data: ImageDataModule, trainer: dict[str, Any]) -> int:
    """Training batches of one process in a whole epoch."""
    devices = trainer["devices"] if isinstance(trainer["devices"], int) else 1
    processes = max(1, devices * trainer["num_nodes"])
    pictures = len(data.table.rows("train"))
    return epoch_batches(pictures, data.batch_size, processes=processes, drop_last=data.source.drop_last)


def _with_reason(text: str, reason: str | None) -> str:
    return f"{text} ({reason})" if reason else text


def _data_lines(data: ImageDataModule) -> dict[str, list[str]]:
    told = data.describe()
    sizes = ", ".join(f"{name} {count:,}" for name, count in told["pictures"].items())
    names = told["classes"]
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    counts = [per["train"] for per in told["pictures_per_class"].values()]
    batch = _with_reason(f"batch {told['batch_size']}", told["batch_size_reason"])
    workers = _with_reason(f"{told['num_workers']} workers", told["num_workers_reason"])
    return {
        "data": [f"{told['source']}: {told['root']}", f"{sizes} (split seed {told['split_seed']})"],
        "classes": [
            f"K = {len(names)}: {shown}",
            f"{min(counts):,} to {max(counts):,} training pictures each",
        ],
        "loading": [f"{batch}, {workers}" + ("" if told["cache"] == "none" else f", cache {told['cache']}")],
        "augment": [told["augment"]],
    }


def _model_lines(model: LightningModule) -> list[str]:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    counts = f"{trained:,} parameters are trained, {frozen:,} are frozen"
    if not isinstance(model, Task):
        return [f"{type(model).__module__}.{type(model).__name__}", counts]
    c = model.model.config
    origin = f"weights {model.weights}" if model.weights else "from scratch"
    height, width = c.size
    sizes = f"{height} x {width} px, patch {c.patch_size}: {c.grid[0] * c.grid[1]} patches"
    shape = f"width {c.width}, depth {c.depth}, heads {c.heads}"
    return [f"ViT, {origin}, {sizes}, {shape}", f"{model.aim}: {counts}"]


def _preparation(p: Preprocessing) -> str:
    usual = Preprocessing()
    parts = [
        f"evaluated with {p.crop_mode} crop of {p.crop_pct:g}, {p.interpolation}",
        f"mean {_numbers(p.mean)}, std {_numbers(p.std)}",
    ]
    parts += [] if p.background == usual.background else [f"background {' '.join(map(str, p.background))}"]
    parts += [] if p.value_range is None else ["value range {:g} to {:g}".format(*p.value_range)]
    parts += [] if p.orient else ["not turned by EXIF"]
    return "; ".join(parts)


def _numbers(values: tuple[float, ...]) -> str:
    shown = [f"{value:.3g}" for value in values]
    return shown[0] if len(set(shown)) == 1 else " ".join(shown)


def _training_lines(model: Task, trainer: dict[str, Any], batches: int) -> dict[str, list[str]]:
    optim, schedule, reasons = model.resolved
    per_epoch, total = planned_steps(trainer, batches)
    epochs = "" if trainer["max_epochs"] in (-1, None) else f"{trainer['max_epochs']} epochs, "
    steps = f"{epochs}{total:,} optimizer steps, {per_epoch:,} per epoch" if total > 0 else "no planned end"
    made = make_schedule(schedule, total)
    assert optim.lr is not None
    rates = [f"{100 * share // 1:.0f} %: {optim.lr * made(step):.3g}" for share, step in _moments(made.total)]
    first = "  ".join(rates)
    lines = {
        "steps": [steps],
        "optimizer": [f"{optim.name}, {_optimizer_line(model)}", *_weights_lines(optim, made.total)],
        "schedule": [
            f"{made}{f' (warm-up: {why})' if (why := reasons.get('schedule.warmup')) else ''}",
            f"lr at {first}",
        ],
        "lr by group": _group_lines(model),
    }
    if trainer["max_epochs"] is not None and total == 0:
        raise ValueError("expected at least 1 optimizer step, but the run has none: raise trainer.max_epochs.")
    return lines


def _optimizer_line(model: Task) -> str:
    """Values of the optimizer; neighbours that have one reason share it."""
    optim, _, reasons = model.resolved
    names = ("lr", "weight_decay", "layer_decay", "clip")
    parts = []
    for reason, group in itertools.groupby(names, key=lambda name: reasons.get(f"optim.{name}")):
        parts.append(_with_reason(", ".join(f"{name} {getattr(optim, name):g}" for name in group), reason))
    return ", ".join(parts)


def _weights_lines(optim: OptimConfig, total: int) -> list[str]:
    """What else is done with the weights, where it is asked for."""
    lines = []
    if optim.ema is not None:
        start = steps_of(optim.ema_start, total)
        lines.append(f"an average of the weights (ema {optim.ema:g}) is scored and kept from step {start + 1:,} on")
    lines += ["blocks are computed again in the backward pass"] if optim.gradient_checkpointing else []
    return lines + (["compiled by torch.compile"] if optim.compile else [])


def _moments(total: int) -> list[tuple[float, int]]:
    return [(0.0, 0), (0.5, total // 2), (1.0, total - 1)]


def _group_lines(model: Task) -> list[str]:
    """Learning rate per parameter group; neighbours with one rate share a line."""
    groups = model.parameter_groups()
    lines: list[tuple[str, str, float, int]] = []
    for group in groups:
        count = sum(p.numel() for p in group["params"])
        name = group["name"].removesuffix(" (no decay)")
        if lines and math.isclose(lines[-1][2], group["lr"]):
            first, _, lr, before = lines[-1]
            lines[-1] = (first, name, lr, before + count)
        else:
            lines.append((name, name, group["lr"], count))
    named = [(a if a == b else f"{a} to {b}", lr, count) for a, b, lr, count in lines]
    return [f"{name}: {lr:.3g} ({count:,} parameters)" for name, lr, count in named]
