"""Masked patch prediction: what is corrupted, what is asked, and that masked patches are not seen."""

import math

import pytest
import torch

from vit.tasks.masked import MaskedPatches, corrupt
from vit.tasks.options import EncoderOptions
from vit.tasks.targets import to_patches

TINY = EncoderOptions(image_size=16, patch_size=4, width=32, depth=2, heads=2)
TOKEN = torch.full((1, 1, 2), -1.0)


def numbered(b, n):
    return torch.arange(n).float()[None, :, None].expand(b, n, 2)


class TestCorrupt:
    def test_half_are_chosen_of_which_80_10_10_are_masked_swapped_kept(self):
        out, chosen, changed = corrupt(numbered(400, 50), TOKEN, torch.rand(400, 50, 3), 0.5)
        assert (chosen.sum(1) == 25).all()
        masked = (out == -1).all(-1)
        swapped = ~masked & (out != numbered(400, 50)).any(-1)
        assert torch.equal(changed, masked | swapped)
        assert not (changed & ~chosen).any()
        shares = [float(part.sum() / chosen.sum()) for part in (masked, swapped, chosen & ~changed)]
        assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.015)

    def test_another_patch_is_never_the_patch_itself_and_each_other_comes(self):
        draws = torch.rand(2000, 4, 3)
        draws[..., 1] = 0.85
        out, chosen, changed = corrupt(numbered(2000, 4), TOKEN, draws, 1.0)
        assert chosen.all()
        assert changed.all()
        counts = torch.stack([torch.bincount(out[:, i, 0].long(), minlength=4) for i in range(4)])
        assert (counts.diagonal() == 0).all()
        assert ((counts > 550) | torch.eye(4, dtype=torch.bool)).all()

    def test_where_each_goes_by_hand(self):
        draws = torch.tensor([[[0.3, 0.1, 0.0], [0.9, 0.1, 0.0], [0.1, 0.85, 0.99], [0.2, 0.95, 0.0]]])
        out, chosen, changed = corrupt(numbered(1, 4), TOKEN, draws, 0.75)
        assert chosen.tolist() == [[True, False, True, True]]
        assert changed.tolist() == [[True, False, True, False]]
        assert out[0, :, 0].tolist() == [-1.0, 1.0, 1.0, 3.0], "patch 2 becomes (2 + 1 + 2) mod 4"


@torch.no_grad()
def test_no_output_depends_on_the_pixels_of_a_masked_patch():
    model = MaskedPatches(encoder=TINY).eval()
    torch.nn.init.normal_(model.decoder.weight)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    draws = torch.rand(2, 16, 3)
    draws[..., 1] = 0.5  # all chosen patches are masked
    outputs, chosen, _ = model.predict(images, draws)
    hidden = torch.nn.functional.interpolate(chosen.view(2, 1, 4, 4).float(), scale_factor=4) > 0
    other = torch.where(hidden, 255 - images, images)
    assert torch.equal(model.predict(other, draws)[0], outputs)
    seen = torch.where(hidden, images, 255 - images)
    assert not torch.allclose(model.predict(seen, draws)[0][chosen], outputs[chosen])


@torch.no_grad()
def test_the_first_losses_are_those_of_knowing_nothing():
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    draws = torch.rand(3, 16, 3)
    for target in ("mean_colour", "colours_4x4"):
        assert float(MaskedPatches(encoder=TINY, target=target).loss(images, draws)) == pytest.approx(math.log(512))
    grey = MaskedPatches(encoder=EncoderOptions(**{**TINY.__dict__, "channels": 1}))
    assert float(grey.loss(images[:, :1], draws)) == pytest.approx(math.log(8))
    pixels = MaskedPatches(encoder=TINY, target="pixels")
    _, chosen, _ = pixels.predict(images, draws)
    values = to_patches(images.float() / 255 * 2 - 1, 4)[chosen]
    assert float(pixels.loss(images, draws)) == pytest.approx(float(values.square().mean()), rel=1e-5)


@torch.no_grad()
def test_the_loss_counts_all_corrupted_patches_and_no_other():
    model = MaskedPatches(encoder=TINY).eval()
    images = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)  # every patch is of class 0
    draws = torch.rand(1, 16, 3)
    model.decoder.bias[0] = 5.0
    want = -float(torch.log_softmax(model.decoder.bias, 0)[0])
    assert float(model.loss(images, draws)) == pytest.approx(want, rel=1e-5)
    _, chosen, _ = model.predict(images, draws)
    away = torch.nn.functional.interpolate(chosen.view(1, 1, 4, 4).float(), scale_factor=4) == 0
    bright = torch.where(away, 255, images.int()).to(torch.uint8)
    assert float(model.loss(bright, draws)) == pytest.approx(want, rel=1e-5)
