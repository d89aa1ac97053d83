"""What training draws at random: presets, single options over them, and the part that follows the resize."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

Preset = Literal["none", "light", "standard", "strong"]
Policy = Literal["none", "trivial", "rand", "augmix", "three"]

# Policy: its least, usual and greatest strength.
_STRENGTHS = {"rand": (0, 9, 30), "augmix": (1, 3, 10)}
_POLICIES = ("none", "trivial", "three", *_STRENGTHS)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """An augmentation with every value decided; see `Augmentation` for their meaning.

    Args:
        crop_scale: None shows the picture as evaluation does.
        crop_ratio: goes with crop_scale.
        strength: None for a policy's usual one.

    Raises:
        ValueError: a value out of its range, or one that nothing uses.
    """

    crop_scale: tuple[float, float] | None
    crop_ratio: tuple[float, float] | None
    flip: float = 0.5
    policy: Policy = "none"
    strength: int | None = None
    color_jitter: float = 0.0
    erasing: float = 0.0

    def __post_init__(self) -> None:
        scale, ratio = self.crop_scale, self.crop_ratio
        if (scale is None) != (ratio is None):
            raise ValueError(
                f"expected crop_scale and crop_ratio together, but got crop_scale={scale} and crop_ratio={ratio}. "
                "The preset none crops as evaluation does: give both, or another preset."
            )
        if scale is not None and not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"expected crop_scale with 0 < least <= most <= 1, but got {scale}.")
        if ratio is not None and not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"expected crop_ratio with 0 < least <= most, but got {ratio}.")
        if self.policy not in _POLICIES:
            raise ValueError(f"expected a policy out of {', '.join(_POLICIES)}, but got {self.policy!r}.")
        for name, value in (("flip", self.flip), ("erasing", self.erasing)):
            if not 0 <= value <= 1:
                raise ValueError(f"expected a {name} probability in [0, 1], but got {value}.")
        if not 0 <= self.color_jitter <= 1:
            raise ValueError(f"expected a color_jitter in [0, 1], but got {self.color_jitter}.")
        if self.strength is not None:
            if self.policy not in _STRENGTHS:
                raise ValueError(
                    f"expected strength with the policy {' or '.join(_STRENGTHS)}, but the policy is {self.policy}. "
                    "Leave it out."
                )
            least, _, most = _STRENGTHS[self.policy]
            if not least <= self.strength <= most:
                raise ValueError(
                    f"expected a strength from {least} to {most} for the policy {self.policy}, but got {self.strength}."
                )

    def policy_strength(self) -> int | None:
        """The strength that counts; None for a policy without one."""
        usual = _STRENGTHS[self.policy][1] if self.policy in _STRENGTHS else None
        return usual if self.strength is None else self.strength


_LIGHT_CROP, _CROP = (0.6, 1.0), (0.08, 1.0)
_LIGHT_RATIO, _RATIO = (0.85, 1.18), (3 / 4, 4 / 3)

PRESETS: dict[str, Drawn] = {
    "none": Drawn(crop_scale=None, crop_ratio=None, flip=0.0),
    "light": Drawn(crop_scale=_LIGHT_CROP, crop_ratio=_LIGHT_RATIO),
    "standard": Drawn(crop_scale=_CROP, crop_ratio=_RATIO),
    "strong": Drawn(crop_scale=_CROP, crop_ratio=_RATIO, policy="trivial", erasing=0.25),
}


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What training draws at random for each picture: a preset, and options that go over it.

    Presets: `none` draws nothing, training sees just what evaluation sees. `light`: crops of 60-100 % of the
    area, nearly square, and flips. `standard`: crops of 8-100 % (Szegedy et al. 2015, "Going Deeper with
    Convolutions", section 6) and flips. `strong`: standard with TrivialAugment and with erasing at 0.25 as in
    DeiT (Touvron et al. 2021, table 9). A value that is set here or by the source wins over the preset.

    Args:
        preset: none, light, standard or strong.
        crop_scale: least and largest share of the picture's area that a crop keeps, in (0, 1].
        crop_ratio: least and largest width / height of the crop.
        flip: probability of a left-right flip; 0 where left and right matter, as with digits.
        policy: `trivial`: one operation at any strength (Müller and Hutter 2021, "TrivialAugment", the wide
            space). `rand`: two operations at one strength (Cubuk et al. 2020, "RandAugment"). `augmix`: a mix
            of three chains of operations (Hendrycks et al. 2020, "AugMix"; without those that resemble
            ImageNet-C's corruptions). `three`: one of grey, solarised, blurred (Touvron et al. 2022,
            "DeiT III", section 3). None of them suits more than 3 channels.
        strength: of `rand`, 0-30, usually 9; of `augmix`, 1-10, usually 3.
        color_jitter: largest relative change of brightness, contrast and saturation, each drawn on its own;
            DeiT III takes 0.3 along with `three`.
        erasing: probability that a rectangle of 2-33 % of the area becomes noise of the preprocessing's mean
            and standard deviation (Zhong et al. 2020, "Random Erasing").

    Raises:
        ValueError: a value out of its range, or one that nothing uses.
    """

    preset: Preset = "standard"
    crop_scale: tuple[float, float] | None = None
    crop_ratio: tuple[float, float] | None = None
    flip: float | None = None
    policy: Policy | None = None
    strength: int | None = None
    color_jitter: float | None = None
    erasing: float | None = None

    def __post_init__(self) -> None:
        self.resolve()

    def resolve(self) -> Drawn:
        """The preset's values with one's own over them."""
        if self.preset not in PRESETS:
            raise ValueError(f"expected a preset out of {', '.join(PRESETS)}, but got {self.preset!r}.")
        return replace(PRESETS[self.preset], **{name: getattr(self, name) for name in self._own()})

    def describe(self) -> str:
        """One line for the plan: the preset, what goes over it, and what that makes."""
        drawn, own = self.resolve(), self._own()
        scale, ratio = drawn.crop_scale, drawn.crop_ratio
        if scale is None or ratio is None:
            parts = ["the whole of what evaluation shows"]
        else:
            area = f"{100 * scale[0]:g}-{100 * scale[1]:g} % of the area"
            parts = [f"crops of {area}, width/height {ratio[0]:.2f}-{ratio[1]:.2f}"]
        strength = drawn.policy_strength()
        if drawn.flip:
            parts.append(f"flip {drawn.flip:g}")
        if drawn.policy != "none":
            parts.append(f"policy {drawn.policy}" + ("" if strength is None else f" at strength {strength}"))
        if drawn.color_jitter:
            parts.append(f"color_jitter {drawn.color_jitter:g}")
        if drawn.erasing:
            parts.append(f"erasing {drawn.erasing:g}")
        return f"{self.preset}{' but for ' + ', '.join(own) if own else ''}: {', '.join(parts)}"

    def _own(self) -> list[str]:
        return [field.name for field in fields(Drawn) if getattr(self, field.name) is not None]


class Finish:
    """What is drawn after the resize, for the small tensor: flip, policy, colour jitter, erasing, in this order.

    All of it comes from torch's default generator, which the caller seeds.

    Args:
        drawn: what to draw.
        mean: per channel, of values in [0, 1]; what an operation moves into view has this colour.
        std: per channel, of the noise of erasing.

    Raises:
        ValueError: a policy or colour jitter for other than 1 or 3 channels.
    """

    def __init__(self, drawn: Drawn, *, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        if len(mean) not in (1, 3) and (drawn.policy != "none" or drawn.color_jitter):
            raise ValueError(
                f"expected 1 or 3 channels for policies and color_jitter, but there are {len(mean)}. Set "
                "data.augment.policy to none and color_jitter to 0; crops, flips and erasing take any number."
            )
        self.flip, self.erasing = drawn.flip, drawn.erasing
        self.changes = _changes(drawn, [float(round(255 * value)) for value in mean])
        self.eraser = v2.RandomErasing(value="random") if drawn.erasing else None  # type: ignore[arg-type]
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, image: UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c h w"]:
        """Draw and apply."""
        image = image.flip(-1) if float(torch.rand(())) < self.flip else image
        for change in self.changes:
            image = change(image)
        if self.eraser is not None and float(torch.rand(())) < self.erasing:
            image = self._erased(image, self.eraser.make_params([image]))
        return image

    def _erased(self, image: UInt8[Tensor, "c h w"], box: dict[str, Any]) -> UInt8[Tensor, "c h w"]:
        """After normalisation the noise has mean 0 and standard deviation 1, but for what 8 bits cut off."""
        if box["v"] is None:  # torchvision found no rectangle that fits
            return image
        noise = (255 * (box["v"] * self.std + self.mean)).round().clamp(0, 255).to(torch.uint8)
        return F.erase(image, **{**box, "v": noise})


def _changes(drawn: Drawn, fill: list[float]) -> list[nn.Module]:
    look = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": fill}
    changes: list[nn.Module] = []
    strength = drawn.policy_strength()
    if drawn.policy == "trivial":
        changes.append(v2.TrivialAugmentWide(**look))
    elif drawn.policy == "rand":
        changes.append(v2.RandAugment(magnitude=strength, **look))
    elif drawn.policy == "augmix":
        changes.append(v2.AugMix(severity=strength, all_ops=False, **look))
    elif drawn.policy == "three":
        grey = v2.Grayscale(num_output_channels=len(fill))
        blur = v2.GaussianBlur(kernel_size=9, sigma=(0.1, 2.0))
        changes.append(v2.RandomChoice([grey, v2.RandomSolarize(threshold=128, p=1.0), blur]))
    if drawn.color_jitter:
        changes.append(v2.ColorJitter(drawn.color_jitter, drawn.color_jitter, drawn.color_jitter))
    return changes
