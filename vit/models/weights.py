"""Weights to start from: our own, and those of timm, transformers, torchvision, Google, Meta and OpenCLIP."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vit.models.adapt import Report, fit
from vit.models.artifact import CONFIG, load_model
from vit.models.checkpoints import Checkpoint, open_checkpoint
from vit.models.config import ViTConfig
from vit.models.hub_family import from_hub, hub_preprocessing, is_hub
from vit.models.jax_family import from_jax, is_jax
from vit.models.lora import merged_state
from vit.models.naming import Found, State, options_of
from vit.models.other_families import from_open_clip, from_torchvision
from vit.models.timm_family import from_timm_model, from_timm_names
from vit.models.vit import VisionTransformer

SHIPPED = Path(__file__).resolve().parents[1] / "pretrained"
SHIPPED_NAMES = ("fashion_mnist_28",)
"""Model folders that travel inside the package."""

ANCHORS = (
    "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.weight",
    "embeddings.patch_embeddings.weight",
    "embeddings.patch_embedding.weight",
    "conv_proj.weight",
    "conv1.weight",
)
PREFIXES = (
    *("module", "model", "net", "network", "_orig_mod", "_forward_module", "backbone", "encoder", "base_model"),
    *("teacher", "student", "teacher_backbone", "student_backbone", "visual", "trunk", "vision_model", "vision_tower"),
    *("image_encoder", "vision_encoder", "vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "timm_model"),
)
"""What programs put before the names of the model that they hold."""
_HEADS = r"^(classifier|cls_classifier|distillation_classifier)\."


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with weights, and what came with them.

    Args:
        model: in evaluation mode, on the CPU.
        preprocessing: how it wants its pictures, as plain values.
        classes: names in the order of the logits; numbers where the weights do not tell them.
        several: a picture can have several classes, each with the sigmoid of its logit.
        report: what became of each tensor.
    """

    model: VisionTransformer
    preprocessing: dict[str, Any]
    classes: tuple[str, ...]
    several: bool = False
    report: Report = field(default_factory=Report)


def load_weights(source: str, *, classes: Sequence[str] | None = None, **options: Any) -> Loaded:
    """Load weights, and move them to another image size, patch size or number of channels where one is asked for.

    Args:
        source: a run folder, a model folder, a file or folder of any family, `local-dir:FOLDER`, a timm name, or
            `fashion_mnist_28`, which comes with the toolkit.
        classes: of the data; the head is kept only if its own class names are these in this order. None keeps it.
        options: of `ViTConfig`, over those of the weights.

    Raises:
        ValueError: there are no such weights, a tensor of the backbone has no place, or the options do not fit.
    """
    path = Path(source.removeprefix("local-dir:")).expanduser()
    if not path.exists() and source in SHIPPED_NAMES:
        path = SHIPPED / source
    path = path / "model" if (path / "model" / CONFIG).is_file() else path
    if not path.exists():
        found = _from_name(source)
    elif path.is_dir() and "vit_toolkit" in _config_of(path):
        return _ours(path, classes, options)
    else:
        found = _from_files(open_checkpoint(path), options)
    known, notes = options_of(found.state, {**found.options})
    preprocessing = {"interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center", **found.preprocessing}
    report = Report(dropped=dict(found.dropped), notes=[f"{found.family} weights", *found.notes, *notes])
    made = _finish(found.state, ViTConfig.from_dict(known), options, preprocessing, (found.classes, classes), report)
    return replace(made, several=found.several)


def _ours(folder: Path, classes: Sequence[str] | None, options: dict[str, Any]) -> Loaded:
    model, info = load_model(folder)
    made = _finish(model.state_dict(), model.config, options, info.preprocessing, (info.classes, classes), Report())
    return replace(made, several=info.several)


def _finish(
    state: State,
    source: ViTConfig,
    options: dict[str, Any],
    preprocessing: dict[str, Any],
    names: tuple[Sequence[str] | None, Sequence[str] | None],
    report: Report,
) -> Loaded:
    """Fit the weights to the options, decide on the head, and adapt mean and std."""
    theirs, wanted = names
    keep = source.num_classes > 0 and (wanted is None or (theirs is not None and tuple(theirs) == tuple(wanted)))
    target = {**source.to_dict(), **options}
    if wanted is not None and not keep:
        target |= {"head": "linear", **options, "num_classes": len(wanted)}
        report.notes.append(f"head re-initialised for {len(wanted)} classes" if wanted else "head left out")
    config = ViTConfig.from_dict(target)
    if config.grid != source.grid and config.position_grid is None and _counts_patches(source):
        config = replace(config, position_grid=source.grid)
    keep = keep and config.num_classes == source.num_classes
    model = fit(state, source, config, report, keep_head=keep)
    if config.num_classes == 0:
        classes: tuple[str, ...] = ()
    elif keep and theirs is None:
        classes = tuple(map(str, range(config.num_classes)))
        report.notes.append("the weights do not name their classes: they are numbered")
    else:
        classes = tuple(theirs if keep and theirs is not None else wanted or map(str, range(config.num_classes)))
    channels = {name: _for_channels(preprocessing[name], config.channels) for name in ("mean", "std")}
    prepared = {**preprocessing, **channels, "image_size": config.image_size}
    return Loaded(model=model, preprocessing=prepared, classes=classes, report=report)


def _counts_patches(config: ViTConfig) -> bool:
    """Whether positions are in units of patches, which another grid has to go on counting in."""
    counted = ("quadratic", "rotary_index", "rotary_mixed")
    return config.position in ("sine", "sine_2d") or config.relative_position in counted


def _for_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    if len(values) == channels:
        return tuple(values)
    return (sum(values) / len(values),) * channels


def read_checkpoint(path: Path) -> tuple[VisionTransformer, dict[str, Any], list[str]]:
    """The model (LoRA merged), preprocessing and class names of a training checkpoint; runs no code from the file.

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
    model.load_state_dict(_plain_state(state, info))
    return model.eval(), info["preprocessing"], info["classes"]


def _plain_state(state: State, info: dict[str, Any]) -> State:
    """The model's tensors out of a training checkpoint of ours, with LoRA merged."""
    prefix = "net.model."
    own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    return merged_state(own, alpha=info["lora_alpha"]) if "lora_alpha" in info else own


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _from_files(checkpoint: Checkpoint, options: dict[str, Any]) -> Found:
    """Whose weights these are, under our names."""
    state, config = checkpoint.state, checkpoint.config
    if checkpoint.ours:
        return _own_checkpoint(checkpoint)
    if is_jax(state):
        return from_jax(state)
    state, outside = _strip(state)
    if "architecture" in config and ("pretrained_cfg" in config or "model_args" in config):
        found = from_timm_model(_timm_skeleton(config), state)
    elif is_hub(state):
        found = from_hub(state, config if "activation" not in options else {"hidden_act": "gelu", **config})
        found.options |= {"activation": options["activation"]} if "activation" in options else {}
    elif "conv_proj.weight" in state:
        found = from_torchvision(state)
    elif "conv1.weight" in state:
        found = from_open_clip(state, config, options.get("activation"))
    else:
        known: dict[str, Any] = {n: options[n] for n in ("heads", "relative_position") if n in options}
        found = from_timm_names(state, known)
    found.dropped |= dict.fromkeys(outside, "not of the image encoder")
    found.preprocessing |= hub_preprocessing(checkpoint.preprocessor)
    return found


def _own_checkpoint(checkpoint: Checkpoint) -> Found:
    info = checkpoint.ours
    return Found(
        family="this toolkit's",
        state=_plain_state(checkpoint.state, info),
        options=dict(info["config"]),
        preprocessing=dict(info["preprocessing"]),
        classes=tuple(info["classes"]),
        several="several" in info and info["several"],
    )


def _strip(state: State) -> tuple[State, list[str]]:
    """The image encoder's tensors without their wrapper's prefix, and the names of all others.

    Raises:
        ValueError: no patch embedding, or one under a prefix that no wrapper known here uses.
    """
    ends = [(name, end) for name in state for end in ANCHORS if name == end or name.endswith(f".{end}")]
    if not ends:
        raise ValueError(
            f"expected a Vision Transformer's patch embedding ({', '.join(ANCHORS)}), but got {len(state)} tensors "
            f"such as {', '.join(list(state)[:6])}."
        )
    prefixes = {name[: -len(end)] for name, end in ends}
    for prefix in sorted(prefixes, key=lambda p: ("student" in p, len(p))):
        if all(part in PREFIXES for part in prefix.split(".")[:-1]):
            kept = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
            heads = {name: t for name, t in state.items() if prefix and re.match(_HEADS, name)}
            outside = [name for name in state if not name.startswith(prefix) and name not in heads]
            return {**kept, **heads}, outside
    shown = ", ".join(sorted(prefixes))
    raise ValueError(
        f"expected names without a prefix, or with one of {', '.join(PREFIXES[:8])} and the like, but got {shown}: "
        "rename the tensors."
    )


def _timm_skeleton(config: dict[str, Any]) -> nn.Module:
    """The timm model of a folder's config.json, without weights."""
    import timm  # takes a second, which most starts do not need

    arguments = dict(config["model_args"]) if "model_args" in config else {}
    classes = config["num_classes"] if "num_classes" in config else config["pretrained_cfg"]["num_classes"]
    try:
        with torch.device("meta"):
            model = timm.create_model(config["architecture"], pretrained=False, num_classes=classes, **arguments)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(f"expected a model that timm knows, but building it failed: {error}") from error
    told: Any = model
    told.pretrained_cfg = {**told.pretrained_cfg, **config.get("pretrained_cfg", {})}
    if "label_names" in config:
        told.pretrained_cfg["label_names"] = config["label_names"]
    return model


def _from_name(source: str) -> Found:
    """Weights by their name in timm, from its cache or the network."""
    import timm

    name = source.removeprefix("timm/").removeprefix("hf-hub:timm/")
    if not timm.is_model(name) or not timm.is_model_pretrained(name):
        raise ValueError(
            f"expected weights from a run folder, a model folder, a file or a timm name, but found none at {source}. "
            "`vit weights` lists good ones."
        )
    cfg: Any = timm.get_pretrained_cfg(name)
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:
        raise ValueError(
            f"expected to fetch {name}, but it is neither in the cache nor can it be downloaded "
            f"({type(error).__name__}). Where there is a network, download config.json and model.safetensors of "
            f"https://huggingface.co/{cfg.hf_hub_id or f'timm/{name}'} into one folder, copy the folder here, and set "
            "model.weights to it."
        ) from error
    return from_timm_model(model, model.state_dict())
