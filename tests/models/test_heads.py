"""vit/models/heads.py: what the ViT paper says about the two heads."""

import math

import pytest
import torch
from torch import nn

from vit.models import VisionTransformer, ViTConfig, swap_head
from vit.models.heads import PretrainHead

TINY = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 1, "heads": 2}


def build(**options):
    return VisionTransformer(ViTConfig(**TINY, **options))


def test_the_pretraining_head_has_one_hidden_layer_with_tanh(randomise):
    head = randomise(PretrainHead(6, 4))
    x = torch.randn(5, 6)
    hidden = torch.tanh(x @ head.hidden.weight.T + head.hidden.bias)
    torch.testing.assert_close(head(x), hidden @ head.out.weight.T + head.out.bias)
    assert head.hidden.weight.shape == (6, 6)


@pytest.mark.parametrize("options", [{}, {"class_token": False, "pool": "mean"}, {"pool": "attention"}])
@pytest.mark.parametrize("before", [{"head": "mlp", "num_classes": 11}, {"num_classes": 4}, {"num_classes": 0}])
@pytest.mark.parametrize("as_method", [True, False])
def test_after_swapping_all_logits_are_zero_and_the_loss_is_ln_k(options, before, as_method, randomise):
    model = randomise(build(**options, **before)).train()
    body = {name: p.clone() for name, p in model.state_dict().items() if not name.startswith("head")}
    if as_method:
        model.swap_head(7)
    else:
        swap_head(model, 7)
    logits = model(torch.randn(3, 3, 32, 32))
    assert torch.equal(logits, torch.zeros(3, 7))
    loss = nn.functional.cross_entropy(logits, torch.tensor([0, 3, 6]))
    assert loss.item() == pytest.approx(math.log(7))
    assert isinstance(model.head, nn.Linear)
    assert model.head.training
    assert (model.config.num_classes, model.config.head) == (7, "linear")
    after = {name: p for name, p in model.state_dict().items() if not name.startswith("head")}
    assert all(torch.equal(body[name], after[name]) for name in body)
    assert body.keys() == after.keys()
    # What the configuration now describes is this model.
    VisionTransformer(model.config).load_state_dict(model.state_dict(), strict=True)


def test_the_distilled_head_averages_two_tokens_and_gives_way_to_one(randomise):
    model = randomise(build(head="distilled", registers=2, num_classes=5)).eval()
    images = torch.randn(3, 3, 32, 32)
    tokens = model.forward_features(images)
    labels, teacher = model.head.labels(tokens[:, 0]), model.head.teacher(tokens[:, 1])
    assert not torch.allclose(labels, teacher)
    torch.testing.assert_close(model(images), (labels + teacher) / 2)
    model.swap_head(2)
    assert torch.equal(model(images), torch.zeros(3, 2))
    torch.testing.assert_close(model.pool(tokens), tokens[:, 0])


def test_a_new_head_starts_at_zero_logits_without_swapping():
    for head in ("linear", "mlp", "distilled"):
        assert torch.equal(build(head=head, registers=1, num_classes=5)(torch.randn(2, 3, 32, 32)), torch.zeros(2, 5))


def test_the_new_head_has_the_models_dtype_and_mode():
    model = build(num_classes=2).to(torch.bfloat16).eval()
    model.swap_head(3)
    assert model.head.weight.dtype == torch.bfloat16
    assert not model.head.training


def test_fewer_than_one_class_is_refused():
    with pytest.raises(ValueError, match="at least 1 class for a new head, but got 0"):
        build().swap_head(0)
