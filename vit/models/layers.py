"""The pieces around attention: patch embedding, MLP, block, pooling, and what regularises them.

Parameter names are timm's, so that published weights load strictly.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.models.attention import Attention, CrossAttention, Mask, Rotation

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
MlpKind = Literal["dense", "swiglu", "swiglu_packed"]


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x), the approximation of GELU that OpenAI's CLIP was trained with."""

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Apply it to every element."""
        return x * torch.sigmoid(1.702 * x)


def make_activation(name: Activation) -> nn.Module:
    """The activation of that name; `gelu` is the exact one of the ViT paper."""
    match name:
        case "gelu":
            return nn.GELU()
        case "gelu_tanh":
            return nn.GELU(approximate="tanh")
        case "quick_gelu":
            return QuickGELU()
        case "relu":
            return nn.ReLU()
        case "silu":
            return nn.SiLU()


class PatchEmbed(nn.Module):
    """Cut an image into patches in raster order and multiply each by E (ViT, eq. 1).

    A convolution whose kernel and stride are P does both: `proj.weight.flatten(1)` is E transposed, patches
    being flattened channel by channel, each channel row by row.

    Args:
        patch_size: side P in pixels.
        channels: C of the images.
        width: D of the tokens.
        bias: whether a bias is added.
    """

    def __init__(self, patch_size: int, channels: int, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size, bias=bias)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Patches of normalised images whose sides P divides."""
        return self.proj(images).flatten(2).transpose(1, 2)


class Mlp(nn.Module):
    """Two dense layers with an activation between them and dropout after each (ViT, eq. 3), or a gated version.

    Args:
        width: D of the tokens.
        hidden: size of the layer between.
        activation: its name; gated versions have silu.
        dropout: rate after either layer.
        kind: `dense`; `swiglu`: silu(xG) · xV before the second layer (Shazeer 2020); `swiglu_packed`: G and V in
            one weight `fc1`.
        bias: whether both layers have one.
        norm: eps of a LayerNorm before the second layer, or None.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        kind: MlpKind = "dense",
        bias: bool = True,
        norm: float | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        if kind == "swiglu":
            self.fc1_g = nn.Linear(width, hidden, bias=bias)
            self.fc1_x = nn.Linear(width, hidden, bias=bias)
        else:
            self.fc1 = nn.Linear(width, hidden if kind == "dense" else 2 * hidden, bias=bias)
        self.act = make_activation(activation if kind == "dense" else "silu")
        self.drop1 = nn.Dropout(dropout)
        self.norm = nn.Identity() if norm is None else nn.LayerNorm(hidden, eps=norm)
        self.fc2 = nn.Linear(hidden, width, bias=bias)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Each token by itself."""
        return self.drop2(self.fc2(self.norm(self.drop1(self._hidden(x)))))

    def _hidden(self, x: Tensor) -> Tensor:
        if self.kind == "dense":
            return self.act(self.fc1(x))
        gate, value = (self.fc1_g(x), self.fc1_x(x)) if self.kind == "swiglu" else self.fc1(x).chunk(2, dim=-1)
        return self.act(gate) * value


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch (Touvron et al. 2021, CaiT).

    Args:
        width: D of the tokens.
        value: the factor at the start.
    """

    def __init__(self, width: int, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), value))

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Scale each channel."""
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: drop a residual branch for whole samples while training (Huang et al. 2016).

    Args:
        rate: probability of dropping, in [0, 1); what is kept is divided by 1 - rate, so that the mean stays.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        """Zero the branch of some samples; nothing in evaluation."""
        if not self.training or self.rate == 0:
            return x
        keep = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)

    def extra_repr(self) -> str:
        """The rate, in the printed model."""
        return f"rate={self.rate:.3g}"


class Block(nn.Module):
    """One layer of the encoder: attention and an MLP, each on a residual path.

    Args:
        attn: the self-attention.
        mlp: the MLP.
        width: D of the tokens.
        norm: `pre`: x + f(LN(x)), as in ViT, eq. 2 and 3; `post`: LN(x + f(x)), as in Vaswani et al., 3.1.
        norm_eps: eps of the LayerNorms.
        layer_scale: first value of LayerScale; None leaves it out.
        drop_path: rate of stochastic depth.
    """

    def __init__(
        self,
        attn: Attention,
        mlp: nn.Module,
        *,
        width: int,
        norm: Literal["pre", "post"] = "pre",
        norm_eps: float = 1e-6,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.pre = norm == "pre"
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attn = attn
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = mlp
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.drop_path2 = DropPath(drop_path)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        *,
        mask: Mask | None = None,
        causal: bool = False,
        rotation: Rotation | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Tokens through both sub-layers; `mask`, `causal` and `rotation` as in `Attention`."""
        if self.pre:
            x = x + self.drop_path1(self.ls1(self._attend(self.norm1(x), mask, causal, rotation)))
            return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        x = self.norm1(x + self.drop_path1(self.ls1(self._attend(x, mask, causal, rotation))))
        return self.norm2(x + self.drop_path2(self.ls2(self.mlp(x))))

    def _attend(self, x: Tensor, mask: Mask | None, causal: bool, rotation: Rotation | None) -> Tensor:
        return self.attn(x, mask=mask, causal=causal, rotation=rotation)


class AttentionPool(CrossAttention):
    """Pool tokens with one learned query, then a residual MLP (the "MAP" head of Zhai et al. 2022).

    Args:
        width: D of the tokens.
        heads: number of heads; divides the width.
        mlp: the MLP.
        norm_eps: eps of the LayerNorm before the MLP.
        dropout: rate after the output projection.
    """

    def __init__(self, width: int, heads: int, mlp: nn.Module, *, norm_eps: float = 1e-6, dropout: float = 0.0) -> None:
        super().__init__(width, heads, dropout=dropout)
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        del self.norm  # this one stands behind the projection
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = mlp

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b d"]:  # type: ignore[override]
        """One vector per image."""
        pooled = super().forward(self.latent.expand(x.shape[0], -1, -1), x)[:, 0]
        return pooled + self.mlp(self.norm(pooled))
