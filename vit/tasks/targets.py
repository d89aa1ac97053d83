"""What pre-training predicts of a patch: its pixels, or its colours in 3 bits a channel; and the way back to pixels."""

import torch
from jaxtyping import Float, Int64, Num
from torch import Tensor
from torch.nn import functional as F

from vit.models.positions import Grid

LEVELS = 8
"""3 bits of each channel."""


def to_patches(images: Num[Tensor, "b c h w"], patch_size: int) -> Num[Tensor, "b n p"]:
    """Patches in raster order, flattened as the patch embedding multiplies them: by channel, then by row.

    Args:
        images: sides that P divides.
        patch_size: side P in pixels.
    """
    cut = images.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))  # (b, c, rows, p, columns, p)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def to_images(patches: Num[Tensor, "b n p"], grid: Grid, patch_size: int) -> Num[Tensor, "b c h w"]:
    """The images that `to_patches` cut.

    Args:
        patches: in raster order.
        grid: their rows and columns.
        patch_size: side P in pixels.
    """
    cut = patches.unflatten(2, (-1, patch_size, patch_size)).unflatten(1, grid)  # (b, rows, columns, c, p, p)
    return cut.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def statistics(patches: Float[Tensor, "b n p"]) -> tuple[Float[Tensor, "b n 1"], Float[Tensor, "b n 1"]]:
    """Mean and standard deviation of each patch over all of its values, as MAE's code takes them."""
    mean, variance = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
    return mean, (variance + 1e-6).sqrt()


def normalised(patches: Float[Tensor, "b n p"]) -> Float[Tensor, "b n p"]:
    """Each patch less its mean, over its deviation (He et al. 2022, section 3); one of a single colour becomes 0."""
    mean, std = statistics(patches)
    return (patches - mean) / std


def colour_classes(images: Num[Tensor, "b c h w"], patch_size: int, side: int = 1) -> Int64[Tensor, "b n s"]:
    """Mean colours of each patch in 3 bits a channel, as class numbers (ViT, B.1.2).

    With R, G, B in 0..7 the class is 64 R + 8 G + B, one of 512; a picture of one channel has 8 classes. A grey
    picture in three channels uses only the 8 classes with R = G = B, and the other 504 are soon ruled out.

    Args:
        images: pixels, uint8 or floats in [0, 1].
        patch_size: side P in pixels.
        side: cells along a side of the patch, each with its own mean; 1 is the whole patch, 4 the paper's 4x4.
    """
    values = images.float() if images.dtype == torch.uint8 else images.float() * 255
    patches = to_patches(values, patch_size)
    flat = patches.flatten(0, 1).unflatten(1, (images.shape[1], patch_size, patch_size))
    means = F.adaptive_avg_pool2d(flat, side).flatten(2)  # (b · n, c, s)
    bits = (means / (256 / LEVELS)).long().clamp(0, LEVELS - 1)
    powers = LEVELS ** torch.arange(images.shape[1] - 1, -1, -1, device=images.device)
    return (bits * powers[:, None]).sum(1).unflatten(0, patches.shape[:2])


def colour_patches(
    classes: Int64[Tensor, "b n s"], channels: int, patch_size: int, side: int = 1
) -> Float[Tensor, "b n p"]:
    """Patches of the colours in the middle of each class, in [0, 1]: the way back from `colour_classes`.

    Args:
        classes: of each cell.
        channels: C of the images.
        patch_size: side P in pixels.
        side: cells along a side of the patch.
    """
    powers = LEVELS ** torch.arange(channels - 1, -1, -1, device=classes.device)
    bits = classes[..., None, :] // powers[:, None] % LEVELS  # (b, n, c, s)
    cells = ((bits + 0.5) / LEVELS).flatten(0, 1).unflatten(-1, (side, side))
    grown = F.interpolate(cells, size=(patch_size, patch_size), mode="nearest")
    return grown.flatten(1).unflatten(0, classes.shape[:2])
