"""vit/models/vit.py: equation by equation, every option, initialisation, groups, compiling and exporting."""

from dataclasses import fields

import pytest
import torch
from torch import nn

from vit.models import VisionTransformer, ViTConfig, vit_config

TINY = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "num_classes": 3}

PRESETS = {
    "paper": {},
    "pre-training": {"head": "mlp", "dropout": 0.1, "drop_path": 0.1},
    "mean": {"pool": "mean", "class_token": False},
    "attention": {"pool": "attention", "class_token": False},
    "registers": {"registers": 4, "layer_scale": 1e-5, "prefix_position": False},
    "no positions": {"position": "none", "qk_norm": True, "qkv_bias": False},
    "post-norm": {"block_norm": "post", "head_dim": 24, "activation": "relu"},
    "features": {"num_classes": 0},
    "rotary": {"position": "none", "relative_position": "rotary", "key_bias": False, "registers": 1},
    "rotary by index, gated": {"relative_position": "rotary_index", "mlp": "swiglu", "mlp_norm": True},
    "mixed rotary, packed gate": {"relative_position": "rotary_mixed", "mlp": "swiglu_packed", "proj_bias": False},
    "bias table": {"position": "none", "relative_position": "bias"},
    "shared bias table": {"relative_position": "bias", "position_at": "every_layer_shared", "norm_pre": True},
    "quadratic": {"position": "none", "relative_position": "quadratic", "attention_norm": True},
    "two axes at every layer": {"position": "learned_2d", "position_at": "every_layer", "patch_bias": False},
    "learned at every layer": {"position_at": "every_layer", "prefix_position": False, "mlp_bias": False},
    "sine": {"position": "sine_2d"},
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(**options) -> VisionTransformer:
    return VisionTransformer(ViTConfig(**{**TINY, **options}))


def images(*size, channels=3):
    return torch.randn(2, channels, *(size or (32, 32)))


def test_tokens_are_equation_1_class_token_registers_patches_plus_positions(randomise):
    model = randomise(build(registers=2))
    x = images()
    patches = model.patch_embed(x)
    z0 = torch.stack([torch.cat([model.cls_token[0], model.reg_token[0], patch]) for patch in patches])
    torch.testing.assert_close(model.embed(x), z0 + model.pos_embed)
    assert model.embed(x).shape == (2, 1 + 2 + 16, 32)


def test_logits_are_equations_2_to_4_and_the_head(randomise):
    model = randomise(build())
    x = images()
    z = model.embed(x)
    for block in model.blocks:
        z = block.attn(block.norm1(z)) + z
        z = block.mlp(block.norm2(z)) + z
    y = model.norm(z[:, 0])
    torch.testing.assert_close(model(x), model.head(y))
    torch.testing.assert_close(model.pool(model.forward_features(x)), y)
    assert build(num_classes=0).eval()(x).shape == (2, 32)


def test_a_plain_dictionary_builds_the_same_model():
    torch.manual_seed(3)
    one = build()
    torch.manual_seed(3)
    other = VisionTransformer(one.config.to_dict())
    assert other.config == one.config
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


OPTIONS = {
    "image_size": 16,
    "patch_size": 16,
    "channels": 1,
    "width": 48,
    "depth": 3,
    "heads": 4,
    "mlp_dim": 20,
    "head_dim": 8,
    "class_token": False,
    "registers": 2,
    "position": "none",
    "position_at": "every_layer_shared",
    "prefix_position": False,
    "position_grid": (7, 9),
    "relative_position": "rotary",
    "rotary_base": 10.0,
    "pool": "mean",
    "patch_bias": False,
    "norm_pre": True,
    "block_norm": "post",
    "final_norm": "none",
    "norm_eps": 0.1,
    "qkv_bias": False,
    "key_bias": False,
    "qk_norm": True,
    "attention_norm": True,
    "proj_bias": False,
    "layer_scale": 0.1,
    "mlp": "swiglu",
    "mlp_bias": False,
    "mlp_norm": True,
    "activation": "quick_gelu",
    "dropout": 0.1,
    "position_dropout": 0.1,
    "attention_dropout": 0.1,
    "drop_path": 0.9,
    "num_classes": 4,
    "head": "mlp",
}
NEEDS = {
    "class_token": {"pool": "attention"},
    "position_grid": {"position": "sine_2d"},
    "rotary_base": {"relative_position": "rotary"},
}
SHAPELESS = {"dynamic_size", "fused", "init_std", "position_antialias"}  # each has a test of its own


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_makes_a_difference(name, randomise):
    assert set(OPTIONS) | SHAPELESS == {field.name for field in fields(ViTConfig)}
    base = NEEDS.get(name, {})
    plain, changed = build(**base), build(**base, **{name: OPTIONS[name]})
    shapes = [{key: tensor.shape for key, tensor in m.state_dict().items()} for m in (plain, changed)]
    if shapes[0] != shapes[1]:
        changed(images(*changed.config.size, channels=changed.config.channels))
        return
    outputs = []
    for model in (plain, changed):
        randomise(model).train()
        torch.manual_seed(1)
        outputs.append(model(torch.ones(2, 3, *model.config.size)))
    assert not torch.allclose(*outputs, atol=1e-4)


def test_the_fused_option_reaches_every_attention_and_changes_no_logit(randomise):
    models = [randomise(build(pool="attention", fused=fused)) for fused in (None, True, False)]
    for model, fused in zip(models, (None, True, False), strict=True):
        attentions = [model.attn_pool, *(block.attn for block in model.blocks)]
        assert [attention.fused for attention in attentions] == [fused] * 3
    x = images()
    for model in models[1:]:
        torch.testing.assert_close(model(x), models[0](x), atol=1e-5, rtol=1e-5)


# Case B8.
def test_a_wrong_size_names_both_sizes_and_the_switch():
    with pytest.raises(ValueError, match=r"32x32 pixels, but got 40x32.*dynamic_size=True"):
        build()(images(40, 32))
    with pytest.raises(ValueError, match="expected images of 3 channels, but got 1"):
        build()(images(channels=1))


def test_with_dynamic_size_any_size_that_the_patch_divides_works():
    model = build(dynamic_size=True)
    for size in ((40, 40), (8, 64), (32, 32)):
        assert model(images(*size)).shape == (2, 3)
        assert model.embed(images(*size)).shape == (2, 1 + size[0] * size[1] // 64, 32)
    # Case B7.
    with pytest.raises(ValueError, match=r"patch size 8 divides, but got 36x32: use 32 or 40"):
        model(images(36, 32))


# Case B19.
@pytest.mark.parametrize("init_std", [0.02, 0.1])
def test_initial_weights_have_the_documented_statistics(init_std):
    options = {"pool": "attention", "registers": 64, "init_std": init_std}
    model = VisionTransformer(vit_config("Ti/16", depth=2, num_classes=5, **options))
    for name, parameter in model.named_parameters():
        last = name.split(".")[-1]
        if name.startswith("head") or last == "bias":
            assert parameter.abs().max() == 0, name
        elif ".norm" in name or name.startswith(("norm", "fc_norm")):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            std = (16 * 16 * 3) ** -0.5 if name.startswith("patch_embed") else init_std
            tolerance = 0.25 if parameter.numel() < 1000 else 0.1
            assert parameter.std().item() == pytest.approx(std, rel=tolerance), name
            assert parameter.abs().max() <= 2 * std, name
    x = torch.randn(4, 3, 224, 224)
    assert model.patch_embed(x).std().item() == pytest.approx(1, abs=0.05)


def test_layer_scale_starts_at_its_value():
    gammas = [p for name, p in build(layer_scale=0.25).named_parameters() if name.endswith("gamma")]
    assert len(gammas) == 4
    assert all(torch.equal(gamma, torch.full((32,), 0.25)) for gamma in gammas)


# Case C18.
@pytest.mark.parametrize("preset", PRESETS)
def test_one_backward_pass_reaches_every_parameter(preset):
    model = build(**PRESETS[preset])
    out = model(images())
    loss = nn.functional.cross_entropy(out, torch.tensor([0, 1])) if model.config.num_classes else out.square().sum()
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_has_one_depth_in_order(preset):
    model = build(**PRESETS[preset])
    groups = model.layer_groups()
    assert [depth for depth, _ in groups] == ["embed", "blocks.0", "blocks.1", "head"]
    names = [name for _, members in groups for name in members]
    assert len(names) == len(set(names))
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    depth_of = {name: depth for depth, members in groups for name in members}
    for name, depth in depth_of.items():
        if name in ("cls_token", "reg_token", "pos_embed") or name.startswith("patch_embed"):
            assert depth == "embed"
        if name.startswith(("norm.", "fc_norm", "head", "attn_pool")):
            assert depth == "head"


# Case C10.
def test_a_parameter_without_a_depth_is_an_error():
    model = build()
    model.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="'extra'"):
        model.layer_groups()
    del model.extra
    model.mask_token = nn.Parameter(torch.zeros(1, 1, 32))
    assert "mask_token" in dict(model.layer_groups())["embed"]


# Case C9.
@pytest.mark.parametrize("preset", PRESETS)
def test_weight_decay_spares_vectors_tokens_and_positions_and_nothing_else(preset):
    model = build(**PRESETS[preset])
    decayed = {name for name, p in model.named_parameters() if not model.no_weight_decay(name, p)}
    matrices = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert decayed == matrices


@pytest.mark.parametrize("options", [{}, {"dropout": 0.1, "drop_path": 0.5}])
def test_gradient_checkpointing_changes_neither_loss_nor_gradient(options, randomise):
    model = randomise(build(**options)).train()
    x, results = images(), []
    for on in (False, True):
        model.gradient_checkpointing = on
        model.zero_grad()
        torch.manual_seed(2)
        loss = model(x).square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_stands_where_the_paper_has_it():
    """After every dense layer but those to q, k, v (and the logits), and directly after adding positions."""
    rates = {name: m.p for name, m in build(dropout=0.1, head="mlp").named_modules() if isinstance(m, nn.Dropout)}
    on = {name for name, rate in rates.items() if rate}
    blocks = {f"blocks.{i}.{part}" for i in (0, 1) for part in ("attn.proj_drop", "mlp.drop1", "mlp.drop2")}
    assert on == {"pos_drop", "head.drop", *blocks}
    assert build(dropout=0.1, position_dropout=0.0).pos_drop.p == 0
    model = build(dropout=0.5)
    tokens = model.embed(images())
    assert 0.3 < (tokens == 0).float().mean() < 0.7
    assert torch.equal(model.eval().embed(x := images()), model.embed(x))


def test_evaluation_is_deterministic_with_every_random_option_on(randomise):
    model = randomise(build(dropout=0.3, attention_dropout=0.3, drop_path=0.3))
    x = images()
    assert torch.equal(model(x), model(x))


def test_encode_takes_a_selection_of_tokens_and_masks(randomise):
    model = randomise(build())
    tokens = model.embed(images())
    kept = tokens[:, [0, 3, 5]]
    mask = torch.zeros(1, 1, 17, 17, dtype=torch.bool)
    mask[..., [0, 3, 5]] = True
    torch.testing.assert_close(model.encode(kept), model.encode(tokens, mask=mask)[:, [0, 3, 5]])
    changed = tokens.clone()
    changed[:, -1] += 1
    causal = [model.encode(t, causal=True) for t in (tokens, changed)]
    assert torch.equal(causal[0][:, :-1], causal[1][:, :-1])


def slow(*presets):
    return [pytest.param(preset, marks=pytest.mark.slow) for preset in presets]


@pytest.mark.parametrize("preset", ["rotary", *slow("attention", "registers", "post-norm", "quadratic")])
def test_the_model_compiles_into_one_graph(preset, randomise, as_users_run):
    model = randomise(build(**PRESETS[preset]))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for batch in (2, 3):
        x = torch.randn(batch, 3, 32, 32)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("fused", [True, False])
def test_the_model_exports_with_a_dynamic_batch(fused, randomise):
    model = randomise(build(fused=fused, registers=1))
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (images(),), dynamic_shapes={"images": {0: batch}}).module()
    for size in (1, 2, 5):
        x = torch.randn(size, 3, 32, 32)
        torch.testing.assert_close(exported(x), model(x))


@pytest.mark.parametrize("preset", ["paper", *slow("rotary", "sine", "two axes at every layer")])
def test_a_dynamic_model_exports_with_dynamic_batch_height_and_width(preset, randomise, as_users_run):
    model = randomise(build(dynamic_size=True, **PRESETS[preset]))
    free = torch.export.Dim.DYNAMIC
    shapes = {"images": {0: free, 2: free, 3: free}}
    exported = torch.export.export(model, (images(48, 64),), dynamic_shapes=shapes).module()
    for size in ((32, 32), (40, 64), (64, 48)):
        x = torch.randn(3, 3, *size)
        torch.testing.assert_close(exported(x), model(x))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_selection_of_tokens_keeps_the_places_they_came_from(preset, randomise):
    model = randomise(build(**PRESETS[preset]))
    x = images()
    tokens = model.embed(x)
    count = tokens.shape[1]
    kept = torch.stack([torch.tensor([0, 2, 3, 9, 14]), torch.tensor([0, 1, 7, 8, 16 if count > 16 else 15])])
    mask = torch.zeros(2, 1, count, count, dtype=torch.bool)
    for i in range(2):
        mask[i, :, :, kept[i]] = True
    whole = model.encode(tokens, mask=mask)
    some = model.encode(torch.stack([tokens[i, kept[i]] for i in range(2)]), kept=kept)
    expected = torch.stack([whole[i, kept[i]] for i in range(2)])
    torch.testing.assert_close(some, expected, atol=1e-4, rtol=1e-4)
