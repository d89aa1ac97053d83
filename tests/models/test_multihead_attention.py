"""vit/models/attention.py against the formula written out, torch's own module, and itself under masks."""

import math

import pytest
import torch
from torch import nn

from vit.models.attention import Attention, CrossAttention, causal_mask, cpu_computes_bf16, padding_mask


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def by_hand(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    """softmax(QK^T / sqrt(d_k)) V, one head and one image at a time."""
    images = []
    for tokens in x:
        q, k, v = (tokens @ attention.qkv.weight.T + attention.qkv.bias).chunk(3, dim=-1)
        heads = []
        for i in range(attention.heads):
            part = slice(i * attention.head_dim, (i + 1) * attention.head_dim)
            scores = q[:, part] @ k[:, part].T / math.sqrt(attention.head_dim)
            weights = scores.exp() / scores.exp().sum(1, keepdim=True)
            heads.append(weights @ v[:, part])
        images.append(torch.cat(heads, dim=-1) @ attention.proj.weight.T + attention.proj.bias)
    return torch.stack(images)


def both_paths(module, *args, **kwargs):
    results = []
    for fused in (True, False):
        module.fused = fused
        results.append(module(*args, **kwargs))
    return results


@pytest.mark.parametrize("head_dim", [None, 5])
def test_attention_is_the_formula_of_vaswani_on_both_paths(head_dim):
    attention = Attention(12, 3, head_dim=head_dim)
    x = torch.randn(2, 7, 12)
    for out in both_paths(attention, x):
        torch.testing.assert_close(out, by_hand(attention, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cross", [False, True])
def test_attention_equals_torchs_multihead_attention_with_the_same_weights(cross):
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    x, context = torch.randn(2, 7, 12), torch.randn(2, 5, 12)
    ours = CrossAttention(12, 3) if cross else Attention(12, 3)
    weight, bias = theirs.in_proj_weight.data, theirs.in_proj_bias.data
    if isinstance(ours, CrossAttention):
        ours.q.weight.data, ours.kv.weight.data = weight[:12], weight[12:]
        ours.q.bias.data, ours.kv.bias.data = bias[:12], bias[12:]
    else:
        ours.qkv.weight.data, ours.qkv.bias.data = weight, bias
    ours.proj.load_state_dict(theirs.out_proj.state_dict())
    memory = context if cross else x
    keep = torch.ones(2, memory.shape[1], dtype=torch.bool)
    keep[1, 3:] = False
    expected, _ = theirs(x, memory, memory, key_padding_mask=~keep)
    for out in both_paths(ours, *((x, context) if cross else (x,)), mask=padding_mask(keep)):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_and_plain_agree_under_any_mask_even_for_a_query_that_sees_nothing(kind, causal):
    attention = Attention(12, 3, qk_norm=1e-6)
    x = torch.randn(2, 7, 12)
    mask = torch.rand(2, 1, 7, 7) > 0.4
    mask[0, 0, 2] = False
    if kind == "additive":
        mask = torch.randn(2, 3, 7, 7).masked_fill(~mask, -math.inf)
    gradients = []
    fused, plain = both_paths(attention, x, mask=mask, causal=causal)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(plain[0, 2], attention.proj.bias)
    for out in (fused, plain):
        attention.zero_grad()
        out.square().sum().backward()
        gradients.append(attention.qkv.weight.grad.clone())
    assert gradients[0].isfinite().all()
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_with_causal_attention_no_token_sees_a_later_one(fused):
    attention = Attention(12, 3)
    attention.fused = fused
    x = torch.randn(1, 7, 12)
    changed = x.clone()
    changed[:, 4:] += 1
    before, after = attention(x, causal=True), attention(changed, causal=True)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).any(dim=-1).all()
    torch.testing.assert_close(before, attention(x, mask=causal_mask(7, x.device)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_padding_changes_no_other_token(fused):
    attention = Attention(12, 3)
    attention.fused = fused
    x = torch.randn(2, 5, 12)
    padded = torch.cat([x, 100 * torch.randn(2, 3, 12)], dim=1)
    keep = torch.arange(8)[None].expand(2, 8) < 5
    torch.testing.assert_close(attention(padded, mask=padding_mask(keep))[:, :5], attention(x))


def test_without_positions_attention_is_permutation_equivariant():
    attention = Attention(12, 3)
    x, order = torch.randn(2, 7, 12), torch.randperm(7)
    torch.testing.assert_close(attention(x[:, order]), attention(x)[:, order])


def test_on_the_plain_path_a_hook_finds_the_probabilities():
    attention = Attention(12, 3, qkv_bias=False).eval()
    attention.fused = False
    seen = []
    attention.attn_drop.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    attention(torch.randn(2, 7, 12))
    (probabilities,) = seen
    assert probabilities.shape == (2, 3, 7, 7)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 3, 7))


def test_query_and_key_norm_makes_attention_blind_to_their_scale():
    x = torch.randn(2, 7, 12)
    plain, normed = Attention(12, 3), Attention(12, 3, qk_norm=1e-12)
    for attention, blind in ((plain, False), (normed, True)):
        before = attention(x)
        attention.qkv.weight.data[:24] *= 3
        attention.qkv.bias.data[:24] *= 3
        assert torch.allclose(attention(x), before, atol=1e-5) is blind


@pytest.mark.parametrize("fused", [True, False])
def test_attention_dropout_works_in_training_only_and_keeps_the_mean(fused):
    attention = Attention(8, 2, attention_dropout=0.5)
    attention.fused = fused
    x = torch.randn(1, 4, 8).expand(4000, 4, 8)
    with torch.no_grad():
        noisy, clean = attention(x), attention.eval()(x)
    assert not torch.allclose(noisy[0], noisy[1])
    torch.testing.assert_close(noisy.mean(0), clean[0], atol=0.03, rtol=0)


def test_the_default_path_is_fused_unless_the_processor_multiplies_bf16_natively():
    attention = Attention(12, 3)
    assert attention.fused is None
    assert attention._is_fused(torch.zeros(1))
    assert attention._is_fused(torch.zeros(1, dtype=torch.bfloat16)) is not cpu_computes_bf16()


@pytest.mark.parametrize("fused", [True, False])
def test_attention_runs_in_autocast_bf16_near_its_float32_self(fused):
    attention = Attention(32, 4, qk_norm=1e-6)
    attention.fused = fused
    x = torch.randn(2, 7, 32)
    with torch.autocast("cpu", torch.bfloat16):
        low = attention(x, causal=True)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), attention(x, causal=True), atol=0.03, rtol=0.03)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match=r"width=10 and heads=3: change one of them or set head_dim"):
        Attention(10, 3)
