"""Mixup and CutMix of a batch, on its device, for any batch size, from a given seed."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from vit.data.sampler import mix


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """What training batches are mixed by.

    Args:
        mixup: alpha of mixup; 0 switches it off. Train accuracy then counts the class with the larger share.
        cutmix: alpha of CutMix; with both on, a coin chooses one per batch.

    Raises:
        ValueError: an alpha below 0.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0:
            raise ValueError(f"expected mixup and cutmix of at least 0, but got {self.mixup} and {self.cutmix}.")


UNMIXED = Mixing()


def mixed(
    images: UInt8[Tensor, "b c h w"],
    labels: Int64[Tensor, " b"],
    *,
    classes: int,
    seed: int,
    mixup: float = 0.0,
    cutmix: float = 0.0,
) -> tuple[UInt8[Tensor, "b c h w"], Float[Tensor, "b k"]]:
    """Mix each picture with its neighbour in the batch (the first with the last); a single picture stays as it is.

    One share is drawn per batch, from Beta(alpha, alpha). Where both are on, a coin chooses one of them per batch.

    Args:
        images: as the datamodule gives them.
        labels: class numbers.
        classes: number of classes K.
        seed: of all that is drawn.
        mixup: alpha of mixup (Zhang et al., 2018, equation 2); 0 switches it off.
        cutmix: alpha of CutMix (Yun et al., 2019, equations 1 and 2); 0 switches it off.

    Returns:
        Pictures, and targets whose rows sum to 1.
    """
    targets = torch.nn.functional.one_hot(labels, classes).float()
    if len(images) == 1 or not (mixup or cutmix):
        return images, targets
    # Drawn on the CPU, so that every device mixes alike.
    draw = torch.Generator().manual_seed(mix(seed))
    cut = bool(cutmix) and (not mixup or float(torch.rand((), generator=draw)) < 0.5)
    share = _beta(cutmix if cut else mixup, draw)
    other = images.roll(1, 0)
    if cut:
        top, left, bottom, right = _box(images.shape[-2], images.shape[-1], share, draw)
        images = images.clone()
        images[..., top:bottom, left:right] = other[..., top:bottom, left:right]
        # What is left of the picture after the box was clipped at its edges.
        share = 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])
    else:
        images = (images * share + other * (1 - share)).round().to(torch.uint8)
    return images, targets * share + targets.roll(1, 0) * (1 - share)


def _beta(alpha: float, draw: torch.Generator) -> float:
    one, two = torch._standard_gamma(torch.full((2,), alpha, dtype=torch.float64), generator=draw).tolist()
    return one / (one + two) if one + two > 0 else 1.0


def _box(height: int, width: int, share: float, draw: torch.Generator) -> tuple[int, int, int, int]:
    """A box of 1 - share of the area around a uniform centre, clipped at the edges."""
    side = (1 - share) ** 0.5
    y, x = (torch.rand(2, generator=draw) * torch.tensor([height, width])).tolist()
    half_h, half_w = height * side / 2, width * side / 2
    top, bottom = max(0, round(y - half_h)), min(height, round(y + half_h))
    left, right = max(0, round(x - half_w)), min(width, round(x + half_w))
    return top, left, bottom, right
