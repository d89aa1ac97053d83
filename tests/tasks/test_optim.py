"""Parameter groups and schedules against hand computations."""

import itertools
import math

import pytest
import torch

from vit.models.config import ViTConfig
from vit.models.vit import VisionTransformer
from vit.tasks.optim import (
    OptimConfig,
    ScheduleConfig,
    apply_to_optimizer,
    make_optimizer,
    make_schedule,
    parameter_groups,
)


def tiny(**options):
    values = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "num_classes": 3}
    return VisionTransformer(ViTConfig(**{**values, **options}))


VARIANTS = [
    {},
    {"registers": 4},
    {"layer_scale": 0.1, "qk_norm": True},
    {"pool": "attention"},
    {"pool": "mean", "class_token": False, "head": "mlp"},
]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("layer_decay", [1.0, 0.7])
def test_every_parameter_stands_in_exactly_one_group_and_no_vector_token_or_position_decays(options, layer_decay):  # C9
    model = tiny(**options)
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1, layer_decay=layer_decay)
    seen = [id(p) for group in groups for p in group["params"]]
    assert sorted(seen) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        for p in group["params"]:
            last = names[id(p)].split(".")[-1]
            spared = p.ndim < 2 or last in ("cls_token", "reg_token", "pos_embed", "latent")
            assert group["weight_decay"] == (0.0 if spared else 0.1), names[id(p)]


def test_rates_under_layer_decay_equal_the_hand_computation():  # C10
    model = tiny(registers=2)
    groups = parameter_groups(model, lr=2.0, weight_decay=0.1, layer_decay=0.7)
    names = {id(p): name for name, p in model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    for name in ("cls_token", "reg_token", "pos_embed", "patch_embed.proj.weight"):
        assert rates[name] == pytest.approx(2.0 * 0.343)
    assert rates["blocks.0.attn.qkv.weight"] == pytest.approx(2.0 * 0.49)
    assert rates["blocks.1.mlp.fc2.bias"] == pytest.approx(2.0 * 0.7)
    assert rates["norm.weight"] == rates["head.weight"] == 2.0


def test_frozen_parameters_are_in_no_group():
    model = tiny()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.5)
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.head.parameters()}
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="everything is frozen"):
        parameter_groups(model, lr=1.0, weight_decay=0.1, layer_decay=1.0)


def test_the_schedule_climbs_from_above_zero_peaks_after_warm_up_and_ends_at_its_final_value():  # C5, C8
    schedule = make_schedule(ScheduleConfig(warmup=4, final=0.1), 20)
    values = [schedule(step) for step in range(20)]
    assert values[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert values[4] == 1.0
    assert values[19] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(values[4:]))
    middle = 4 + (19 - 4) / 3
    assert schedule(9) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2)
    assert middle == 9
    assert schedule(100) == pytest.approx(0.1)


def test_a_share_as_warm_up_counts_optimizer_steps():  # C6
    assert make_schedule(ScheduleConfig(warmup=0.1), 200).warmup == 20
    assert make_schedule(ScheduleConfig(warmup=7), 200).warmup == 7
    assert make_schedule(ScheduleConfig(warmup=0.1, steps=50), 200).total == 50


CURVES = [
    (
        ScheduleConfig(name="linear", warmup=2, final=0.1),
        [0.5, 1.0, 1.0, 1 - 0.9 / 7, 1 - 1.8 / 7, 1 - 2.7 / 7, 1 - 3.6 / 7, 1 - 4.5 / 7, 1 - 5.4 / 7, 0.1],
    ),
    (ScheduleConfig(name="constant", warmup=2), [0.5] + [1.0] * 9),
    (ScheduleConfig(name="constant", cooldown=4), [1.0] * 6 + [0.75, 0.5, 0.25, 0.0]),
    (
        ScheduleConfig(name="rsqrt", warmup=2, timescale=3),
        [0.5, 1.0, *(math.sqrt(3 / (3 + n)) for n in range(8))],
    ),
    (
        ScheduleConfig(name="rsqrt", timescale=3, cooldown=0.2, final=0.1),
        [*(math.sqrt(3 / (3 + n)) for n in range(8)), (math.sqrt(0.3) + 0.1) / 2, 0.1],
    ),
    (ScheduleConfig(name="constant", warmup=6, cooldown=4), [n / 6 for n in range(1, 7)] + [0.75, 0.5, 0.25, 0.0]),
]


@pytest.mark.parametrize(("config", "want"), CURVES)
def test_each_curve_equals_its_hand_computation_and_stays_at_its_end(config, want):  # C5, C8, D16
    schedule = make_schedule(config, 10)
    assert [schedule(step) for step in range(10)] == pytest.approx(want)
    assert schedule(50) == schedule(9)


@pytest.mark.parametrize("config", [config for config, _ in CURVES])
def test_a_run_that_is_lengthened_keeps_the_curve_of_its_steps(config):  # C8
    values = {field: getattr(config, field) for field in config.__dataclass_fields__}
    short = make_schedule(ScheduleConfig(**{**values, "steps": 10}), 10)
    longer = make_schedule(ScheduleConfig(**{**values, "steps": 10}), 1000)
    assert [short(step) for step in range(20)] == [longer(step) for step in range(20)]


def test_rsqrt_goes_on_where_a_shorter_run_began_to_cool_down():
    config = ScheduleConfig(name="rsqrt", warmup=2, timescale=5, cooldown=4)
    short, long = make_schedule(config, 20), make_schedule(config, 40)
    assert [short(step) for step in range(16)] == [long(step) for step in range(16)]
    assert short(19) == long(39) == 0.0


@pytest.mark.parametrize("config", [config for config, _ in CURVES])
def test_a_schedule_says_what_it_does(config):
    text = str(make_schedule(config, 10))
    assert config.name in text
    assert ("linear in" in text) == bool(config.cooldown)


def test_a_warm_up_longer_than_the_run_is_an_error():  # C8
    with pytest.raises(ValueError, match="at most the 10 steps"):
        make_schedule(ScheduleConfig(warmup=11), 10)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (OptimConfig, {"lr": 0.0}, "above 0"),
        (OptimConfig, {"lr": float("nan")}, "above 0"),
        (OptimConfig, {"name": "lyon", "lr": 0.1}, "did you mean lion"),
        (OptimConfig, {"name": "adahessian", "lr": 0.1}, "another of timm's"),
        (OptimConfig, {"name": "lion"}, "expected optim.lr with optim.name=lion"),
        (OptimConfig, {"ema": 1.0}, "between 0 and 1"),
        (OptimConfig, {"ema_start": -1.0}, "at least 0"),
        (OptimConfig, {"momentum": 0.5}, "expected optim.momentum with another optimizer"),
        (OptimConfig, {"name": "sgd", "betas": (0.9, 0.99)}, "expected optim.betas with adamw"),
        (OptimConfig, {"name": "sgd", "eps": 1e-8}, "expected optim.eps with adamw"),
        (OptimConfig, {"ema_start": 0.5}, "expected optim.ema_start with optim.ema"),
        (OptimConfig, {"ema_warmup": False}, "expected optim.ema_warmup with optim.ema"),
        (ScheduleConfig, {"timescale": 100}, "expected schedule.timescale with rsqrt"),
        (ScheduleConfig, {"name": "constant", "final": 0.1}, "with schedule.cooldown"),
        (ScheduleConfig, {"name": "cosinus"}, "cosine, linear"),
        (ScheduleConfig, {"cooldown": 0.1}, "constant or rsqrt"),
        (ScheduleConfig, {"name": "rsqrt", "timescale": 0.0}, "timescale above 0"),
        (OptimConfig, {"layer_decay": 1.5}, "at most 1"),
        (OptimConfig, {"weight_decay": -1.0}, "at least 0"),
        (ScheduleConfig, {"warmup": -1.0}, "at least 0"),
        (ScheduleConfig, {"final": 2.0}, "between 0 and 1"),
        (ScheduleConfig, {"steps": 0}, "at least 1"),
    ],
)
def test_values_out_of_range_are_refused(make, options, message, as_users_run):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [("sgd", {"momentum": 0.5}, {"momentum": 0.8}), ("adamw", {"betas": (0.5, 0.6)}, {"betas": (0.7, 0.9)})],
)
def test_what_is_configured_wins_over_what_an_optimizer_remembers(name, first, then):  # D6
    model = tiny()
    old = OptimConfig(name=name, lr=0.1, weight_decay=0.3, **first)
    new = OptimConfig(name=name, lr=0.7, weight_decay=0.2, **then)
    before = make_optimizer(old, parameter_groups(model, lr=0.1, weight_decay=0.3, layer_decay=1.0))
    groups = parameter_groups(model, lr=0.7, weight_decay=0.2, layer_decay=1.0)
    after = make_optimizer(new, groups)
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0]["lr"] == 0.1
    apply_to_optimizer(after, groups)
    assert after.param_groups[0]["lr"] == 0.7
    assert {group["weight_decay"] for group in after.param_groups} == {0.0, 0.2}
    assert all(group[key] == value for group in after.param_groups for key, value in then.items())


def test_optimizers_are_torchs_own():
    model = tiny()
    groups = parameter_groups(model, lr=0.1, weight_decay=0.0, layer_decay=1.0)
    assert type(make_optimizer(OptimConfig(name="sgd", lr=0.1), groups)) is torch.optim.SGD
    assert type(make_optimizer(OptimConfig(lr=0.1), groups)) is torch.optim.AdamW


def other_optimizers():
    from timm.optim import list_optimizers

    # These need packages that are not here, or second derivatives.
    return [
        n for n in list_optimizers() if not n.startswith(("bnb", "fused")) and n not in ("adahessian", "sgd", "adamw")
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
@pytest.mark.parametrize("name", other_optimizers())
def test_every_optimizer_of_timm_moves_all_parameters_by_its_groups(name):
    model = tiny()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    config = OptimConfig(name=name, lr=1e-3)
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.01, layer_decay=0.5)
    optimizer = make_optimizer(config, groups)
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in groups]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [g["weight_decay"] for g in groups]
    before = [p.detach().clone() for p in model.parameters()]
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 32, 32, generator=draw)).logsumexp(1).mean()
        loss.backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    moved = [n for (n, p), b in zip(model.named_parameters(), before, strict=True) if not torch.equal(p, b)]
    assert len(moved) >= 0.9 * len(before), moved
    apply_to_optimizer(optimizer, groups)


def test_betas_that_an_optimizer_cannot_take_are_refused():
    groups = parameter_groups(tiny(), lr=1e-3, weight_decay=0.01, layer_decay=1.0)
    with pytest.raises(ValueError, match="expected timm to make the optimizer lion"):
        make_optimizer(OptimConfig(name="lion", lr=1e-3, betas=(0.9, 1.5)), groups)
    chosen = make_optimizer(OptimConfig(name="lion", lr=1e-3, betas=(0.5, 0.6)), groups)
    assert chosen.param_groups[0]["betas"] == (0.5, 0.6)
