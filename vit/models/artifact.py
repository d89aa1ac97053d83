"""The model folder: weights under timm's names, a config.json that three libraries read, a card for people.

`timm.create_model("local-dir:FOLDER", pretrained=True)` and `transformers.pipeline("image-classification",
model="FOLDER")` open it too, unless the card says that they cannot.
"""

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vit.models.card import model_card
from vit.models.config import ViTConfig
from vit.models.timm_names import timm_architecture, timm_arguments, timm_gaps
from vit.models.vit import VisionTransformer

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
FORMAT = 1
PREPROCESSING = ("image_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a model folder says about its model.

    Args:
        classes: names in the order of the logits.
        preprocessing: how the model wants its pictures: image_size, mean, std, interpolation, crop_pct,
            crop_mode, and whatever else was saved with them.
        provenance: where the model comes from, as saved.
        several: a picture can have several classes, each with the sigmoid of its logit.
    """

    classes: tuple[str, ...]
    preprocessing: dict[str, Any]
    provenance: dict[str, Any]
    several: bool = False


def save_model(
    folder: str | Path,
    model: VisionTransformer,
    *,
    classes: Sequence[str],
    preprocessing: Mapping[str, Any],
    provenance: Mapping[str, Any] | None = None,
    several: bool = False,
) -> Path:
    """Write a model folder; it appears complete or not at all, and replaces only an earlier model folder.

    Args:
        folder: where; its parents are made.
        model: its weights are written in their own dtype.
        classes: names in the order of the logits.
        preprocessing: plain values; at least image_size, mean, std, interpolation, crop_pct, crop_mode.
        provenance: plain values to keep, such as versions, data and metrics.
        several: a picture can have several classes, each with the sigmoid of its logit.

    Returns:
        The folder.

    Raises:
        ValueError: names or preprocessing that do not fit the model, values that JSON does not know, or a
            folder with other files in it.
    """
    target = Path(folder)
    _check_classes(classes, model.config)
    _check_preprocessing(preprocessing, model.config)
    _check_target(target)
    config = _config_json(model.config, classes, preprocessing, provenance or {})
    config["vit_toolkit"]["several"] = several
    # transformers' word for it: its pipeline then takes sigmoids.
    config |= {"problem_type": "multi_label_classification"} if several else {}
    try:
        text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected plain finite values in preprocessing and provenance, but got {error}.") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    beside.mkdir()
    try:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, beside / WEIGHTS, metadata={"format": "pt"})
        (beside / CONFIG).write_text(text + "\n", encoding="utf-8")
        card = model_card(model.config, classes, preprocessing, timm_gaps(model.config))
        (beside / CARD).write_text(card, encoding="utf-8")
        # safetensors lets nobody but the owner read; a model folder is as readable as its other files.
        (beside / WEIGHTS).chmod((beside / CARD).stat().st_mode)
        for file in beside.iterdir():
            _flush_to_disk(file)
        _put_in_place(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def load_model(folder: str | Path) -> tuple[VisionTransformer, ModelInfo]:
    """Open a model folder: the model, on the CPU and in evaluation mode, and what the folder says about it.

    Args:
        folder: written by `save_model`.

    Raises:
        ValueError: a file that is missing or broken, a folder that another library wrote, or tensors that do
            not fit the configuration.
    """
    folder = Path(folder)
    ours = _read_config(folder)
    config = ViTConfig.from_dict(ours["config"])
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"expected the weights in {folder / WEIGHTS}, but got: {error}.") from error
    with torch.device("meta"):
        model = VisionTransformer(config)
    _check_tensors(model, tensors, folder / WEIGHTS)
    # Copies, because safetensors maps the file into memory.
    copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    model.load_state_dict(copies, assign=True)
    info = ModelInfo(
        classes=tuple(ours["classes"]),
        preprocessing=ours["preprocessing"],
        provenance=ours["provenance"],
        several="several" in ours and bool(ours["several"]),
    )
    return model.eval(), info


def _config_json(
    config: ViTConfig, classes: Sequence[str], preprocessing: Mapping[str, Any], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """timm's keys, as its own export writes them, and ours under `vit_toolkit`."""
    return {
        "architecture": timm_architecture(config),
        "num_classes": config.num_classes,
        "num_features": config.width,
        "global_pool": timm_arguments(config)["global_pool"],
        "label_names": list(classes),
        "model_args": timm_arguments(config),
        "pretrained_cfg": {
            "custom_load": False,
            "input_size": [config.channels, *config.size],
            "fixed_input_size": not config.dynamic_size,
            "interpolation": preprocessing["interpolation"],
            "crop_pct": preprocessing["crop_pct"],
            "crop_mode": preprocessing["crop_mode"],
            "mean": list(preprocessing["mean"]),
            "std": list(preprocessing["std"]),
            "num_classes": config.num_classes,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
        "vit_toolkit": {
            "format": FORMAT,
            "config": config.to_dict(),
            "classes": list(classes),
            "preprocessing": dict(preprocessing),
            "provenance": dict(provenance),
            "timm_cannot_express": timm_gaps(config),
        },
    }


def _check_classes(classes: Sequence[str], config: ViTConfig) -> None:
    if isinstance(classes, str) or not all(isinstance(name, str) and name for name in classes):
        raise ValueError(f"expected class names as a list of texts, but got {classes!r}.")
    if len(classes) != config.num_classes:
        raise ValueError(f"expected {config.num_classes} class names, as many as logits, but got {len(classes)}.")
    if len(set(classes)) != len(classes):
        twice = sorted({name for name in classes if list(classes).count(name) > 1})
        raise ValueError(f"expected each class name once, but got {', '.join(twice)} more than once.")


def _check_preprocessing(preprocessing: Mapping[str, Any], config: ViTConfig) -> None:
    if missing := [name for name in PREPROCESSING if name not in preprocessing]:
        raise ValueError(f"expected {', '.join(PREPROCESSING)} in preprocessing, but {', '.join(missing)} is missing.")
    size = preprocessing["image_size"]
    size = (size, size) if isinstance(size, int) else tuple(size)
    if size != config.size and not config.dynamic_size:
        raise ValueError(
            f"expected preprocessing to the model's {config.size[0]}x{config.size[1]} pixels, "
            f"but got image_size={preprocessing['image_size']}."
        )
    for name in ("mean", "std"):
        if len(preprocessing[name]) != config.channels:
            raise ValueError(f"expected {config.channels} values of {name}, but got {list(preprocessing[name])}.")


def _check_target(target: Path) -> None:
    if not target.exists():
        return
    others = [p.name for p in target.iterdir() if p.name not in (WEIGHTS, CONFIG, CARD)] if target.is_dir() else ["it"]
    if others:
        raise ValueError(
            f"expected {target} to be new, empty or an earlier model folder, but got other files: "
            f"{', '.join(sorted(others)[:5])}. Choose another folder."
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"expected a model folder with {CONFIG}, but got {folder}: {error}.") from error
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, but got: {error}.") from error
    if not isinstance(whole, dict) or "vit_toolkit" not in whole:
        raise ValueError(f"expected a key vit_toolkit in {path}: another library wrote this folder.")
    ours = whole["vit_toolkit"]
    if missing := {"format", "config", "classes", "preprocessing", "provenance"} - set(ours):
        raise ValueError(f"expected {', '.join(sorted(missing))} under vit_toolkit in {path}.")
    if ours["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT} in {path}, but got {ours['format']}: update vit-toolkit.")
    return ours


def _check_tensors(model: VisionTransformer, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    wrong += [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if wrong:
        shown = "; ".join(f"{name}: expected {wanted.get(name)}, got {found.get(name)}" for name in wrong[:3])
        raise ValueError(f"expected the tensors of config.json in {path}, but {len(wrong)} differ: {shown}.")


def _flush_to_disk(file: Path) -> None:
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())


def _put_in_place(beside: Path, target: Path) -> None:
    """Rename, an earlier folder giving way and coming back should the rename fail."""
    if not target.exists():
        beside.rename(target)
        return
    earlier = beside.with_name(beside.name + ".earlier")
    target.rename(earlier)
    try:
        beside.rename(target)
    except BaseException:
        earlier.rename(target)
        raise
    shutil.rmtree(earlier)
