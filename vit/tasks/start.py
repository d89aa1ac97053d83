"""Where a task starts from: a model of its own, or one from weights, and how pictures are prepared for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vit.data.transforms import Preprocessing
from vit.models.config import ViTConfig
from vit.models.sizes import vit_config
from vit.models.vit import VisionTransformer
from vit.models.weights import load_weights


@dataclass(frozen=True)
class Start:
    """Where a task starts from: the model, how pictures are prepared for it, what became of the weights."""

    model: VisionTransformer
    preprocessing: Preprocessing
    notes: tuple[str, ...]


def start_from(
    encoder: dict[str, Any], weights: str | None, classes: Sequence[str], preparing: dict[str, Any]
) -> Start:
    """Build the model, from weights or not; its head is new unless the weights have the same classes."""
    size = encoder.pop("size", None)
    base: dict[str, Any] = {}
    notes: list[str] = []
    if weights is not None:
        if size is not None:
            raise ValueError(
                f"expected either weights or a size, but got weights {weights} and encoder.size {size}; "
                "the size comes with the weights."
            )
        loaded = load_weights(weights, classes=classes, **encoder)
        model, base = loaded.model, loaded.preprocessing
        notes = loaded.report.table().splitlines()
        changed = [k for k in ("mean", "std") if k in preparing and tuple(preparing[k]) != tuple(base[k])]
        notes += [f"note: {k} {preparing[k]} is set by hand, the weights were trained with {base[k]}" for k in changed]
    else:
        config = {**encoder, "num_classes": len(classes)}
        model = VisionTransformer(vit_config(size, **config) if size else ViTConfig.from_dict(config))
    channels = {"mean": (0.5,) * model.config.channels, "std": (0.5,) * model.config.channels}
    values = {**channels, **base, **preparing, "image_size": model.config.image_size}
    preprocessing = Preprocessing.from_dict(values)
    usual = Preprocessing()
    for name in ("background", "value_range", "orient"):
        if name in base and name not in preparing and (value := getattr(preprocessing, name)) != getattr(usual, name):
            notes.append(f"note: preprocessing.{name} {value} comes with the weights, from the pictures they learned")
    return Start(model, preprocessing, tuple(notes))
