"""The recipe that looks: what to choose for these pictures, these weights and this machine, each with its reason."""

import math
from typing import Any

from vit.tasks.facts import Choice, Facts, Start, tokens_of
from vit.tasks.methods import FEW

_FINE = 2000  # val pictures that tell accuracies apart by less than a point
_RIDGE = 50_000  # pictures whose features fit anywhere
_LONG = 1.75  # longer over shorter side; photographs have up to 1.5. At 2.0 squashing took 63 to 74 % mAP (one seed)


def auto(facts: Facts) -> dict[str, Choice]:
    """A sound choice for every option that matters, by dotted name.

    Fine-tuning: everything learns, at a rate that falls with the width and with depth below the head (MAE, He et al.
    2021, table 9), from a ridge regression as first head, since a random one pulls good features out of place
    (Kumar et al. 2022, "Fine-Tuning can Distort Pretrained Features"). From scratch: small patches for small
    pictures, more epochs, more augmentation.

    Args:
        facts: what is to be trained, and what was set by hand, which all choices follow from.
    """
    chosen = _from_weights(facts, facts.start) if facts.start is not None else _from_scratch(facts)
    chosen["data.batch_size"] = _batch(facts)
    batch = int(facts.settled("data.batch_size", chosen["data.batch_size"]))
    together = facts.pictures_per_step(batch)
    if (lr := chosen.get("model.optim.lr")) is not None and together != 64:
        scaled = lr.value * math.sqrt(together / 64)
        chosen["model.optim.lr"] = Choice(float(f"{scaled:.2g}"), f"{lr.why}; by the square root of the batch")
    if facts.start is not None and facts.start.large and _method(facts, chosen) == "full":
        steps = facts.steps(int(facts.settled("trainer.max_epochs", chosen["trainer.max_epochs"])), batch)
        ridge = _settled(facts, chosen, "model.tuning.head_init", "zero") == "ridge"
        chosen |= _calm(facts, steps, good_head=facts.start.keeps_head or ridge)
    if facts.aspect >= _LONG:
        why = f"longer sides are {facts.aspect:.1f} times the shorter, of which a square would cut much away"
        chosen["model.preprocessing.crop_mode"] = Choice("squash", why)
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
    tokens = tokens_of(facts.settled("model.encoder.image_size", size), start.patch_size)
    epochs, method = _epochs(facts, start, tokens)
    chosen["trainer.max_epochs"] = epochs
    if method is not None:
        chosen["model.method"] = method
    # With several labels too: it took 54 to 63 % mAP on 300 pictures of two garments each, from 250 (one seed).
    if facts.pictures <= _RIDGE and not start.keeps_head and "model.encoder.head" not in facts.typed:
        chosen["model.tuning.head_init"] = Choice("ridge", "a head that fits the features spares them a rough start")
    if _method(facts, chosen) == "head":
        if _adamw(facts):
            chosen["model.optim.lr"] = Choice(1e-3, "the head alone")
            chosen["model.optim.weight_decay"] = Choice(0.0, "the head alone")
        if not facts.sets("data.augment."):
            chosen["data.augment.preset"] = Choice("none", "features of the pictures as they are")
        return chosen
    if _method(facts, chosen) not in FEW and _adamw(facts):
        chosen |= _rates(start)
    return chosen | _augmentation(facts)


def _method(facts: Facts, chosen: dict[str, Choice]) -> str:
    return str(_settled(facts, chosen, "model.method", "full"))


def _settled(facts: Facts, chosen: dict[str, Choice], name: str, default: str) -> Any:
    """What an option is going to have: the typed value, or the chosen one, or its default."""
    return facts.settled(name, chosen.get(name, Choice(default, "")))


def _adamw(facts: Facts) -> bool:
    """Other optimizers want rates of their own."""
    return bool(facts.typed.get("model.optim.name", "adamw") == "adamw")


def _rates(start: Start) -> dict[str, Choice]:
    """How fast everything learns."""
    chosen = {}
    # Measured on DINOv2-S: 2e-4 takes a ridge start of 83 % to 54 % within 16 steps; 5e-5 to 1e-4, slowly reached,
    # improve it. Stochastic depth undoes such weights too (87 % to 60 % at 0.1), unless they were trained with it.
    rate = (1e-4 if start.large else 3e-4) * math.sqrt(384 / start.width)
    chosen["model.optim.lr"] = Choice(rate, f"pre-trained weights of width {start.width}")
    if start.large:
        chosen["model.schedule.warmup"] = Choice(0.2, "Adam's first steps would pull good features out of place")
    why = (
        "large weights: early layers are good already" if start.large else "small weights: early layers must adapt too"
    )
    chosen["model.optim.layer_decay"] = Choice(0.75 if start.large else 0.9, why)
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
    enough = 5 * facts.seconds(start.parameters, tokens_of(usual, start.patch_size)) <= 60 * facts.minutes
    if not facts.gpu and not enough:
        smaller = min(own, 10 * start.patch_size)
        return Choice(smaller, f"10 x 10 patches, as {facts.cores} cores would need hours for more")
    return Choice(usual, "16 x 16 patches, as many as are usual" if usual != own else "that of the weights")


def _epochs(facts: Facts, start: Start, tokens: int) -> tuple[Choice, Choice | None]:
    """Number of epochs by data and time, and the method, where time forbids to train everything."""
    wanted = round(min(50, max(5, 40_000 / facts.pictures)))
    if start.large:
        # Good features need fewer, and each costs more. DINOv2-S with 20 and 50 epochs (one seed, 600 test pictures):
        # 83.2 and 82.3 % from 160 pictures of two garments, 81.3 and 82.8 % from 48 of six.
        wanted = min(wanted, max(20, round(2400 / facts.pictures)))
    seconds = facts.seconds(start.parameters, tokens)
    affordable = int(60 * facts.minutes / seconds)
    asked = facts.typed.get("model.method")
    # Who sets a length by hand knows how long that takes.
    if asked == "head" or (asked is None and affordable < 2 and not facts.length_is_set):
        why = f"an epoch of everything would take about {seconds / 60:.0f} minutes here"
        return Choice(20, "the head alone is quick"), None if asked else Choice("head", why)
    if affordable < wanted:
        why = f"about {facts.minutes if affordable else seconds / 60:.0f}"
        return Choice(max(1, affordable), f"{why} minutes on this machine; {wanted} would be better"), None
    return Choice(wanted, f"{facts.pictures:,} pictures, seen about {wanted * facts.pictures:,} times in all"), None


def _from_scratch(facts: Facts) -> dict[str, Choice]:
    side, patch = (32, 4) if facts.side <= 40 else (64, 8) if facts.side <= 96 else (128, 16)
    if facts.gpu and facts.side > 96 and facts.pictures >= 20_000:
        side = 224
    why = f"pictures are {facts.side} px" if side != 128 else "no weights: a small model at a small size learns soonest"
    width, depth, heads = (384, 12, 6) if facts.pictures >= 20_000 and facts.gpu else (128, 6, 4)
    shape = f"{facts.pictures:,} pictures and no weights"
    epochs = round(min(200, max(30, 100_000 / facts.pictures)))
    # The colour operations of strong augmentation know grey and RGB alone.
    colours = facts.typed.get("model.encoder.channels", 3) in (1, 3)
    strong = facts.pictures >= 2000 and facts.side > 40 and colours
    rates = {
        "model.optim.lr": Choice(1e-3, "from scratch"),
        "model.optim.weight_decay": Choice(0.05, "the usual one with AdamW"),
    }
    return (rates if _adamw(facts) else {}) | {
        "model.encoder.image_size": Choice(side, why),
        "model.encoder.patch_size": Choice(patch, f"{(side // patch) ** 2} patches"),
        "model.encoder.width": Choice(width, shape),
        "model.encoder.depth": Choice(depth, shape),
        "model.encoder.heads": Choice(heads, shape),
        "model.encoder.init_std": Choice(float(f"{1 / math.sqrt(width):.1g}"), "a narrow model learns sooner so"),
        "trainer.max_epochs": Choice(epochs, f"from scratch, {facts.pictures:,} pictures"),
        "data.augment.preset": Choice(
            "strong" if strong else "standard", "nothing else keeps it from learning by heart"
        ),
        "data.augment.crop_scale": Choice(
            (0.5, 1.0) if facts.side <= 64 else (0.2, 1.0), f"pictures are {facts.side} px"
        ),
    }


def _batch(facts: Facts) -> Choice:
    size = 16 if facts.pictures < 500 else 32 if facts.pictures < 5000 else 64
    parameters = facts.start.parameters if facts.start else 0
    if facts.gpu and facts.pictures >= 50_000:
        # Of ViT-B at 224 px a batch of 128 keeps some 8 GB of activations, of ViT-L one of 64 some 10 GB.
        size = 256 if parameters < 50_000_000 else 128 if parameters < 150_000_000 else 64
    size = min(size, facts.pictures)
    return Choice(size, f"{facts.batches(size):,} batches an epoch")


def _calm(facts: Facts, steps: int, *, good_head: bool) -> dict[str, Choice]:
    """What keeps chance out of the fine-tuning of large weights: an average over a tenth of all steps, chosen by loss.

    Measured on DINOv2-S, 2,000 pictures of clothing. At 56 pixels, on the way from a ridge start, the live weights
    fall from 83 % to 74 % and come back (to 80 % at a tenth of the rate); their average stays above 81 % and ends as
    high. At 112 pixels, of four epochs, 200 val pictures called the first one the most accurate (85 to 84 %), which
    named 82.5 % of 10,000 others right, while their loss fell to the end, and so did the error on 1,000 others, from
    15 to 12 %.
    """
    chosen = {}
    if not facts.sharded:
        # A tenth of the steps, at most 1,000; of a short run fewer than 10, or they would reach back to its start.
        decay = min(0.999, max(0.5, 1 - 10 / max(20, steps)))
        why = "single steps upset large weights, their average is calm"
        chosen["model.optim.ema"] = Choice(float(f"{decay:.3g}"), why)
        if good_head:
            chosen["model.optim.ema_warmup"] = Choice(False, "the first weights are good ones")
    # A loss that shifts or weighs classes on purpose is not what the plain loss on val pictures tells.
    other = {name for name in facts.typed if name.startswith("model.loss.")} - {"model.loss.label_smoothing"}
    if 0 < facts.val < _FINE and not other and facts.typed.get("data.sampling") != "balanced":
        points = 100 * math.sqrt(0.15 * 0.85 / facts.val)
        why = f"{facts.val:,} val pictures tell accuracies apart by some {points:.1f} points only, losses more finely"
        chosen["monitor"] = Choice("val_loss", why)
    return chosen


def _letters(classes: tuple[str, ...]) -> bool:
    return all(len(name) == 1 and name.isalnum() for name in classes)
