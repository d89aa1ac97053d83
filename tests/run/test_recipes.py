"""`--recipe` fills in what was not typed, says why, and what was typed wins."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image

from vit.models.artifact import save_model
from vit.models.sizes import vit_config
from vit.models.vit import VisionTransformer
from vit.run import session
from vit.tasks import facts

QUICK = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.limit_train_batches=2"]


@pytest.fixture
def photos(tmp_path):
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(30):
            pixels = draw.integers(0, 256, (60, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


@pytest.fixture
def weights(tmp_path):
    model = VisionTransformer(vit_config("Ti/8", image_size=64, num_classes=2, depth=2))
    prepared = {"image_size": 64, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9}
    folder = tmp_path / "weights"
    return save_model(folder, model, classes=["x", "y"], preprocessing={**prepared, "crop_mode": "center"})


def fitted(tmp_path, *words):
    return session.fit([*words, *QUICK, f"--trainer.default_root_dir={tmp_path / 'outputs'}"])


def test_auto_chooses_says_why_and_is_recorded(tmp_path, photos, weights, capsys):
    run = fitted(
        tmp_path, "--data=Folder", f"--data.root={photos}", f"--model.weights={weights}", "--trainer.max_epochs=1"
    )
    out = capsys.readouterr().out
    assert "recipe       auto; what is set by hand wins" in out
    assert "data.batch_size 16 (3 batches an epoch)" in out
    assert "model.tuning.head_init ridge" in out
    assert "head: ridge regression on 48 pictures" in out
    config = run.record["config"]
    assert config["data"]["init_args"]["batch_size"] == 16
    assert config["data"]["init_args"]["augment"]["preset"] == "light"
    assert config["model"]["tuning"]["head_init"] == "ridge"
    assert config["trainer"]["max_epochs"] == 1, "what was typed wins"
    assert "max_epochs" not in out.partition("recipe")[2].partition("model ")[0]
    assert "; val_acc chose the checkpoint" in out


def test_large_weights_are_averaged_and_chosen_by_their_loss(tmp_path, photos, weights, capsys, monkeypatch):
    monkeypatch.setattr(facts, "LARGE", 1000)
    words = ["--data=Folder", f"--data.root={photos}", f"--model.weights={weights}", "--trainer.max_epochs=2"]
    run = fitted(tmp_path, *words)
    out = capsys.readouterr().out
    assert "monitor val_loss (6 val pictures tell accuracies apart by some 14.6 points only" in out
    assert "; val_loss chose the checkpoint" in out
    assert run.record["checkpoint"]["chosen_by"] == "val_loss"
    held = torch.load(run.best, weights_only=True)
    assert held["averaging"]["state_dict"] == "average"
    rows = csv.DictReader((run.path / "metrics.csv").read_text().splitlines())
    losses = {int(row["epoch"]): float(row["val_loss"]) for row in rows}
    assert held["epoch"] + 1 == min(losses, key=losses.get)
    typed = fitted(tmp_path, *words, "--monitor=val_acc")
    assert typed.record["checkpoint"]["chosen_by"] == "val_acc"


def test_what_is_typed_wins_also_in_a_file(tmp_path, photos, weights, capsys):
    file = tmp_path / "own.yaml"
    file.write_text("model:\n  optim: {lr: 0.02}\ndata:\n  class_path: Folder\n  init_args: {batch_size: 4}\n")
    fitted(tmp_path, f"--config={file}", f"--data.root={photos}", f"--model.weights={weights}", "--dry_run")
    out = capsys.readouterr().out
    assert "batch 4 (as asked for)" in out
    assert "model.optim.lr" not in out
    assert "data.batch_size" not in out
    assert "lr 0.02 is high for pre-trained weights" in out  # C3


def test_what_is_typed_is_what_the_other_choices_follow_from(tmp_path, photos, weights, capsys):
    words = ["--data=Folder", f"--data.root={photos}", f"--model.weights={weights}", "--dry_run"]
    fitted(tmp_path, *words, "--model.method=lora")
    out = capsys.readouterr().out
    assert "model.optim" not in out
    assert "lr 0.003" in out
    assert "the few parameters of lora" in out
    rates = []
    for batch in (4, 16):
        fitted(tmp_path, *words, f"--data.batch_size={batch}")
        rates.append(float(capsys.readouterr().out.split("model.optim.lr ")[1].split()[0]))
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.05)


def test_a_head_that_knows_the_classes_goes_on(tmp_path, photos, weights, capsys):
    for number, name in enumerate(("cat", "dog")):
        (photos / name).rename(photos / "xy"[number])
    words = ["--data=Folder", f"--data.root={photos}", f"--model.weights={weights}", "--trainer.max_epochs=1"]
    fitted(tmp_path, *words)
    out = capsys.readouterr().out
    assert "newly initialised 0 tensors" in out
    assert "ridge" not in out


def test_one_option_of_a_model_from_scratch_leaves_the_others_to_the_recipe(tmp_path, photos, capsys):
    words = ["--data=Folder", f"--data.root={photos}", "--dry_run"]
    fitted(tmp_path, *words, "--model.encoder.drop_path=0.1")
    assert "model.encoder.width 128" in capsys.readouterr().out
    fitted(tmp_path, *words, "--model.encoder.width=64", "--model.encoder.heads=2")
    out = capsys.readouterr().out
    assert "model.encoder.depth" not in out
    assert "model.encoder as described by hand; what was left open is that of ViT-B/16" in out


def test_the_rate_is_that_of_the_batch_that_is_found(tmp_path, photos, weights, capsys):
    words = ["--data=Folder", f"--data.root={photos}", f"--model.weights={weights}", "--dry_run"]
    fitted(tmp_path, *words, "--find_batch_size=true")
    out = capsys.readouterr().out
    assert "data.batch_size 48 (48 is the largest that fitted)" in out
    assert "batch 48 (as asked for)" in out
    assert out.count("data.batch_size") == 1
    found = float(out.split("model.optim.lr ")[1].split()[0])
    fitted(tmp_path, *words, "--data.batch_size=48")
    assert found == float(capsys.readouterr().out.split("model.optim.lr ")[1].split()[0])


def test_long_pictures_are_seen_as_such(tmp_path, capsys):
    for name in ("cat", "dog"):
        (tmp_path / "long" / name).mkdir(parents=True)
        for i in range(10):
            Image.new("L", (56, 28), 9 * i).save(tmp_path / "long" / name / f"{i}.png")
    fitted(tmp_path, "--data=Folder", f"--data.root={tmp_path / 'long'}", "--dry_run")
    assert "crop_mode squash (longer sides are 2.0 times the shorter" in capsys.readouterr().out


def test_blocks_that_never_wake_are_said(tmp_path, photos, weights, capsys):
    words = ["--data=Folder", f"--data.root={photos}", f"--model.weights={weights}", "--dry_run"]
    fitted(tmp_path, *words, "--model.tuning.unfreeze_every=2", "--trainer.max_epochs=4")
    assert "parameters are still frozen when the run ends" in capsys.readouterr().out
    fitted(tmp_path, *words, "--model.tuning.unfreeze_every=1", "--trainer.max_epochs=4")
    assert "still frozen" not in capsys.readouterr().out


def test_none_takes_the_defaults(tmp_path, photos, capsys):
    fitted(
        tmp_path,
        "--data=Folder",
        f"--data.root={photos}",
        "--recipe=none",
        "--model.encoder.image_size=32",
        "--model.encoder.depth=1",
        "--dry_run",
    )
    out = capsys.readouterr().out
    assert "recipe" not in out
    assert "4 patches are few to tell things apart" in out  # C2
    assert "48 pictures are few to learn from scratch; vit weights" in out


def test_paper_is_refused_for_a_task_of_ones_own(tmp_path, photos):
    with pytest.raises(ValueError, match="expected classification with a data source"):
        fitted(tmp_path, "--data=Folder", f"--data.root={photos}", "--recipe=paper", "--model=MAE")
