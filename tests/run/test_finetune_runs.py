"""Fine-tuning methods through whole runs: cut and resumed, exported, tested."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from test_resume import Cut, equal, fit_with

from vit.data.transforms import Preprocessing
from vit.deploy.predict import Predictor
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
def test_a_cut_run_goes_on_bit_for_bit(tmp_path, tiny, method, watched, capsys):  # C14
    args = [*tiny, "--data.num_workers=0", "--save_every_n_steps=1", *METHODS[method]]
    unbroken = session.fit([*args, "--name=unbroken"])
    fit_with(Cut(9), [*args, "--name=cut"], Cut.Now, watched)
    ridge = "ridge" in method
    assert capsys.readouterr().out.count("head: ridge regression") == 2 * ridge
    resumed = session.fit([], resume=str(tmp_path / "outputs" / "cut" / "1"))
    assert "head: ridge" not in capsys.readouterr().out
    assert equal(resumed.last, unbroken.last)
    assert equal(resumed.best, unbroken.best)
    assert resumed.record["val"]["loss"] == unbroken.record["val"]["loss"]


@pytest.mark.slow
def test_a_cut_run_on_stored_features_goes_on_bit_for_bit_and_decodes_nothing_twice(tmp_path, tiny, watched, capsys):
    # Without quickstart's crops.
    args = ["--data=Digits", "--data.augment.preset=none", *tiny[1:], "--data.batch_size=64", "--data.num_workers=0"]
    args += ["--model.encoder.image_size=16", "--model.encoder.patch_size=4", "--model.method=head"]
    args += ["--trainer.limit_train_batches=1.0", "--save_every_n_steps=1"]
    unbroken = session.fit([*args, "--name=unbroken"])
    fit_with(Cut(27), [*args, "--name=cut"], Cut.Now, watched)
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


# F9, A14, A16, A17: what the data declare reaches the model, and with it every later verb.
def test_predictions_prepare_pictures_as_the_run_was_told_to(tmp_path, tiny):
    draw = np.random.default_rng(0)
    for k in range(16):
        folder = tmp_path / "scans" / "ab"[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        scan = draw.integers(2000 * (k % 2), 2000 + 2000 * (k % 2), (20, 20), dtype=np.uint16)
        Image.fromarray(scan).save(folder / f"{k}.png")
    hidden = Image.new("RGBA", (20, 20), (200, 10, 10, 0))
    exif = hidden.getexif()
    exif[0x0112] = 6
    hidden.putpixel((0, 0), (1, 2, 3, 255))
    hidden.save(tmp_path / "scans" / "a" / "clear.png", exif=exif)
    words = ["--data=Folder", f"--data.root={tmp_path / 'scans'}", "--recipe=none", *tiny[1:]]
    words += ["--model.encoder.image_size=16", "--model.encoder.patch_size=4", "--model.preprocessing.crop_pct=1"]
    declared = ["--data.value_range=[0,4095]", "--data.background=[0,0,255]", "--data.orient=false"]
    run = session.fit([*words, *declared, "--trainer.max_epochs=1", "--data.val=0.4"])
    assert "background 0 0 255; value range 0 to 4095; not turned by EXIF" in run.plan.read_text()
    data, _ = Options("fit", ["--config", str(run.config)]).build()
    data.preprocessing = Predictor.load(run.path).preprocessing
    assert Options("fit", ["--config", str(run.config)]).config.model.preprocessing.orient is False
    seen = 0
    for split in ("train", "val", "test"):
        for batch in data.loader(split):
            for image, row in zip(batch.images, batch.index.tolist(), strict=True):
                for source in (run.path, run.model, run.best):
                    assert torch.equal(Predictor.load(source).prepare(data.table.path(row)), image)
                seen += 1
    assert seen == 17
    # Those pictures are the declared ones, which the defaults would show otherwise.
    shown = Predictor.load(run.path).prepare(str(tmp_path / "scans" / "a" / "clear.png"))
    assert shown[2].float().mean() > 200 > shown[0].float().mean()
    assert Predictor.load(run.path).prepare(str(tmp_path / "scans" / "b" / "1.png")).float().mean() > 150
    # A run that goes on from it may say otherwise.
    more = session.fit([*words, f"--model.weights={run.path}", "--trainer.max_epochs=1", "--name=more"])
    assert "preprocessing.value_range (0.0, 4095.0) comes with the weights" in more.plan.read_text()
    assert "preprocessing.orient False comes with the weights" in more.plan.read_text()
    turned = session.fit([*words, f"--model.weights={run.path}", "--model.preprocessing.orient=true", "--dry_run"])
    assert turned is None


# A29, A30: a folder that has grown is not split anew, which would score pictures that the model has learned.
def test_a_changed_folder_keeps_the_runs_split(tmp_path, tiny, caplog):
    draw = np.random.default_rng(0)

    def add(count, first=0):
        for k in range(first, first + count):
            (tmp_path / "photos" / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
            picture = draw.integers(0, 256, (16, 16), dtype=np.uint8)
            Image.fromarray(picture).save(tmp_path / "photos" / "ab"[k % 2] / f"{k * 7919 % 1000:03d}.png")

    def pictures(file):
        rows = pq.read_table(file, columns=["path", "split"] if file == run.split else ["path"]).to_pylist()
        return {Path(row["path"]).name: row.get("split") for row in rows}

    add(60)
    words = ["--data=Folder", f"--data.root={tmp_path / 'photos'}", "--recipe=none", *tiny[1:]]
    words += ["--model.encoder.image_size=16", "--model.encoder.patch_size=4"]
    run = session.fit([*words, "--trainer.max_epochs=1"])
    split = pictures(run.split)
    tested = {name for name, where in split.items() if where == "test"}
    add(40, first=60)
    gone = next(name for name, where in split.items() if where == "train")
    next((tmp_path / "photos").rglob(gone)).unlink()
    assert score.evaluate("test", str(run.path), [])["pictures"] == len(tested) == 6
    assert set(pictures(run.predictions("test"))) == tested
    assert "whose split is kept: 1 are gone, 40 are new and left out" in caplog.text
    # Who asks for another split gets it.
    assert score.evaluate("test", str(run.path), ["--data.test=0.3"])["pictures"] > 20
    more = session.fit(["--trainer.max_epochs=2"], resume=str(run.path))
    assert pictures(more.split) == {name: where for name, where in split.items() if name != gone}


def test_a_runs_split_file_and_other_options_of_the_data_go_over_its_split(tmp_path, tiny):
    draw = np.random.default_rng(0)
    lines = ["path,split"]
    for k in range(40):
        name = f"{'ab'[k % 2]}/{k:02d}.png"
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (16, 16), dtype=np.uint8)).save(tmp_path / "photos" / name)
        lines += [f"{name},{'train' if k < 20 else 'val' if k < 26 else 'test'}"] if k < 30 else []
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(lines) + "\n")
    words = ["--data=Folder", f"--data.root={tmp_path / 'photos'}", "--recipe=none", *tiny[1:]]
    words += ["--model.encoder.image_size=16", "--model.encoder.patch_size=4", "--trainer.max_epochs=1"]
    run = session.fit([*words, f"--data.split_file={file}"])
    (tmp_path / "photos" / "notes.txt").write_text("changes what is left out")
    assert score.evaluate("test", str(run.path), [])["pictures"] == 4
    file.write_text("\n".join([*lines, "a/30.png,test"]) + "\n")
    assert score.evaluate("test", str(run.path), [])["pictures"] == 5
    plain = session.fit([*words, "--data.nested=true", "--data.test=0.2"])
    tested = score.evaluate("test", str(plain.path), [])["pictures"]
    Image.new("L", (16, 16)).save(tmp_path / "photos" / "a" / "new.png")
    assert score.evaluate("test", str(plain.path), [])["pictures"] == tested
    assert score.evaluate("test", str(plain.path), ["--data.suffixes=[.png,.jpg]"])["pictures"] >= tested
