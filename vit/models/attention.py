"""Multi-head attention (Vaswani et al. 2017, 3.2): fused or in plain matrix products, masked, self or cross.

Parameter names are timm's, so that published weights load strictly.
"""

import math
from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

Mask = Bool[Tensor, "..."] | Float[Tensor, "..."]
Rotation = Float[Tensor, "..."]
"""Angles that broadcast to (b, heads, t, head_dim / 2); 0 leaves a token as it is."""


@cache
def cpu_computes_bf16() -> bool:
    """Whether this processor multiplies bfloat16 matrices natively (AVX512-BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def padding_mask(keep: Bool[Tensor, "b t"]) -> Bool[Tensor, "b 1 1 t"]:
    """The attention mask under which no query sees the keys that are padding.

    Args:
        keep: true for tokens, false for padding.
    """
    return keep[:, None, None, :]


def causal_mask(tokens: int, device: torch.device) -> Bool[Tensor, "t t"]:
    """True where a query (row) may see a key (column): itself and what stands before it."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()


def masked_softmax(scores: Float[Tensor, "b h q k"], mask: Mask | None) -> Float[Tensor, "b h q k"]:
    """Softmax over the keys that `mask` leaves; a query without any gets zeros, as in torch's fused path.

    Args:
        scores: of each query (rows) with each key.
        mask: true where a query may look, or a bias that is added to the scores, -inf forbidding.
    """
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        blocked = ~mask
    else:
        blocked = mask == -math.inf
        scores = scores + mask
    # The lowest finite number, not -inf, with which a row without any key would be NaN on its way to zeros.
    scores = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(blocked, 0.0)


def rotate(x: Float[Tensor, "b h t e"], angles: Rotation) -> Float[Tensor, "b h t e"]:
    """Rotate the pairs (i, i + e/2) of each token by its angles (Su et al. 2021, eq. 34), in float32.

    Args:
        x: queries or keys.
        angles: of each token and pair.
    """
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Multi-head self-attention: softmax(QKᵀ/√d_k)V per head, concatenated, times W^O (Vaswani et al., 3.2).

    `fused` chooses the path, at any time: True is torch's fused kernel, False plain matrix products, where
    the probabilities pass through the module `attn_drop` and a hook finds them. None chooses the faster one:
    plain for bfloat16 on a processor that multiplies it natively, fused everywhere else.

    Args:
        width: D of the tokens.
        heads: number of heads.
        head_dim: size of a head; None is width / heads, any other value is free of both.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        key_bias: whether that of the keys is there; without it the others are named `q_bias` and `v_bias`.
        proj_bias: whether the output projection has a bias.
        norm: eps of a LayerNorm before the output projection, or None.
        qk_norm: eps of a LayerNorm over each head's queries and keys (Dehghani et al. 2023), or None.
        dropout: rate after the output projection.
        attention_dropout: rate on the probabilities.

    Raises:
        ValueError: heads do not divide the width and no `head_dim` is given.
    """

    fused: bool | None = None

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        key_bias: bool = True,
        proj_bias: bool = True,
        norm: float | None = None,
        qk_norm: float | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if head_dim is None and width % heads:
            raise ValueError(
                f"expected a width that heads divide, but got width={width} and heads={heads}: "
                "change one of them or set head_dim."
            )
        self.heads = heads
        self.head_dim = head_dim or width // heads
        self._make_projections(width, qkv_bias and key_bias)
        self.q_bias = self.v_bias = None
        if qkv_bias and not key_bias:
            self.q_bias = nn.Parameter(torch.zeros(self.heads * self.head_dim))
            self.v_bias = nn.Parameter(torch.zeros(self.heads * self.head_dim))
        self.q_norm = nn.Identity() if qk_norm is None else nn.LayerNorm(self.head_dim, eps=qk_norm)
        self.k_norm = nn.Identity() if qk_norm is None else nn.LayerNorm(self.head_dim, eps=qk_norm)
        self.attn_drop = nn.Dropout(attention_dropout)
        inner = self.heads * self.head_dim
        self.norm = nn.Identity() if norm is None else nn.LayerNorm(inner, eps=norm)
        self.proj = nn.Linear(inner, width, bias=proj_bias)
        self.proj_drop = nn.Dropout(dropout)

    def _make_projections(self, width: int, bias: bool) -> None:
        self.qkv = nn.Linear(width, 3 * self.heads * self.head_dim, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        *,
        mask: Mask | None = None,
        causal: bool = False,
        rotation: Rotation | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Let each token look at all tokens.

        Args:
            x: tokens.
            mask: broadcast to (b, heads, queries, keys): true where a query may look, or a bias that is added
                to the scores, -inf forbidding. `padding_mask` makes one.
            causal: whether a token sees only itself and those before it, besides what `mask` says.
            rotation: angles by which queries and keys are rotated, see `rotate`.
        """
        q, k, v = self._split(self._project(x), 3)
        # Under autocast a LayerNorm, and a rotation, give float32.
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if not causal:
            return self._attend(q, k, v, mask)
        if mask is None and self._is_fused(q):
            return self._attend(q, k, v, None, causal=True)
        seen = causal_mask(x.shape[1], x.device)
        if mask is not None:
            seen = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
        return self._attend(q, k, v, seen)

    def _project(self, x: Tensor) -> Tensor:
        if self.q_bias is None or self.v_bias is None:
            return self.qkv(x)
        projected = self.qkv(x)
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        return projected + bias.to(projected.dtype)

    def _split(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(b, t, parts · heads · head_dim) -> `parts` tensors (b, heads, t, head_dim)."""
        return projected.unflatten(-1, (parts, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)

    def _is_fused(self, q: Tensor) -> bool:
        if self.fused is not None:
            return self.fused
        return not (q.device.type == "cpu" and q.dtype == torch.bfloat16 and cpu_computes_bf16())

    def _attend(
        self,
        q: Float[Tensor, "b h q e"],
        k: Float[Tensor, "b h k e"],
        v: Float[Tensor, "b h k e"],
        mask: Mask | None,
        causal: bool = False,
    ) -> Float[Tensor, "b q d"]:
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self._is_fused(q):
            if mask is not None and mask.dtype != torch.bool:
                mask = mask.to(q.dtype)
            rate = self.attn_drop.p if self.training else 0.0
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, is_causal=causal)
        else:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            # Under autocast the softmax gives float32.
            heads = self.attn_drop(masked_softmax(scores, mask)).to(v.dtype) @ v
        return self.proj_drop(self.proj(self._join(heads)))

    def _join(self, heads: Float[Tensor, "b h q e"]) -> Float[Tensor, "b q d"]:
        return self.norm(heads.transpose(1, 2).flatten(2))


class CrossAttention(Attention):
    """Attention whose queries come from one sequence, keys and values from another, the context.

    Arguments and paths are those of `Attention`, but `norm` and `key_bias`; the projections are `q` and `kv`.
    """

    def _make_projections(self, width: int, bias: bool) -> None:
        inner = self.heads * self.head_dim
        self.q = nn.Linear(width, inner, bias=bias)
        self.kv = nn.Linear(width, 2 * inner, bias=bias)

    def _join(self, heads: Float[Tensor, "b h q e"]) -> Float[Tensor, "b q d"]:
        return heads.transpose(1, 2).flatten(2)

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "b q d"], context: Float[Tensor, "b k d"], *, mask: Mask | None = None
    ) -> Float[Tensor, "b q d"]:
        """Let each token of `x` look at all tokens of `context`; `mask` as in `Attention`."""
        (q,) = self._split(self.q(x), 1)
        k, v = self._split(self.kv(context), 2)
        return self._attend(self.q_norm(q), self.k_norm(k), v, mask)
