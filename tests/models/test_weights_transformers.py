"""vit/models/hub_family.py: transformers' models give the same tokens and logits here, under either naming."""

import json

import pytest
import torch
import transformers as hub
from safetensors.torch import load_file, save_file

from vit.models.weights import load_weights

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
NAMES = {"id2label": {0: "cat", 1: "dog", 2: "owl"}, "label2id": {"cat": 0, "dog": 1, "owl": 2}}
MODELS = {
    "ViT": lambda: hub.ViTForImageClassification(hub.ViTConfig(**SMALL, **NAMES, layer_norm_eps=1e-6)),
    "ViT without a head": lambda: hub.ViTModel(hub.ViTConfig(**SMALL, qkv_bias=False)),
    "DeiT": lambda: hub.DeiTModel(hub.DeiTConfig(**SMALL)),
    "DeiT with its teacher's head": lambda: hub.DeiTForImageClassificationWithTeacher(hub.DeiTConfig(**SMALL, **NAMES)),
    "DINOv2": lambda: hub.Dinov2Model(hub.Dinov2Config(**SMALL)),
    "DINOv2 giant's MLP": lambda: hub.Dinov2Model(hub.Dinov2Config(**SMALL, use_swiglu_ffn=True)),
    "DINOv2 with registers": lambda: hub.Dinov2WithRegistersModel(hub.Dinov2WithRegistersConfig(**SMALL)),
    "DINOv2 classifier": lambda: hub.Dinov2ForImageClassification(hub.Dinov2Config(**SMALL, **NAMES)),
    "DINOv3": lambda: hub.DINOv3ViTModel(hub.DINOv3ViTConfig(**SMALL, num_register_tokens=4)),
    "DINOv3, gated": lambda: hub.DINOv3ViTModel(
        hub.DINOv3ViTConfig(**SMALL, num_register_tokens=2, use_gated_mlp=True, hidden_act="silu")
    ),
    "CLIP": lambda: hub.CLIPVisionModel(hub.CLIPVisionConfig(**SMALL)),
    "CLIP with gelu": lambda: hub.CLIPVisionModel(hub.CLIPVisionConfig(**SMALL, hidden_act="gelu")),
    "SigLIP": lambda: hub.SiglipVisionModel(hub.SiglipVisionConfig(**SMALL)),
}


def make(kind, folder, naming, randomise):
    """A model with random weights, saved as on the hub or under the names that transformers has in memory."""
    torch.manual_seed(0)
    model = randomise(MODELS[kind]())
    model.save_pretrained(folder)
    if naming == "memory":
        save_file({n: t.contiguous() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    return model


@pytest.mark.parametrize("naming", ["hub", "memory"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_transformers_folder_gives_the_same_tokens(kind, naming, tmp_path, randomise, error_of):
    theirs = make(kind, tmp_path, naming, randomise)
    loaded = load_weights(str(tmp_path))
    x = torch.randn(2, 3, 32, 32)
    tower = next((getattr(theirs, n) for n in ("vit", "deit", "dinov2") if hasattr(theirs, n)), theirs)
    with torch.no_grad():
        out = tower(x)
        if kind.startswith("CLIP"):
            # transformers normalises the class token only.
            theirs_tokens, ours = out.pooler_output, loaded.model(x)
        else:
            theirs_tokens, ours = out.last_hidden_state, loaded.model.forward_features(x)
        assert error_of(ours, theirs_tokens) < 1e-5
        if kind == "SigLIP":
            assert error_of(loaded.model(x), out.pooler_output) < 1e-5
        if kind in ("ViT", "DeiT with its teacher's head"):
            assert error_of(loaded.model(x), theirs(x).logits) < 1e-5
            assert loaded.classes == ("cat", "dog", "owl")
    assert loaded.model.config.norm_eps == theirs.config.layer_norm_eps  # case B18


# Case B20.
def test_the_activation_of_clip_comes_with_the_configuration_or_is_asked_for(tmp_path, randomise):
    make("CLIP", tmp_path, "hub", randomise)
    assert load_weights(str(tmp_path)).model.config.activation == "quick_gelu"
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="gelu or quick_gelu"):
        load_weights(str(tmp_path))
    assert load_weights(str(tmp_path), activation="gelu", heads=2).model.config.activation == "gelu"


def test_a_whole_clip_gives_its_image_tower(tmp_path, randomise, error_of):
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 9,
    }
    model = randomise(hub.CLIPModel(hub.CLIPConfig(text_config=text, vision_config=SMALL, projection_dim=16)))
    model.save_pretrained(tmp_path)
    loaded = load_weights(str(tmp_path))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert error_of(loaded.model(x), model.vision_model(x).pooler_output) < 1e-5
    assert any(name.startswith("text_model.") for name in loaded.report.dropped)


def test_a_head_that_reads_class_token_and_mean_together_is_dropped_with_a_line(tmp_path, randomise):
    make("DINOv2 classifier", tmp_path, "hub", randomise)
    loaded = load_weights(str(tmp_path))
    assert loaded.model.config.num_classes == 0
    assert "class token and mean of patches" in loaded.report.dropped["head.weight"]


def test_positions_move_as_transformers_moves_them(tmp_path, randomise, error_of):
    for kind in ("DINOv2", "DINOv2 with registers", "DINOv3"):
        theirs = make(kind, tmp_path / kind, "hub", randomise)
        for size in ((32, 48), (16, 16), (64, 64)):
            x = torch.randn(1, 3, *size)
            loaded = load_weights(str(tmp_path / kind), image_size=size)
            with torch.no_grad():
                assert error_of(loaded.model.forward_features(x), theirs(x).last_hidden_state) < 1e-5


# Cases B14 and B15.
def test_mean_std_and_crop_come_from_the_preprocessor(tmp_path, randomise):
    make("DINOv2", tmp_path, "hub", randomise)
    values = {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "resample": 2,
        "do_center_crop": True,
        "size": {"shortest_edge": 40},
        "crop_size": {"height": 32, "width": 32},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    told = load_weights(str(tmp_path)).preprocessing
    assert told == {
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
        "interpolation": "bilinear",
        "crop_pct": 0.8,
        "crop_mode": "center",
        "image_size": 32,
    }


@pytest.mark.shared
@pytest.mark.parametrize("size", [112, 224, pytest.param(518, marks=pytest.mark.slow)])
def test_real_dinov2_gives_transformers_tokens_at_any_size_with_one_option(size, shared, error_of):
    folder = shared / "weights" / "dinov2_small_hf"
    theirs = hub.Dinov2Model.from_pretrained(folder, dtype=torch.float32).eval()
    loaded = load_weights(str(folder), image_size=size)
    x = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert error_of(loaded.model.forward_features(x), theirs(x).last_hidden_state) < 1e-5
    assert loaded.preprocessing["mean"] == (0.485, 0.456, 0.406)
    assert loaded.preprocessing["crop_pct"] == 224 / 256


def test_a_file_alone_says_what_it_assumes(tmp_path, randomise):
    make("DINOv2", tmp_path, "hub", randomise)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state, tmp_path / "alone.bin")
    (tmp_path / "config.json").unlink()
    loaded = load_weights(str(tmp_path / "alone.bin"))
    assert loaded.model.config.heads == 1
    assert any("heads are not in the file" in note for note in loaded.report.notes)
