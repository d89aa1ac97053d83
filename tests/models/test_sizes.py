"""vit/models/sizes.py against timm's parameter counts and the ViT paper's table 1."""

import math

import pytest
import timm
import torch

from vit.models import VisionTransformer, vit_config


def count(model) -> int:
    return sum(math.prod(parameter.shape) for parameter in model.parameters())


def build(name, **options):
    with torch.device("meta"):
        return VisionTransformer(vit_config(name, **options))


@pytest.mark.parametrize(
    ("name", "timms"),
    [
        ("Ti/16", "vit_tiny_patch16_224"),
        ("S/32", "vit_small_patch32_224"),
        ("S/16", "vit_small_patch16_224"),
        ("S/8", "vit_small_patch8_224"),
        ("B/32", "vit_base_patch32_224"),
        ("B/16", "vit_base_patch16_224"),
        ("B/8", "vit_base_patch8_224"),
        ("L/32", "vit_large_patch32_224"),
        ("L/16", "vit_large_patch16_224"),
        ("L/14", "vit_large_patch14_224"),
        ("H/14", "vit_huge_patch14_224"),
        ("g/14", "vit_giant_patch14_224"),
    ],
)
def test_a_size_has_exactly_timms_parameters(name, timms):
    with torch.device("meta"):
        theirs = timm.create_model(timms, num_classes=1000)
    ours = build(name)
    assert count(ours) == count(theirs)
    shapes = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == shapes


@pytest.mark.parametrize(("name", "millions"), [("B/16", 86), ("L/16", 307), ("H/14", 632)])
def test_a_size_has_the_papers_parameters_within_one_and_a_half_percent(name, millions):
    assert count(build(name)) / 1e6 == pytest.approx(millions, rel=0.015)


def test_any_patch_from_4_to_32_and_any_option_can_be_named():
    for patch in (4, 7, 32):
        assert vit_config(f"Ti/{patch}", image_size=224).patch_size == patch
    config = vit_config("S/4", image_size=(32, 48), num_classes=0, depth=3, pool="mean")
    assert (config.size, config.depth, config.pool, config.width) == ((32, 48), 3, "mean", 384)


@pytest.mark.parametrize(
    ("name", "near"),
    [("b/16", "B/16"), ("B16", "B/16"), ("B/64", "B/16"), ("Tiny/8", "Ti/8"), ("", "Ti/4"), ("B/³", "B/32")],
)
def test_a_wrong_name_gets_the_nearest_right_ones(name, near):
    with pytest.raises(ValueError, match="did you mean") as error:
        vit_config(name)
    assert near in str(error.value)
    assert repr(name) in str(error.value)


def test_a_wrong_option_gets_the_nearest_right_one():
    with pytest.raises(ValueError, match="did you mean drop_path"):
        vit_config("B/16", droppath=0.1)
