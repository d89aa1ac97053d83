"""vit/models/artifact.py: a folder that three libraries open, whole or not at all, without running code."""

import json
import math
import pickle

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_model_data_config
from transformers import pipeline

from vit.models import VisionTransformer, ViTConfig, artifact, load_model, save_model

TINY = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "num_classes": 3}
NAMES = ("cat", "dog", "été")
PREPROCESSING = {
    "image_size": 32,
    "mean": (0.1, 0.5, 0.4),
    "std": (0.2, 0.3, 0.25),
    "interpolation": "bilinear",
    "crop_pct": 0.8,
    "crop_mode": "center",
    "background": (255, 255, 255),
}


def build(randomise, **options) -> VisionTransformer:
    return randomise(VisionTransformer(ViTConfig(**{**TINY, **options})))


def save(folder, model, classes=NAMES, **changes):
    return save_model(folder, model, classes=classes, preprocessing={**PREPROCESSING, **changes})


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    "options",
    [{}, {"norm_eps": 1e-12, "head": "mlp", "block_norm": "post", "head_dim": 24}, {"image_size": (32, 48)}],
)
def test_what_is_saved_is_what_is_opened(options, tmp_path, randomise):
    model = build(randomise, **options)
    provenance = {"version": "0.1", "metrics": {"top1": 0.5}}
    preprocessing = {**PREPROCESSING, "image_size": model.config.image_size}
    folder = save_model(
        tmp_path / "runs" / "model", model, classes=NAMES, preprocessing=preprocessing, provenance=provenance
    )
    opened, info = load_model(folder)
    assert opened.config == model.config
    assert not opened.training
    assert opened.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(opened.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in opened.parameters())
    assert info.classes == NAMES
    assert info.provenance == provenance
    assert info.preprocessing == json.loads(json.dumps(preprocessing))
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


KINDS = {
    "token": ({}, NAMES),
    "mean pooling, registers, LayerScale": (
        {"pool": "mean", "class_token": False, "registers": 2, "layer_scale": 0.1},
        NAMES,
    ),
    "attention pooling, eps, QuickGELU": (
        {"pool": "attention", "norm_eps": 1e-5, "activation": "quick_gelu"},
        NAMES,
    ),
    "any size, query and key norm": (
        {"dynamic_size": True, "qk_norm": True, "prefix_position": False},
        NAMES,
    ),
    "numbers as names": ({"num_classes": 4}, ("1", "2", "10", "007")),
    "two classes": ({"num_classes": 2}, ("yes", "no")),
    "one class": ({"num_classes": 1}, ("猫",)),
    "a thousand classes": ({"num_classes": 1000}, tuple(f"class {i}" for i in range(1000))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_timm_and_transformers_open_the_folder_with_equal_logits_names_and_preprocessing(kind, tmp_path, randomise):
    options, names = KINDS[kind]
    model = build(randomise, **options)
    folder = save(tmp_path / "model", model, names)

    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(theirs))
    pixels = transform(picture())[None]
    assert pixels.shape == (1, 3, 32, 32)
    with torch.no_grad():
        logits = model(pixels)
        torch.testing.assert_close(theirs(pixels), logits, atol=1e-5, rtol=1e-5)
    for key in ("interpolation", "crop_pct", "crop_mode", "mean", "std"):
        assert tuple(np.atleast_1d(theirs.pretrained_cfg[key])) == tuple(np.atleast_1d(PREPROCESSING[key]))
    assert tuple(theirs.pretrained_cfg["label_names"]) == names

    classify = pipeline("image-classification", model=str(folder))
    answers = classify(picture(), top_k=len(names), function_to_apply="none")
    scores = {answer["label"]: answer["score"] for answer in answers}
    assert set(scores) == set(names)
    torch.testing.assert_close(torch.tensor([[scores[name] for name in names]]), logits, atol=1e-5, rtol=1e-5)


def test_several_labels_are_so_many_questions_in_transformers_too(tmp_path, randomise):
    model = build(randomise)
    save_model(tmp_path / "model", model, classes=NAMES, preprocessing=PREPROCESSING, several=True)
    answers = pipeline("image-classification", model=str(tmp_path / "model"))(picture())
    scores = {answer["label"]: answer["score"] for answer in answers}
    logits = pipeline("image-classification", model=str(tmp_path / "model"))(picture(), function_to_apply="none")
    for answer in logits:
        assert scores[answer["label"]] == pytest.approx(1 / (1 + math.exp(-answer["score"])), rel=1e-4)
    assert load_model(tmp_path / "model")[1].several


def test_timm_goes_on_training_with_the_same_regularisation(tmp_path, randomise):
    model = build(randomise, dropout=0.1, position_dropout=0.2, attention_dropout=0.3, drop_path=0.4)
    theirs = timm.create_model(f"local-dir:{save(tmp_path / 'model', model)}", pretrained=True)
    assert theirs.pos_drop.p == 0.2
    assert (theirs.blocks[1].attn.proj_drop.p, theirs.blocks[1].attn.attn_drop.p) == (0.1, 0.3)
    assert theirs.blocks[1].drop_path1.drop_prob == pytest.approx(0.4)


def test_a_model_without_a_head_is_a_feature_extractor_in_timm_too(tmp_path, randomise):
    model = build(randomise, num_classes=0)
    theirs = timm.create_model(f"local-dir:{save(tmp_path / 'model', model, ())}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(theirs(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "gap"),
    [
        ({"head": "mlp"}, "MLP head"),
        ({"head": "distilled", "registers": 1}, "distillation token"),
        ({"block_norm": "post"}, "post-norm"),
        ({"head_dim": 24}, "head_dim"),
    ],
)
def test_what_timm_cannot_build_says_so_in_the_folder_and_timm_refuses_it(options, gap, tmp_path, randomise):
    folder = save(tmp_path / "model", build(randomise, **options))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert [gap in text for text in config["vit_toolkit"]["timm_cannot_express"]] == [True]
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert gap in card
    assert "cannot open this model" in card
    assert "local-dir" not in card
    with pytest.raises(RuntimeError, match="Unknown model"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_the_card_names_the_classes_and_the_preprocessing(tmp_path, randomise):
    card = (save(tmp_path / "model", build(randomise)) / "README.md").read_text(encoding="utf-8")
    assert all(f"{i}. `{name}`" in card for i, name in enumerate(NAMES))
    assert "- mean: `[0.1, 0.5, 0.4]`" in card
    assert "local-dir" in card


# Case B20.
def test_the_activation_survives_the_folder(tmp_path, randomise):
    model = build(randomise, activation="quick_gelu")
    opened, _ = load_model(save(tmp_path / "model", model))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(opened(x), model(x))
    assert not torch.allclose(build(randomise)(x), model(x), atol=1e-4)


def test_half_precision_weights_stay_half_on_disk_and_open_in_float32(tmp_path, randomise):
    folder = save(tmp_path / "model", build(randomise).half())
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}
    opened, _ = load_model(folder)
    assert {parameter.dtype for parameter in opened.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position": "sine_2d", "relative_position": "quadratic"},
        {"position": "sine", "position_at": "every_layer", "relative_position": "bias"},
        {"position": "learned_2d", "position_at": "every_layer", "relative_position": "rotary", "mlp": "swiglu"},
        {"position": "none", "relative_position": "rotary_index", "key_bias": False, "norm_pre": True},
        {"relative_position": "rotary_mixed", "attention_norm": True, "mlp_norm": True, "mlp": "swiglu_packed"},
    ],
)
def test_opening_leaves_nothing_on_the_meta_device_and_every_kind_gives_its_logits(options, tmp_path, randomise):
    model = build(randomise, **options)
    opened, _ = load_model(save(tmp_path / "model", model))
    tensors = [*opened.parameters(), *opened.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(opened(x), model(x))


def test_saving_again_replaces_the_folder(tmp_path, randomise):
    save(tmp_path / "model", build(randomise))
    second = build(randomise, num_classes=2)
    save(tmp_path / "model", second, ("a", "b"))
    opened, info = load_model(tmp_path / "model")
    assert info.classes == ("a", "b")
    assert torch.equal(opened.head.weight, second.head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("broken", ["save_file", "_flush_to_disk", "model_card"])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_failing_write_leaves_what_was_there_and_nothing_else(earlier, broken, tmp_path, randomise, monkeypatch):
    model = build(randomise)
    if earlier:
        save(tmp_path / "model", model)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, broken, full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "model", build(randomise, depth=1))
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if earlier else [])
    if earlier:
        opened, _ = load_model(tmp_path / "model")
        assert opened.config == model.config


def test_when_the_last_rename_fails_the_earlier_folder_comes_back(tmp_path, randomise, monkeypatch):
    model = build(randomise)
    save(tmp_path / "model", model)
    rename = artifact.Path.rename

    def fail(self, target):
        if target == tmp_path / "model" and not self.name.endswith("earlier"):
            raise OSError("renaming failed")
        return rename(self, target)

    monkeypatch.setattr(artifact.Path, "rename", fail)
    with pytest.raises(OSError, match="renaming failed"):
        save(tmp_path / "model", build(randomise, depth=1))
    monkeypatch.undo()
    assert load_model(tmp_path / "model")[0].config == model.config
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_with_other_files_is_never_replaced(tmp_path, randomise):
    (tmp_path / "holiday.jpg").write_bytes(b"precious")
    with pytest.raises(ValueError, match=r"other files: holiday\.jpg"):
        save(tmp_path, build(randomise))
    assert (tmp_path / "holiday.jpg").read_bytes() == b"precious"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="to be new, empty or an earlier model folder"):
        save(tmp_path / "file", build(randomise))


@pytest.mark.parametrize(
    ("classes", "changes", "message"),
    [
        (("a", "b"), {}, "expected 3 class names, as many as logits, but got 2"),
        (("a", "b", "a"), {}, "each class name once, but got a"),
        (("a", "", "b"), {}, "a list of texts"),
        ((1, 2, 3), {}, "a list of texts"),
        ("abc", {}, "a list of texts"),
        (NAMES, {"image_size": 48}, "32x32 pixels, but got image_size=48"),
        (NAMES, {"mean": (0.5,)}, "expected 3 values of mean"),
        (NAMES, {"std": (0.5, float("nan"), 0.5)}, "plain finite values"),
        (NAMES, {"extra": object()}, "plain finite values"),
    ],
)
@pytest.mark.usefixtures("as_users_run")
def test_what_does_not_fit_the_model_is_refused_and_nothing_is_written(classes, changes, message, tmp_path, randomise):
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "model", build(randomise), classes, **changes)
    assert list(tmp_path.iterdir()) == []


def test_preprocessing_must_be_complete(tmp_path, randomise):
    with pytest.raises(ValueError, match="crop_mode is missing"):
        save_model(
            tmp_path / "model",
            build(randomise),
            classes=NAMES,
            preprocessing={k: v for k, v in PREPROCESSING.items() if k != "crop_mode"},
        )


def spoil_tensor(folder, change):
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "expected a model folder with config.json"),
        (lambda f: (f / "config.json").write_text("{"), "expected JSON"),
        (
            lambda f: (f / "config.json").write_text('{"architecture": "x"}'),
            "another library wrote this folder",
        ),
        (
            lambda f: (f / "config.json").write_text('{"vit_toolkit": {"format": 1}}'),
            "expected classes, config",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "expected the weights in"),
        (lambda f: (f / "model.safetensors").write_bytes(b"12345678901"), "expected the weights in"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
            "expected the weights in",
        ),
        (lambda f: spoil_tensor(f, lambda t: t.pop("head.bias")), r"head\.bias: expected \(3,\), got None"),
        (lambda f: spoil_tensor(f, lambda t: t.update(x=torch.zeros(2))), r"x: expected None, got \(2,\)"),
        (
            lambda f: spoil_tensor(f, lambda t: t.update({"head.bias": torch.zeros(4)})),
            r"head\.bias: expected \(3,\), got \(4,\)",
        ),
        (
            lambda f: spoil_tensor(f, lambda t: t.update({"head.bias": torch.zeros(3, dtype=torch.int64)})),
            r"1 differ: head\.bias",
        ),
    ],
)
def test_a_broken_folder_gets_one_clear_error(spoil, message, tmp_path, randomise):
    folder = save(tmp_path / "model", build(randomise))
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_a_folder_of_a_later_format_asks_for_an_update(tmp_path, randomise):
    folder = save(tmp_path / "model", build(randomise))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["vit_toolkit"]["format"] = 99
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="got 99: update vit-toolkit"):
        load_model(folder)


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


# Case H2.
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "pytorch_model.bin"])
def test_a_planted_pickle_never_runs(name, tmp_path, randomise):
    folder = save(tmp_path / "model", build(randomise))
    marker = tmp_path / "ran"
    (folder / name).write_bytes(pickle.dumps(Payload(marker)))
    if name == "pytorch_model.bin":
        load_model(folder)
    else:
        with pytest.raises(ValueError, match="expected"):
            load_model(folder)
    assert not marker.exists()
