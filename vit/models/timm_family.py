"""timm's names, and those of the repositories that share them: DINO, DINOv2, DINOv3, MAE, DeiT, EVA-02."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vit.models.naming import (
    HALF,
    IMAGENET,
    Found,
    State,
    drop,
    fold_class_position,
    join_qkv,
    keep_distillation,
    rename,
)

_NAMES = (
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # DINOv2 in chunks
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    (r"\.mlp\.ffn_ln\.", ".mlp.norm."),
    (r"\.attn\.inner_attn_ln\.", ".attn.norm."),
    (r"\.gamma_([12])$", r".ls\1.gamma"),
    (r"\.attn\.([qkv])_proj\.", r".attn.\1."),
    (r"^(register_tokens|storage_tokens)$", "reg_token"),
)
_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu", "SiLU": "silu"}


def from_timm_names(state: State, said: Mapping[str, Any]) -> Found:
    """Tensors named as timm names them, or almost, under our names.

    Args:
        state: without the wrapper's prefix.
        said: options that are known, from timm's own description or from the user.

    Raises:
        ValueError: an EVA-like file that does not say whether queries and keys are rotated.
    """
    found = Found(
        family="timm", state={}, preprocessing=dict(IMAGENET), options={"norm_eps": 1e-6, "activation": "gelu"}
    )
    if "mask_token" in state and state["mask_token"].ndim == 2 and "register_tokens" not in state:
        found.options["position_antialias"] = False  # DINOv2's own file, whose code resamples without
    state = drop(state, r"^(decoder_|mask_token$|masked_embed$)", "for pre-training only", found.dropped)
    state = drop(state, r"^head\.(mlp|last_layer|\d)", "projection head of self-distillation", found.dropped)
    state = drop(state, r"^(local_)?cls_norm\.", "norm of crops, for pre-training only", found.dropped)
    state = drop(state, r"\.attn\.k_bias$|relative_position_index$", "a constant", found.dropped)
    if "storage_tokens" in state:
        found.family, found.options = "DINOv3", _dinov3(state)
        state = _without_key_bias(state, found.dropped)
    elif "register_tokens" in state or any(".mlp.w12." in name for name in state):
        found.family = "DINOv2"
    rope = [name for name in state if "rope" in name and not name.endswith("rope.freqs")]
    if any("freqs_cos" in name for name in rope):
        found.family, found.preprocessing = "EVA-02", dict(HALF)
        found.options |= {"relative_position": "rotary_index", "rotary_base": 10000.0, "position_grid": (16, 16)}
    found.dropped |= dict.fromkeys(rope, "angles, which are computed")
    state = {name: tensor for name, tensor in state.items() if name not in rope}
    separate = "register_tokens" in state and "pos_embed" in state
    state = join_qkv(rename(state, _NAMES))
    if separate:
        state = fold_class_position(state)
        found.options["prefix_position"] = False
    state = keep_distillation(state, "dist_token", "head_dist", found)
    found.options |= said
    if any(name.endswith("attn.q_bias") for name in state) and "relative_position" not in found.options:
        raise ValueError(
            "expected to know whether these weights, which look like EVA's, rotate queries and keys, but the file does "
            "not say: give timm's folder with its config.json, or set the option relative_position."
        )
    if found.family == "EVA-02":
        heads = found.options["heads"] if "heads" in found.options else state["cls_token"].shape[-1] // 64
        found.options["heads"] = heads
        state = to_half_layout(state, heads, interleaved=True, columns_first=False)
    found.state = state
    return found


def _dinov3(state: State) -> dict[str, Any]:
    periods = next((tensor for name, tensor in state.items() if name.endswith("rope_embed.periods")), None)
    base = 100.0
    if periods is not None and len(periods) > 1:
        # periods are base^(i / n): the ratio of neighbours to the n-th power.
        base = round(float((periods[1].double() / periods[0].double()) ** len(periods)), 1)
    return {"norm_eps": 1e-5, "activation": "gelu", "relative_position": "rotary", "rotary_base": base}


def _without_key_bias(state: State, dropped: dict[str, str]) -> State:
    """DINOv3 keeps a bias of q, k, v together with a mask that is 0 (or NaN before loading) for the keys."""
    kept = {}
    for name, tensor in state.items():
        if name.endswith("attn.qkv.bias_mask"):
            dropped[name] = "mask of the keys' bias"
        elif name.endswith("attn.qkv.bias") and f"{name}_mask" in state:
            width = len(tensor) // 3
            base = name.removesuffix("qkv.bias")
            kept[f"{base}q_bias"], kept[f"{base}v_bias"] = tensor[:width], tensor[2 * width :]
        else:
            kept[name] = tensor
    return kept


def to_half_layout(state: State, heads: int, *, interleaved: bool, columns_first: bool) -> State:
    """Queries and keys reordered inside each head, so that our one way of rotating gives the same scores.

    Args:
        state: by our names.
        heads: number of heads.
        interleaved: the weights rotate pairs (2i, 2i + 1) instead of (i, i + e/2).
        columns_first: the first half of their pairs turns with the column, not with the row.
    """
    if not interleaved and not columns_first:
        return state
    changed = dict(state)
    for name, tensor in state.items():
        if re.search(r"attn\.(qkv\.(weight|bias)|q_bias|[qk]_norm\.(weight|bias))$", name):
            size = len(tensor) if "_norm" in name else len(tensor) // heads // (3 if "qkv" in name else 1)
            order = _pair_order(size, interleaved, columns_first)
            if "_norm" in name:
                changed[name] = tensor[order]
            elif "q_bias" in name:
                changed[name] = tensor.unflatten(0, (heads, size))[:, order].flatten(0, 1)
            else:
                split = tensor.unflatten(0, (3, heads, size))
                turned = torch.cat([split[:2, :, order], split[2:]])
                changed[name] = turned.flatten(0, 2)
    return changed


def _pair_order(size: int, interleaved: bool, columns_first: bool) -> Tensor:
    pairs = torch.arange(size // 2)
    if columns_first:
        pairs = pairs.roll(size // 4)
    return torch.cat([2 * pairs, 2 * pairs + 1] if interleaved else [pairs, pairs + size // 2])


def timm_options(model: nn.Module) -> tuple[dict[str, Any], dict[str, bool]]:
    """What a timm model is, in our options, and how it lays out its rotations (for `to_half_layout`).

    Raises:
        ValueError: not one of timm's plain ViTs, or one with parts that there is no option for.
    """
    kind = type(model).__name__
    if kind not in ("VisionTransformer", "VisionTransformerDistilled", "Eva"):
        raise ValueError(f"expected one of timm's VisionTransformer or Eva models, but got its {kind}.")
    m: Any = model
    block = m.blocks[0]
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    eps = {norm.eps for norm in norms}
    odd = {
        f"blocks of type {type(block).__name__}": type(block).__name__ not in ("Block", "EvaBlock"),
        "norms other than LayerNorm": any(not isinstance(norm, nn.LayerNorm) for norm in norms) or len(eps) != 1,
        "pooling over prefix tokens": getattr(m, "pool_include_prefix", False),
        f"pooling {m.global_pool!r}": m.global_pool not in ("token", "avg", "map", ""),
        "gated attention": getattr(block.attn, "gate", None) is not None,
        "patches that are not square": m.patch_embed.patch_size[0] != m.patch_embed.patch_size[1],
    }
    if wrong := [what for what, present in odd.items() if present]:
        raise ValueError(f"expected a plain ViT, but this timm model has {'; '.join(wrong)}.")
    options: dict[str, Any] = {
        "heads": block.attn.num_heads,
        "norm_eps": eps.pop(),
        "image_size": tuple(m.patch_embed.img_size),
        "prefix_position": not m.no_embed_class and m.pos_embed is not None and m.num_prefix_tokens > 0,
        "relative_position": "none",
    }
    if m.global_pool in ("token", "avg", "map"):
        options["pool"] = {"token": "token", "avg": "mean", "map": "attention"}[m.global_pool]
    if not hasattr(block.mlp, "fc1_g") and type(block.mlp).__name__ == "Mlp":
        options["activation"] = _ACTIVATIONS[type(block.mlp.act).__name__]
    if (scale := getattr(getattr(block, "ls1", None), "init_values", None)) is not None:
        options["layer_scale"] = scale
    rope = getattr(m, "rope", None)
    return (options, {}) if rope is None else (options | _rope_options(rope), _rope_layout(rope))


def _rope_layout(rope: Any) -> dict[str, bool]:
    return {
        "interleaved": not getattr(rope, "rotate_half", False),
        "columns_first": rope.grid_indexing == "xy" and type(rope).__name__ != "RotaryEmbeddingMixed",
    }


def _rope_options(rope: Any) -> dict[str, Any]:
    kind = type(rope).__name__
    if kind == "RotaryEmbeddingMixed":
        return {"relative_position": "rotary_mixed"}
    base = float(rope.temperature)
    if getattr(rope, "grid_offset", 0):
        raise ValueError(f"expected rotations that start at the first patch, but got an offset of {rope.grid_offset}.")
    if kind == "RotaryEmbeddingDinoV3":
        return {"relative_position": "rotary", "rotary_base": base}
    if kind == "RotaryEmbeddingCat" and not rope.in_pixels:
        grid = None if rope.ref_feat_shape is None else tuple(rope.ref_feat_shape)
        return {"relative_position": "rotary_index", "rotary_base": base, "position_grid": grid}
    raise ValueError(f"expected rotary positions of DINOv3, EVA-02 or RoPE-ViT, but got timm's {kind}.")


def from_timm_model(model: nn.Module, state: State) -> Found:
    """A timm model's weights under our names.

    Args:
        model: built by timm; its own weights are not read.
        state: the weights, as that model names them.

    Raises:
        ValueError: see `timm_options`.
    """
    options, layout = timm_options(model)
    if "rope.freqs" in state and getattr(model.rope, "grid_indexing", "xy") == "ij":
        state = {**state, "rope.freqs": state["rope.freqs"].flip(0)}
    found = from_timm_names(state, options)
    found.family = f"timm {type(model).__name__}"
    if layout:
        found.state = to_half_layout(found.state, options["heads"], **layout)
    cfg: Any = model.pretrained_cfg
    if _trained_with_quick_gelu(cfg) and found.options["activation"] != "quick_gelu":
        found.options["activation"] = "quick_gelu"
        found.notes.append("the weights were trained with quick_gelu, which timm's name for them leaves out")
    found.preprocessing = {name: tuple(cfg[name]) for name in ("mean", "std")}
    found.preprocessing |= {name: cfg[name] for name in ("interpolation", "crop_pct", "crop_mode") if cfg.get(name)}
    names = cfg.get("label_names")
    found.classes = tuple(names) if names else _imagenet_names(model)
    return found


def _trained_with_quick_gelu(cfg: Any) -> bool:
    """Whether timm has these weights under a QuickGELU name too, as CLIP's trainers published them."""
    import timm

    twin = f"{cfg.get('architecture', '')}".replace("_clip_", "_clip_quickgelu_")
    return (
        "quickgelu" in twin and timm.is_model(twin) and f"{twin}.{cfg.get('tag')}" in timm.list_pretrained(f"{twin}*")
    )


def _imagenet_names(model: Any) -> tuple[str, ...] | None:
    import timm

    subset = timm.data.infer_imagenet_subset(model)
    if subset is None:
        return None
    info = timm.data.ImageNetInfo(subset)
    names = tuple(info.index_to_description(i) for i in range(model.num_classes))
    return names if len(set(names)) == len(names) else tuple(info.index_to_label_name(i) for i in range(len(names)))
