"""Averages of weights: an exponential moving average while training goes on, and the greedy soup after it."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

_KEY = "averaging"


class Averaging(Callback):
    """An exponential moving average of the trained weights, which is what is scored and kept once it has begun.

    The average begins as the weights after step `start` + 1. After every further optimizer step it becomes
    d·average + (1 - d)·weights with d = min(decay, (1 + n) / (10 + n)) at the n-th update (the warm-up of TensorFlow's
    `ExponentialMovingAverage`), so that a short run is not ruled by its first weights; or d = decay from the start,
    where the first weights are good ones. Until it has begun, validation and checkpoints see the live weights.

    A checkpoint's `state_dict` is what was scored. Under `averaging` it says which copy that is, and holds the live
    weights, from which training goes on bit for bit. Weights in low precision are averaged in float32. Every process
    keeps the whole average; sharded weights are not supported.

    Args:
        decay: largest d, in (0, 1).
        start: optimizer steps before the average begins.
        warmup: let d rise to `decay`.
    """

    def __init__(self, decay: float, start: int = 0, *, warmup: bool = True) -> None:
        self.decay, self.start, self.warmup = decay, start, warmup
        self.updates = 0
        self._average: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        self._last_step = 0

    @property
    def has_started(self) -> bool:
        """Whether there is an average yet."""
        return self.updates > 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the live weights back for a fit that goes on; a new fit begins a new average."""
        if stage != "fit":
            return
        if trainer.global_step > 0:
            self._back(pl_module)
        else:
            self.updates, self._average, self._live, self._last_step = 0, {}, {}, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here; the weights are on their device now."""
        self._last_step = trainer.global_step
        parameters = dict(pl_module.named_parameters())
        self._average = {name: value.to(parameters[name].device) for name, value in self._average.items()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Take the new weights into the average, if this batch ended with an optimizer step."""
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        # A longer run may start late by its own length; what has begun goes on.
        if trainer.global_step > self.start or self.has_started:
            self._update(pl_module)

    @torch.no_grad()
    def _update(self, pl_module: LightningModule) -> None:
        named = pl_module.named_parameters()
        current = {n: p.detach() for n, p in named if p.requires_grad or n in self._average}
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        self.updates += 1
        # What begins to learn later, as in gradual unfreezing, joins with the weights it has.
        for name in current.keys() - self._average.keys():
            self._average[name] = current[name].to(torch.promote_types(current[name].dtype, torch.float32), copy=True)
        names = list(self._average)
        new = [current[name].to(self._average[name].dtype) for name in names]
        torch._foreach_lerp_([self._average[name] for name in names], new, 1 - decay)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a validation within training see the average."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._to_average(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train on with the live weights."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._back(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the model with the average, as it was scored."""
        self._to_average(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the model with the live weights, where an error struck during validation."""
        self._back(pl_module)

    @torch.no_grad()
    def _to_average(self, pl_module: LightningModule) -> None:
        if self.has_started and not self._live:
            parameters = dict(pl_module.named_parameters())
            self._live = {name: parameters[name].detach().clone() for name in self._average}
            for name, value in self._average.items():
                parameters[name].copy_(value)

    @torch.no_grad()
    def _back(self, pl_module: LightningModule) -> None:
        parameters = dict(pl_module.named_parameters())
        for name, value in self._live.items():
            parameters[name].copy_(value)
        self._live = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let `state_dict` be the average, and keep the live weights beside it."""
        copies = {"state_dict": "average" if self.has_started else "live", "decay": self.decay, "updates": self.updates}
        checkpoint[_KEY] = copies
        if self.has_started:
            state = checkpoint["state_dict"]
            live = self._live or {name: state[name] for name in self._average}
            checkpoint["state_dict"] = {**state, **self._average}
            checkpoint[_KEY] |= {"live": dict(live)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the average from a checkpoint that `live_weights_first` has put in order."""
        if trainer.state.fn == TrainerFn.FITTING:
            held = checkpoint.get(_KEY, {})
            self.updates = held.get("updates", 0) if "average" in held else 0
            self._average = {name: value.clone() for name, value in held.get("average", {}).items()}


def live_weights_first(checkpoint: dict[str, Any]) -> None:
    """Let `state_dict` be the live weights, for training to go on from, and keep the average under `averaging`.

    Args:
        checkpoint: changed in place, if it holds an average.
    """
    held = checkpoint.get(_KEY, {})
    if "live" in held:
        state = checkpoint["state_dict"]
        average = {name: state[name] for name in held["live"]}
        checkpoint["state_dict"] = {**state, **held["live"]}
        checkpoint[_KEY] = {**held, "state_dict": "live", "average": average}


class Soup(NamedTuple):
    """The greedy soup and how it came about.

    Args:
        state_dict: the weights.
        score: of these weights.
        used: files whose weights are in it, the best first.
        tried: (file, its own score, score with it, whether it stayed) in the order they were tried.
    """

    state_dict: dict[str, Tensor]
    score: float
    used: tuple[str, ...]
    tried: tuple[tuple[str, float, float, bool], ...]


def greedy_soup(
    checkpoints: Sequence[str | Path], score: Callable[[Mapping[str, Tensor]], float], *, higher_is_better: bool = True
) -> Soup:
    """Average those of several checkpoints of a run that together score best (Wortsman et al. 2022, recipe 1).

    In falling order of their own score, each checkpoint joins the mean if the mean then scores at least as well.

    Args:
        checkpoints: files with a `state_dict`, such as the k best of a run.
        score: of a state dict, on the val split; nothing else may choose.
        higher_is_better: the direction of the score.

    Raises:
        ValueError: no checkpoints, or checkpoints of different models.
    """
    if not checkpoints:
        raise ValueError("expected at least one checkpoint to make a soup of, but got none.")
    sign = 1 if higher_is_better else -1
    own = {Path(file): sign * score(_weights(Path(file))) for file in checkpoints}
    first, *rest = sorted(own, key=lambda file: own[file], reverse=True)
    # Sums in float64: the mean does not depend on how many came before.
    total = {name: value.double() for name, value in _weights(first).items()}
    dtypes = {name: value.dtype for name, value in _weights(first).items()}
    used, best, tried = [first], own[first], [(first.name, sign * own[first], sign * own[first], True)]
    for file in rest:
        new = _weights(file)
        if {n: v.shape for n, v in new.items()} != {n: v.shape for n, v in total.items()}:
            raise ValueError(f"expected checkpoints of one model, but {file} differs from {first}.")
        joined = {name: value + new[name].double() for name, value in total.items()}
        with_it = sign * score(_mean(joined, len(used) + 1, dtypes))
        stays = with_it >= best
        if stays:
            total, best = joined, with_it
            used.append(file)
        tried.append((file.name, sign * own[file], sign * with_it, stays))
    names = tuple(file.name for file in used)
    return Soup(_mean(total, len(used), dtypes), sign * best, names, tuple(tried))


def save_soup(soup: Soup, file: Path, *, like: Path) -> None:
    """Write a soup as a checkpoint that every verb reads, but that no run goes on from.

    Args:
        soup: its weights.
        file: where.
        like: a checkpoint of the same run, for all that is not weights.
    """
    held = torch.load(like, map_location="cpu", weights_only=True)
    kept = {
        name: held[name] for name in held if name not in ("optimizer_states", "lr_schedulers", "callbacks", "loops")
    }
    beside = file.with_name(f".{file.name}")
    torch.save({**kept, "state_dict": soup.state_dict, _KEY: {"state_dict": "soup", "used": list(soup.used)}}, beside)
    beside.replace(file)


def read_soup(file: Path) -> Soup:
    """A soup that was saved; its score and what was tried are not in the file.

    Args:
        file: written by `save_soup`.
    """
    held = torch.load(file, map_location="cpu", weights_only=True)
    return Soup(held["state_dict"], math.nan, tuple(held[_KEY]["used"]), ())


def _weights(file: Path) -> dict[str, Tensor]:
    return torch.load(file, map_location="cpu", weights_only=True)["state_dict"]


def _mean(total: Mapping[str, Tensor], count: int, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    return {name: (value / count).to(dtypes[name]) for name, value in total.items()}
