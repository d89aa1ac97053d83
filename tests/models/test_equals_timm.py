"""The one VisionTransformer against timm's: names, strict loading both ways, logits."""

import pytest
import timm
import torch

from vit.models import VisionTransformer, ViTConfig
from vit.models.timm_names import timm_architecture, timm_arguments, timm_gaps

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}
OURS = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 3, "heads": 3, "num_classes": 7}

KINDS = {
    "class token": ("vit_tiny_patch16_224", {}, {}),
    "no class token, mean pooling": (
        "vit_tiny_patch16_224",
        {"class_token": False, "global_pool": "avg"},
        {"class_token": False, "pool": "mean"},
    ),
    "mean pooling beside a class token": ("vit_tiny_patch16_224", {"global_pool": "avg"}, {"pool": "mean"}),
    "mean pooling after the norm": (
        "vit_tiny_patch16_224",
        {"global_pool": "avg", "fc_norm": False},
        {"pool": "mean", "final_norm": "before_pool"},
    ),
    "norm after the class token": (
        "vit_tiny_patch16_224",
        {"fc_norm": True},
        {"final_norm": "after_pool"},
    ),
    "no final norm": ("vit_tiny_patch16_224", {"final_norm": False}, {"final_norm": "none"}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 4}, {"registers": 4}),
    "registers as in DINOv2": (
        "vit_small_patch14_reg4_dinov2",
        {},
        {"registers": 4, "prefix_position": False, "layer_scale": 1e-5},
    ),
    "LayerScale": ("vit_tiny_patch16_224", {"init_values": 0.1}, {"layer_scale": 0.1}),
    "query and key norm": ("vit_tiny_patch16_224", {"qk_norm": True}, {"qk_norm": True}),
    "attention pooling as in SigLIP": (
        "vit_base_patch16_siglip_224",
        {},
        {"class_token": False, "pool": "attention"},
    ),
    "no positions for the class token": (
        "vit_tiny_patch16_224",
        {"no_embed_class": True},
        {"prefix_position": False},
    ),
    "no positions": ("vit_tiny_patch16_224", {"pos_embed": "none"}, {"position": "none"}),
    "QuickGELU and the eps of CLIP": (
        "vit_base_patch16_clip_quickgelu_224",
        {"pre_norm": False},
        {"activation": "quick_gelu", "norm_eps": 1e-5},
    ),
    "no bias on q, k, v": ("vit_tiny_patch16_224", {"qkv_bias": False}, {"qkv_bias": False}),
    "one channel, narrow MLP, non-square": (
        "vit_tiny_patch16_224",
        {"in_chans": 1, "mlp_ratio": 1.5, "img_size": (16, 40)},
        {"channels": 1, "mlp_dim": 72, "image_size": (16, 40)},
    ),
    "CLIP": (
        "vit_base_patch16_clip_quickgelu_224",
        {},
        {"activation": "quick_gelu", "norm_eps": 1e-5, "norm_pre": True, "patch_bias": False},
    ),
    "packed SwiGLU as in DINOv2 giant": (
        "vit_giant_patch14_dinov2",
        {"mlp_ratio": 3.0, "global_pool": "token"},
        {"mlp": "swiglu_packed", "mlp_dim": 72, "layer_scale": 1e-5},
    ),
    "norms inside attention and MLP, no biases behind them": (
        "vit_tiny_patch16_224",
        {"scale_attn_norm": True, "scale_mlp_norm": True, "proj_bias": False},
        {"attention_norm": True, "mlp_norm": True, "proj_bias": False, "mlp_bias": False},
    ),
    "features": ("vit_tiny_patch16_224", {"num_classes": 0}, {"num_classes": 0}),
}


def pair(kind):
    name, theirs, ours = KINDS[kind]
    config = ViTConfig(**{**OURS, **ours})
    return timm.create_model(name, **{**SMALL, **theirs}).eval(), VisionTransformer(config).eval(), config


def images_for(config):
    return torch.randn(3, config.channels, *config.size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_strict_loading_both_ways_gives_equal_logits(kind, randomise):
    theirs, ours, config = pair(kind)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    images = images_for(config)
    ours.load_state_dict(randomise(theirs).state_dict(), strict=True)
    with torch.no_grad():
        expected = theirs(images)
        assert expected.std() > 0.1
        for fused in (True, False):
            for block in ours.blocks:
                block.attn.fused = fused
            torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=1e-5)
        theirs.load_state_dict(randomise(ours, seed=5).state_dict(), strict=True)
        torch.testing.assert_close(theirs(images), ours(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_timms_model_built_from_our_arguments_is_the_same(kind, randomise):
    _, ours, config = pair(kind)
    assert timm_gaps(config) == []
    rebuilt = timm.create_model(timm_architecture(config), num_classes=config.num_classes, **timm_arguments(config))
    rebuilt.load_state_dict(randomise(ours).state_dict(), strict=True)
    with torch.no_grad():
        images = images_for(config)
        torch.testing.assert_close(rebuilt.eval()(images), ours(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix_position", [True, False])
@pytest.mark.parametrize("size", [(32, 32), (48, 48), (24, 64), (8, 8)])
def test_a_dynamic_size_resamples_positions_as_timm_does(size, prefix_position, randomise):
    theirs = timm.create_model(
        "vit_tiny_patch16_224", dynamic_img_size=True, no_embed_class=not prefix_position, **SMALL
    )
    ours = VisionTransformer(ViTConfig(**OURS, dynamic_size=True, prefix_position=prefix_position)).eval()
    ours.load_state_dict(randomise(theirs).state_dict())
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-5)


def test_stochastic_depth_grows_as_in_timm():
    theirs = timm.create_model("vit_tiny_patch16_224", drop_path_rate=0.3, **SMALL)
    ours = VisionTransformer(ViTConfig(**OURS, drop_path=0.3))
    for a, b in zip(ours.blocks, theirs.blocks, strict=True):
        assert a.drop_path1.rate == a.drop_path2.rate
        assert a.drop_path1.rate == pytest.approx(getattr(b.drop_path1, "drop_prob", 0.0))


@pytest.mark.parametrize("hidden", [1, 15, 61, 1000, 6144])
def test_the_mlp_ratio_gives_back_the_hidden_size(hidden):
    for width in (7, 11, 1408):
        config = ViTConfig(width=width, heads=1, mlp_dim=hidden)
        assert int(width * timm_arguments(config)["mlp_ratio"]) == hidden


@pytest.mark.parametrize(
    ("options", "gap"),
    [
        ({"head": "mlp"}, "MLP head"),
        ({"block_norm": "post"}, "post-norm"),
        ({"head_dim": 20}, "head_dim"),
        ({"norm_eps": 1e-12}, "norm_eps"),
        ({"mlp": "swiglu", "layer_scale": 0.1}, "this MLP"),
        ({"mlp": "swiglu_packed"}, "without LayerScale"),
        ({"mlp": "swiglu_packed", "pool": "attention", "layer_scale": 0.1}, "attention pooling"),
        ({"position": "sine"}, "these positions"),
        ({"position_at": "every_layer"}, "beyond the stem"),
        ({"relative_position": "rotary"}, "rotations or biases"),
        ({"dynamic_size": True, "position_antialias": False}, "antialiasing"),
        ({"norm_pre": True}, "norm before the blocks"),
        ({"patch_bias": False}, "norm before the blocks"),
        ({"key_bias": False}, "keys alone"),
        ({"proj_bias": False}, "different biases"),
        ({"mlp_bias": False}, "different biases"),
    ],
)
def test_what_timm_cannot_express_is_named_and_timm_refuses_it(options, gap):
    config = ViTConfig(**OURS, **options)
    assert [gap in text for text in timm_gaps(config)] == [True]
    with pytest.raises(RuntimeError, match="Unknown model"):
        timm.create_model(timm_architecture(config))
