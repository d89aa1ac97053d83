"""Google's weights: the JAX trees of vision_transformer and big_vision, written as .npz."""

import re

import torch
from torch import Tensor

from vit.models.naming import HALF, Found, State, join_qkv, split_pool

_TOP = {
    "embedding/kernel": "patch_embed.proj.weight",
    "embedding/bias": "patch_embed.proj.bias",
    "cls": "cls_token",
    "pos_embedding": "pos_embed",
    "Transformer/posembed_input/pos_embedding": "pos_embed",
    "Transformer/encoder_norm/scale": "norm.weight",
    "Transformer/encoder_norm/bias": "norm.bias",
    "head/kernel": "head.weight",
    "head/bias": "head.bias",
    "MAPHead_0/probe": "attn_pool.latent",
}
_NORMS = {"LayerNorm_0": "norm1", "LayerNorm_1": "norm2", "LayerNorm_2": "norm2"}

_PARTS = {"query": "q", "key": "k", "value": "v", "out": "proj"}


def is_jax(state: State) -> bool:
    """Whether the names are those of a JAX tree."""
    return any(name.endswith("embedding/kernel") for name in state)


def from_jax(state: State) -> Found:
    """Google's tensors under our names: vision_transformer's and big_vision's, one block each or all scanned.

    flax's gelu is the tanh approximation unless it is told otherwise, and neither repository tells it.
    """
    anchor = min((name for name in state if name.endswith("embedding/kernel")), key=len)
    root = anchor.removesuffix("embedding/kernel")
    found = Found(family="Google JAX", state={}, preprocessing=dict(HALF))
    heads = None
    tree = {name.removeprefix(root): value for name, value in state.items() if name.startswith(root)}
    found.dropped |= {name: "not of the image tower" for name in state if not name.startswith(root)}
    for name, value in _unrolled(tree).items():
        value = value.float()
        if name.startswith("pre_logits/"):
            found.dropped[name] = "hidden layer of the pre-training head"
        elif name in _TOP:
            found.state[_TOP[name]] = _turned(_TOP[name], value)
        else:
            ours = _inner(name)
            if ours.endswith("q.weight"):
                heads = value.shape[1]
            found.state[ours] = _flattened(name, value)
    if "pre_logits/kernel" in tree:
        # The head reads the hidden layer, which has no place in a fine-tuned model.
        for name in ("head.weight", "head.bias"):
            if found.state.pop(name, None) is not None:
                found.dropped[name] = "head behind the hidden layer of pre-training"
    if "pos_embed" in found.state and found.state["pos_embed"].ndim == 2:
        found.state["pos_embed"] = found.state["pos_embed"][None]
    found.options = {"norm_eps": 1e-6, "activation": "gelu_tanh"} | ({"heads": heads} if heads else {})
    found.state = split_pool(_join(found.state))
    return found


def _unrolled(tree: State) -> State:
    """Scanned blocks, whose tensors have one leading axis for all layers, as one block each."""
    flat: State = {}
    for name, value in tree.items():
        if name.startswith("Transformer/encoderblock/"):
            rest = name.removeprefix("Transformer/encoderblock/")
            flat |= {f"Transformer/encoderblock_{i}/{rest}": layer for i, layer in enumerate(value)}
        else:
            flat[name] = value
    return flat


def _turned(ours: str, value: Tensor) -> Tensor:
    if ours == "patch_embed.proj.weight":
        return value.permute(3, 2, 0, 1)  # (p, p, c, d) -> (d, c, p, p)
    return value.T if ours == "head.weight" else value


def _inner(name: str) -> str:
    """Our name of a tensor in a block or in the pooling head."""
    block = re.fullmatch(r"Transformer/encoderblock_(\d+)/(.*)", name)
    base, rest = (f"blocks.{block[1]}.", block[2]) if block else ("", name)
    base, rest = ("attn_pool.", rest.removeprefix("MAPHead_0/")) if rest.startswith("MAPHead_0/") else (base, rest)
    kind = "bias" if rest.endswith("/bias") else "weight"
    part = rest.rpartition("/")[0]
    if part in _NORMS:
        return f"{base}{'norm' if base == 'attn_pool.' else _NORMS[part]}.{kind}"
    if match := re.fullmatch(r"MlpBlock_\d+/Dense_([01])", part):
        return f"{base}mlp.fc{int(match[1]) + 1}.{kind}"
    if match := re.fullmatch(r"MultiHeadDotProductAttention_\d+/(query|key|value|out)", part):
        attention = base if base == "attn_pool." else f"{base}attn."
        return f"{attention}{_PARTS[match[1]]}.{kind}"
    return name


def _flattened(name: str, value: Tensor) -> Tensor:
    """Dense kernels as torch has them: (out, in), heads and their size in one axis."""
    if name.endswith("out/kernel"):
        return value.flatten(0, 1).T  # (h, e, d) -> (d, h·e)
    if re.search(r"(query|key|value)/kernel$", name):
        return value.flatten(1, 2).T  # (d, h, e) -> (h·e, d)
    if re.search(r"(query|key|value)/bias$", name):
        return value.flatten()
    return value.T if name.endswith("/kernel") else value


def _join(state: State) -> State:
    joined = join_qkv(state)
    for kind in ("weight", "bias"):
        names = [f"attn_pool.{part}.{kind}" for part in "qkv"]
        if all(name in joined for name in names):
            parts = [joined.pop(name) for name in names]
            joined[f"attn_pool.qkv.{kind}"] = torch.cat(parts)
    return joined
