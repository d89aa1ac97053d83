"""vit/models/normalise.py against torchvision's transforms."""

import pytest
import torch
from torch import nn
from torchvision.transforms import functional as F

from vit.models import Normalise, VisionTransformer, ViTConfig

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Echo(nn.Linear):
    def forward(self, x):
        return x


def wrap(**options):
    return Normalise(Echo(1, 1), mean=MEAN, std=STD, **options)


def expected(images):
    """As timm and transformers preprocess an 8-bit picture: ToTensor, then Normalize."""
    floats = [F.to_tensor(image.permute(1, 2, 0).numpy()) for image in images]
    return F.normalize(torch.stack(floats), list(MEAN), list(STD))


def test_bytes_and_floats_are_normalised_as_torchvision_does():
    images = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 16, 16)
    assert torch.equal(wrap()(images), expected(images))
    assert torch.equal(wrap(pixels="float")(images.float() / 255), expected(images))
    views = images.expand(2, 1, 3, 16, 16)  # multi-crop
    assert torch.equal(wrap().normalise(views)[1], expected(images))


@pytest.mark.parametrize(
    ("pixels", "images", "message"),
    [
        ("uint8", torch.zeros(1, 3, 2, 2), r"expected uint8 images \(0 to 255\), but got torch.float32"),
        ("float", torch.zeros(1, 3, 2, 2, dtype=torch.uint8), r"expected float images.*but got torch.uint8"),
        ("uint8", torch.zeros(1, 3, 2, 2, dtype=torch.int64), "but got torch.int64"),
        ("float", torch.zeros(1, 1, 2, 2), "expected images of 3 channels, but got 1"),
    ],
)
def test_another_dtype_or_channel_count_than_declared_is_refused(pixels, images, message):
    with pytest.raises(ValueError, match=message):
        wrap(pixels=pixels)(images)


def test_the_state_dict_is_the_models_alone_and_statistics_move_along():
    model = VisionTransformer(ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=1, num_classes=2))
    wrapped = Normalise(model, mean=MEAN, std=STD)
    assert set(wrapped.state_dict()) == {f"model.{name}" for name in model.state_dict()}
    assert wrapped.model is model
    assert wrapped.to("meta").mean.device.type == "meta"


def test_statistics_stay_float32_and_images_take_the_models_dtype_when_cast():
    wrapped = wrap().to(torch.bfloat16)
    assert wrapped.mean.dtype == wrapped.std.dtype == torch.float32
    assert torch.equal(wrapped.mean.flatten(), torch.tensor(MEAN))
    images = torch.randint(0, 256, (1, 3, 4, 4), dtype=torch.uint8)
    assert torch.equal(wrapped(images), expected(images).bfloat16())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": (0.1, 0.2)}, "one mean and one std per channel"),
        ({"mean": (), "std": ()}, "one mean and one std per channel"),
        ({"std": (0.1, 0.0, 0.1)}, "a std above 0"),
        ({"pixels": "int"}, '"uint8" or "float", but got'),
    ],
)
@pytest.mark.usefixtures("as_users_run")
def test_wrong_statistics_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Normalise(Echo(1, 1), **{"mean": MEAN, "std": STD, **options})


def test_one_channel_works():
    grey = Normalise(Echo(1, 1), mean=(0.5,), std=(0.25,))
    assert torch.equal(grey(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)), torch.full((1, 1, 2, 2), 2.0))
