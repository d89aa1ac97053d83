"""What learns under each method, by name, by mode, by what moves, and what the optimizer gets."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from vit.models.config import ViTConfig
from vit.models.vit import VisionTransformer
from vit.tasks.methods import Method, TuningConfig, prepare, set_learning, set_modes, unfrozen
from vit.tasks.optim import OptimConfig, make_optimizer, parameter_groups

METHODS = get_args(Method)
VARIANTS = [
    {},
    {"registers": 2, "layer_scale": 0.1, "qk_norm": True, "mlp": "swiglu", "mlp_norm": True, "attention_norm": True},
    {"key_bias": False, "relative_position": "bias", "position_at": "every_layer", "pool": "attention"},
    {"pool": "mean", "class_token": False, "head": "mlp", "position": "sine_2d", "norm_pre": True},
]


def tiny(**options):
    values = {"image_size": 16, "patch_size": 8, "width": 32, "depth": 3, "heads": 2, "num_classes": 3}
    return VisionTransformer(ViTConfig(**{**values, "dropout": 0.1, "drop_path": 0.2, **options}))


def expected(name, method):
    """Whether a parameter of the tiny model learns, by hand."""
    parts = name.split(".")
    if method == "full" or parts[0] == "head":
        return True
    return {
        "head": False,
        "lora": parts[-1] in ("lora_a", "lora_b"),
        "bitfit": parts[-1] in ("bias", "q_bias", "v_bias"),
        "norms": any("norm" in part for part in parts),
        "attention": parts[0] == "blocks" and parts[2] == "attn",
        "last_n": parts[0] in ("norm", "fc_norm", "attn_pool")
        or (parts[0] == "blocks" and parts[1] in ("1", "2"))
        or (parts[0] == "rel_pos" and parts[1] in ("1", "2"))
        or (parts[0] == "layer_pos_embed" and parts[1] in ("0", "1")),
    }[method]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", VARIANTS)
def test_just_the_methods_parameters_learn_and_each_gets_a_gradient(options, method):  # C18
    model = tiny(**options)
    learning = prepare(model, method, TuningConfig())
    own_tables = "position_at" in options
    for name, parameter in model.named_parameters():
        wanted = expected(name, method) if own_tables or not name.startswith("rel_pos") else None
        assert wanted is None or parameter.requires_grad == wanted, name
        assert (name in learning) == parameter.requires_grad
    set_modes(model, True)
    for name, parameter in model.named_parameters():
        if name.startswith("head.") or name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.1)
    model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    without = [name for name, p in model.named_parameters() if (p.grad is None) == p.requires_grad]
    assert without == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layer_decay", [1.0, 0.7])
def test_parameter_groups_hold_what_learns_once_at_its_blocks_rate(method, layer_decay):  # C9, C10
    model = tiny(registers=2, layer_scale=0.1)
    learning = prepare(model, method, TuningConfig())
    groups = parameter_groups(model, lr=2.0, weight_decay=0.1, layer_decay=layer_decay)
    names = {id(p): name for name, p in model.named_parameters()}
    seen = [names[id(p)] for group in groups for p in group["params"]]
    assert sorted(seen) == sorted(learning)
    powers = {"blocks.0": 3, "blocks.1": 2, "blocks.2": 1, "norm": 0, "head": 0}
    for group in groups:
        for p in group["params"]:
            name = names[id(p)]
            first, *rest = name.split(".")
            power = powers.get(f"blocks.{rest[0]}" if first == "blocks" else first, 4)
            assert group["lr"] == pytest.approx(2.0 * layer_decay**power), name
            spared = p.ndim < 2 or first in ("cls_token", "reg_token", "pos_embed")
            assert group["weight_decay"] == (0.0 if spared else 0.1), name


def modes(model):
    return {name for name, module in model.named_modules() if module.training}


@pytest.mark.parametrize("method", METHODS)
def test_modules_in_which_nothing_learns_draw_nothing(method):  # C11
    model = tiny()
    prepare(model, method, TuningConfig())
    set_modes(model, True)
    on = modes(model)
    drops = {name for name in on if name.endswith(("drop1", "drop2", "proj_drop", "attn_drop", "drop_path1"))}
    per_block = {
        "head": [],
        "full": ["attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2", "drop_path1"],
        "lora": ["attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2", "drop_path1"],
        "bitfit": ["attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2", "drop_path1"],
        "norms": ["drop_path1"],
        "attention": ["attn.attn_drop", "attn.proj_drop", "drop_path1"],
        "last_n": ["attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2", "drop_path1"],
    }[method]
    blocks = (1, 2) if method == "last_n" else (0, 1, 2)
    assert drops == {f"blocks.{i}.{name}" for i in blocks for name in per_block}
    assert ("pos_drop" in on) == (method in ("full", "bitfit"))
    assert "head" in on
    set_modes(model, False)
    assert modes(model) == set()


def test_blocks_unfreeze_from_the_top_as_a_function_of_the_epoch():
    model = tiny()
    tuning = TuningConfig(unfreeze_every=2)
    learning = prepare(model, "full", tuning)
    groups = [group for _, group in model.layer_groups()]
    for epoch, open_layers in enumerate([1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]):
        assert unfrozen(model, learning, tuning, epoch) == {n for group in groups[-open_layers:] for n in group}
    assert unfrozen(model, learning, replace(tuning, unfreeze_every=None), 0) == learning
    biases = prepare(model, "bitfit", tuning)
    first = unfrozen(model, biases, tuning, 0)
    assert first == {"norm.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_frozen_parameters_of_an_optimizer_neither_move_nor_decay_nor_gather_moments(name):
    model = tiny()
    tuning = TuningConfig(unfreeze_every=1)
    learning = prepare(model, "full", tuning)
    groups = parameter_groups(model, lr=0.1, weight_decay=0.5, layer_decay=1.0)
    optimizer = make_optimizer(OptimConfig(name=name, lr=0.1), groups)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    now = unfrozen(model, learning, tuning, 1)
    set_learning(model, now)
    torch.nn.init.normal_(model.head.weight)
    before["head.weight"] = model.head.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 16, 16)).square().sum().backward()
        optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == now
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)] for p in optimizer.state} == now


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("hed", {}, "expected method full, head, lora"),
        ("last_n", {"last_n": 4}, "at most the 3 blocks"),
        ("full", {"last_n": 3}, "tuning.last_n with method last_n, but the method is full"),
        ("bitfit", {"lora_rank": 4}, "tuning.lora_rank with method lora"),
        ("head", {"unfreeze_every": 1}, "tuning.unfreeze_every with method full or lora"),
        ("lora", {"lora_rank": 33}, "lora_rank from 1 to 32"),
        ("full", {"lora_rank": 0}, "tuning.lora_rank of at least 1"),
        ("full", {"unfreeze_every": 0}, "tuning.unfreeze_every of at least 1"),
        ("full", {"lora_alpha": -1.0}, "tuning.lora_alpha above 0"),
        ("full", {"lora_projections": ()}, "qkv, proj, fc1, fc2, but got none"),
        ("full", {"lora_projections": ("q",)}, "but got q"),
        ("full", {"head_init": "one"}, "zero or ridge"),
    ],
)
def test_options_that_do_not_go_together_are_refused(method, options, message, as_users_run):
    with pytest.raises(ValueError, match=message):
        prepare(tiny(), method, TuningConfig(**options))


def test_a_ridge_start_needs_a_linear_head():
    with pytest.raises(ValueError, match="linear head"):
        prepare(tiny(head="mlp"), "full", TuningConfig(head_init="ridge"))
