"""vit/models/layers.py: the ViT paper's equations and the regularisers' statistics."""

import pytest
import torch
from torch import nn

from vit.models.attention import Attention
from vit.models.layers import (
    AttentionPool,
    Block,
    DropPath,
    LayerScale,
    Mlp,
    PatchEmbed,
    QuickGELU,
    make_activation,
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_patch_embedding_is_cutting_flattening_in_raster_order_and_multiplying_by_e():
    embed = PatchEmbed(4, 3, 10)
    images = torch.randn(2, 3, 8, 12)
    patches = torch.stack(
        [
            images[:, :, y : y + 4, x : x + 4].flatten(1)  # (b, c, p, p): channel by channel, row by row
            for y in range(0, 8, 4)
            for x in range(0, 12, 4)
        ],
        dim=1,
    )
    e = embed.proj.weight.flatten(1).T  # (p²c, d)
    assert patches.shape == (2, 6, 48)
    torch.testing.assert_close(embed(images), patches @ e + embed.proj.bias, atol=1e-5, rtol=1e-5)
    # The same with the paper's order, in which a pixel's channels lie together, and E's rows reordered alike.
    pixelwise = patches.unflatten(-1, (3, 4, 4)).permute(0, 1, 3, 4, 2).flatten(2)
    e = embed.proj.weight.permute(0, 2, 3, 1).flatten(1).T
    torch.testing.assert_close(embed(images), pixelwise @ e + embed.proj.bias, atol=1e-5, rtol=1e-5)


def make_block(norm="pre", dropout=0.0, **options):
    attention = Attention(12, 3, dropout=dropout, attention_dropout=0.0)
    return Block(attention, Mlp(12, 24, activation="relu", dropout=dropout), width=12, norm=norm, **options)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_equals_torchs_encoder_layer_with_the_same_weights(norm):
    theirs = nn.TransformerEncoderLayer(
        12, 3, 24, dropout=0.0, batch_first=True, norm_first=norm == "pre", layer_norm_eps=1e-6
    )
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = make_block(norm)
    ours.attn.qkv.weight.data = theirs.self_attn.in_proj_weight.data
    ours.attn.qkv.bias.data = theirs.self_attn.in_proj_bias.data
    ours.attn.proj.load_state_dict(theirs.self_attn.out_proj.state_dict())
    ours.mlp.fc1.load_state_dict(theirs.linear1.state_dict())
    ours.mlp.fc2.load_state_dict(theirs.linear2.state_dict())
    ours.norm1.load_state_dict(theirs.norm1.state_dict())
    ours.norm2.load_state_dict(theirs.norm2.state_dict())
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    torch.testing.assert_close(ours(x, causal=True), theirs(x, src_mask=causal, is_causal=True), atol=1e-5, rtol=1e-5)


def test_layer_scale_of_zero_silences_both_branches():
    block = make_block(layer_scale=0.5)
    assert torch.equal(block.ls1.gamma, torch.full((12,), 0.5))
    nn.init.zeros_(block.ls1.gamma)
    nn.init.zeros_(block.ls2.gamma)
    x = torch.randn(2, 7, 12)
    assert torch.equal(block(x), x)
    assert torch.equal(LayerScale(3, 2.0)(torch.ones(3)), torch.full((3,), 2.0))


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    drop = DropPath(0.25)
    out = drop(torch.ones(20_000, 2, 3))
    assert out.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert torch.equal(out, out[:, :1, :1].expand_as(out))
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    x = torch.randn(4, 2, 3)
    assert drop.eval()(x) is x
    assert "rate=0.25" in repr(drop)


def test_dropout_stands_after_every_dense_layer_but_those_to_q_k_v():
    block = make_block(dropout=0.3)
    rates = {name: m.p for name, m in block.named_modules() if isinstance(m, nn.Dropout)}
    assert rates == {"attn.attn_drop": 0.0, "attn.proj_drop": 0.3, "mlp.drop1": 0.3, "mlp.drop2": 0.3}
    order = []
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear | nn.Dropout | nn.ReLU):
            module.register_forward_hook(lambda m, args, out, name=name: order.append(name))
    block.attn.fused = False
    block(torch.randn(2, 7, 12))
    assert order == [
        *("attn.qkv", "attn.attn_drop", "attn.proj", "attn.proj_drop"),
        *("mlp.fc1", "mlp.act", "mlp.drop1", "mlp.fc2", "mlp.drop2"),
    ]


def test_every_activation_is_the_function_of_its_name():
    x = torch.linspace(-3, 3, 13)
    expected = {
        "gelu": x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu_tanh": nn.functional.gelu(x, approximate="tanh"),
        "quick_gelu": x / (1 + torch.exp(-1.702 * x)),
        "relu": x.clamp(min=0),
        "silu": x / (1 + torch.exp(-x)),
    }
    for name, values in expected.items():
        torch.testing.assert_close(make_activation(name)(x), values)
    assert isinstance(make_activation("quick_gelu"), QuickGELU)


def test_attention_pooling_sees_no_order_and_looks_where_its_query_points():
    pool = AttentionPool(12, 3, Mlp(12, 24))
    nn.init.normal_(pool.latent)
    x = torch.randn(2, 7, 12)
    assert pool(x).shape == (2, 12)
    torch.testing.assert_close(pool(x), pool(x[:, torch.randperm(7)]))
    assert not torch.allclose(pool(x), pool(x.mean(1, keepdim=True)), atol=1e-3)
