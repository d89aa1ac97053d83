"""Recipes at work: look at the data and the weights, fill in what nobody typed, and warn of what rarely goes well."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jsonargparse import Namespace

from vit.data.header import DecodeError, read_header
from vit.data.module import ImageDataModule
from vit.data.source import available_cores
from vit.models.weights import load_weights
from vit.run.options import Options
from vit.tasks.auto import auto
from vit.tasks.base import Task
from vit.tasks.classify import Classifier
from vit.tasks.facts import Choice, Facts, Start
from vit.tasks.methods import unfrozen
from vit.tasks.options import given
from vit.tasks.paper import paper
from vit.tasks.pretrain import Pretraining

_RECIPES = {"auto": auto, "paper": paper}
_SAMPLE = 64
_SHAPE = {
    f"model.encoder.{name}" for name in ("size", "image_size", "patch_size", "width", "depth", "heads", "mlp_dim")
}


def apply_recipe(options: Options, found: Mapping[str, Any] | None = None) -> list[str]:
    """Let the run's recipe choose what was not typed, in place.

    Args:
        options: of a fit.
        found: options that were searched for, by dotted name; they count as typed.

    Returns:
        A line for the plan per choice, with its reason; none without a recipe.

    Raises:
        ValueError: a recipe for a task or data of one's own.
    """
    config = options.config
    if config.recipe not in _RECIPES:
        return []
    typed = options.by_hand()
    known = set(typed.keys())
    own = options.own_model or options.pretraining
    data = None if own else options.data()
    if not isinstance(data, ImageDataModule):
        if "recipe" in known:
            raise ValueError(
                f"expected classification with a data source of this toolkit for recipe {config.recipe}, but the model "
                "or the data are others. Leave it out, or write recipe: none."
            )
        return []
    hand = {**_by_name(typed), **(found or {})}
    facts = replace(look(data, config), typed=hand)
    lines = [f"{config.recipe}; what is set by hand wins"]
    for name, choice in _RECIPES[config.recipe](facts).items():
        if _set(config, known | hand.keys(), name, choice, facts):
            lines.append(f"{name} {_shown(choice.value)} ({choice.why})")
    if facts.start is None and known & _SHAPE:
        lines.append("model.encoder as described by hand; what was left open is that of ViT-B/16")
    return lines


def _by_name(typed: Namespace) -> dict[str, Any]:
    """Typed values by the names that recipes know; null is no value."""
    named = ((name.replace("data.init_args.", "data.", 1), value) for name, value in typed.items())
    return {name: value for name, value in named if value is not None}


def _set(config: Namespace, typed: set[str], name: str, choice: Choice, facts: Facts) -> bool:
    """Set one option, unless it was typed, or another one that decides it."""
    key = name.replace("data.", "data.init_args.", 1) if name.startswith("data.") else name
    decided = {key, name, *_DECIDED_BY.get(name, ())}
    if facts.start is None and name.startswith("model.encoder."):
        # A model whose shape was described in part is not to be finished by a guess.
        decided |= _SHAPE
    if decided & typed:
        return False
    config[key] = list(choice.value) if isinstance(choice.value, tuple) else choice.value
    return True


_DECIDED_BY = {
    "trainer.max_epochs": ("trainer.max_steps", "trainer.max_time"),
    "trainer.max_steps": ("trainer.max_epochs", "trainer.max_time"),
    "model.optim.ema_warmup": ("model.optim.ema",),
    "model.loss.label_smoothing": ("model.loss.name",),
    "data.augment.crop_scale": ("data.init_args.augment.preset",),
}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(f"{part:g}" for part in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def look(data: ImageDataModule, config: Namespace) -> Facts:
    """What a recipe needs to know; reads the headers of a few pictures.

    Raises:
        ValueError: the data or the weights are not there.
    """
    start = None
    if config.model.weights is not None:
        # Some weights open only with options that they do not tell themselves; their size is looked at as it is.
        encoder = given(config.model.encoder.as_dict())
        loaded = load_weights(
            config.model.weights,
            classes=data.classes,
            **{k: v for k, v in encoder.items() if f"model.encoder.{k}" not in _SHAPE},
        )
        c = loaded.model.config
        start = Start(
            parameters=sum(p.numel() for p in loaded.model.parameters()),
            width=c.width,
            patch_size=encoder.get("patch_size", c.patch_size),
            image_size=min(c.size),
            keeps_head=not any(name.startswith("head.") for name in loaded.report.new),
        )
    accelerator = str(config.trainer.accelerator)
    side, aspect = _shape(data)
    return Facts(
        pictures=max(1, len(data.table.rows("train"))),
        val=val_pictures(data, config.trainer.limit_val_batches),
        classes=data.classes,
        multi_label=data.table.several,
        side=side,
        aspect=aspect,
        start=start,
        cores=available_cores(),
        gpu=accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available(),
        devices=_processes(config.trainer),
        sharded=any(kind in str(config.trainer.strategy) for kind in ("fsdp", "deepspeed", "model_parallel")),
    )


def val_pictures(data: ImageDataModule, limit: float | None) -> int:
    """Val pictures that a fit looks at: those of the split, or none where it leaves validation out.

    Args:
        data: with that split or without it.
        limit: the Trainer's limit_val_batches.
    """
    return 0 if limit == 0 else len(data.table.rows("val"))


def _processes(trainer: Namespace) -> int:
    """Those that train together; 1 where only the machine can tell."""
    devices = trainer.devices
    here = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 1
    return max(1, here) * int(trainer.num_nodes)


def _shape(data: ImageDataModule) -> tuple[int, float]:
    """Medians of some training pictures: shorter side, longer over shorter; a square of 224 where no header is read."""
    rows, orient = data.table.rows("train"), data.preprocessing.orient
    sides, aspects = [], []
    for row in rows[:: max(1, len(rows) // _SAMPLE)]:
        try:
            header = read_header(data.table.read(row), max_pixels=data.source.max_pixels, orient=orient)
        except (DecodeError, OSError, ValueError):
            continue
        sides.append(min(header.size))
        aspects.append(max(header.size) / min(header.size))
    return (int(statistics.median(sides)), statistics.median(aspects)) if sides else (224, 1.0)


_NARROW = 192  # the width of ViT-Ti, the smallest that is published


def _highest_rate(model: Classifier) -> float:
    """The highest rate that rarely spoils pre-trained weights; infinite where none is known, or they do not move."""
    name, method = model.resolved.optim.name, model.method
    if method == "head":
        return math.inf
    few = 10.0 if method in ("lora", "bitfit", "norms") else 1.0
    # Toys are nearly as easily trained anew.
    toy = 5.0 if model.model.config.width < _NARROW else 1.0
    if "adam" in name:
        return 1e-3 * few * toy
    return {"sgd": 0.1 * few, "lion": 3e-4 * few * toy}.get(name, math.inf)


def advice(model: Task, pictures: int, val: int, epochs: int | None) -> list[str]:
    """What rarely goes well, said before hours are lost; lines for the plan.

    Args:
        model: as it is going to be trained.
        pictures: to train on.
        val: pictures that are looked at.
        epochs: of the run; None or -1 where something else ends it.
    """
    lines = []
    c, optim = model.model.config, model.resolved.optim
    if isinstance(model, Classifier):
        limit = _highest_rate(model)
        if model.weights is not None and optim.lr and optim.lr > limit:
            usual = f"{limit / 10:g} to {limit / 2:g}"
            lines.append(f"lr {optim.lr:g} is high for pre-trained weights, which it may wipe out; {usual} is usual")
        if model.tuning.unfreeze_every is not None and epochs not in (None, -1):
            asleep = model.learning - unfrozen(model.model, model.learning, model.tuning, epochs - 1)
            if asleep:
                count = sum(p.numel() for name, p in model.model.named_parameters() if name in asleep)
                lines.append(f"{count:,} parameters are still frozen when the run ends: more epochs, or a lower "
                             "tuning.unfreeze_every")  # fmt: skip
    if isinstance(model, Pretraining) and model.pictures_every and not val:
        lines.append("reconstructions are drawn of val pictures, of which none is looked at")
    tokens = c.grid[0] * c.grid[1]
    if tokens < 16:
        lines.append(f"{tokens} patches are few to tell things apart: a smaller patch_size, or a larger image_size")
    if model.weights is None and pictures < 1000 and model.classes:
        lines.append(f"{pictures:,} pictures are few to learn from scratch; vit weights lists weights to start from")
    return lines
