"""Upright picture -> uint8 tensor: for evaluation as the weights were evaluated, for training at random.

Both work on PIL pictures, whose resize always smooths before it shrinks (antialias).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from vit.data.augment import Augmentation, Drawn, Finish
from vit.data.decode import WHITE, View

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How a model wants its pictures: part of the model, saved and exported with it.

    Args:
        image_size: side, or (height, width), in pixels.
        mean: per channel, of values in [0, 1]; its length is the number of channels.
        std: per channel.
        interpolation: filter of the resize.
        crop_pct: share of the resized side that the central crop keeps, in (0, 1].
        crop_mode: `center`: the short side is resized, the long one cropped; `squash`: both sides are
            resized, the aspect ratio is lost (training crops then have the picture's own shape); `border`: the
            long side is resized, the short one padded with the mean.
        background: red, green, blue (0-255) behind transparent pixels.
        value_range: values of 16-bit, 32-bit and float pictures that stand for black and white.
        orient: turn pictures upright by their EXIF orientation.

    Raises:
        ValueError: a value out of its range.
    """

    image_size: int | tuple[int, int] = 224
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: Interpolation = "bicubic"
    crop_pct: float = 0.9
    crop_mode: Literal["center", "squash", "border"] = "center"
    background: tuple[int, int, int] = WHITE
    value_range: tuple[float, float] | None = None
    orient: bool = True

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"expected an image_size of at least 1 pixel, but got {self.image_size}.")
        if not self.mean or len(self.std) != len(self.mean):
            raise ValueError(f"expected a mean and a std per channel, but got mean={self.mean}, std={self.std}.")
        if min(self.std) <= 0:
            raise ValueError(f"expected a std above 0, but got {self.std}.")
        if self.interpolation not in _RESAMPLING:
            raise ValueError(
                f"expected an interpolation out of {', '.join(_RESAMPLING)}, but got {self.interpolation!r}."
            )
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"expected a crop_pct above 0 and at most 1, but got {self.crop_pct}.")
        if self.crop_mode not in ("center", "squash", "border"):
            raise ValueError(f"expected crop_mode center, squash or border, but got {self.crop_mode!r}.")
        if self.value_range is not None and self.value_range[0] >= self.value_range[1]:
            raise ValueError(f"expected a value_range (black, white) that rises, but got {self.value_range}.")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return (self.image_size,) * 2 if isinstance(self.image_size, int) else self.image_size

    @property
    def channels(self) -> int:
        """Number of channels: 3 (RGB), 1 (grey), or others, of .npy and TIFF files."""
        return len(self.mean)

    def with_channels(self, channels: int) -> "Preprocessing":
        """The same for another number of channels, which all take the mean of the present ones."""
        if channels == self.channels:
            return self
        mean, std = ((sum(v) / len(v),) * channels for v in (self.mean, self.std))
        return replace(self, mean=mean, std=std)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML; `from_dict` reads them back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Preprocessing":
        """Rebuild from `to_dict`.

        Raises:
            ValueError: an unknown name.
        """
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            known = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"expected the preprocessing values {known}, but got also {', '.join(unknown)}.")
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)

    @classmethod
    def from_timm(cls, config: Mapping[str, Any]) -> "Preprocessing":
        """From a timm `pretrained_cfg`; what it leaves open takes timm's defaults.

        Args:
            config: holds `input_size` (channels, height, width) and any of mean, std, interpolation,
                crop_pct, crop_mode.
        """
        channels, height, width = config["input_size"]
        known = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
        given = {name: config[name] for name in known if name in config and config[name] is not None}
        values = {
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
            "interpolation": "bicubic",
            "crop_pct": 0.875,
            **given,
        }
        values |= {"mean": tuple(values["mean"]), "std": tuple(values["std"])}
        image_size = height if height == width else (height, width)
        return cls(image_size=image_size, **values).with_channels(channels)

    def to_timm(self) -> dict[str, Any]:
        """The values that timm's `pretrained_cfg` has names for."""
        return {
            "input_size": [self.channels, *self.size],
            "mean": list(self.mean),
            "std": list(self.std),
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "crop_mode": self.crop_mode,
        }


Transform = Callable[[Image.Image], UInt8[Tensor, "c h w"]]


def evaluation_transform(preprocessing: Preprocessing) -> Transform:
    """The one way to turn an upright picture into a tensor for evaluation and prediction.

    Equal, bit for bit, to timm's `create_transform(is_training=False)` before its normalisation.
    """
    return _Evaluation(preprocessing)


def training_transform(preprocessing: Preprocessing, augmentation: Augmentation) -> "Training | Still":
    """What training draws, from torch's default generator: `Training`, or `Still` where nothing is cropped.

    Raises:
        ValueError: an augmentation that the number of channels does not allow.
    """
    drawn = augmentation.resolve()
    return Still(preprocessing, drawn) if drawn.crop_scale is None else Training(preprocessing, drawn)


class _Evaluation:
    def __init__(self, preprocessing: Preprocessing) -> None:
        self.preprocessing = preprocessing

    def __call__(self, picture: Image.Image) -> UInt8[Tensor, "c h w"]:
        p = self.preprocessing
        width, height = self._resized(*picture.size)
        if (width, height) != picture.size:
            picture = picture.resize((width, height), _RESAMPLING[p.interpolation])
        if p.crop_mode == "border":
            picture = self._padded(picture)
        return F.pil_to_tensor(F.center_crop(picture, list(p.size)))

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height before the crop, rounded as timm and torchvision round them."""
        p = self.preprocessing
        target_h, target_w = (math.floor(side / p.crop_pct) for side in p.size)
        if p.crop_mode == "squash":
            return target_w, target_h
        ratio_h, ratio_w = height / target_h, width / target_w
        if p.crop_mode == "center" and target_h == target_w:
            if width <= height:
                return target_w, max(1, int(target_w * height / width))
            return max(1, int(target_h * width / height)), target_h
        ratio = max(ratio_h, ratio_w) if p.crop_mode == "border" else min(ratio_h, ratio_w)
        return max(1, round(width / ratio)), max(1, round(height / ratio))

    def _padded(self, picture: Image.Image) -> Image.Image:
        height, width = self.preprocessing.size
        extra_w, extra_h = max(0, width - picture.width), max(0, height - picture.height)
        padding = [extra_w // 2, extra_h // 2, (extra_w + 1) // 2, (extra_h + 1) // 2]
        return F.pad(picture, padding, fill=[round(255 * value) for value in self.preprocessing.mean])


class Training:
    """The random transform of training, in two parts: what to look at, and what to do with it.

    The crop is drawn before the picture is decoded, so that no more is decoded than it needs; see
    `vit.data.decode.decode_view`.
    """

    def __init__(self, preprocessing: Preprocessing, drawn: Drawn) -> None:
        self.preprocessing = preprocessing
        self.resample = _RESAMPLING[preprocessing.interpolation]
        assert drawn.crop_scale is not None
        assert drawn.crop_ratio is not None
        self.scale, self.ratio = drawn.crop_scale, drawn.crop_ratio
        self.rest = Finish(drawn, mean=preprocessing.mean, std=preprocessing.std)

    def view(self, width: int, height: int) -> View:
        """Draw the crop of an upright picture of this size, as torchvision's `RandomResizedCrop` draws it.

        Where evaluation squashes pictures, the crop's width over height counts in those of the picture: training then
        sees what evaluation sees, and long pictures are not cut to their middle.
        """
        shape = width / height if self.preprocessing.crop_mode == "squash" else 1.0
        ratio = (shape * self.ratio[0], shape * self.ratio[1])
        left, top, crop_width, crop_height = draw_crop(width, height, self.scale, ratio)
        edges = (left, top, left + crop_width, top + crop_height)
        return View(edges, width=self.preprocessing.size[1], height=self.preprocessing.size[0])

    def finish(self, picture: Image.Image | UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c h w"]:
        """Draw the rest and apply it to the resized crop."""
        return self.rest(picture if isinstance(picture, Tensor) else F.pil_to_tensor(picture))

    def __call__(self, picture: Image.Image) -> UInt8[Tensor, "c h w"]:
        """Crop, resize and finish a decoded picture."""
        view = self.view(*picture.size)
        return self.finish(picture.resize((view.width, view.height), self.resample, box=view.box))


def draw_crop(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Left, top, width and height of a crop, by the draws of torchvision's `RandomResizedCrop`.

    Its own function costs a fifth of the decoding of a small photograph, most of it for finding out the size.

    Args:
        width: of the picture.
        height: of the picture.
        scale: least and largest share of the picture's area.
        ratio: least and largest width / height.
    """
    low, high = (math.log(value) for value in ratio)
    for _ in range(10):
        area = width * height * torch.empty(1).uniform_(*scale).item()
        shape = torch.exp(torch.empty(1).uniform_(low, high)).item()
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(0, height - h + 1, (1,)).item())
            return int(torch.randint(0, width - w + 1, (1,)).item()), top, w, h
    # No such crop fits: the largest one of the nearest ratio, in the middle.
    shape = min(max(width / height, ratio[0]), ratio[1])
    w, h = min(width, round(height * shape)), min(height, round(width / shape))
    return (width - w) // 2, (height - h) // 2, w, h


class Still:
    """The whole picture as evaluation shows it, bit for bit; only what follows the resize may be drawn."""

    def __init__(self, preprocessing: Preprocessing, drawn: Drawn) -> None:
        self.show = evaluation_transform(preprocessing)
        self.rest = Finish(drawn, mean=preprocessing.mean, std=preprocessing.std)

    def __call__(self, picture: Image.Image) -> UInt8[Tensor, "c h w"]:
        """Resize, crop in the middle, and finish."""
        return self.rest(self.show(picture))
