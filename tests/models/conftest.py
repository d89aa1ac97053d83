"""What the model tests share."""

import pytest
import torch
from torch import nn


@pytest.fixture
def randomise():
    """Every parameter non-trivial: LayerScale, norms, biases and the zero head included."""

    def fill(model: nn.Module, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale = 0.5 if parameter.ndim < 2 else 0.15
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
                if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
                    parameter.add_(1)
        return model.eval()

    return fill


@pytest.fixture
def error_of():
    """The largest difference, relative to the largest value of the reference, which itself must vary."""

    def measure(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        assert ours.shape == theirs.shape
        assert theirs.std() > 0.05
        return float((ours - theirs).abs().max() / theirs.abs().max())

    return measure
