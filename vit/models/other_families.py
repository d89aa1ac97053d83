"""torchvision's `vit_*` and OpenCLIP's image towers under our names."""

from collections.abc import Mapping
from typing import Any

from vit.models.naming import CLIP, IMAGENET, Found, State, drop, rename

_TORCHVISION = (
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^class_token$", "cls_token"),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
)
_OPEN_CLIP = (
    (r"^conv1\.", "patch_embed.proj."),
    (r"^class_embedding$", "cls_token"),
    (r"^positional_embedding$", "pos_embed"),
    (r"^ln_pre\.", "norm_pre."),
    (r"^ln_post\.", "norm."),
    (r"^transformer\.resblocks\.(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.ls_([12])\.gamma$", r".ls\1.gamma"),
)


def from_torchvision(state: State) -> Found:
    """torchvision's tensors under our names; it has no names of classes in its files."""
    found = Found(family="torchvision", state={}, preprocessing=dict(IMAGENET))
    found.options = {"norm_eps": 1e-6, "activation": "gelu"}
    state = rename(state, _TORCHVISION)
    if any(name.startswith("heads.pre_logits.") for name in state):
        state = drop(state, r"^heads\.pre_logits\.|^head\.", "head with a hidden layer of pre-training", found.dropped)
    found.state = state
    return found


def from_open_clip(state: State, config: Mapping[str, Any], activation: str | None) -> Found:
    """OpenCLIP's tensors under our names; the projection to the space of texts is left out.

    Args:
        state: of the image tower.
        config: of `open_clip_config.json`, under `open_clip`.
        activation: that the user set.

    Raises:
        ValueError: neither of them says the activation.
    """
    found = Found(family="OpenCLIP", state={}, preprocessing=dict(CLIP), options={"norm_eps": 1e-5})
    beside = config.get("open_clip", {})
    model: dict[str, Any] = beside.get("model_cfg", {})
    if model:
        found.options["activation"] = "quick_gelu" if model.get("quick_gelu") else "gelu"
        vision = model["vision_cfg"]
        if "head_width" in vision:
            found.options["heads"] = vision["width"] // vision["head_width"]
        if isinstance(vision.get("image_size"), int):
            found.options["image_size"] = vision["image_size"]
    elif activation is None:
        raise ValueError(
            "expected the activation of these OpenCLIP weights, which files of OpenAI (quick_gelu) and others (gelu) "
            "do not tell: put open_clip_config.json beside them, or set the option activation."
        )
    prepared = beside.get("preprocess_cfg", {})
    found.preprocessing |= {name: tuple(prepared[name]) for name in ("mean", "std") if name in prepared}
    state = drop(state, r"^proj$", "projection to the space of texts", found.dropped)
    state = rename(state, _OPEN_CLIP)
    for name in ("cls_token", "pos_embed"):
        state[name] = state[name].reshape(1, -1, state[name].shape[-1])
    found.state = state
    return found
