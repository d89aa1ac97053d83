"""Recipes: what to choose for these pictures, these weights and this machine, each value with its reason."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vit.tasks.methods import FEW


class Choice(NamedTuple):
    """A value and why."""

    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """The weights that training starts from.

    Args:
        parameters: number of them.
        width: D.
        patch_size: P in pixels.
        image_size: side in pixels that they were trained at.
    """

    parameters: int
    width: int
    patch_size: int
    image_size: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a recipe looks at.

    Args:
        pictures: to train on.
        val: pictures that choose the checkpoint.
        classes: their names.
        multi_label: pictures have several labels.
        side: median of the pictures' shorter sides in pixels.
        start: the weights; None from scratch.
        cores: processor cores.
        gpu: whether a GPU computes.
        sharded: the weights are divided among processes (FSDP, DeepSpeed).
        typed: options that were set by hand, by dotted name: choices follow from them.
    """

    pictures: int
    val: int
    classes: tuple[str, ...]
    multi_label: bool
    side: int
    start: Start | None
    cores: int
    gpu: bool
    sharded: bool = False
    typed: Mapping[str, Any] = field(default_factory=dict)

    def settled(self, name: str, choice: Choice) -> Any:
        """The value that an option is going to have: the typed one, or else the recipe's.

        Args:
            name: of the option.
            choice: of the recipe.
        """
        return self.typed.get(name, choice.value)


# Rough speeds in operations per second, only to tell minutes from hours: one core in float32, and one GPU.
_CORE, _GPU = 40e9, 60e12
_MINUTES = 30
_LARGE = 10_000_000
_FINE = 2000  # val pictures that tell accuracies apart by less than a point


def auto(facts: Facts) -> dict[str, Choice]:
    """A sound choice for every option that matters, by dotted name.

    Fine-tuning: everything learns, at a rate that falls with the width and with depth below the head (MAE, He et al.
    2021, table 9), from a ridge regression as first head, since a random one pulls good features out of place
    (Kumar et al. 2022, "Fine-Tuning can Distort Pretrained Features"). From scratch: small patches for small
    pictures, more epochs, more augmentation.
    """
    chosen = _from_weights(facts, facts.start) if facts.start is not None else _from_scratch(facts)
    chosen["data.batch_size"] = _batch(facts)
    batch = facts.settled("data.batch_size", chosen["data.batch_size"])
    if (lr := chosen.get("model.optim.lr")) is not None and batch != 64:
        scaled = lr.value * math.sqrt(batch / 64)
        chosen["model.optim.lr"] = Choice(float(f"{scaled:.2g}"), f"{lr.why}; by the square root of the batch")
    if facts.start is not None and facts.start.parameters >= _LARGE and _method(facts, chosen) == "full":
        chosen |= _calm(facts, _steps(facts, chosen["trainer.max_epochs"], batch))
    if _letters(facts.classes):
        chosen["data.augment.flip"] = Choice(0.0, "classes are letters or digits, which a flip would spoil")
    if not facts.multi_label:
        chosen["model.loss.label_smoothing"] = Choice(0.1, "costs nothing and calms the end of training")
    return chosen


def _from_weights(facts: Facts, start: Start) -> dict[str, Choice]:
    chosen: dict[str, Choice] = {}
    size = _image_size(facts, start)
    if size.value != start.image_size:
        chosen["model.encoder.image_size"] = size
    tokens = _tokens(facts.settled("model.encoder.image_size", size), start.patch_size)
    epochs, method = _epochs(facts, start.parameters, tokens)
    chosen["trainer.max_epochs"] = epochs
    if method is not None:
        chosen["model.method"] = method
    if not facts.multi_label and facts.pictures <= 50_000:
        chosen["model.tuning.head_init"] = Choice("ridge", "a head that fits the features spares them a rough start")
    if _method(facts, chosen) == "head":
        chosen["model.optim.lr"] = Choice(1e-3, "the head alone, from a good start")
        chosen["model.optim.weight_decay"] = Choice(0.0, "the head alone")
        chosen["data.augment.preset"] = Choice("none", "features of the pictures as they are")
        return chosen
    if _method(facts, chosen) not in FEW:
        chosen |= _rates(start)
    return chosen | _augmentation(facts)


def _method(facts: Facts, chosen: dict[str, Choice]) -> str:
    return str(facts.settled("model.method", chosen.get("model.method", Choice("full", ""))))


def _tokens(size: Any, patch: int) -> int:
    """Of an image size, which is one number or a height and a width, with the class token."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height // patch) * int(width // patch) + 1


def _steps(facts: Facts, epochs: Choice, batch: int) -> int:
    if (steps := facts.typed.get("trainer.max_steps", -1)) > 0:
        return int(steps)
    return int(facts.settled("trainer.max_epochs", epochs)) * max(1, facts.pictures // batch)


def _rates(start: Start) -> dict[str, Choice]:
    """How fast everything learns."""
    chosen = {}
    large = start.parameters >= _LARGE
    # Measured on DINOv2-S: 2e-4 takes a ridge start of 83 % to 54 % within 16 steps; 5e-5 to 1e-4, slowly reached,
    # improve it. Stochastic depth undoes such weights too (87 % to 60 % at 0.1), unless they were trained with it.
    rate = (1e-4 if large else 3e-4) * math.sqrt(384 / start.width)
    chosen["model.optim.lr"] = Choice(rate, f"pre-trained weights of width {start.width}")
    if large:
        chosen["model.schedule.warmup"] = Choice(0.2, "Adam's first steps would pull good features out of place")
    why = "large weights: early layers are good already" if large else "small weights: early layers must adapt too"
    chosen["model.optim.layer_decay"] = Choice(0.75 if large else 0.9, why)
    chosen["model.optim.weight_decay"] = Choice(0.05, "the usual one with AdamW")
    return chosen


def _augmentation(facts: Facts) -> dict[str, Choice]:
    if facts.side <= 64:
        return {
            "data.augment.preset": Choice("light", f"small pictures ({facts.side} px) have no room for small crops"),
            "model.preprocessing.crop_pct": Choice(1.0, f"pictures of {facts.side} px are shown to their edges"),
        }
    return {
        "data.augment.preset": Choice("standard", "pictures with room for crops"),
        "data.augment.crop_scale": Choice((0.3, 1.0), "crops that still show the subject"),
    }


def _image_size(facts: Facts, start: Start) -> Choice:
    own = start.image_size
    if own <= 64:
        return Choice(own, "that of the weights")
    eight = 8 * start.patch_size
    if facts.side <= 64:
        return Choice(min(own, eight), f"pictures are {facts.side} px, so 8 x 8 patches show all there is")
    usual = min(own, 16 * start.patch_size)
    if not facts.gpu and _seconds(facts, start.parameters, _tokens(usual, start.patch_size)) * 5 > 60 * _MINUTES:
        smaller = min(own, 10 * start.patch_size)
        return Choice(smaller, f"10 x 10 patches, as {facts.cores} cores would need hours for more")
    return Choice(usual, "16 x 16 patches, as in the ViT paper" if usual != own else "that of the weights")


def _epochs(facts: Facts, parameters: int, tokens: int) -> tuple[Choice, Choice | None]:
    """Number of epochs by data and time, and the method, where time forbids to train everything."""
    wanted = round(min(50, max(5, 40_000 / facts.pictures)))
    seconds = _seconds(facts, parameters, tokens)
    affordable = int(60 * _MINUTES / seconds)
    asked = facts.typed.get("model.method")
    if asked == "head" or (asked is None and affordable < 2):
        why = f"an epoch of everything would take about {seconds / 60:.0f} minutes here"
        return Choice(20, "the head alone is quick"), None if asked else Choice("head", why)
    if affordable < wanted:
        why = f"about {_MINUTES}" if affordable else f"{seconds / 60:.0f}"
        return Choice(max(1, affordable), f"{why} minutes on this machine; {wanted} would be better"), None
    return Choice(wanted, f"{facts.pictures:,} pictures, seen about {wanted * facts.pictures:,} times in all"), None


def _seconds(facts: Facts, parameters: int, tokens: int) -> float:
    """Of an epoch: two operations per parameter and token forward, twice that backward."""
    return 6 * parameters * tokens * facts.pictures / (_GPU if facts.gpu else _CORE * facts.cores)


def _from_scratch(facts: Facts) -> dict[str, Choice]:
    side, patch = (32, 4) if facts.side <= 40 else (64, 8) if facts.side <= 96 else (128, 16)
    if facts.gpu and facts.side > 96 and facts.pictures >= 20_000:
        side = 224
    why = f"pictures are {facts.side} px" if side != 128 else "no weights: a small model at a small size learns soonest"
    width, depth, heads = (384, 12, 6) if facts.pictures >= 20_000 and facts.gpu else (128, 6, 4)
    shape = f"{facts.pictures:,} pictures and no weights"
    epochs = round(min(200, max(30, 100_000 / facts.pictures)))
    strong = facts.pictures >= 2000 and facts.side > 40
    return {
        "model.encoder.image_size": Choice(side, why),
        "model.encoder.patch_size": Choice(patch, f"{(side // patch) ** 2} patches"),
        "model.encoder.width": Choice(width, shape),
        "model.encoder.depth": Choice(depth, shape),
        "model.encoder.heads": Choice(heads, shape),
        "model.encoder.init_std": Choice(float(f"{1 / math.sqrt(width):.1g}"), "a narrow model learns sooner so"),
        "trainer.max_epochs": Choice(epochs, f"from scratch, {facts.pictures:,} pictures"),
        "model.optim.lr": Choice(1e-3, "from scratch"),
        "model.optim.weight_decay": Choice(0.05, "the usual one with AdamW"),
        "data.augment.preset": Choice(
            "strong" if strong else "standard", "nothing else keeps it from learning by heart"
        ),
        "data.augment.crop_scale": Choice(
            (0.5, 1.0) if facts.side <= 64 else (0.2, 1.0), f"pictures are {facts.side} px"
        ),
    }


def _batch(facts: Facts) -> Choice:
    size = 16 if facts.pictures < 500 else 32 if facts.pictures < 5000 else 64
    if facts.gpu and facts.pictures >= 50_000:
        size = 256
    steps = facts.pictures // size
    return Choice(size, f"{steps:,} steps an epoch")


def _calm(facts: Facts, steps: int) -> dict[str, Choice]:
    """What keeps chance out of the fine-tuning of large weights: an average over a tenth of all steps, chosen by loss.

    Measured on DINOv2-S, 2,000 pictures of clothing. At 56 pixels, on the way from a ridge start, the live weights
    fall from 83 % to 74 % and come back (to 80 % at a tenth of the rate); their average stays above 81 % and ends as
    high. At 112 pixels, of four epochs, 200 val pictures called the first one the most accurate (85 to 84 %), which
    named 82.5 % of 10,000 others right, while their loss fell to the end, and so did the error on 1,000 others, from
    15 to 12 %.
    """
    chosen = {}
    if not facts.sharded:
        decay = min(0.999, max(0.9, 1 - 10 / max(1, steps)))
        why = "single steps upset large weights, their average is calm"
        chosen["model.optim.ema"] = Choice(float(f"{decay:.3g}"), why)
        chosen["model.optim.ema_warmup"] = Choice(False, "the first weights are good ones")
    if 0 < facts.val < _FINE:
        points = 100 * math.sqrt(0.15 * 0.85 / facts.val)
        why = f"{facts.val:,} val pictures tell accuracies apart by some {points:.1f} points only, losses more finely"
        chosen["monitor"] = Choice("val_loss", why)
    return chosen


def _letters(classes: tuple[str, ...]) -> bool:
    return all(len(name) == 1 and name.isalnum() for name in classes)


def paper(facts: Facts) -> dict[str, Choice]:
    """Fine-tuning as in the ViT paper, section 4.1 and table 4: SGD with momentum, no decay, cosine, 384 pixels.

    Steps by the size of the data set, as in table 4: 500 for Pets and Flowers, 10,000 for CIFAR, 20,000 for ImageNet.
    The paper tries every rate of `paper_rates` on a part of train; `vit sweep --recipe paper` does.
    """
    n = facts.pictures
    steps = 500 if n < 10_000 else 10_000 if n < 500_000 else 20_000
    table = "ViT paper, table 4"
    return {
        "model.optim.name": Choice("sgd", table),
        "model.optim.momentum": Choice(0.9, table),
        "model.optim.lr": Choice(0.01, f"one of {', '.join(map(str, paper_rates(n)))} ({table}); vit sweep tries all"),
        "model.optim.weight_decay": Choice(0.0, table),
        "model.optim.layer_decay": Choice(1.0, table),
        "model.optim.clip": Choice(1.0, "ViT paper, section 4.1"),
        "model.schedule.name": Choice("cosine", table),
        "model.schedule.warmup": Choice(min(500, steps // 10), "ViT paper, appendix B.1.1"),
        "model.encoder.image_size": Choice(384, table),
        "data.batch_size": Choice(512, "ViT paper, section 4.1"),
        "data.augment.preset": Choice("standard", "ViT paper, appendix B.1.1: crops and flips"),
        "trainer.max_steps": Choice(steps, f"{table}, for {n:,} pictures"),
    }


def paper_rates(pictures: int) -> tuple[float, ...]:
    """Learning rates that the ViT paper tries when it fine-tunes (table 4): higher ones for ImageNet."""
    return (0.003, 0.01, 0.03, 0.06) if pictures >= 500_000 else (0.001, 0.003, 0.01, 0.03)
