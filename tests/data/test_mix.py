"""Mixup and CutMix equal a hand computation, for batches of any size."""

from types import SimpleNamespace

import pytest
import torch

from vit.data import Batch
from vit.data.mix import Mixing, mixed
from vit.data.sampler import mix
from vit.tasks import Classifier, EncoderOptions


def batch(size):
    draw = torch.Generator().manual_seed(size)
    images = torch.randint(0, 256, (size, 3, 16, 12), dtype=torch.uint8, generator=draw)
    return images, torch.arange(size) % 4


# C16
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("alphas", [(0.0, 0.0), (0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_targets_sum_to_one_and_the_loss_is_finite_for_any_batch(size, alphas):
    images, labels = batch(size)
    for seed in range(8):
        result, targets = mixed(images, labels, classes=4, seed=seed, mixup=alphas[0], cutmix=alphas[1])
        assert result.shape == images.shape
        assert result.dtype == torch.uint8
        assert torch.allclose(targets.sum(1), torch.ones(size))
        assert torch.nn.functional.cross_entropy(torch.randn(size, 4), targets).isfinite()
        if size == 1 or alphas == (0.0, 0.0):
            assert torch.equal(result, images)
            assert torch.equal(targets.argmax(1), labels)


# C17
def test_mixup_is_the_weighted_mean_of_neighbours():
    images, labels = batch(5)
    result, targets = mixed(images, labels[:5], classes=5, seed=3, mixup=1.0)
    share = float(targets[1, 1])
    for i in range(1, 4):
        expected = images[i].float() * share + images[i - 1].float() * (1 - share)
        assert (result[i].float() - expected).abs().max() <= 0.501
        assert targets[i, labels[i - 1]] == pytest.approx(1 - share)


# C17
def test_cutmix_targets_are_the_shares_of_pixels():
    images, labels = torch.arange(1, 4, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, 16, 12), torch.arange(3)
    for seed in range(20):
        result, targets = mixed(images, labels, classes=3, seed=seed, cutmix=1.0)
        for i in range(3):
            assert targets[i, i] == pytest.approx(float((result[i, 0] == i + 1).float().mean()), abs=1e-6)


def test_the_seed_alone_decides():
    images, labels = batch(6)
    before = torch.get_rng_state()
    options = {"classes": 4, "mixup": 0.8, "cutmix": 1.0}
    one, again, other = (mixed(images, labels, seed=seed, **options) for seed in (1, 1, 2))
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[1], again[1])
    assert not torch.equal(one[0], other[0])
    assert torch.equal(before, torch.get_rng_state())


# C17
@pytest.mark.parametrize("alphas", [(0.0, 0.0), (0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_the_training_loss_equals_a_hand_computation_and_accuracy_counts_the_larger_share(alphas):
    model = Classifier(
        classes=["a", "b", "c", "d"],
        encoder=EncoderOptions(image_size=32, patch_size=8, width=32, depth=1, heads=2),
        mixing=Mixing(mixup=alphas[0], cutmix=alphas[1]),
        seed=1,
    )
    torch.nn.init.normal_(model.model.head.weight)
    model._trainer = SimpleNamespace(current_epoch=2, global_rank=0)
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(5) % 4
    loss = model.training_step(Batch(images, labels, torch.arange(5)), 3)
    pictures, targets = mixed(images, labels, classes=4, seed=mix(1, 2, 3, 0, 1), mixup=alphas[0], cutmix=alphas[1])
    logits = model(pictures)
    assert loss.item() == pytest.approx(-(targets * logits.log_softmax(1)).sum(1).mean().item(), rel=1e-5)
    right = (logits.argmax(1) == targets.argmax(1)).float().mean()
    assert float(model.train_metrics.compute()["acc"]) == pytest.approx(float(right))
