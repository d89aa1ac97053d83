"""Masked patch prediction, the self-supervision of the ViT paper (appendix B.1.2), after BERT."""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn
from torch.nn import functional as F

from vit.models.heads import zero_linear
from vit.models.vit import trunc_normal
from vit.tasks.pretrain import Pretraining, Shown, freeze_pooling
from vit.tasks.targets import LEVELS, colour_classes, colour_patches, to_patches

Target = Literal["mean_colour", "colours_4x4", "pixels"]
MASKED, OTHER = 0.8, 0.1
"""Shares of the corrupted patches that become the mask token, and another patch; the rest stays."""


def corrupt(
    patches: Float[Tensor, "b n d"], mask_token: Float[Tensor, "1 1 d"], draws: Float[Tensor, "b n 3"], share: float
) -> tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """Corrupt a share of a picture's patch embeddings (ViT, B.1.2).

    Of the chosen ones each becomes the mask token (80 %), another patch of the same picture (10 %), or stays (10 %).

    Args:
        patches: embedded, without positions.
        mask_token: the learned [mask] embedding.
        draws: uniform numbers: which patches are chosen, what happens to each, which other patch it becomes.
        share: of the patches that are chosen, in (0, 1]; rounded to a whole number, at least 1.

    Returns:
        The embeddings, which patches were chosen, and which of these became another embedding.
    """
    n = patches.shape[1]
    chosen = draws[..., 0].argsort(1).argsort(1) < max(1, round(share * n))
    masked = chosen & (draws[..., 1] < MASKED)
    swapped = chosen & (draws[..., 1] >= MASKED) & (draws[..., 1] < MASKED + OTHER)
    step = 1 + (draws[..., 2] * (n - 1)).long()
    other = (torch.arange(n, device=patches.device) + step) % n
    others = patches.gather(1, other[..., None].expand_as(patches))
    mixed = torch.where(swapped[..., None], others, patches)
    return torch.where(masked[..., None], mask_token.to(patches.dtype), mixed), chosen, masked | swapped


class MaskedPatches(Pretraining):
    """Predict what corrupted patches show, from the others: masked patch prediction of ViT, appendix B.1.2.

    Half of the patch embeddings are corrupted: 80 % of these by a learned [mask] embedding, 10 % by another patch
    of the picture, 10 % are kept; the loss is that of all corrupted patches. The paper has lr 2e-4 with Adam, 10,000
    steps of warm-up, and a cosine.

    Args:
        target: what is predicted of a patch. `mean_colour`: the class of its mean colour in 3 bits a channel, one of
            512 (of 8 for one channel); `colours_4x4`: the same for each cell of its 4x4 version, 16 predictions in
            parallel; `pixels`: all of its normalised values, by the squared error.
        corrupted: share of the patches that is corrupted.

    Raises:
        ValueError: a share outside of (0, 1], fewer than 2 patches, or patches too small for 4x4 cells.
    """

    def __init__(self, *, target: Target = "mean_colour", corrupted: float = 0.5, **common: Any) -> None:
        super().__init__(**common)
        c = self.config
        if target not in get_args(Target):
            raise ValueError(f"expected a target out of {', '.join(get_args(Target))}, but got {target!r}.")
        if not 0 < corrupted <= 1:
            raise ValueError(f"expected corrupted above 0 and at most 1, but got {corrupted}.")
        if c.grid[0] * c.grid[1] < 2:
            raise ValueError(f"expected at least 2 patches, but image_size {c.image_size} has one: lower patch_size.")
        if target == "colours_4x4" and c.patch_size < 4:
            raise ValueError(f"expected patches of at least 4 pixels for colours_4x4, but got {c.patch_size}.")
        self.target, self.corrupted = target, corrupted
        self.side = 4 if target == "colours_4x4" else 1
        self.classes_per_cell = LEVELS**c.channels
        outputs = c.channels * c.patch_size**2 if target == "pixels" else self.classes_per_cell * self.side**2
        self.mask_token = nn.Parameter(torch.empty(1, 1, c.width))
        trunc_normal(self.mask_token, std=c.init_std)
        self.decoder = zero_linear(c.width, outputs)
        freeze_pooling(self.model)
        self.keep_options(target=target, corrupted=corrupted)

    @property
    def draws_per_patch(self) -> int:
        """Chosen or not, what happens, which other patch."""
        return 3

    def predict(
        self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n 3"]
    ) -> tuple[Float[Tensor, "b n o"], Bool[Tensor, "b n"], Bool[Tensor, "b n"]]:
        """Outputs for every patch, which were corrupted, and which of these became another embedding."""
        x = self.net.normalise(images)
        patches, chosen, changed = corrupt(self.model.patch_embed(x), self.mask_token, draws, self.corrupted)
        tokens = self.model.encode(self.model.assemble(patches, self.config.grid))
        tokens = self.last_norm(tokens)[:, self.config.prefix_tokens :]
        return self.decoder(tokens).float(), chosen, changed

    def loss(self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n r"]) -> Float[Tensor, ""]:
        """Cross-entropy of the colour classes, or squared error of the values, over the corrupted patches."""
        outputs, chosen, _ = self.predict(images, draws)
        p = self.config.patch_size
        if self.target == "pixels":
            return F.mse_loss(outputs[chosen], to_patches(self.net.normalise(images).float(), p)[chosen])
        logits = outputs[chosen].unflatten(1, (self.side**2, self.classes_per_cell))
        return F.cross_entropy(logits.flatten(0, 1), colour_classes(images, p, self.side)[chosen].flatten())

    def reconstruct(self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n r"]) -> Shown:
        """Corrupted patches grey, then as predicted; a patch that was kept is predicted too."""
        outputs, chosen, _ = self.predict(images, draws)
        c = self.config
        if self.target != "pixels":
            classes = outputs.unflatten(2, (self.side**2, self.classes_per_cell)).argmax(-1)
            colours = colour_patches(classes, c.channels, c.patch_size, self.side)
            each = (c.channels, c.patch_size**2)
            outputs = ((colours.unflatten(2, each) - self.net.mean[..., 0]) / self.net.std[..., 0]).flatten(2)
        return self.draw(images, outputs, chosen, normalised=False)
