"""The Vision Transformer (Dosovitskiy et al., ICLR 2021): images -> tokens -> logits."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit.models.attention import Attention, Mask
from vit.models.config import ViTConfig, check_divisible
from vit.models.heads import make_head, swap_head
from vit.models.layers import AttentionPool, Block, Mlp, PatchEmbed
from vit.models.positions import resample_table

EMBEDDINGS = ("cls_token", "reg_token", "mask_token", "pos_embed", "latent")
"""Parameters that are tokens, positions or queries, by the last part of their name."""


class VisionTransformer(nn.Module):
    """A standard Transformer encoder over image patches, with a head for classification.

    Works on normalised images; `Normalise` wraps it for pixels. Set `gradient_checkpointing` to recompute
    each block in the backward pass, which saves memory and costs about a third more time.

    Args:
        config: what to build, a `ViTConfig` or its plain dictionary.

    Raises:
        ValueError: see `ViTConfig`.
    """

    def __init__(self, config: ViTConfig | Mapping[str, Any]) -> None:
        super().__init__()
        c = config if isinstance(config, ViTConfig) else ViTConfig.from_dict(config)
        self.config = c
        self.gradient_checkpointing = False
        self.patch_embed = PatchEmbed(c.patch_size, c.channels, c.width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, c.width)) if c.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, c.registers, c.width)) if c.registers else None
        rows = math.prod(c.grid) + self._prefix_rows
        self.pos_embed = nn.Parameter(torch.empty(1, rows, c.width)) if c.position == "learned" else None
        self.pos_drop = nn.Dropout(c.dropout if c.position_dropout is None else c.position_dropout)
        self.blocks = nn.ModuleList(_make_block(c, i) for i in range(c.depth))
        self.norm = self._norm_at("before_pool")
        self.attn_pool = (
            AttentionPool(c.width, c.heads, _make_mlp(c), norm_eps=c.norm_eps, dropout=c.dropout)
            if c.pool == "attention"
            else None
        )
        self.fc_norm = self._norm_at("after_pool")
        self.head = make_head(c)
        for module in self.modules():
            if isinstance(module, Attention):
                module.fused = c.fused
        init_weights(self)

    @property
    def _prefix_rows(self) -> int:
        return self.config.prefix_tokens if self.config.prefix_position else 0

    def _norm_at(self, place: str) -> nn.Module:
        c = self.config
        return nn.LayerNorm(c.width, eps=c.norm_eps) if c.last_norm == place else nn.Identity()

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        """Logits of normalised images; pooled features where the model has no classes.

        Raises:
            ValueError: images of another size or number of channels than the model's.
        """
        return self.head(self.pool(self.forward_features(images)))

    def forward_features(
        self, images: Float[Tensor, "b c h w"], *, mask: Mask | None = None, causal: bool = False
    ) -> Float[Tensor, "b t d"]:
        """Tokens after the last block and its norm: class token, registers, patches in raster order.

        Args:
            images: normalised.
            mask: which token sees which, as in `Attention`.
            causal: whether a token sees only itself and those before it.
        """
        return self.encode(self.embed(images), mask=mask, causal=causal)

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b t d"]:
        """z_0 of eq. 1: [class token; registers; patches times E] plus positions."""
        self._check_images(images)
        p = self.config.patch_size
        return self.assemble(self.patch_embed(images), (images.shape[-2] // p, images.shape[-1] // p))

    def assemble(self, patches: Float[Tensor, "b n d"], grid: tuple[int, int]) -> Float[Tensor, "b t d"]:
        """Put the prefix tokens before embedded patches and add the positions.

        Args:
            patches: embedded, in raster order, without positions.
            grid: their rows and columns.
        """
        given = (self.cls_token, self.reg_token)
        prefix = [token.expand(patches.shape[0], -1, -1) for token in given if token is not None]
        if self.pos_embed is None:
            return self.pos_drop(torch.cat([*prefix, patches], dim=1))
        table = resample_table(self.pos_embed, self.config.grid, grid, prefix=self._prefix_rows)
        if self._prefix_rows:
            return self.pos_drop(torch.cat([*prefix, patches], dim=1) + table)
        return self.pos_drop(torch.cat([*prefix, patches + table], dim=1))

    def encode(
        self, tokens: Float[Tensor, "b t d"], *, mask: Mask | None = None, causal: bool = False
    ) -> Float[Tensor, "b t d"]:
        """Blocks (eq. 2 and 3) and the norm before pooling, for any selection of embedded tokens."""
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                tokens = checkpoint(block, tokens, mask=mask, causal=causal, use_reentrant=False)
            else:
                tokens = block(tokens, mask=mask, causal=causal)
        return self.norm(tokens)

    def pool(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b d"]:
        """y of eq. 4: one vector per image; mean and attention look at the patches only."""
        if self.config.pool == "token":
            pooled = tokens[:, 0]
        elif self.attn_pool is None:
            pooled = tokens[:, self.config.prefix_tokens :].mean(dim=1)
        else:
            pooled = self.attn_pool(tokens[:, self.config.prefix_tokens :])
        return self.fc_norm(pooled)

    def swap_head(self, num_classes: int) -> None:
        """Replace the head by a zero-initialised layer D x K, see `heads.swap_head`."""
        swap_head(self, num_classes)

    def layer_groups(self) -> list[tuple[str, list[str]]]:
        """Names of all parameters by depth, for layer-wise learning rates: `embed`, `blocks.0`, ..., `head`.

        Raises:
            ValueError: a parameter that belongs to no depth.
        """
        depths = ["embed", *(f"blocks.{i}" for i in range(len(self.blocks))), "head"]
        groups: dict[str, list[str]] = {depth: [] for depth in depths}
        for name, _ in self.named_parameters():
            first, *rest = name.split(".")
            if first == "blocks":
                groups[f"blocks.{rest[0]}"].append(name)
            elif first in ("patch_embed", "cls_token", "reg_token", "mask_token", "pos_embed"):
                groups["embed"].append(name)
            elif first in ("norm", "attn_pool", "fc_norm", "head"):
                groups["head"].append(name)
            else:
                raise ValueError(
                    f"expected parameters of {', '.join(depths)}, but got {name!r}: give it a depth there."
                )
        return list(groups.items())

    @staticmethod
    def no_weight_decay(name: str, parameter: Tensor) -> bool:
        """Whether weight decay spares a parameter: vectors (biases, norms, scales), tokens, positions."""
        return parameter.ndim < 2 or name.split(".")[-1] in EMBEDDINGS

    def _check_images(self, images: Tensor) -> None:
        c = self.config
        if images.shape[1] != c.channels:
            raise ValueError(f"expected images of {c.channels} channels, but got {images.shape[1]}.")
        height, width = images.shape[-2:]
        if c.dynamic_size:
            check_divisible((height, width), c.patch_size)
        elif (height, width) != c.size:
            raise ValueError(
                f"expected images of {c.size[0]}x{c.size[1]} pixels, but got {height}x{width}: "
                "resize them, or build the model with dynamic_size=True."
            )


def _make_mlp(c: ViTConfig) -> Mlp:
    return Mlp(c.width, c.mlp_width, activation=c.activation, dropout=c.dropout)


def _make_block(c: ViTConfig, index: int) -> Block:
    attention = Attention(
        c.width,
        c.heads,
        head_dim=c.head_dim,
        qkv_bias=c.qkv_bias,
        qk_norm=c.norm_eps if c.qk_norm else None,
        dropout=c.dropout,
        attention_dropout=c.attention_dropout,
    )
    return Block(
        attention,
        _make_mlp(c),
        width=c.width,
        norm=c.block_norm,
        norm_eps=c.norm_eps,
        layer_scale=c.layer_scale,
        drop_path=c.drop_path * index / max(c.depth - 1, 1),
    )


def init_weights(model: VisionTransformer) -> None:
    """Initialise all weights but the head's, which starts at zero.

    Dense layers, tokens and positions: a truncated normal of standard deviation `init_std` that ends at 2 of them;
    biases 0. E: the same with standard deviation 1/√(P²C), which turns patches of unit variance into tokens
    of unit variance, as in the paper's code. Norms and LayerScale keep their own start values.

    Args:
        model: changed in place.
    """
    std = model.config.init_std
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in ("head", "head.out"):
            trunc_normal(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        for part, parameter in module.named_parameters(prefix=name, recurse=False):
            if part.split(".")[-1] in EMBEDDINGS:
                trunc_normal(parameter, std=std)
    patches = model.patch_embed.proj
    trunc_normal(patches.weight, std=patches.weight[0].numel() ** -0.5)
    if patches.bias is not None:
        nn.init.zeros_(patches.bias)


def trunc_normal(tensor: Tensor, *, std: float) -> None:
    """Fill with a truncated normal whose own standard deviation is `std` and whose ends are ±2 `std`."""
    # Cutting a normal at 1.4515 standard deviations leaves 0.7257 of one, half of where it is cut.
    nn.init.trunc_normal_(tensor, std=std / 0.72574095, a=-2 * std, b=2 * std)
