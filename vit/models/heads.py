"""From pooled features to logits: the pre-training head, the fine-tuning head, and their exchange."""

from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.models.config import ViTConfig


class PretrainHead(nn.Module):
    """An MLP with one hidden layer and tanh, for pre-training (ViT, 3.1).

    Args:
        width: D of the features and of the hidden layer.
        num_classes: K.
        dropout: rate after the hidden layer.
    """

    def __init__(self, width: int, num_classes: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.out = zero_linear(width, num_classes)

    def forward(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b k"]:
        """Logits; all exactly 0 in a new head."""
        return self.out(self.drop(torch.tanh(self.hidden(features))))


class DistilledHead(nn.Module):
    """Two layers D x K, one for each token: the class token's learns labels, the distillation token's a teacher.

    Their logits are averaged (DeiT, Touvron et al. 2021, section 4). The distillation token is the first register.

    Args:
        width: D of each token.
        num_classes: K.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.labels = zero_linear(width, num_classes)
        self.teacher = zero_linear(width, num_classes)

    def parts(self, features: Float[Tensor, "b f"]) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
        """Logits of the class token and of the distillation token, whose features stand beside each other (f = 2d)."""
        first, second = features.chunk(2, dim=1)
        return self.labels(first), self.teacher(second)

    def forward(self, features: Float[Tensor, "b f"]) -> Float[Tensor, "b k"]:
        """Logits; all exactly 0 in a new head."""
        first, second = self.parts(features)
        return (first + second) / 2


def zero_linear(width: int, num_classes: int) -> nn.Linear:
    """One layer D x K, all zero (ViT, 3.2): its first logits are 0, its first cross-entropy is ln K."""
    layer = nn.Linear(width, num_classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def make_head(config: ViTConfig) -> nn.Module:
    """The head that the configuration names; without classes an identity."""
    if config.num_classes == 0:
        return nn.Identity()
    if config.head == "mlp":
        return PretrainHead(config.width, config.num_classes, dropout=config.dropout)
    if config.head == "distilled":
        return DistilledHead(config.width, config.num_classes)
    return zero_linear(config.width, config.num_classes)


@runtime_checkable
class HasHead(Protocol):
    """A model with a configuration and a head."""

    config: ViTConfig
    head: nn.Module


def swap_head(model: HasHead, num_classes: int) -> None:
    """Replace whichever head is there by a zero-initialised layer D x K, in place (ViT, 3.2).

    Args:
        model: a `VisionTransformer`; its configuration follows.
        num_classes: K, at least 1.

    Raises:
        ValueError: fewer than 1 class.
    """
    if num_classes < 1:
        raise ValueError(f"expected at least 1 class for a new head, but got {num_classes}.")
    config = replace(model.config, num_classes=num_classes, head="linear")
    assert isinstance(model, nn.Module)
    like = next(model.parameters())
    model.head = make_head(config).to(like.device, like.dtype).train(model.training)
    model.config = config
