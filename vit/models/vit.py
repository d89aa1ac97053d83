"""The Vision Transformer (Dosovitskiy et al., ICLR 2021): images -> tokens -> logits."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit.models.attention import Attention, Mask
from vit.models.config import ViTConfig, check_divisible
from vit.models.heads import make_head, swap_head
from vit.models.layers import AttentionPool, Block, Mlp, PatchEmbed
from vit.models.positions import Grid, make_table, position_table
from vit.models.relative import MixedRotation, add_bias, biases, make_biases, rotations, select_pairs, select_rows

EMBEDDINGS = ("cls_token", "reg_token", "mask_token", "pos_embed", "layer_pos_embed", "latent", "rel_pos", "rope")
"""Parameters that are tokens, positions or queries, by a part of their name."""


_FILLED = set(EMBEDDINGS) - {"rel_pos", "rope"}  # these start as their papers say


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
        self.patch_embed = PatchEmbed(c.patch_size, c.channels, c.width, bias=c.patch_bias)
        self.cls_token = nn.Parameter(torch.empty(1, 1, c.width)) if c.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, c.registers, c.width)) if c.registers else None
        self.pos_embed = make_table(c)
        own_tables = c.position_at == "every_layer" and self.pos_embed is not None
        self.layer_pos_embed: Any = nn.ModuleList() if c.position == "learned_2d" else nn.ParameterList()
        tables: list[Any] = [make_table(c) for _ in range(c.depth - 1)] if own_tables else []
        self.layer_pos_embed.extend(tables)
        self.rel_pos = make_biases(c)
        mixed = c.relative_position == "rotary_mixed"
        self.rope = MixedRotation(c.depth, c.heads, c.head_width) if mixed else None
        self.pos_drop = nn.Dropout(c.dropout if c.position_dropout is None else c.position_dropout)
        self.norm_pre = nn.LayerNorm(c.width, eps=c.norm_eps) if c.norm_pre else nn.Identity()
        self.blocks = nn.ModuleList(_make_block(c, i) for i in range(c.depth))
        self.norm = self._norm_at("before_pool")
        self.attn_pool = (
            AttentionPool(c.width, c.heads, _make_mlp(c, gated=False), norm_eps=c.norm_eps, dropout=c.dropout)
            if c.pool == "attention"
            else None
        )
        self.fc_norm = self._norm_at("after_pool")
        self.head = make_head(c)
        for module in self.modules():
            if isinstance(module, Attention):
                module.fused = c.fused
        init_weights(self)

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
        return self.encode(self.embed(images), mask=mask, causal=causal, grid=self._grid_of(images))

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b t d"]:
        """z_0 of eq. 1: [class token; registers; patches times E] plus positions."""
        self._check_images(images)
        return self.assemble(self.patch_embed(images), self._grid_of(images))

    def _grid_of(self, images: Tensor) -> Grid:
        return images.shape[-2] // self.config.patch_size, images.shape[-1] // self.config.patch_size

    def assemble(self, patches: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b t d"]:
        """Put the prefix tokens before embedded patches and add the positions.

        Args:
            patches: embedded, in raster order, without positions.
            grid: their rows and columns.
        """
        given = (self.cls_token, self.reg_token)
        prefix = [token.expand(patches.shape[0], -1, -1) for token in given if token is not None]
        tokens = torch.cat([*prefix, patches], dim=1)
        table = position_table(self.pos_embed, self.config, grid, tokens.device)
        return self.pos_drop(tokens if table is None else tokens + table.to(tokens.dtype))

    def encode(
        self,
        tokens: Float[Tensor, "b t d"],
        *,
        mask: Mask | None = None,
        causal: bool = False,
        grid: Grid | None = None,
        kept: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Blocks (eq. 2 and 3) and the norm before pooling, for all embedded tokens or a selection of them.

        Args:
            tokens: embedded.
            mask: which token sees which, as in `Attention`.
            causal: whether a token sees only itself and those before it.
            grid: rows and columns of the image's patches; None is the model's own.
            kept: where each token stood among all of the image, prefix included; None: they are all there. Models with
                positions beyond the stem need it for a selection.
        """
        x = self.norm_pre(tokens)
        for block, place in zip(self.blocks, self._places(grid or self.config.grid, kept, x), strict=True):
            table, bias, rotation = place
            if table is not None:
                x = x + table.to(x.dtype)
            seen = mask if bias is None else add_bias(bias, mask)
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, mask=seen, causal=causal, rotation=rotation, use_reentrant=False)
            else:
                x = block(x, mask=seen, causal=causal, rotation=rotation)
        return self.norm(x)

    def _places(self, grid: Grid, kept: Tensor | None, x: Tensor) -> list[tuple[Tensor | None, ...]]:
        """What each layer is told about places: a table to add, a bias on scores, angles of rotation."""
        c = self.config
        tables: list[Tensor | None] = [None] * c.depth
        if c.position_at == "every_layer" and self.pos_embed is not None:
            tables[1:] = [position_table(own, c, grid, x.device) for own in self.layer_pos_embed]
        elif c.position_at != "stem":
            # Sines have nothing to learn, so each layer's own are the same.
            tables[1:] = [position_table(self.pos_embed, c, grid, x.device)] * (c.depth - 1)
        all_biases = biases(self.rel_pos, c, grid)
        angles = rotations(self.rope, c, grid, x.device)
        if kept is not None:
            tables = [None if table is None else table[0][kept] for table in tables]
            all_biases = [None if bias is None else select_pairs(bias, kept) for bias in all_biases]
            angles = [None if turn is None else select_rows(turn, kept) for turn in angles]
        return list(zip(tables, all_biases, angles, strict=True))

    def pool(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b f"]:
        """y of eq. 4: one vector per image, f = d; mean and attention look at the patches only.

        With head="distilled" class token and distillation token side by side, f = 2d.
        """
        if self.config.head == "distilled":
            return self.fc_norm(tokens[:, :2]).flatten(1)
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
            if first == "blocks" or (first == "rel_pos" and len(self.rel_pos or ()) == len(self.blocks)):
                groups[f"blocks.{rest[0]}"].append(name)
            elif first == "layer_pos_embed":
                groups[f"blocks.{int(rest[0]) + 1}"].append(name)
            elif first in ("patch_embed", "norm_pre", *EMBEDDINGS):
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
        return parameter.ndim < 2 or not set(EMBEDDINGS).isdisjoint(name.split("."))

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


def _make_mlp(c: ViTConfig, *, gated: bool = True) -> Mlp:
    options: dict[str, Any] = {"activation": c.activation, "dropout": c.dropout}
    if gated:
        options |= {"kind": c.mlp, "bias": c.mlp_bias, "norm": c.norm_eps if c.mlp_norm else None}
    return Mlp(c.width, c.mlp_width, **options)


def _make_block(c: ViTConfig, index: int) -> Block:
    attention = Attention(
        c.width,
        c.heads,
        head_dim=c.head_dim,
        qkv_bias=c.qkv_bias,
        key_bias=c.key_bias,
        proj_bias=c.proj_bias,
        norm=c.norm_eps if c.attention_norm else None,
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
        if isinstance(module, nn.Linear) and name not in ("head", "head.out", "head.labels", "head.teacher"):
            trunc_normal(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        for part, parameter in module.named_parameters(prefix=name, recurse=False):
            if not _FILLED.isdisjoint(part.split(".")):
                trunc_normal(parameter, std=std)
    patches = model.patch_embed.proj
    trunc_normal(patches.weight, std=patches.weight[0].numel() ** -0.5)
    if patches.bias is not None:
        nn.init.zeros_(patches.bias)


def trunc_normal(tensor: Tensor, *, std: float) -> None:
    """Fill with a truncated normal whose own standard deviation is `std` and whose ends are ±2 `std`."""
    # Cutting a normal at 1.4515 standard deviations leaves 0.7257 of one, half of where it is cut. The inverse of its
    # distribution function is many times faster than torch's own way, which draws again until all values are inside.
    if tensor.is_meta:
        return
    sigma = std / 0.72574095
    edge = math.erf(2 * std / sigma / math.sqrt(2))
    with torch.no_grad():
        tensor.uniform_(-edge, edge).erfinv_().mul_(sigma * math.sqrt(2)).clamp_(-2 * std, 2 * std)
