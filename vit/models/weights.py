"""Weights to start from: this toolkit's own model folders, runs and checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit.models.artifact import CONFIG, load_model
from vit.models.config import ViTConfig
from vit.models.positions import resample_table
from vit.models.vit import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with weights, and what came with them.

    Args:
        model: in evaluation mode, on the CPU.
        preprocessing: how it wants its pictures, as plain values.
        classes: names in the order of the logits.
    """

    model: VisionTransformer
    preprocessing: dict[str, Any]
    classes: tuple[str, ...]


def load_weights(source: str, **options: Any) -> Loaded:
    """Load weights, and resample the positions where another image size is asked for.

    Args:
        source: a run folder, a model folder, or a checkpoint of this toolkit.
        options: of `ViTConfig`, over those of the weights.

    Raises:
        ValueError: there are no such weights, or they do not fit the options.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".ckpt":
        model, preprocessing, names = read_checkpoint(path)
    else:
        folder = path / "model" if (path / "model" / CONFIG).is_file() else path
        if not (folder / CONFIG).is_file():
            raise ValueError(
                f"expected weights from a run folder, a model folder or a .ckpt file, but found none at {source}."
            )
        model, info = load_model(folder)
        preprocessing, names = info.preprocessing, list(info.classes)
    if options:
        model = _with_options(model, options)
    return Loaded(model=model, preprocessing=preprocessing, classes=tuple(names))


def read_checkpoint(path: Path) -> tuple[VisionTransformer, dict[str, Any], list[str]]:
    """The model, preprocessing and class names of a training checkpoint; runs no code from the file.

    Raises:
        ValueError: not a checkpoint of this toolkit.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        info, state = checkpoint["vit_toolkit"], checkpoint["state_dict"]
    except Exception as error:
        raise ValueError(
            f"expected a checkpoint of this toolkit at {path}, but it cannot be read as one: {error}"
        ) from error
    model = VisionTransformer(info["config"])
    prefix = "net.model."
    model.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    return model.eval(), info["preprocessing"], info["classes"]


def _with_options(model: VisionTransformer, options: dict[str, Any]) -> VisionTransformer:
    """The same weights in a model with other options; the position table follows the image size."""
    config = ViTConfig.from_dict({**model.config.to_dict(), **options})
    changed = VisionTransformer(config)
    state = model.state_dict()
    if model.pos_embed is not None and changed.pos_embed is not None and config.grid != model.config.grid:
        prefix = changed._prefix_rows
        state["pos_embed"] = resample_table(model.pos_embed, model.config.grid, config.grid, prefix=prefix)
    try:
        changed.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"expected options that fit the weights, but {options} do not: {error}") from error
    return changed.eval()
