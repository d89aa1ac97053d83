"""transformers' names: ViT, DeiT, DINOv2 with and without registers, DINOv3, and the image towers of CLIP and SigLIP.

Both the names in files on the hub and those that transformers 5 has in memory are known.
"""

import re
from collections.abc import Mapping
from typing import Any

from vit.models.naming import (
    CLIP,
    HALF,
    IMAGENET,
    Found,
    Rule,
    State,
    drop,
    fold_class_position,
    join_qkv,
    keep_distillation,
    rename,
    split_pool,
)

_NAMES: tuple[Rule, ...] = (
    (r"^embeddings\.(cls_token|class_embedding)$", "cls_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings$|^embeddings\.position_embedding\.weight$", "pos_embed"),
    (r"^embeddings\.patch_embeddings?\.(projection\.)?", "patch_embed.proj."),
    (r"^(encoder\.layers?|model\.layer|layers?)\.(\d+)\.", r"blocks.\2."),
    (r"\.attention\.attention\.(query|key|value)\.", lambda m: f".attn.{m[1][0]}."),
    (r"^(blocks\.\d+\.)(self_attn|attention)\.([qkv])_proj\.", r"\1attn.\3."),
    (r"^(blocks\.\d+\.)(attention\.output\.dense|attention\.o_proj|self_attn\.out_proj)\.", r"\1attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"^(blocks\.\d+\.)output\.dense\.", r"\1mlp.fc2."),
    (r"\.(layernorm_before|layer_norm1)\.", ".norm1."),
    (r"\.(layernorm_after|layer_norm2)\.", ".norm2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.(gate_proj)\.", ".mlp.fc1_g."),
    (r"\.mlp\.(up_proj)\.", ".mlp.fc1_x."),
    (r"\.mlp\.(down_proj|weights_out)\.", ".mlp.fc2."),
    (r"\.mlp\.weights_in\.", ".mlp.fc1."),
    (r"^(layernorm|post_layernorm)\.", "norm."),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.in_proj_", "attn_pool.qkv."),
    (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^head\.layernorm\.", "attn_pool.norm."),
    (r"^head\.mlp\.", "attn_pool.mlp."),
    (r"^(classifier|cls_classifier)\.", "head."),
)
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "vit": {"norm_eps": 1e-12},
    "deit": {"norm_eps": 1e-12},
    "dinov2": {"norm_eps": 1e-6, "position_antialias": False},
    "dinov2_with_registers": {"norm_eps": 1e-6},
    "dinov3_vit": {"norm_eps": 1e-5, "relative_position": "rotary"},
    "clip_vision_model": {"norm_eps": 1e-5},
    "siglip_vision_model": {"norm_eps": 1e-6, "activation": "gelu_tanh"},
}
_STATISTICS = {"vit": HALF, "siglip_vision_model": HALF, "clip_vision_model": CLIP}


def is_hub(state: State) -> bool:
    """Whether the names are those of transformers, wrapper prefixes apart."""
    return any(re.search(r"(^|\.)embeddings\.patch_embeddings?\.(projection\.)?weight$", name) for name in state)


def _kind(state: State) -> str:
    """The model type that these names belong to."""
    if "embeddings.class_embedding" in state:
        return "clip_vision_model"
    if "embeddings.position_embedding.weight" in state:
        return "siglip_vision_model"
    if "embeddings.patch_embeddings.weight" in state:
        return "dinov3_vit"
    if "embeddings.distillation_token" in state:
        return "deit"
    if not any("layer_scale1" in name for name in state):
        return "vit"
    return "dinov2_with_registers" if "embeddings.register_tokens" in state else "dinov2"


def from_hub(state: State, config: Mapping[str, Any]) -> Found:
    """transformers' tensors under our names.

    Args:
        state: without the wrapper's prefix.
        config: of `config.json`, empty where there is none.

    Raises:
        ValueError: the configuration asks for what there is no option for, or CLIP weights that do not say their
            activation.
    """
    kind = _kind(state)
    config = config.get("vision_config", config)
    found = Found(family=f"transformers {kind}", state={}, preprocessing=dict(_STATISTICS.get(kind, IMAGENET)))
    found.options = dict(_DEFAULTS[kind]) | _options(config, found)
    state = drop(state, r"^pooler\.", "pooler: hidden layer of pre-training", found.dropped)
    state = drop(state, r"embeddings\.mask_token$|position_ids$", "for pre-training only", found.dropped)
    state = drop(state, r"^visual_projection\.", "projection to the space of texts", found.dropped)
    state = rename(state, _NAMES)
    if kind == "dinov3_vit" and not any(".fc1_g." in name for name in state):
        state = rename(state, [(r"\.mlp\.fc1_x\.", ".mlp.fc1.")])
    for name in ("cls_token", "pos_embed"):
        if name in state:
            state[name] = state[name].reshape(1, -1, state[name].shape[-1])
    state = keep_distillation(state, "embeddings.distillation_token", "distillation_classifier", found)
    state = split_pool(join_qkv(state))
    if kind == "dinov2_with_registers":
        state = fold_class_position(state)
        found.options["prefix_position"] = False
    if "head.weight" in state and state["head.weight"].shape[1] != state["norm.weight"].shape[0]:
        state = drop(state, r"^head\.", "head over class token and mean of patches together", found.dropped)
    found.state = state
    _check_activation(found)
    found.classes = _class_names(config)
    return found


def _options(config: Mapping[str, Any], found: Found) -> dict[str, Any]:
    ours = {
        "num_attention_heads": "heads",
        "layer_norm_eps": "norm_eps",
        "image_size": "image_size",
        "num_hidden_layers": "depth",
        "layerscale_value": "layer_scale",
        "rope_theta": "rotary_base",
    }
    options = {mine: config[theirs] for theirs, mine in ours.items() if config.get(theirs) is not None}
    if isinstance(options.get("image_size"), list):
        options["image_size"] = tuple(options["image_size"])
    if "rope_parameters" in config and "rope_theta" in (config["rope_parameters"] or {}):
        options["rotary_base"] = config["rope_parameters"]["rope_theta"]
    if not any(name in found.family for name in ("dinov2", "dinov3")):
        options.pop("layer_scale", None)
    if "hidden_act" in config:
        if config["hidden_act"] not in _ACTIVATIONS:
            raise ValueError(f"expected hidden_act out of {', '.join(_ACTIVATIONS)}, but got {config['hidden_act']!r}.")
        options["activation"] = _ACTIVATIONS[config["hidden_act"]]
    return options


def _check_activation(found: Found) -> None:
    gated = any(".mlp.fc1_g." in name for name in found.state)
    activation = found.options.get("activation")
    if gated and "dinov3" in found.family and activation not in (None, "silu"):
        raise ValueError(f"expected silu in a gated MLP, but the configuration has {activation}.")
    if "clip" in found.family and activation is None:
        raise ValueError(
            "expected a config.json beside CLIP weights, which do not say whether their activation is gelu or "
            "quick_gelu: put it there, or set the option activation."
        )


def _class_names(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    names = config.get("id2label")
    if not names or all(re.fullmatch(r"LABEL_\d+", str(name)) for name in names.values()):
        return None
    return tuple(str(names[key]) for key in sorted(names, key=int))


def hub_preprocessing(values: Mapping[str, Any]) -> dict[str, Any]:
    """How pictures are prepared, from transformers' `preprocessor_config.json`; image_size is the model's matter."""
    known: dict[str, Any] = {}
    if "image_mean" in values and "image_std" in values:
        known |= {"mean": tuple(values["image_mean"]), "std": tuple(values["image_std"])}
    if values.get("resample") in (2, 3):
        known["interpolation"] = {2: "bilinear", 3: "bicubic"}[values["resample"]]
    size = values.get("size")
    size = {"height": size, "width": size} if isinstance(size, int) else size or {}
    crop = values.get("crop_size")
    crop = {"height": crop} if isinstance(crop, int) else crop or {}
    if values.get("do_center_crop") and crop and size.get("shortest_edge"):
        known |= {"crop_mode": "center", "crop_pct": min(crop["height"] / size["shortest_edge"], 1.0)}
    elif values.get("do_center_crop") and crop and size.get("height"):
        known |= {"crop_mode": "squash", "crop_pct": min(crop["height"] / size["height"], 1.0)}
    elif size.get("height"):
        known |= {"crop_mode": "squash", "crop_pct": 1.0}
    return known
