"""Fine-tuning methods through whole runs: cut and resumed, exported, tested."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_resume import Cut, equal, fit_with

from vit.data.transforms import Preprocessing
from vit.models.artifact import load_model
from vit.models.normalise import Normalise
from vit.models.vit import VisionTransformer
from vit.run import score, session
from vit.run.options import Options

METHODS = {
    "lora": ["--model.method=lora", "--model.tuning.lora_rank=2", "--model.tuning.lora_projections=[qkv,fc1]"],
    "one block per epoch, from a ridge start": ["--model.tuning.unfreeze_every=1", "--model.tuning.head_init=ridge"],
}


@pytest.mark.parametrize(
    "method", [name if name == "lora" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_a_cut_run_goes_on_bit_for_bit(tmp_path, tiny, method, monkeypatch, capsys):  # C14
    args = [*tiny, "--data.num_workers=0", "--save_every_n_steps=1", *METHODS[method]]
    unbroken = session.fit([*args, "--name=unbroken"])
    fit_with(Cut(9), [*args, "--name=cut"], Cut.Now, monkeypatch)
    ridge = "ridge" in method
    assert capsys.readouterr().out.count("head: ridge regression") == 2 * ridge
    resumed = session.fit([], resume=str(tmp_path / "outputs" / "cut" / "1"))
    assert "head: ridge" not in capsys.readouterr().out
    assert equal(resumed.last, unbroken.last)
    assert equal(resumed.best, unbroken.best)
    assert resumed.record["val"]["loss"] == unbroken.record["val"]["loss"]


@pytest.mark.slow
def test_a_cut_run_on_stored_features_goes_on_bit_for_bit_and_decodes_nothing_twice(
    tmp_path, tiny, monkeypatch, capsys
):
    # Without quickstart's crops.
    args = ["--data=Digits", "--data.augment.preset=none", *tiny[1:], "--data.batch_size=64", "--data.num_workers=0"]
    args += ["--model.encoder.image_size=16", "--model.encoder.patch_size=4", "--model.method=head"]
    args += ["--trainer.limit_train_batches=1.0", "--save_every_n_steps=1"]
    unbroken = session.fit([*args, "--name=unbroken"])
    fit_with(Cut(27), [*args, "--name=cut"], Cut.Now, monkeypatch)
    resumed = session.fit([], resume=str(tmp_path / "outputs" / "cut" / "1"))
    assert capsys.readouterr().out.count("head: features of 179 val and 1,241 train pictures are computed once") == 3
    assert equal(resumed.last, unbroken.last)
    assert equal(resumed.best, unbroken.best)
    assert resumed.record["val"]["loss"] == unbroken.record["val"]["loss"]


def test_a_lora_run_is_exported_as_a_plain_model_that_scores_the_same(tmp_path, tiny):
    run = session.fit([*tiny, "--trainer.precision=32-true", "--trainer.max_epochs=1", *METHODS["lora"]])
    state = torch.load(run.best, weights_only=True)["state_dict"]
    assert any(name.endswith("qkv.lora_b") and tensor.abs().max() > 0 for name, tensor in state.items())
    model, info = load_model(run.model)
    assert set(load_file(run.model / "model.safetensors")) == set(VisionTransformer(model.config).state_dict())
    before = state["net.model.blocks.0.attn.qkv.weight"]
    assert not torch.equal(model.state_dict()["blocks.0.attn.qkv.weight"], before)
    values = score.evaluate("test", str(run.path), [])
    data, _ = Options("test", ["--config", str(run.config)]).build()
    net = Normalise(model, mean=info.preprocessing["mean"], std=info.preprocessing["std"]).eval()
    data.preprocessing = Preprocessing.from_dict(info.preprocessing)
    with torch.no_grad():
        right = [net(batch.images).argmax(1) == batch.labels for batch in data.test_dataloader()]
    assert float(torch.cat(right).float().mean()) == pytest.approx(values["acc"])


def test_a_dry_run_takes_no_features(tiny, capsys, monkeypatch):
    monkeypatch.setattr("vit.tasks.classify.split_features", None)
    assert session.fit([*tiny, "--model.tuning.head_init=ridge"], dry_run=True) is None
    assert "method full" in capsys.readouterr().out


def test_a_run_that_goes_on_still_knows_where_its_weights_came_from(tmp_path, tiny, capsys):
    first = session.fit([*tiny, "--trainer.max_epochs=1"])
    words = ["--data=Digits", f"--model.weights={first.path}", "--trainer.limit_train_batches=2"]
    common = [word for word in tiny if word.startswith("--trainer.")]
    run = session.fit([*common, *words, "--name=tuned", "--recipe=none", "--trainer.max_epochs=1"])
    capsys.readouterr()
    again = session.fit(["--trainer.max_epochs=2"], resume=str(run.path))
    assert f"weights {first.path}" in capsys.readouterr().out
    assert again.record["config"]["model"]["weights"] == str(first.path)
    card = json.loads((again.model / "config.json").read_text())
    assert card["vit_toolkit"]["provenance"]["weights"] == str(first.path)
    assert f"weights: {first.path}" in again.config.read_text()
