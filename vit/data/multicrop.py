"""Several views of each training picture: large crops at the model's size, small crops at a smaller one."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from vit.data.augment import Augmentation
from vit.data.batch import Sample
from vit.data.transforms import Preprocessing, Training


@dataclass(frozen=True, kw_only=True)
class MultiCrop:
    """Which views are made of a picture (Caron et al. 2020, SwAV; 2021, DINO, section 3.1).

    Two global views at the model's image size and some local ones at a smaller size. Their shape, flips and colours
    are drawn as `data.augment` says, each view on its own; how much of the picture they show is said here.

    Args:
        global_scale: least and largest share of the picture's area in a global view, in (0, 1].
        local_scale: the same for local views.
        local_views: number of local views; 0 leaves them out.
        local_size: their side in pixels, which the patch divides; None is about 3/7 of the image size, as 96 of 224.

    Raises:
        ValueError: a value out of its range.
    """

    global_scale: tuple[float, float] = (0.4, 1.0)
    local_scale: tuple[float, float] = (0.05, 0.4)
    local_views: int = 8
    local_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("global_scale", "local_scale"):
            least, most = getattr(self, name)
            if not 0 < least <= most <= 1:
                raise ValueError(f"expected {name} with 0 < least <= most <= 1, but got {least} and {most}.")
        if self.local_views < 0:
            raise ValueError(f"expected local_views of at least 0, but got {self.local_views}.")
        if self.local_size is not None and self.local_size < 1:
            raise ValueError(f"expected local_size of at least 1 pixel, but got {self.local_size}.")

    def pixels(self, whole: int) -> int:
        """Pixels of all views of a picture.

        Args:
            whole: of one global view.
        """
        return GLOBAL_VIEWS * whole + self.local_views * (self.local_size or 0) ** 2

    def describe(self) -> str:
        """One line for the plan."""
        (a, b), (c, d) = self.global_scale, self.local_scale
        text = f"{GLOBAL_VIEWS} views of {100 * a:g}-{100 * b:g} % of the area"
        return text + (f", {self.local_views} of {100 * c:g}-{100 * d:g} %" if self.local_views else "")


GLOBAL_VIEWS = 2
"""The teacher of DINO sees two views of a picture."""


class Views(NamedTuple):
    """A batch of several views: as `Batch`, with a leading view axis.

    Two tensors, because their sizes differ: resizing local views to the size of the global ones would waste most
    of what makes them cheap.

    Args:
        images: (v, b, c, h, w) uint8, the global views.
        local: (l, b, c, s, s) uint8, the local ones; None without any.
        labels: as in `Batch`.
        index: as in `Batch`.
        weight: as in `Batch`.
    """

    images: UInt8[Tensor, "v b c h w"]
    local: UInt8[Tensor, "l b c s s"] | None
    labels: Tensor
    index: Int64[Tensor, " b"]  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    weight: Float[Tensor, " b"] | None = None


class ViewsTransform:
    """Upright picture -> all of its views, drawn from torch's default generator.

    Args:
        preprocessing: size of the global views, filter, mean and std.
        augment: shape of the crops, flips and colours.
        views: which views; `local_size` is set.

    Raises:
        ValueError: `crop_scale` is set, which would do nothing.
    """

    def __init__(self, preprocessing: Preprocessing, augment: Augmentation, views: MultiCrop) -> None:
        if augment.crop_scale is not None:
            raise ValueError(
                "expected the shares of a picture in model.views.global_scale and local_scale where several views are "
                f"made of it, but got data.augment.crop_scale {augment.crop_scale}: leave that out."
            )
        self.views = views
        self.large = _crops(preprocessing, augment, views.global_scale, preprocessing.image_size)
        self.small = None
        if views.local_views:
            assert views.local_size is not None
            self.small = _crops(preprocessing, augment, views.local_scale, views.local_size)

    def __call__(self, picture: Image.Image) -> tuple[Tensor, ...]:
        """Global views (v, c, h, w), and local views (l, c, s, s) where there are any."""
        made = (torch.stack([self.large(picture) for _ in range(GLOBAL_VIEWS)]),)
        if self.small is None:
            return made
        return *made, torch.stack([self.small(picture) for _ in range(self.views.local_views)])


def collate_views(samples: list[Sample]) -> Views:
    """Stack samples of `ViewsTransform`; the view axis comes first."""
    images, labels, index, weight = zip(*samples, strict=True)
    stacked = [part.transpose(0, 1).contiguous() for part in default_collate(list(images))]
    return Views(
        images=stacked[0],
        local=stacked[1] if len(stacked) > 1 else None,
        labels=torch.tensor(labels),
        index=torch.tensor(index),
        weight=None if weight[0] is None else torch.tensor(weight),
    )


def _crops(
    preprocessing: Preprocessing, augment: Augmentation, scale: tuple[float, float], size: int | tuple[int, int]
) -> Training:
    drawn = augment.resolve()
    crop = replace(drawn, crop_scale=scale, crop_ratio=drawn.crop_ratio or _RATIO)
    return Training(replace(preprocessing, image_size=size), crop)


_RATIO = (3 / 4, 4 / 3)  # where training shows the whole picture
