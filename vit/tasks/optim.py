"""How weights move: parameter groups, the optimizer, and the learning rate as a pure function of the step."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from vit.models.vit import VisionTransformer

ScheduleName = Literal["cosine", "linear", "constant", "rsqrt"]

_OWN = ("adamw", "sgd")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer. `None` leaves the value to the defaults, which the plan prints with their reasons.

    Args:
        name: `adamw`, or `sgd` with momentum (fine-tuning in the ViT paper, section 4.1); another of timm's (but
            adahessian), such as `lion` or `lamb`, with an lr, since the right one differs.
        lr: highest learning rate, that of the head.
        weight_decay: decoupled for AdamW; never applied to biases, norms, tokens and position embeddings.
        momentum: of SGD, and of those of timm's that have one.
        betas: of Adam and its kin; None is the optimizer's own default, (0.9, 0.999) for AdamW.
        eps: of Adam and its kin; None is the optimizer's own default, 1e-8 for AdamW.
        layer_decay: factor on the learning rate per layer below the head, in (0, 1]; 1 switches it off.
        clip: largest global gradient norm; 0 switches clipping off.
        ema: decay of an exponential moving average of the weights, in (0, 1), which is what is then scored and kept;
            see `vit.tasks.averaging`. None switches it off.
        ema_start: optimizer steps before the average begins; below 1 a share of all steps.
        ema_warmup: let the average follow quickly at first; false trusts the first weights, where they are good ones.
        gradient_checkpointing: compute each block again in the backward pass: less memory, about a third more time.
        compile: compile the encoder's blocks with `torch.compile`; the first step takes a minute, the others less time.

    Raises:
        ValueError: a value out of its range, or an optimizer that is unknown.
    """

    name: str = "adamw"
    lr: float | None = None
    weight_decay: float | None = None
    momentum: float = 0.9
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    layer_decay: float | None = None
    clip: float | None = None
    ema: float | None = None
    ema_start: float = 0.0
    ema_warmup: bool = True
    gradient_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"expected an optim.lr above 0, but got {self.lr}.")
        if self.name not in _OWN:
            _check_timm_name(self.name)
            if self.lr is None:
                raise ValueError(f"expected optim.lr with optim.name={self.name}: only {' and '.join(_OWN)} have one.")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"expected optim.layer_decay above 0 and at most 1, but got {self.layer_decay}.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"expected an optim.ema between 0 and 1, or null for none, but got {self.ema}.")
        for key in ("weight_decay", "momentum", "clip", "ema_start"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"expected optim.{key} of at least 0, but got {value}.")
        self._check_used()

    def _check_used(self) -> None:
        """No option is passed over."""
        unused = []
        if self.name == "adamw" and self.momentum != OptimConfig.momentum:
            unused.append(("momentum", "another optimizer: that of adamw is betas[0]"))
        if self.name == "sgd":
            unused += [(key, "adamw and its kin") for key in ("betas", "eps") if getattr(self, key) is not None]
        if self.ema is None:
            late, cold = self.ema_start != OptimConfig.ema_start, self.ema_warmup != OptimConfig.ema_warmup
            unused += [("ema_start", "optim.ema")] * late + [("ema_warmup", "optim.ema")] * cold
        for key, owner in unused:
            raise ValueError(f"expected optim.{key} with {owner}, but it would do nothing here: leave it out.")


def _check_timm_name(name: str) -> None:
    from timm.optim import list_optimizers  # takes a second, which most starts do not need

    # Second derivatives need another training loop.
    names = [str(n) for n in list_optimizers() if n not in ("adahessian", *_OWN)]
    if name not in names:
        near: list[str] = difflib.get_close_matches(name, [*_OWN, *names], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see timm.optim.list_optimizers()."
        raise ValueError(f"expected optim.name {', '.join(_OWN)} or another of timm's, but got {name!r}: {hint}")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, in optimizer steps: a linear warm-up, a curve, perhaps a linear cool-down.

    Args:
        name: the curve. `cosine` and `linear` go down to `final`; `constant` stays; `rsqrt` goes down as one over the
            square root of the steps (Zhai et al. 2022, "Scaling Vision Transformers", section 3.5), so that a run can
            be lengthened and cooled down at any time.
        warmup: length of the warm-up; below 1 a share of all steps, otherwise a number of steps.
        final: last learning rate as a share of the highest; of constant and rsqrt, that of their cool-down.
        cooldown: length of a linear cool-down at the end of constant and rsqrt, as for `warmup`.
        timescale: of rsqrt: after so many steps the rate is 1/√2 of the highest, as for `warmup`.
        steps: optimizer steps from the first to the last value; None for the length of the run. Set it to stop
            earlier, or to go on later, without a change of the curve.

    Raises:
        ValueError: a value out of its range.
    """

    name: ScheduleName = "cosine"
    warmup: float | None = None
    final: float = 0.0
    cooldown: float = 0.0
    timescale: float = 10_000
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(ScheduleName):
            shown = ", ".join(get_args(ScheduleName))
            raise ValueError(f"expected schedule.name to be one of {shown}, but got {self.name!r}.")
        for key in ("warmup", "cooldown"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"expected a schedule.{key} of at least 0, but got {value}.")
        if self.cooldown and self.name in ("cosine", "linear"):
            raise ValueError(
                f"expected schedule.cooldown with constant or rsqrt, but got {self.name}, which ends at "
                "schedule.final without."
            )
        if self.timescale != ScheduleConfig.timescale and self.name != "rsqrt":
            raise ValueError(f"expected schedule.timescale with rsqrt, but got {self.name}: leave it out.")
        if self.final and self.name in ("constant", "rsqrt") and not self.cooldown:
            raise ValueError(
                f"expected schedule.final of {self.name} with schedule.cooldown, at whose end it is reached: leave it "
                "out, or set both."
            )
        if not 0 <= self.final <= 1:
            raise ValueError(f"expected schedule.final between 0 and 1, but got {self.final}.")
        if not 0 < self.timescale < math.inf:
            raise ValueError(f"expected a schedule.timescale above 0, but got {self.timescale}.")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"expected schedule.steps of at least 1, but got {self.steps}.")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate factor by optimizer step; nothing is remembered between steps, so a run can go on anywhere.

    Args:
        warmup: number of steps that climb; the first has 1 / warmup of the highest rate, never 0.
        total: number of steps from the first to the last value.
        final: factor of the last step and of any step after it, but for curves that do not go down to it.
        name: the curve after the warm-up.
        cooldown: number of steps at the end that go down to `final` in a line.
        timescale: of rsqrt, in steps.

    Raises:
        ValueError: a warm-up and a cool-down that are longer than the run.
    """

    warmup: int
    total: int
    final: float = 0.0
    name: ScheduleName = "cosine"
    cooldown: int = 0
    timescale: float = 10_000

    def __post_init__(self) -> None:
        if self.warmup + self.cooldown > self.total:
            both = f"a warm-up of {self.warmup} and a cool-down of {self.cooldown}" if self.cooldown else self.warmup
            raise ValueError(
                f"expected a warm-up of at most the {self.total} steps of the run, but got {both}. "
                "Lower model.schedule.warmup or train longer."
            )

    def __call__(self, step: int) -> float:
        """The factor on the highest learning rate at optimizer step `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        step = min(step, self.total - 1)
        flat = self.total - 1 - self.cooldown
        if not self.cooldown or step <= flat:
            return self._curve(step)
        top = self._curve(flat)
        return top + (self.final - top) * (step - flat) / self.cooldown

    def _curve(self, step: int) -> float:
        since = max(0, step - self.warmup)
        if self.name == "constant":
            return 1.0
        if self.name == "rsqrt":
            return (1 + since / self.timescale) ** -0.5
        share = min(1.0, since / max(1, self.total - 1 - self.warmup))
        left = 1 - share if self.name == "linear" else 0.5 * (1 + math.cos(math.pi * share))
        return self.final + (1 - self.final) * left

    def __str__(self) -> str:
        text = f"warm-up of {self.warmup:,} steps, then {self.name}"
        if self.name in ("cosine", "linear"):
            return f"{text} to {self.final:g} of the highest rate at step {self.total:,}"
        if self.name == "rsqrt":
            text += f" with a timescale of {self.timescale:,.0f} steps"
        if self.cooldown:
            text += f", then linear in {self.cooldown:,} steps to {self.final:g} of the highest rate"
        return text


def make_schedule(config: ScheduleConfig, run_steps: int) -> Schedule:
    """The schedule of a run of `run_steps` optimizer steps.

    Raises:
        ValueError: the warm-up is longer than the schedule.
    """
    total = max(1, config.steps if config.steps is not None else run_steps)
    return Schedule(
        warmup=steps_of(config.warmup or 0.0, total),
        total=total,
        final=config.final,
        name=config.name,
        cooldown=steps_of(config.cooldown, total),
        timescale=max(1, steps_of(config.timescale, total)),
    )


def steps_of(length: float, total: int) -> int:
    """A length in optimizer steps: below 1 a share of `total`, otherwise a number of steps."""
    return round(length * total) if length < 1 else int(length)


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
    """The optimizer over `parameter_groups`; every `None` of the configuration must be resolved.

    Raises:
        ValueError: an optimizer that needs a package that is not there, or other options.
    """
    own = [dict(group) for group in groups]
    given = {key: value for key in ("betas", "eps") if (value := getattr(config, key)) is not None}
    if config.name == "sgd":
        return torch.optim.SGD(own, momentum=config.momentum)
    if config.name == "adamw":
        return torch.optim.AdamW(own, **given)
    from timm.optim import create_optimizer_v2

    try:
        return create_optimizer_v2(own, opt=config.name, lr=config.lr, momentum=config.momentum, **given)
    except (ImportError, AssertionError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"expected timm to make the optimizer {config.name} of {given or 'its own options'}, but: {error}. "
            "Install what it needs, or choose another optim.name."
        ) from error


def apply_to_optimizer(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Make the configured values hold in an optimizer whose state came from a checkpoint.

    A checkpoint brings its own learning rates and decay; what the user set for the run that goes on must win.

    Args:
        optimizer: made from the configuration, so that its defaults are what is configured.
        groups: as it was made of.
    """
    configured = {key: optimizer.defaults[key] for key in ("momentum", "betas", "eps") if key in optimizer.defaults}
    for current, wanted in zip(optimizer.param_groups, groups, strict=True):
        current |= {key: wanted[key] for key in ("lr", "lr_scale", "weight_decay", "name")} | configured
