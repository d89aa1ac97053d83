"""LoRA starts as the base model, equals a hand computation, and merges into a plain model."""

import pytest
import torch
from torch import nn

from vit.models.config import ViTConfig
from vit.models.lora import LoraLinear, add_lora, merged_state
from vit.models.vit import VisionTransformer

ALL = ("qkv", "proj", "fc1", "fc2")
KINDS = [
    {},
    {"qkv_bias": False, "mlp": "swiglu", "head_dim": 8},
    {"key_bias": False, "mlp": "swiglu_packed", "relative_position": "rotary"},
]


def tiny(**options):
    values = {"image_size": 16, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "num_classes": 3}
    model = VisionTransformer(ViTConfig(**{**values, **options}))
    nn.init.normal_(model.head.weight)
    return model


def perturbed(model):
    """With updates that are not zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("options", KINDS)
@torch.no_grad()
def test_the_start_equals_the_base_model(options):
    model, images = tiny(**options).train(), torch.randn(2, 3, 16, 16)
    before, names = model(images), [name for name, _ in model.named_parameters()]
    add_lora(model, rank=4, alpha=8.0, projections=ALL)
    assert torch.equal(model.train()(images), before)
    assert torch.equal(model.eval()(images), before)
    added = [name for name, _ in model.named_parameters() if name not in names]
    assert all(name.endswith(("lora_a", "lora_b")) for name in added)
    assert len(added) == 2 * 2 * (5 if options.get("mlp") == "swiglu" else 4)


@pytest.mark.parametrize("options", KINDS)
@torch.no_grad()
def test_merged_weights_give_the_logits_of_unmerged_ones_in_the_plain_model(options):
    model, images = tiny(**options), torch.randn(2, 3, 16, 16)
    base = model(images)
    add_lora(model, rank=4, alpha=8.0, projections=ALL)
    plain = tiny(**options).eval()
    perturbed(model)
    plain.load_state_dict(merged_state(model.state_dict(), alpha=8.0))
    assert (model.train()(images) - base).abs().max() > 0.01
    torch.testing.assert_close(plain(images), model.train()(images), atol=1e-5, rtol=1e-5)
    assert torch.equal(plain(images), model.eval()(images)), "evaluation computes what is exported"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain(images), model(images))


def test_a_layer_equals_the_hand_computation_with_one_update_per_projection():
    base = nn.Linear(6, 9)
    layer = LoraLinear(base, rank=2, alpha=3.0, parts=3)
    nn.init.normal_(layer.lora_b)
    x = torch.randn(4, 6)
    a, b = layer.lora_a, layer.lora_b
    updates = [x @ a[2 * i : 2 * i + 2].T @ b[3 * i : 3 * i + 3].T * 3.0 / 2 for i in range(3)]
    torch.testing.assert_close(layer(x), base(x) + torch.cat(updates, dim=-1))
    assert layer.weight is base.weight


@pytest.mark.parametrize("name", ALL)
def test_only_the_chosen_projections_get_updates(name):
    model = tiny()
    add_lora(model, rank=2, alpha=2.0, projections=[name])
    found = {key.split(".")[-2] for key in model.state_dict() if "lora" in key}
    assert found == {name}


def test_updates_learn_and_stand_in_their_blocks_group():
    model = tiny()
    add_lora(model, rank=2, alpha=2.0, projections=ALL)
    model.train()(torch.randn(2, 3, 16, 16)).square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if name.endswith("lora_b")}
    assert all(grad.abs().max() > 0 for grad in grads.values())
    groups = dict(model.layer_groups())
    assert "blocks.1.attn.qkv.lora_a" in groups["blocks.1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "lora_rank from 1 to 32"),
        ({"rank": 33}, "lora_rank from 1 to 32"),
        ({"alpha": 0.0}, "above 0"),
        ({"projections": ()}, "but got none"),
        ({"projections": ("qkv", "key")}, "qkv, proj, fc1, fc2, but got qkv, key"),
    ],
)
def test_values_out_of_range_are_refused(options, message, as_users_run):
    with pytest.raises(ValueError, match=message):
        add_lora(tiny(), **{"rank": 2, "alpha": 2.0, "projections": ALL, **options})
