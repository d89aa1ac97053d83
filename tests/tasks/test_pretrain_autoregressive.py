"""Autoregressive patches: which token depends on which patch, and what is asked of each."""

import pytest
import torch

from vit.models.attention import causal_mask
from vit.tasks.autoregressive import Autoregressive, prefix_mask
from vit.tasks.options import EncoderOptions
from vit.tasks.targets import normalised, to_patches

TINY = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 2}


def tiny(attention, normalise_targets=True, **encoder):
    options = EncoderOptions(**{**TINY, **encoder})
    return Autoregressive(attention=attention, encoder=options, normalise_targets=normalise_targets).eval()


def with_patch_changed(images, patch):
    row, column = divmod(patch, 4)
    changed = images.clone()
    changed[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] ^= 255
    return changed


def moved(a, b):
    """Which predictions differ: entry k - 1 is that of patch k."""
    return (a - b).abs().amax((0, 2)) > 1e-6


def test_the_prefix_mask_by_hand():
    mask = prefix_mask(torch.tensor([1, 3]), 4)[:, 0].int().tolist()
    assert mask[0] == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert mask[1] == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert torch.equal(prefix_mask(torch.tensor([0]), 5)[0, 0], causal_mask(5, torch.device("cpu")))


@torch.no_grad()
@pytest.mark.parametrize("encoder", [{}, {"class_token": False, "pool": "mean"}, {"registers": 2}], ids=str)
def test_a_causal_prediction_depends_on_all_earlier_patches_and_no_later_one(encoder):
    model = tiny("causal", **encoder)
    images, draws = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8), torch.rand(2, 16, 1)
    outputs, counted = model.predict(images, draws)
    assert counted.all(), "all patches but the first are predicted"
    for patch in (0, 6, 15):
        changed = moved(model.predict(with_patch_changed(images, patch), draws)[0], outputs)
        assert changed.tolist() == [k > patch for k in range(1, 16)]


@torch.no_grad()
def test_a_prefix_is_seen_from_both_sides_and_nothing_behind_it_is_seen_early():
    model = tiny("prefix")
    images = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8)
    draws = torch.full((1, 16, 1), 5.5 / 15)  # a prefix of patches 0 to 5
    assert model.prefix_lengths(draws).tolist() == [6]
    outputs, counted = model.predict(images, draws)
    assert counted[0].tolist() == [k >= 6 for k in range(1, 16)]
    inside = moved(model.predict(with_patch_changed(images, 5), draws)[0], outputs)
    assert inside.all(), "tokens before it see the last patch of the prefix"
    behind = moved(model.predict(with_patch_changed(images, 9), draws)[0], outputs)
    assert behind.tolist() == [k > 9 for k in range(1, 16)]
    assert tiny("causal").prefix_lengths(draws).tolist() == [1]


def test_prefix_lengths_are_from_1_to_n_minus_1_equally_often():
    lengths = tiny("prefix").prefix_lengths(torch.rand(30_000, 16, 1))
    counts = torch.bincount(lengths, minlength=16)
    assert counts[0] == 0
    assert len(counts) == 16
    assert counts[1:].min() > 1800


@torch.no_grad()
@pytest.mark.parametrize("norm", [True, False])
def test_the_loss_is_the_mean_error_behind_each_prefix_and_pictures_count_alike(norm):
    model = tiny("prefix", normalise_targets=norm)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    draws = torch.stack([torch.full((16, 1), 2.5 / 15), torch.full((16, 1), 13.5 / 15)])
    outputs, _ = model.predict(images, draws)
    target = to_patches(images / 255 * 2 - 1, 4)
    target = normalised(target) if norm else target
    first, second = outputs[0, 2:] - target[0, 3:], outputs[1, 13:] - target[1, 14:]
    want = (first.square().mean() + second.square().mean()) / 2
    assert torch.allclose(model.loss(images, draws), want, rtol=1e-5)
