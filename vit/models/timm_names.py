"""A `ViTConfig` in timm's words."""

import math
from typing import Any

from vit.models.config import ViTConfig

# eps is no plain argument of timm's: the architecture brings it, the arguments override the rest of it.
_ARCHITECTURES = {
    ("dense", 1e-6): "vit_base_patch16_224",
    ("dense", 1e-5): "vit_base_patch16_clip_224",
    ("swiglu_packed", 1e-6): "vit_giant_patch14_dinov2",
}


def timm_gaps(config: ViTConfig) -> list[str]:
    """What timm's `VisionTransformer` has no argument for; empty where it can build exactly this model."""
    gaps = {
        'an MLP head (head="mlp")': config.head == "mlp" and config.num_classes > 0,
        'a distillation token with a head of its own (head="distilled")': config.head == "distilled"
        and config.num_classes > 0,
        'post-norm blocks (block_norm="post")': config.block_norm == "post",
        "heads whose size is not width / heads (head_dim)": config.head_dim
        not in (
            None,
            config.width / config.heads,
        ),
        "a norm_eps other than 1e-6 or 1e-5": config.norm_eps not in (1e-6, 1e-5),
        f'this MLP with this eps (mlp="{config.mlp}")': config.norm_eps in (1e-6, 1e-5)
        and (config.mlp, config.norm_eps) not in _ARCHITECTURES,
        "a gated MLP without LayerScale": config.mlp != "dense" and config.layer_scale is None,
        "a gated MLP with attention pooling": config.mlp != "dense" and config.pool == "attention",
        f'these positions (position="{config.position}")': config.position not in ("learned", "none"),
        "positions beyond the stem (position_at)": config.position_at != "stem",
        f'rotations or biases in attention ("{config.relative_position}")': config.relative_position != "none",
        "tables that move without antialiasing (position_antialias)": config.dynamic_size
        and config.position == "learned"
        and not config.position_antialias,
        "a norm before the blocks beside a bias of the patches, or neither": config.norm_pre == config.patch_bias,
        "keys alone without a bias (key_bias)": config.qkv_bias and not config.key_bias,
        "different biases of projection and MLP": config.proj_bias != config.mlp_bias,
    }
    return [name for name, present in gaps.items() if present]


def timm_arguments(config: ViTConfig) -> dict[str, Any]:
    """The arguments with which timm's `VisionTransformer` is this model, as plain JSON values."""
    arguments: dict[str, Any] = {
        "img_size": list(config.size),
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": _ratio(config.mlp_width * (2 if config.mlp == "swiglu_packed" else 1), config.width),
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "class_token": config.class_token,
        "reg_tokens": config.registers,
        "pos_embed": "learn" if config.position == "learned" else "none",
        "no_embed_class": not config.prefix_position,
        "pre_norm": config.norm_pre,
        "proj_bias": config.proj_bias,
        "scale_attn_norm": config.attention_norm,
        "scale_mlp_norm": config.mlp_norm,
        "final_norm": config.last_norm != "none",
        "fc_norm": config.last_norm == "after_pool",
        "global_pool": {"token": "token", "mean": "avg", "attention": "map"}[config.pool],
        "act_layer": config.activation if config.mlp == "dense" else "silu",
        "dynamic_img_size": config.dynamic_size,
        "pos_drop_rate": config.dropout if config.position_dropout is None else config.position_dropout,
        "proj_drop_rate": config.dropout,
        "attn_drop_rate": config.attention_dropout,
        "drop_path_rate": config.drop_path,
    }
    if config.layer_scale is not None:
        arguments["init_values"] = config.layer_scale
    return arguments


def timm_architecture(config: ViTConfig) -> str:
    """The timm model that `timm_arguments` turn into this one; where none does, a name that timm refuses."""
    return "vit_toolkit_only" if timm_gaps(config) else _ARCHITECTURES[config.mlp, config.norm_eps]


def _ratio(hidden: int, width: int) -> float:
    """The smallest `mlp_ratio` near hidden / width from which timm's int(width · ratio) gives `hidden`."""
    ratio = hidden / width
    while int(width * ratio) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio
