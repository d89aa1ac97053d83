"""What all families of weights share: renaming, joining projections, reading a configuration off the shapes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Rule = tuple[str, str | Callable[[re.Match[str]], str]]

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


@dataclass(kw_only=True)
class Found:
    """A stranger's weights in our words.

    Args:
        family: whose they are, for people.
        state: tensors by our names.
        options: of `ViTConfig`, as far as the family or its files say them.
        preprocessing: mean, std and whatever else is known of how the model wants its pictures.
        classes: names in the order of the logits; None where the files do not say.
        several: a picture can have several classes.
        dropped: tensors without a place here, and why.
        notes: what else to know.
    """

    family: str
    state: State
    options: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    several: bool = False
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def rename(state: State, rules: Sequence[Rule]) -> State:
    """Apply each (pattern, replacement) to every name, in order."""
    renamed = {}
    for name, tensor in state.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def drop(state: State, pattern: str, why: str, dropped: dict[str, str]) -> State:
    """The tensors whose names do not match; the others go to `dropped`."""
    gone = [name for name in state if re.search(pattern, name)]
    dropped.update(dict.fromkeys(gone, why))
    return {name: tensor for name, tensor in state.items() if name not in dropped}


def keep_distillation(state: State, token: str, head: str, found: "Found") -> State:
    """DeiT's distillation token as our first register, and its head beside that of the class token.

    Args:
        state: in which `head` is already the class token's.
        token: name of the distillation token.
        head: name of its head.
        found: gets a note.
    """
    why = "head of the distillation token"
    if token not in state:
        return drop(state, rf"^{head}\.", why, found.dropped)
    state = {"reg_token" if name == token else name: tensor for name, tensor in state.items()}
    if f"{head}.weight" in state and "head.weight" in state:
        found.notes.append("logits are the mean of those of the class token and of the distillation token")
        return rename(state, [(r"^head\.", "head.labels."), (rf"^{head}\.", "head.teacher.")])
    found.notes.append("the distillation token is kept as a register; logits are those of the class token")
    return drop(state, rf"^{head}\.", why, found.dropped)


def join_qkv(state: State) -> State:
    """`attn.q`, `attn.k`, `attn.v` as one `attn.qkv`; keys without a bias leave `attn.q_bias` and `attn.v_bias`."""
    joined = dict(state)
    for base in sorted(
        {name[: -len("q.weight")] for name in state if re.search(r"blocks\.\d+\.attn\.q\.weight$", name)}
    ):
        parts = {
            (part, kind): joined.pop(f"{base}{part}.{kind}", None) for part in "qkv" for kind in ("weight", "bias")
        }
        weights = [tensor for part in "qkv" if (tensor := parts[part, "weight"]) is not None]
        if len(weights) != 3:
            raise ValueError(f"expected queries, keys and values under {base}, but only {len(weights)} are there.")
        joined[f"{base}qkv.weight"] = torch.cat(weights)
        q, k, v = (parts[part, "bias"] for part in "qkv")
        if q is not None and v is not None:
            if k is None:
                joined[f"{base}q_bias"], joined[f"{base}v_bias"] = q, v
            else:
                joined[f"{base}qkv.bias"] = torch.cat([q, k, v])
    return joined


def split_pool(state: State) -> State:
    """`attn_pool.qkv` of torch's attention as `attn_pool.q` and `attn_pool.kv`."""
    split = dict(state)
    for kind in ("weight", "bias"):
        whole = split.pop(f"attn_pool.qkv.{kind}", None)
        if whole is not None:
            width = whole.shape[0] // 3
            split[f"attn_pool.q.{kind}"], split[f"attn_pool.kv.{kind}"] = whole[:width], whole[width:]
    return split


def fold_class_position(state: State) -> State:
    """A position table of the class token and the patches, registers having none: its first row joins the token."""
    folded = dict(state)
    table = folded["pos_embed"]
    folded["cls_token"] = folded["cls_token"] + table[:, :1]
    folded["pos_embed"] = table[:, 1:]
    return folded


def options_of(state: State, said: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options of `ViTConfig` read off the shapes, and what had to be assumed.

    Args:
        state: tensors by our names.
        said: options that are known already; they win.

    Raises:
        ValueError: no patch embedding or no blocks, or a position table of no square grid.
    """
    if "patch_embed.proj.weight" not in state or not any(name.startswith("blocks.0.") for name in state):
        raise ValueError(f"expected a patch embedding and blocks, but got {', '.join(list(state)[:8])}.")
    notes: list[str] = []
    kernel = state["patch_embed.proj.weight"]
    width, channels, patch, _ = kernel.shape
    options: dict[str, Any] = {
        "width": width,
        "channels": channels,
        "patch_size": patch,
        "patch_bias": "patch_embed.proj.bias" in state,
        "depth": 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks.")),
        "class_token": "cls_token" in state,
        "registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "norm_pre": "norm_pre.weight" in state,
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in state else None,
        "position": "learned" if "pos_embed" in state else "none",
        "head": "distilled" if "head.labels.weight" in state else "linear",
        "num_classes": next((len(state[name]) for name in ("head.weight", "head.labels.weight") if name in state), 0),
    }
    options |= _block_options(state)
    options["pool"] = _pool_of(state)
    has = [place for place, name in (("before_pool", "norm.weight"), ("after_pool", "fc_norm.weight")) if name in state]
    options["final_norm"] = has[0] if has else "none"
    options |= said
    if "heads" not in options:
        size = state["blocks.0.attn.q_norm.weight"].shape[0] if "blocks.0.attn.q_norm.weight" in state else 64
        options["heads"] = max(width // size, 1)
        if "blocks.0.attn.q_norm.weight" not in state:
            notes.append(f"heads are not in the file: {options['heads']} of size 64 assumed; option heads changes it")
    if state["blocks.0.attn.qkv.weight"].shape[0] != 3 * width and "head_dim" not in options:
        options["head_dim"] = state["blocks.0.attn.qkv.weight"].shape[0] // 3 // options["heads"]
    _add_grid(state, options, notes)
    return options, notes


def _block_options(state: State) -> dict[str, Any]:
    block = {name.removeprefix("blocks.0."): tensor for name, tensor in state.items() if name.startswith("blocks.0.")}
    if "attn.qkv.weight" not in block or "mlp.fc2.weight" not in block:
        raise ValueError(f"expected attention and an MLP in the first block, but got {', '.join(list(block)[:12])}.")
    hidden = block["mlp.fc2.weight"].shape[1]
    packed = "mlp.fc1.weight" in block and block["mlp.fc1.weight"].shape[0] == 2 * hidden
    return {
        "mlp_dim": hidden,
        "mlp": "swiglu" if "mlp.fc1_g.weight" in block else "swiglu_packed" if packed else "dense",
        "mlp_bias": "mlp.fc2.bias" in block,
        "mlp_norm": "mlp.norm.weight" in block,
        "qkv_bias": "attn.qkv.bias" in block or "attn.q_bias" in block,
        "key_bias": "attn.q_bias" not in block,
        "qk_norm": "attn.q_norm.weight" in block,
        "attention_norm": "attn.norm.weight" in block,
        "proj_bias": "attn.proj.bias" in block,
    }


def _pool_of(state: State) -> str:
    if "attn_pool.latent" in state:
        return "attention"
    return "mean" if "fc_norm.weight" in state or "cls_token" not in state else "token"


def _add_grid(state: State, options: dict[str, Any], notes: list[str]) -> None:
    """Image size and whether prefix tokens have positions, from the number of rows."""
    prefix = int(options["class_token"]) + options["registers"]
    patch = options["patch_size"]
    if "pos_embed" not in state:
        if "image_size" not in options:
            options["image_size"] = 224 // patch * patch
            notes.append(f"the image size is not in the file: {options['image_size']} assumed")
        return
    rows = state["pos_embed"].shape[1]
    if "image_size" in options:
        size = options["image_size"]
        height, width = (size, size) if isinstance(size, int) else size
        patches = (height // patch) * (width // patch)
        if rows in (patches, patches + prefix):
            options.setdefault("prefix_position", rows == patches + prefix and prefix > 0)
            return
    for own in (prefix, 0):
        side = isqrt(rows - own)
        if side * side == rows - own:
            options |= {"image_size": side * patch, "prefix_position": own > 0}
            return
    raise ValueError(
        f"expected positions of a square grid and {prefix} or 0 prefix tokens, but got {rows} rows: the size that the "
        "weights were trained at is unknown."
    )
