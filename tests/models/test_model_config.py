"""vit/models/config.py: one spelling per model, plain values, and errors that say what to do."""

import json
from dataclasses import FrozenInstanceError, fields

import pytest
import yaml

from vit.models import ViTConfig

CHANGED = {
    "image_size": [32, 48],
    "patch_size": 8,
    "channels": 1,
    "width": 24,
    "depth": 2,
    "heads": 5,
    "mlp_dim": 40,
    "head_dim": 8,
    "class_token": False,
    "registers": 2,
    "position": "sine",
    "position_at": "every_layer",
    "prefix_position": False,
    "position_grid": [3, 5],
    "position_antialias": False,
    "relative_position": "rotary",
    "rotary_base": 50.0,
    "pool": "mean",
    "patch_bias": False,
    "norm_pre": True,
    "block_norm": "post",
    "final_norm": "before_pool",
    "norm_eps": 1e-5,
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
    "position_dropout": 0.2,
    "attention_dropout": 0.3,
    "drop_path": 0.4,
    "init_std": 0.05,
    "num_classes": 3,
    "head": "mlp",
    "dynamic_size": True,
    "fused": False,
}


def test_every_option_survives_json_yaml_and_plain_dictionaries():
    assert set(CHANGED) == {field.name for field in fields(ViTConfig)}
    config = ViTConfig.from_dict(CHANGED)
    assert config.image_size == (32, 48)
    assert config.to_dict() == CHANGED
    for through in (
        dict,
        lambda d: json.loads(json.dumps(d)),
        lambda d: yaml.safe_load(yaml.safe_dump(d)),
    ):
        assert ViTConfig.from_dict(through(config.to_dict())) == config
    assert ViTConfig.from_dict(ViTConfig().to_dict()) == ViTConfig()


def test_a_square_size_has_one_spelling():
    assert ViTConfig(image_size=(32, 32), patch_size=8) == ViTConfig(image_size=32, patch_size=8)
    assert ViTConfig(image_size=(32, 32), patch_size=8).size == (32, 32)
    assert ViTConfig.from_dict({"image_size": [32, 64], "patch_size": 8}).grid == (4, 8)


def test_a_configuration_cannot_change():
    with pytest.raises(FrozenInstanceError):
        ViTConfig().width = 3


# Case B7.
@pytest.mark.parametrize(
    ("size", "shown"), [(36, ("36x36", "32 or 40")), ((32, 33), ("32x33", "32 or 40")), (5, ("5x5", "use 8"))]
)
def test_a_size_that_the_patch_does_not_divide_names_the_nearest_ones(size, shown):
    with pytest.raises(ValueError, match="patch size 8") as error:
        ViTConfig(image_size=size, patch_size=8)
    assert all(part in str(error.value) for part in shown)


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widht": 3}, "did you mean width"),
        ({"width": 10, "heads": 3}, "or set head_dim"),
        ({"width": 10, "heads": 3, "head_dim": 4, "pool": "attention"}, "attention pooling needs it"),
        ({"class_token": False}, 'expected class_token=True for pool="token"'),
        ({"pool": "max"}, "one of token, mean, attention, but got 'max'"),
        ({"final_norm": "last"}, "one of None, before_pool, after_pool, none"),
        ({"activation": "swish"}, "one of gelu"),
        ({"position": "cosine"}, "one of learned, learned_2d, sine, sine_2d, none"),
        ({"width": 9, "heads": 3, "position": "learned_2d"}, "a width that 2 divides"),
        ({"width": 18, "heads": 3, "relative_position": "rotary"}, "heads of a size that 4 divides"),
        ({"position": "none", "position_at": "every_layer"}, "expected positions to add"),
        ({"position_grid": (0, 3)}, "position_grid as"),
        ({"mlp": "geglu"}, "one of dense, swiglu, swiglu_packed"),
        ({"norm_pre": 1}, "norm_pre to be true or false"),
        ({"block_norm": "both"}, "one of pre, post"),
        ({"head": "zero"}, "one of linear, mlp, distilled"),
        ({"head": "distilled"}, "the first of which is the distillation token"),
        ({"head": "distilled", "registers": 1, "pool": "mean"}, "pool='mean'"),
        ({"depth": 0}, "depth to be a whole number of at least 1, but got 0"),
        ({"depth": 2.0}, "depth to be a whole number"),
        ({"depth": True}, "depth to be a whole number"),
        ({"image_size": (224, 224, 3)}, r"\(height, width\)"),
        ({"image_size": "224"}, "image_size to be a whole number"),
        ({"registers": -1}, "registers to be a whole number of at least 0"),
        ({"num_classes": None}, "num_classes to be a whole number of at least 0"),
        ({"dropout": 1.0}, r"dropout to be a rate in \[0, 1\)"),
        ({"drop_path": -0.1}, "drop_path to be a rate"),
        ({"dropout": "0.1"}, "dropout to be a rate"),
        ({"layer_scale": 0.0}, "layer_scale to be a number above 0"),
        ({"norm_eps": None}, "norm_eps to be a number above 0"),
        ({"qk_norm": "yes"}, "qk_norm to be true or false"),
        ({"fused": 1}, "fused to be None, true or false"),
    ],
)
def test_a_wrong_value_says_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig.from_dict(options)
