"""Which parameters learn, from which epoch on, and which modules draw random numbers meanwhile."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Literal, get_args

from torch import nn

from vit.models.lora import Projection, add_lora
from vit.models.vit import VisionTransformer

Method = Literal["full", "head", "lora", "bitfit", "norms", "attention", "last_n"]
FEW: tuple[Method, ...] = ("lora", "bitfit", "norms")
"""Methods that train few parameters, which have further to go."""
HeadInit = Literal["zero", "ridge"]


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Options of the methods that leave a part of the model as it is, and of how the head starts.

    Args:
        lora_rank: r of `lora`, for each of queries, keys, values and every other chosen layer.
        lora_alpha: updates of `lora` are scaled by alpha / rank.
        lora_projections: the layers of every block that `lora` updates: qkv, proj, fc1, fc2.
        last_n: blocks that `last_n` trains.
        unfreeze_every: gradual unfreezing (Howard and Ruder 2018, section 3.3): epochs after which one further block
            from the top begins to learn, the embedding last; the head and the last norm learn from the start. None: all
            from the start.
        head_init: `zero`: a new head starts at 0 (ViT, section 3.2). `ridge`: any head starts as the regularised least
            squares solution on the features of the training pictures, without augmentation.

    Raises:
        ValueError: a value out of its range.
    """

    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_projections: tuple[Projection, ...] = ("qkv", "proj", "fc1", "fc2")
    last_n: int = 2
    unfreeze_every: int | None = None
    head_init: HeadInit = "zero"

    def __post_init__(self) -> None:
        for name in ("lora_rank", "last_n", "unfreeze_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected a tuning.{name} of at least 1, but got {value}.")
        if not 0 < self.lora_alpha < math.inf:
            raise ValueError(f"expected a tuning.lora_alpha above 0, but got {self.lora_alpha}.")
        known = get_args(Projection)
        if not self.lora_projections or not set(self.lora_projections) <= set(known):
            raise ValueError(
                f"expected tuning.lora_projections out of {', '.join(known)}, but got "
                f"{', '.join(self.lora_projections) or 'none'}."
            )
        if self.head_init not in get_args(HeadInit):
            raise ValueError(f"expected tuning.head_init zero or ridge, but got {self.head_init!r}.")


def prepare(model: VisionTransformer, method: Method, tuning: TuningConfig) -> frozenset[str]:
    """Make a model ready for a method, in place: LoRA gets its matrices, and what never learns is frozen.

    `full`: everything learns. `head`: the head alone. All others train the head and: `lora` low-rank updates (Hu et
    al. 2021), `bitfit` all biases (Ben Zaken et al. 2022), `norms` all norms, `attention` the attention of all blocks
    (Touvron et al. 2022, "Three things"), `last_n` the last blocks and what follows them.

    Args:
        model: changed in place.
        method: which parameters learn.
        tuning: its options.

    Returns:
        Names of the parameters that learn, at the latest when all is unfrozen.

    Raises:
        ValueError: an unknown method, or options that do not go with it or with the model.
    """
    if method not in get_args(Method):
        raise ValueError(f"expected method {', '.join(get_args(Method))}, but got {method!r}.")
    _check_used(method, tuning)
    if tuning.head_init == "ridge" and not isinstance(model.head, nn.Linear):
        raise ValueError("expected a linear head for tuning.head_init ridge: set model.encoder.head to linear.")
    if method == "lora":
        add_lora(
            model, rank=tuning.lora_rank, alpha=tuning.lora_alpha, projections=sorted(set(tuning.lora_projections))
        )
    learning = _learning(model, method, tuning)
    set_learning(model, learning)
    return learning


def _check_used(method: Method, tuning: TuningConfig) -> None:
    users: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(("lora_rank", "lora_alpha", "lora_projections"), ("lora",)),
        "last_n": ("last_n",),
        "unfreeze_every": tuple(name for name in get_args(Method) if name != "head"),
    }
    for field in fields(tuning):
        value = getattr(tuning, field.name)
        if field.name in users and method not in users[field.name] and value != field.default:
            raise ValueError(
                f"expected tuning.{field.name} with method {' or '.join(users[field.name])}, but the method is "
                f"{method}: leave it out, or choose another method."
            )


def _learning(model: VisionTransformer, method: Method, tuning: TuningConfig) -> frozenset[str]:
    names = [name for name, _ in model.named_parameters()]
    match method:
        case "full":
            chosen = names
        case "head":
            chosen = []
        case "lora":
            chosen = [name for name in names if name.endswith((".lora_a", ".lora_b"))]
        case "bitfit":
            chosen = [name for name in names if name.endswith(("bias", "_bias"))]
        case "norms":
            chosen = [
                f"{place}.{name}"
                for place, module in model.named_modules()
                if isinstance(module, nn.LayerNorm)
                for name, _ in module.named_parameters()
            ]
        case "attention":
            chosen = [name for name in names if name.startswith("blocks.") and ".attn." in name]
        case "last_n":
            depth = len(model.blocks)
            if tuning.last_n > depth:
                raise ValueError(f"expected tuning.last_n of at most the {depth} blocks, but got {tuning.last_n}.")
            chosen = [name for _, group in model.layer_groups()[-1 - tuning.last_n :] for name in group]
    return frozenset(chosen) | {name for name in names if name.startswith("head.")}


def unfrozen(model: VisionTransformer, learning: Collection[str], tuning: TuningConfig, epoch: int) -> frozenset[str]:
    """Those of the parameters that learn in an epoch, a pure function of its number.

    Args:
        model: tells which parameter belongs to which block.
        learning: names of all that learn in the end.
        tuning: `unfreeze_every` counts.
        epoch: from 0.
    """
    if tuning.unfreeze_every is None:
        return frozenset(learning)
    open_layers = 1 + epoch // tuning.unfreeze_every
    return frozenset(name for _, group in model.layer_groups()[-open_layers:] for name in group if name in learning)


def set_learning(model: nn.Module, names: Collection[str]) -> None:
    """Let just these parameters learn. Others get no gradient, so that an optimizer leaves them and their moments."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def set_modes(model: VisionTransformer, training: bool) -> None:
    """Training mode where something learns, evaluation mode everywhere else.

    A module without a parameter that learns is in evaluation mode. One without any parameters (dropout, stochastic
    depth) follows the module that holds it, and dropout after the embedding follows the embedding: with `norms` blocks
    drop paths, but their attention and MLPs, in which nothing learns, drop nothing.

    Args:
        model: changed in place.
        training: False: evaluation mode throughout.
    """
    model.train(False)
    if training:
        _switch_on(model)
        learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        model.pos_drop.train(not learning.isdisjoint(dict(model.layer_groups())["embed"]))


def _switch_on(module: nn.Module) -> None:
    module.training = True
    for child in module.children():
        parameters = list(child.parameters())
        if not parameters or any(parameter.requires_grad for parameter in parameters):
            _switch_on(child)
