"""LoRA (Hu et al. 2021): W + BA · alpha/r, where only A and B learn; merged it is the plain model again."""

from collections.abc import Collection, Mapping
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit.models.attention import Attention
from vit.models.layers import Block, Mlp
from vit.models.vit import VisionTransformer

Projection = Literal["qkv", "proj", "fc1", "fc2"]


class LoraLinear(nn.Linear):
    """A dense layer with a low-rank update: xWᵀ + b + xAᵀBᵀ · alpha/r (Hu et al., eq. 3).

    A starts from a normal distribution of variance 1/in, B at zero, so that the first output is the base layer's. A
    layer that holds several projections side by side has its own A and B of the full rank for each of them. In
    evaluation mode it multiplies by the merged weight: what is scored is what is exported.

    Args:
        base: the layer, whose weight and bias are shared.
        rank: r.
        alpha: updates are scaled by alpha/r.
        parts: how many projections of equal size the layer holds; 3 for queries, keys and values.
    """

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float, parts: int = 1) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.alpha, self.parts = rank, alpha, parts
        self.lora_a = nn.Parameter(base.weight.new_empty(parts * rank, self.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(self.out_features, rank))
        nn.init.normal_(self.lora_a, std=self.in_features**-0.5)

    def forward(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        """Each token by itself."""
        if not self.training:
            # Mixed precision would multiply A and B with fewer digits than an export does.
            with torch.autocast(x.device.type, enabled=False):
                weight = merged_weight(self.weight, self.lora_a, self.lora_b, alpha=self.alpha)
            return F.linear(x, weight, self.bias)
        low = F.linear(x, self.lora_a).unflatten(-1, (self.parts, self.rank))
        update = torch.einsum("...pr,por->...po", low, self.lora_b.unflatten(0, (self.parts, -1)))
        return F.linear(x, self.weight, self.bias) + update.flatten(-2) * (self.alpha / self.rank)

    def extra_repr(self) -> str:
        """Rank and alpha, in the printed model."""
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha:g}"


def merged_weight(
    weight: Float[Tensor, "o i"], a: Float[Tensor, "pr i"], b: Float[Tensor, "o r"], *, alpha: float
) -> Float[Tensor, "o i"]:
    """W + BA · alpha/r.

    Args:
        weight: W.
        a: A of each projection, one below the other.
        b: B of each projection, one below the other.
        alpha: updates are scaled by alpha/r.
    """
    rank = b.shape[1]
    parts = a.shape[0] // rank
    update = b.unflatten(0, (parts, -1)) @ a.unflatten(0, (parts, rank))  # (p, o/p, i)
    return weight + update.flatten(0, 1) * (alpha / rank)


def add_lora(model: VisionTransformer, *, rank: int, alpha: float, projections: Collection[Projection]) -> None:
    """Give dense layers of every block a low-rank update, in place; names of all other parameters stay.

    Args:
        model: its output stays the same until something learns.
        rank: r, at least 1 and at most the layers' smaller side.
        alpha: above 0; updates are scaled by alpha/r.
        projections: which layers: `qkv`, `proj` (attention's output), `fc1` (a gated MLP's two) and `fc2`.

    Raises:
        ValueError: a value out of its range, or no projections.
    """
    unknown = [name for name in projections if name not in get_args(Projection)]
    if unknown or not projections:
        wanted = ", ".join(get_args(Projection))
        raise ValueError(f"expected lora_projections out of {wanted}, but got {', '.join(projections) or 'none'}.")
    if not alpha > 0:
        raise ValueError(f"expected lora_alpha above 0, but got {alpha}.")
    for block in model.blocks:
        assert isinstance(block, Block)
        assert isinstance(block.mlp, Mlp)
        for part, name in _layers(block.attn, block.mlp, projections):
            base = getattr(part, name)
            parts = 3 if name == "qkv" else 1
            most = min(base.in_features, base.out_features // parts)
            if not 1 <= rank <= most:
                raise ValueError(f"expected a lora_rank from 1 to {most}, the size of {name}, but got {rank}.")
            setattr(part, name, LoraLinear(base, rank=rank, alpha=alpha, parts=parts))


def _layers(attention: Attention, mlp: Mlp, projections: Collection[str]) -> list[tuple[nn.Module, str]]:
    found: list[tuple[nn.Module, str]] = [(attention, name) for name in ("qkv", "proj") if name in projections]
    if "fc1" in projections:
        found += [(mlp, name) for name in (("fc1_g", "fc1_x") if mlp.kind == "swiglu" else ("fc1",))]
    return found + ([(mlp, "fc2")] if "fc2" in projections else [])


def merged_state(state: Mapping[str, Tensor], *, alpha: float) -> dict[str, Tensor]:
    """The state dict of the plain model from that of a model with LoRA.

    Args:
        state: under any prefix.
        alpha: that the updates were trained with.
    """
    plain = {name: tensor for name, tensor in state.items() if not name.endswith((".lora_a", ".lora_b"))}
    for name in state:
        if name.endswith(".lora_a"):
            layer = name.removesuffix(".lora_a")
            a, b = state[name], state[f"{layer}.lora_b"]
            plain[f"{layer}.weight"] = merged_weight(state[f"{layer}.weight"], a, b, alpha=alpha)
    return plain
