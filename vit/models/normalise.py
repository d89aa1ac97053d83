"""From pixels to what a model works on: the one place where mean and std are applied."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

Pixels = Literal["uint8", "float"]


class Normalise(nn.Module):
    """A model that takes pixels: (value - mean) / std, then `model`.

    Mean and std are buffers outside the state dict. They stay float32 when the module is cast; the model gets
    images in the dtype of its own weights.

    Args:
        model: takes normalised floats (b, c, h, w).
        mean: per channel, of values in [0, 1].
        std: per channel, above 0.
        pixels: what `forward` takes: `uint8` (0 to 255) or `float` (0 to 1); never guessed from values.

    Raises:
        ValueError: mean and std of different lengths, a std that is not above 0, or an unknown `pixels`.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, *, mean: Sequence[float], std: Sequence[float], pixels: Pixels = "uint8"
    ) -> None:
        super().__init__()
        if len(mean) != len(std) or not mean:
            raise ValueError(f"expected one mean and one std per channel, but got mean={mean} and std={std}.")
        if min(std) <= 0:
            raise ValueError(f"expected a std above 0 for each channel, but got {std}.")
        if pixels not in ("uint8", "float"):
            raise ValueError(f'expected pixels to be "uint8" or "float", but got {pixels!r}.')
        self.model = model
        self.pixels = pixels
        for name, values in (("mean", mean), ("std", std)):
            buffer = torch.tensor(values, dtype=torch.float32)[:, None, None]
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, images: Num[Tensor, "b c h w"]) -> Tensor:
        """What the model gives for these images.

        Raises:
            ValueError: another dtype than declared, or another number of channels than mean and std have.
        """
        return self.model(self.normalise(images))

    def normalise(self, images: Num[Tensor, "*b c h w"]) -> Float[Tensor, "*b c h w"]:
        """The images as the model works on them."""
        right = images.dtype == torch.uint8 if self.pixels == "uint8" else images.is_floating_point()
        if not right:
            wanted = "uint8 images (0 to 255)" if self.pixels == "uint8" else "float images (0 to 1)"
            raise ValueError(f"expected {wanted}, but got {images.dtype}: convert them, or change `pixels`.")
        if images.shape[-3] != len(self.mean):
            raise ValueError(f"expected images of {len(self.mean)} channels, but got {images.shape[-3]}.")
        values = images.float() / 255 if self.pixels == "uint8" else images.float()
        return ((values - self.mean) / self.std).to(next(self.model.parameters()).dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Normalise":
        mean, std = self.mean, self.std
        super()._apply(fn, recurse)
        # `fn` moves and casts: follow the move, keep the values.
        self.mean, self.std = mean.to(self.mean.device), std.to(self.std.device)
        return self
