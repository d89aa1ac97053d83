"""Autoregressive patches: the masked attention of Vaswani et al. on images (AIM: El-Nouby et al. 2024)."""

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int64, Num
from torch import Tensor, nn

from vit.models.layers import Mlp
from vit.tasks.pretrain import Pretraining, Shown, freeze_pooling, init_parts
from vit.tasks.targets import normalised, to_patches


def prefix_mask(lengths: Int64[Tensor, " b"], tokens: int) -> Bool[Tensor, "b 1 t t"]:
    """True where a query (row) may see a key (column): all of the prefix, and what does not stand behind itself.

    Args:
        lengths: tokens in the prefix of each picture, in which all see each other.
        tokens: number of all tokens.
    """
    place = torch.arange(tokens, device=lengths.device)
    seen = (place <= place[:, None]) | (place < lengths[:, None, None])
    return seen[:, None]


class PatchHead(nn.Module):
    """A few residual MLPs over each token by itself, then the values of a patch (AIM, section 3.2).

    Args:
        width: D of the tokens.
        depth: number of MLPs.
        outputs: values of a patch.
    """

    def __init__(self, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(depth))
        self.mlps = nn.ModuleList(Mlp(width, 4 * width) for _ in range(depth))
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n p"]:
        """Values of the patch that follows each token."""
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return self.out(x)


class Autoregressive(Pretraining):
    """Predict each patch from those before it, in raster order, by the squared error of its values.

    With `causal` a token sees itself and what stands before it, as in the decoder of "Attention Is All You Need"
    (3.2.3). With `prefix` the first patches of a picture, a number drawn anew each time, see each other, as they will
    after pre-training, and only later ones are predicted (AIM, section 3.2). Class token and registers stand first.
    The first patch is never predicted.

    Args:
        attention: which mask.
        head_depth: MLPs between the encoder and the values.
        normalise_targets: predict each patch less its mean, over its deviation, not its plain values.

    Raises:
        ValueError: an unknown mask, or fewer than 2 patches.
    """

    def __init__(
        self,
        *,
        attention: Literal["causal", "prefix"] = "prefix",
        head_depth: int = 2,
        normalise_targets: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        c = self.config
        if attention not in ("causal", "prefix"):
            raise ValueError(f"expected attention causal or prefix, but got {attention!r}.")
        if head_depth < 0:
            raise ValueError(f"expected head_depth of at least 0, but got {head_depth}.")
        if c.grid[0] * c.grid[1] < 2:
            raise ValueError(f"expected at least 2 patches, but image_size {c.image_size} has one: lower patch_size.")
        self.attention, self.normalise_targets = attention, normalise_targets
        self.decoder = PatchHead(c.width, head_depth, c.channels * c.patch_size**2)
        init_parts(self.decoder, c.init_std)
        freeze_pooling(self.model)
        self.keep_options(attention=attention, head_depth=head_depth, normalise_targets=normalise_targets)

    def prefix_lengths(self, draws: Float[Tensor, "b n 1"]) -> Int64[Tensor, " b"]:
        """Patches in the prefix of each picture: 1 with a causal mask, else each from 1 to n - 1 equally often."""
        if self.attention == "causal":
            return torch.ones(len(draws), dtype=torch.int64, device=draws.device)
        return 1 + (draws[:, 0, 0] * (draws.shape[1] - 1)).long()

    def predict(
        self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n 1"]
    ) -> tuple[Float[Tensor, "b m p"], Bool[Tensor, "b m"]]:
        """Values of every patch but the first, each from the token before it, and which count."""
        x, prefix = self.net.normalise(images), self.config.prefix_tokens
        lengths = self.prefix_lengths(draws)
        if self.attention == "causal":
            tokens = self.model.forward_features(x, causal=True)
        else:
            mask = prefix_mask(lengths + prefix, prefix + draws.shape[1])
            tokens = self.model.forward_features(x, mask=mask)
        outputs = self.decoder(self.last_norm(tokens)[:, prefix:-1]).float()
        return outputs, torch.arange(1, draws.shape[1], device=lengths.device) >= lengths[:, None]

    def loss(self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n r"]) -> Float[Tensor, ""]:
        """Mean squared error of the patches behind the prefix; each picture counts alike, however long its prefix."""
        predicted, counted = self.predict(images, draws)
        target = to_patches(self.net.normalise(images).float(), self.config.patch_size)
        target = normalised(target) if self.normalise_targets else target
        errors = (predicted - target[:, 1:]).square().mean(-1)
        return ((errors * counted).sum(1) / counted.sum(1)).mean()

    def reconstruct(self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n r"]) -> Shown:
        """The prefix alone, then each patch as predicted from the true ones before it."""
        predicted, counted = self.predict(images, draws)
        first = torch.zeros_like(predicted[:, :1])
        hidden = torch.cat([torch.zeros_like(counted[:, :1]), counted], dim=1)
        return self.draw(images, torch.cat([first, predicted], dim=1), hidden, normalised=self.normalise_targets)
