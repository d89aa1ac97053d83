"""vit/models/positions.py and relative.py: where each kind of position lands on another grid."""

import math

import pytest
import timm
import torch
from torch import nn

from vit.models import VisionTransformer, ViTConfig
from vit.models.attention import rotate
from vit.models.positions import coordinates, make_table, position_table, resample_table, sine_table
from vit.models.relative import BiasTable, QuadraticBias, biases, make_biases, resample_offsets, rotations

CPU = torch.device("cpu")


def config(**options) -> ViTConfig:
    base = {"image_size": (32, 64), "patch_size": 8, "width": 32, "depth": 3, "heads": 2, "num_classes": 0}
    return ViTConfig(**{**base, **options})


def test_the_same_grid_gives_the_same_tensor():
    table = torch.randn(1, 33, 4)
    assert resample_table(table, (4, 8), (4, 8), prefix=1) is table
    offsets = torch.randn(2, 7, 15)
    assert resample_offsets(offsets, (4, 8)) is offsets


# Case B2.
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_prefix_rows_stay_and_a_ramp_along_x_stays_a_ramp_along_x(prefix, antialias):
    ramp = torch.arange(8.0).expand(4, 8)
    grid = torch.stack([ramp, ramp.flip(1)], dim=-1).flatten(0, 1)
    head = torch.randn(prefix, 2)
    table = torch.cat([head, grid])[None]
    old = (4, 8)
    for new in ((8, 4), (16, 16), (4, 8)):
        table = resample_table(table, old, new, prefix=prefix, antialias=antialias)
        old = new
        assert torch.equal(table[0, :prefix], head)
        moved = table[0, prefix:, 0].unflatten(0, new)
        assert moved.diff(dim=1).min() > -1e-5
        torch.testing.assert_close(moved, moved[:1].expand_as(moved), atol=1e-5, rtol=0)
        torch.testing.assert_close(moved.flip(1), table[0, prefix:, 1].unflatten(0, new), atol=1e-4, rtol=0)


def is_ramp_along_x(values):
    """Each row the same, rising to the right."""
    torch.testing.assert_close(values, values[:1].expand_as(values), atol=1e-4, rtol=1e-4)
    return values.diff(dim=1).min() > 0


@pytest.mark.parametrize("grid", [(4, 8), (8, 4), (16, 16)])
@pytest.mark.parametrize("kind", ["learned", "learned_2d"])
def test_a_learned_ramp_along_x_is_one_on_every_grid(kind, grid):
    c = config(position=kind, registers=1)
    stored = make_table(c)
    ramp = torch.arange(8.0)
    with torch.no_grad():
        for parameter in stored.values() if isinstance(stored, nn.ParameterDict) else [stored]:
            parameter.zero_()
        if kind == "learned":
            stored[0, 2:, -1] = ramp.repeat(4)
        else:
            stored["columns"][0, :, -1] = ramp
    table = position_table(stored, c, grid, CPU)
    assert table.shape == (1, 2 + math.prod(grid), 32)
    assert is_ramp_along_x(table[0, 2:, -1].unflatten(0, grid))
    assert table[0, 2:, 0].abs().max() == 0


@pytest.mark.parametrize("grid", [(4, 8), (8, 4), (16, 16)])
@pytest.mark.parametrize("kind", ["sine", "sine_2d"])
def test_sines_stay_at_their_place_in_the_picture_on_every_grid(kind, grid):
    c = config(position=kind)
    table = sine_table(c, grid, CPU)
    assert table.shape == (math.prod(grid), 32)
    # The slowest wave of the column is a ramp; that of the raster rises along x in every row.
    slow = (table[:, 30] if kind == "sine" else table[:, 7]).unflatten(0, grid)
    assert slow.diff(dim=1).min() > 0
    if kind == "sine_2d":
        assert is_ramp_along_x(slow)
    own = sine_table(c, (4, 8), CPU)
    fine = sine_table(c, (12, 24), CPU).unflatten(0, (12, 24))[1::3, 1::3]  # the same centres
    torch.testing.assert_close(fine.flatten(0, 1), own, atol=1e-4, rtol=1e-4)


def test_sines_are_those_of_the_papers():
    c = config(position="sine_2d")
    ours = sine_table(c, (4, 8), CPU)
    y, x = coordinates((4, 8), (4, 8), CPU)
    omega = 10000 ** -(torch.arange(8) / 8)
    expected = [f(p[:, None] * omega) for p in (x, y) for f in (torch.sin, torch.cos)]
    torch.testing.assert_close(ours, torch.cat(expected, dim=1), atol=1e-5, rtol=1e-5)
    # timm puts the row first, and all sines before all cosines.
    timms = timm.layers.build_sincos2d_pos_embed([4, 8], dim=32).unflatten(1, (2, 2, 8))
    torch.testing.assert_close(ours.unflatten(1, (2, 2, 8)), timms.transpose(1, 2).flip(1), atol=1e-5, rtol=1e-5)
    one = sine_table(config(position="sine"), (4, 8), CPU)
    for place in (0, 3, 17):
        for i in (0, 5, 15):
            angle = place / 10000 ** (2 * i / 32)
            assert one[place, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert one[place, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


@pytest.mark.parametrize("grid", [(4, 8), (8, 4), (16, 16)])
def test_a_bias_that_is_a_ramp_along_x_is_one_on_every_grid(grid):
    table = BiasTable(2, (4, 8))
    with torch.no_grad():
        table.table.copy_(torch.arange(-7.0, 8.0).expand(2, 7, 15))
    bias = table(grid).unflatten(2, grid).unflatten(1, grid)  # (heads, query row, query column, key row, key column)
    assert is_ramp_along_x(bias[0, 1, 2])
    for column in range(grid[1]):
        assert bias[0, 0, column, 0, column].abs() < 1e-5
    assert bias[0, 0, 0, 0, -1].item() == pytest.approx(7, abs=1e-4)


def test_a_quadratic_bias_is_the_papers_and_peaks_at_its_centre():
    module = QuadraticBias(3, (4, 8))
    centre, sharpness = torch.tensor([[0.0, 1.0], [-1.0, 2.0], [0.0, 0.0]]), torch.tensor([1.0, 2.0, 0.5])
    with torch.no_grad():
        module.centre.copy_(centre)
        module.sharpness.copy_(sharpness)
    bias = module((4, 8)).unflatten(2, (4, 8)).unflatten(1, (4, 8))
    for head in range(3):
        best = bias[head, 2, 3].flatten().argmax().item()
        assert (best // 8 - 2, best % 8 - 3) == tuple(centre[head].int().tolist())
    v = -sharpness[1] * torch.tensor([1.0, -2 * centre[1, 0], -2 * centre[1, 1]])
    delta = torch.tensor([1.0, -2.0])
    r = torch.tensor([delta.square().sum(), *delta])
    torch.testing.assert_close(bias[1, 2, 3, 3, 1], v @ r)
    # Twice as fine a grid: half the offset in patches of the scale.
    fine = module((8, 16)).unflatten(2, (8, 16)).unflatten(1, (8, 16))
    torch.testing.assert_close(fine[1, 2, 6, 4, 2], bias[1, 2, 3, 3, 1])


@pytest.mark.parametrize(("at", "count"), [("stem", 3), ("every_layer", 3), ("every_layer_shared", 1)])
def test_a_bias_table_is_each_layers_own_or_one_for_all(at, count):
    c = config(relative_position="bias", position_at=at)
    modules = make_biases(c)
    assert len(modules) == count
    made = biases(modules, c, (4, 8))
    assert len(made) == 3
    assert made[0].shape == (2, 33, 33)
    assert made[0][:, 0].abs().max() == 0


def test_rotations_are_those_of_dinov3_and_eva():
    c = config(relative_position="rotary", image_size=(32, 48))
    angles = rotations(None, c, (4, 6), CPU)[0]
    theirs = timm.layers.RotaryEmbeddingDinoV3(16, feat_shape=(4, 6), temperature=100.0, rotate_half=True)
    torch.testing.assert_close(theirs.get_embed((4, 6))[:, :8], angles[1:].sin(), atol=1e-5, rtol=1e-5)
    assert angles[0].abs().max() == 0
    c = config(relative_position="rotary_index", rotary_base=10000.0, position_grid=(2, 3), image_size=(32, 48))
    theirs = timm.layers.RotaryEmbeddingCat(16, in_pixels=False, feat_shape=(4, 6), ref_feat_shape=(2, 3))
    sines = theirs.get_embed((4, 6))[:, :16:2]
    torch.testing.assert_close(sines, rotations(None, c, (4, 6), CPU)[0][1:].sin(), atol=1e-5, rtol=1e-5)


def test_rotated_scores_depend_on_the_difference_of_places_only():
    q, k = torch.randn(2, 1, 1, 1, 16)
    a, b, shift = torch.rand(3, 8)
    score = (rotate(q, a) * rotate(k, b)).sum()
    torch.testing.assert_close(score, (rotate(q, a + shift) * rotate(k, b + shift)).sum(), atol=1e-5, rtol=1e-5)
    assert torch.equal(rotate(q, torch.zeros(8)), q)


# ViT, appendix D.4.
@pytest.mark.parametrize("kind", ["learned", "learned_2d", "sine_2d"])
def test_positions_stand_at_the_stem_at_every_layer_or_at_every_layer_from_one_table(kind, randomise):
    x = torch.randn(1, 3, 32, 64)
    counts, outputs = [], []
    for at in ("stem", "every_layer_shared", "every_layer"):
        model = randomise(VisionTransformer(config(position=kind, position_at=at)))
        counts.append(sum(p.numel() for n, p in model.named_parameters() if "pos_embed" in n))
        outputs.append(model(x))
        table = position_table(model.pos_embed, model.config, (4, 8), CPU)
        seen = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0]))
        model(x)
        z = model.patch_embed(x)
        z = torch.cat([model.cls_token, z], dim=1) + table
        torch.testing.assert_close(seen[0], z)
        z = model.blocks[0](z)
        if at == "every_layer_shared":
            z = z + table
        elif at == "every_layer" and kind != "sine_2d":
            z = z + position_table(model.layer_pos_embed[0], model.config, (4, 8), CPU)
        elif at == "every_layer":
            z = z + table
        torch.testing.assert_close(seen[1], z, atol=1e-5, rtol=1e-5)
    assert counts[0] == counts[1]
    assert counts[2] == 3 * counts[0]
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)


# Case B4.
def test_the_number_of_rows_is_exact_for_every_size():
    table = torch.randn(1, 1 + 37 * 37, 1)
    for size in range(14, 2000, 14):
        assert resample_table(table, (37, 37), (size // 14, 3), prefix=1).shape[1] == 1 + size // 14 * 3


def test_half_precision_tables_are_resampled_in_float32():
    table = torch.randn(1, 16, 8).half()
    exact = resample_table(table.float(), (4, 4), (7, 7), prefix=0)
    assert torch.equal(resample_table(table, (4, 4), (7, 7), prefix=0), exact.half())


def test_a_table_of_another_length_is_refused():
    with pytest.raises(ValueError, match="1 prefix rows and 4x4 patches, but got 16 rows"):
        resample_table(torch.zeros(1, 16, 2), (4, 4), (2, 2), prefix=1)
