"""The recipe of "An Image is Worth 16x16 Words" for fine-tuning: section 4.1 and table 4."""

from vit.tasks.facts import Choice, Facts

_PIXELS, _PATCH, _BATCH = 384, 16, 512


def paper(facts: Facts) -> dict[str, Choice]:
    """Fine-tuning as in the ViT paper, section 4.1 and table 4: SGD with momentum, no decay, cosine, 384 pixels.

    Steps by the size of the data set, as in table 4: 500 for Pets and Flowers, 10,000 for CIFAR, 20,000 for ImageNet.
    The paper tries every rate of `paper_rates` on pictures that are held out of train; `vit sweep --recipe paper` does
    so on the val split.

    Args:
        facts: what is to be trained; a typed length shortens the warm-up with it.
    """
    n = facts.pictures
    steps = 500 if n < 10_000 else 10_000 if n < 500_000 else 20_000
    batch = int(facts.typed.get("data.batch_size", _BATCH))
    length = facts.sets("trainer.max_epochs", "trainer.max_steps")
    run = facts.steps(int(facts.typed.get("trainer.max_epochs", 1)), batch) if length else steps
    patch = facts.start.patch_size if facts.start else int(facts.typed.get("model.encoder.patch_size", _PATCH))
    pixels = round(_PIXELS / patch) * patch
    table = "ViT paper, table 4"
    rates = {
        "model.optim.name": Choice("sgd", table),
        "model.optim.momentum": Choice(0.9, table),
        "model.optim.lr": Choice(0.01, f"one of {', '.join(map(str, paper_rates(n)))} ({table}); vit sweep tries all"),
        "model.optim.weight_decay": Choice(0.0, table),
    }
    # Another optimizer wants rates of its own.
    return (rates if facts.typed.get("model.optim.name", "sgd") == "sgd" else {}) | {
        "model.optim.layer_decay": Choice(1.0, table),
        "model.optim.clip": Choice(1.0, "ViT paper, section 4.1"),
        "model.schedule.name": Choice("cosine", table),
        "model.schedule.warmup": Choice(min(500, run // 10), "500 steps, or a tenth of a shorter run"),
        "model.encoder.image_size": Choice(
            pixels, table if pixels == _PIXELS else f"{_PIXELS} in {table}; whole patches of {patch}"
        ),
        "data.batch_size": Choice(_BATCH, "ViT paper, section 4.1"),
        "data.augment.preset": Choice("standard", "crops and flips"),
        "trainer.max_steps": Choice(steps, f"{table}, for {n:,} pictures"),
    }


def paper_rates(pictures: int) -> tuple[float, ...]:
    """Learning rates that the ViT paper tries when it fine-tunes (table 4): higher ones for ImageNet.

    Args:
        pictures: to train on.
    """
    return (0.003, 0.01, 0.03, 0.06) if pictures >= 500_000 else (0.001, 0.003, 0.01, 0.03)
