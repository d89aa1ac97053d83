"""Masked autoencoder: the encoder sees a quarter of the patches, a light decoder draws the rest (He et al. 2022)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Num
from torch import Tensor, nn

from vit.models.attention import Attention
from vit.models.config import ViTConfig
from vit.models.layers import Block, Mlp
from vit.models.positions import sine_table
from vit.tasks.options import rebuilt
from vit.tasks.pretrain import Pretraining, Shown, freeze_pooling, init_parts
from vit.tasks.targets import normalised, to_patches


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The decoder that is thrown away after pre-training; the defaults are those of the paper (section 4.1).

    Args:
        width: of its tokens; 4 divides it.
        depth: number of its blocks.
        heads: of each attention; divides the width.

    Raises:
        ValueError: a value out of its range.
    """

    width: int = 512
    depth: int = 8
    heads: int = 16

    def __post_init__(self) -> None:
        if min(self.width, self.depth, self.heads) < 1 or self.width % self.heads or self.width % 4:
            raise ValueError(
                "expected a decoder with depth and heads of at least 1 and a width that 4 and heads divide, but got "
                f"width={self.width}, depth={self.depth}, heads={self.heads}."
            )


class Decoder(nn.Module):
    """Mask tokens in the places of what is hidden, fixed 2-D positions, a few blocks, the values of each patch.

    Args:
        encoder: configuration of the encoder.
        config: of the decoder.
    """

    positions: Tensor

    def __init__(self, encoder: ViTConfig, config: DecoderConfig) -> None:
        super().__init__()
        d = config.width
        self.prefix = encoder.prefix_tokens
        self.embed = nn.Linear(encoder.width, d)
        self.mask_token = nn.Parameter(torch.empty(1, 1, d))
        self.blocks = nn.ModuleList(
            Block(Attention(d, config.heads), Mlp(d, 4 * d), width=d) for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(d, eps=1e-6)
        self.out = nn.Linear(d, encoder.channels * encoder.patch_size**2)
        places = replace(encoder, width=d, heads=config.heads, head_dim=None, position="sine_2d")
        self.register_buffer("positions", sine_table(places, encoder.grid, torch.device("cpu")), persistent=False)
        init_parts(self, encoder.init_std)

    def forward(self, tokens: Float[Tensor, "b t d"], kept: Int64[Tensor, "b k"]) -> Float[Tensor, "b n p"]:
        """Values of all patches.

        Args:
            tokens: prefix and visible patches, from the encoder.
            kept: place of each visible patch among all.
        """
        x = self.embed(tokens)
        prefix, visible = x[:, : self.prefix], x[:, self.prefix :]
        everywhere = self.mask_token.to(x.dtype).expand(len(x), len(self.positions), -1)
        patches = everywhere.scatter(1, kept[..., None].expand_as(visible), visible)
        x = torch.cat([prefix, patches + self.positions.to(x.dtype)], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x[:, self.prefix :]))


class MAE(Pretraining):
    """Draw the hidden three quarters of a picture from the visible quarter (He et al. 2022).

    The encoder never sees a hidden patch nor a mask token, which makes it several times cheaper than the model it
    trains. The loss is the mean squared error of the hidden patches' values.

    Args:
        mask_ratio: share of the patches that is hidden.
        decoder: its size.
        normalise_targets: predict each patch less its mean, over its deviation (section 3), not its plain values.

    Raises:
        ValueError: a share that leaves nothing to see or nothing to predict.
    """

    def __init__(
        self,
        *,
        mask_ratio: float = 0.75,
        decoder: DecoderConfig = DecoderConfig(),
        normalise_targets: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        c, chosen = self.config, rebuilt(DecoderConfig, decoder)
        patches = c.grid[0] * c.grid[1]
        self.visible = round(patches * (1 - mask_ratio))
        if not 0 < self.visible < patches:
            raise ValueError(
                f"expected a mask_ratio that leaves 1 to {patches - 1} of {patches} patches, but {mask_ratio} leaves "
                f"{self.visible}."
            )
        self.normalise_targets = normalise_targets
        self.decoder = Decoder(c, chosen)
        freeze_pooling(self.model)
        self.keep_options(mask_ratio=mask_ratio, decoder=vars(chosen).copy(), normalise_targets=normalise_targets)

    def encode_visible(
        self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n 1"]
    ) -> tuple[Float[Tensor, "b t d"], Int64[Tensor, "b k"]]:
        """Tokens of prefix and visible patches, and the place of each visible patch among all."""
        tokens = self.model.embed(self.net.normalise(images))
        kept = draws[..., 0].argsort(1)[:, : self.visible]
        prefix = torch.arange(self.config.prefix_tokens, device=kept.device).expand(len(kept), -1)
        places = torch.cat([prefix, kept + prefix.shape[1]], dim=1)
        seen = tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[2]))
        return self.last_norm(self.model.encode(seen, kept=places)), kept

    def predict(
        self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n 1"]
    ) -> tuple[Float[Tensor, "b n p"], Bool[Tensor, "b n"]]:
        """Values of every patch, and which were hidden."""
        tokens, kept = self.encode_visible(images, draws)
        hidden = torch.ones(draws.shape[:2], dtype=torch.bool, device=kept.device).scatter(1, kept, False)
        return self.decoder(tokens, kept).float(), hidden

    def loss(self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n r"]) -> Float[Tensor, ""]:
        """Mean squared error over the hidden patches."""
        predicted, hidden = self.predict(images, draws)
        target = to_patches(self.net.normalise(images).float(), self.config.patch_size)
        target = normalised(target) if self.normalise_targets else target
        return (predicted - target)[hidden].square().mean()

    def reconstruct(self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n r"]) -> Shown:
        """Hidden patches grey, then as predicted."""
        predicted, hidden = self.predict(images, draws)
        return self.draw(images, predicted, hidden, normalised=self.normalise_targets)
