"""How weights move: parameter groups, the optimizer, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vit.models.vit import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer. `None` leaves the value to the defaults, which the plan prints with their reasons.

    Args:
        name: `adamw`, or `sgd` with momentum (fine-tuning in the ViT paper, section 4.1).
        lr: highest learning rate, that of the head.
        weight_decay: decoupled for AdamW; never applied to biases, norms, tokens and position embeddings.
        momentum: of SGD.
        betas: of AdamW.
        eps: of AdamW.
        layer_decay: factor on the learning rate per layer below the head, in (0, 1]; 1 switches it off.
        clip: largest global gradient norm; 0 switches clipping off.

    Raises:
        ValueError: a value out of its range.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float | None = None
    weight_decay: float | None = None
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    layer_decay: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "sgd"):
            raise ValueError(f"expected optim.name adamw or sgd, but got {self.name!r}.")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"expected an optim.lr above 0, but got {self.lr}.")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"expected optim.layer_decay above 0 and at most 1, but got {self.layer_decay}.")
        for key in ("weight_decay", "momentum", "clip"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"expected optim.{key} of at least 0, but got {value}.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, in optimizer steps: a linear warm-up, then a cosine.

    Args:
        warmup: length of the warm-up; below 1 a share of all steps, otherwise a number of steps.
        final: last learning rate as a share of the highest.
        steps: optimizer steps from the first to the last value; None for the length of the run. Set it to stop
            earlier, or to go on later, without a change of the curve.

    Raises:
        ValueError: a value out of its range.
    """

    warmup: float | None = None
    final: float = 0.0
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.warmup is not None and not 0 <= self.warmup < math.inf:
            raise ValueError(f"expected a schedule.warmup of at least 0, but got {self.warmup}.")
        if not 0 <= self.final <= 1:
            raise ValueError(f"expected schedule.final between 0 and 1, but got {self.final}.")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"expected schedule.steps of at least 1, but got {self.steps}.")


@dataclass(frozen=True)
class Schedule:
    """Learning rate factor by optimizer step; nothing is remembered between steps, so a run can go on anywhere.

    Args:
        warmup: number of steps that climb; the first has 1 / warmup of the highest rate, never 0.
        total: number of steps from the first to the last value.
        final: factor of the last step and of any step after it.

    Raises:
        ValueError: a warm-up that is longer than the run.
    """

    warmup: int
    total: int
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup > self.total:
            raise ValueError(
                f"expected a warm-up of at most the {self.total} steps of the run, but got {self.warmup}. "
                "Lower model.schedule.warmup or train longer."
            )

    def __call__(self, step: int) -> float:
        """The factor on the highest learning rate at optimizer step `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        share = min(1.0, (step - self.warmup) / max(1, self.total - 1 - self.warmup))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * share))


def make_schedule(config: ScheduleConfig, run_steps: int) -> Schedule:
    """The schedule of a run of `run_steps` optimizer steps.

    Raises:
        ValueError: the warm-up is longer than the schedule.
    """
    total = max(1, config.steps if config.steps is not None else run_steps)
    warmup = config.warmup if config.warmup is not None else 0.0
    return Schedule(warmup=round(warmup * total) if warmup < 1 else int(warmup), total=total, final=config.final)


def parameter_groups(
    model: VisionTransformer, *, lr: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Trainable parameters, each exactly once, by layer and by whether they decay.

    The group of layer i of L (0 the embedding, L the head and last norm) learns at lr * layer_decay^(L - i), as in
    BEiT (Bao et al., 2021, section 3.2).

    Args:
        model: its `layer_groups` names every parameter.
        lr: of the head.
        weight_decay: for matrices; biases, norms, tokens and positions get 0.
        layer_decay: factor per layer, in (0, 1].

    Returns:
        Groups with `params`, `lr`, `lr_scale`, `weight_decay`, `name`; groups without parameters are left out.

    Raises:
        ValueError: nothing is trainable.
    """
    parameters = dict(model.named_parameters())
    layers = model.layer_groups()
    groups = []
    for depth, (layer, names) in enumerate(layers):
        scale = layer_decay ** (len(layers) - 1 - depth)
        trainable = [name for name in names if parameters[name].requires_grad]
        exempt = [name for name in trainable if model.no_weight_decay(name, parameters[name])]
        decayed = [name for name in trainable if name not in exempt]
        for suffix, chosen, decay in (("", decayed, weight_decay), (" (no decay)", exempt, 0.0)):
            if chosen:
                params = [parameters[name] for name in chosen]
                group = {"params": params, "lr": lr * scale, "lr_scale": scale, "weight_decay": decay}
                groups.append({**group, "name": layer + suffix})
    if not groups:
        raise ValueError("expected at least one trainable parameter, but everything is frozen.")
    return groups


def make_optimizer(config: OptimConfig, groups: Iterable[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer over `parameter_groups`; every `None` of the configuration must be resolved."""
    own = [dict(group) for group in groups]
    if config.name == "sgd":
        return torch.optim.SGD(own, momentum=config.momentum)
    return torch.optim.AdamW(own, betas=config.betas, eps=config.eps)


def apply_to_optimizer(
    optimizer: torch.optim.Optimizer, config: OptimConfig, groups: Iterable[Mapping[str, Any]]
) -> None:
    """Make the configured values hold in an optimizer whose state came from a checkpoint.

    A checkpoint brings its own learning rates and decay; what the user set for the run that goes on must win.
    """
    for current, wanted in zip(optimizer.param_groups, groups, strict=True):
        current |= {key: wanted[key] for key in ("lr", "lr_scale", "weight_decay", "name")}
        current |= {"momentum": config.momentum} if config.name == "sgd" else {"betas": config.betas, "eps": config.eps}
