"""vit/models/known.py: the table says what timm says, and the command shows what becomes of each tensor."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

from vit.models import VisionTransformer, ViTConfig
from vit.models.artifact import save_model
from vit.models.known import KNOWN, command
from vit.models.timm_family import from_timm_model, timm_options
from vit.models.weights import SHIPPED, SHIPPED_NAMES, load_weights

TIMMS = [known for known in KNOWN if known.name not in SHIPPED_NAMES]


@pytest.mark.parametrize("known", TIMMS, ids=lambda known: known.name)
def test_size_licence_and_parameters_are_timms_and_the_model_is_one_that_loads(known):
    cfg = timm.get_pretrained_cfg(known.name)
    assert cfg.license == known.licence
    assert cfg.input_size == (3, known.size, known.size)
    with torch.device("meta"):
        model = timm.create_model(known.name, num_classes=0)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(known.millions, abs=0.06)
    timm_options(model)


@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_weights_that_ship_are_small_recorded_and_open_here_and_in_timm(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = SHIPPED / name
    known = next(known for known in KNOWN if known.name == name)
    assert (folder / "model.safetensors").stat().st_size <= 2e6
    loaded = load_weights(name, classes=["a", "b"])
    assert not loaded.report.resized
    assert all(key.startswith("head.") for key in loaded.report.dropped)
    config = loaded.model.config
    assert (config.size[0], config.num_classes) == (known.size, 2)
    assert sum(p.numel() for p in loaded.model.parameters()) / 1e6 == pytest.approx(known.millions, abs=0.06)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert record["test"]["pictures"] == 10_000
    assert f"{100 * record['test']['acc']:.2f} %" in (folder / "README.md").read_text(encoding="utf-8")
    assert "/home" not in json.dumps(record)
    # The MLP head has no place in timm; with a new head, as fine-tuning gives it one, the model opens there.
    swapped = save_model(tmp_path / "model", loaded.model, classes=["a", "b"], preprocessing=loaded.preprocessing)
    images = torch.rand(1, 3, *config.size)
    theirs = timm.create_model(f"local-dir:{swapped}", pretrained=True, num_classes=0).eval()(images)
    assert torch.allclose(load_weights(name, num_classes=0).model(images), theirs, atol=1e-5)


def test_the_bare_command_lists_all_of_them(capsys):
    assert command([]) == 0
    shown = capsys.readouterr().out
    assert all(known.name in shown and known.licence in shown for known in KNOWN)


def test_with_a_file_the_command_reports_every_tensor(tmp_path, capsys, randomise):
    config = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, heads=1, num_classes=3)
    state = randomise(VisionTransformer(config)).state_dict()
    save_file({**state, "decoder_norm.weight": torch.zeros(3)}, tmp_path / "weights")
    assert command([str(tmp_path / "weights"), "--image_size", "48"]) == 0
    shown = capsys.readouterr().out
    assert "48x48 pixels, patches of 8, width 64, 2 blocks" in shown
    assert f"matched           {len(state) - 1} tensors" in shown
    assert "pos_embed: grid 4x4 -> 6x6" in shown
    assert "decoder_norm.weight: for pre-training only" in shown
    assert "note: heads are not in the file" in shown


# Case B20.
def test_openais_weights_get_their_activation_even_under_timms_other_name(randomise):
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 1}
    for name in ("vit_base_patch16_clip_224.openai", "vit_base_patch16_clip_quickgelu_224.openai"):
        model = timm.create_model(name, **small)
        assert from_timm_model(model, model.state_dict()).options["activation"] == "quick_gelu"
    laion = timm.create_model("vit_base_patch16_clip_224.laion2b_ft_in12k_in1k", **small)
    assert from_timm_model(laion, laion.state_dict()).options["activation"] == "gelu"
