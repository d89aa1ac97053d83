"""Several runs: seeds, folds and sweeps, each with what they say together."""

import csv
import json
import statistics

import pytest
import torch

from vit import api, cli
from vit.run import session
from vit.run.many import fit_many
from vit.run.sweep import read_grid, sweep


@pytest.fixture
def tiny(tiny):
    return [*tiny, "--trainer.max_epochs=1"]


def test_seeds_give_runs_of_their_own_and_mean_and_deviation(tmp_path, tiny, capsys):
    runs = fit_many(tiny, seeds=3)
    assert [run.record["seeds"]["run"] for run in runs] == [0, 1, 2]
    losses = [run.record["val"]["loss"] for run in runs]
    assert len(set(losses)) == 3
    file = tmp_path / "outputs" / "quickstart" / "several-1-3.json"
    told = json.loads(file.read_text())["values"]["loss"]
    assert told["mean"] == pytest.approx(statistics.fmean(losses))
    assert told["sd"] == pytest.approx(statistics.stdev(losses))
    assert f"loss {told['mean']:.4f} ± {told['sd']:.4f}" in capsys.readouterr().out
    alone = session.fit([*tiny, "--seed=2", "--name=alone"])
    assert alone.record["val"]["loss"] == losses[2], "a run does not depend on those before it"


@pytest.mark.slow
def test_folds_validate_every_picture_once(tiny):
    import pyarrow.parquet as pq

    runs = fit_many([*tiny, "--data.test=0.0"], folds=2)
    seen = [set(pq.read_table(run.predictions("val"))["path"].to_pylist()) for run in runs]
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) == 1797


def test_the_first_seed_is_that_of_the_options_also_in_a_file(tmp_path, tiny):
    file = tmp_path / "own.yaml"
    file.write_text("seed: 5\n")
    runs = fit_many([*tiny, f"--config={file}", "--trainer.limit_train_batches=1"], seeds=2)
    assert [run.record["seeds"]["run"] for run in runs] == [5, 6]


@pytest.mark.parametrize("words", [["--seeds=0"], ["--folds=1"], ["--seeds=2", "--resume=x"], ["--seeds=many"]])
def test_bad_numbers_of_runs_are_bad_input(tiny, words, capsys):
    assert cli.main(["fit", *tiny, *words]) == 2
    assert "expected" in capsys.readouterr().err


def test_a_sweep_ranks_by_val_goes_on_and_never_looks_at_test(tmp_path, tiny, capsys):
    grid = {"model.optim.lr": ["1e-4", "3e-2"], "data.batch_size": ["8", "16"]}
    rows = sweep([*tiny, "--name=tried"], grid)
    assert len(rows) == 4
    assert [row["val_acc"] for row in rows] == sorted((row["val_acc"] for row in rows), reverse=True)
    folder = tmp_path / "outputs" / "tried"
    for row in rows:
        record = json.loads((folder / row["run"] / "run.json").read_text())
        assert record["val"]["acc"] == row["val_acc"]
        assert str(record["config"]["data"]["init_args"]["batch_size"]) == row["data.batch_size"]
        assert "test" not in record
    with (folder / "sweep.csv").open(newline="") as file:
        assert [row["run"] for row in csv.DictReader(file)] == [row["run"] for row in rows]
    assert "ranked by val_acc; test pictures were never looked at" in capsys.readouterr().out
    assert sweep([*tiny, "--name=tried"], grid) == rows
    assert len([p for p in folder.iterdir() if p.name.isdecimal()]) == 4, "nothing is trained twice"
    with pytest.raises(ValueError, match="Choose another --name"):
        sweep([*tiny, "--name=tried", "--seed=1"], grid)


def test_a_combination_that_fails_does_not_end_the_sweep(tiny, capsys):
    rows = sweep(tiny, {"model.encoder.patch_size": ["5", "4"]})
    assert [row["model.encoder.patch_size"] for row in rows] == ["4", "5"]
    assert rows[1]["val_acc"] is None
    assert "patch size 5" in rows[1]["trouble"]
    assert "failed: " in capsys.readouterr().out


def test_a_sweep_of_a_task_without_accuracy_is_refused(capsys):
    assert cli.main(["sweep", "--data=Digits", "--model=MAE", "--grid", "seed=[0,1]"]) == 2
    assert "expected classification for vit sweep" in capsys.readouterr().err


@pytest.mark.slow
def test_optuna_searches_a_range(tmp_path, tiny):
    words = [*tiny, "--name=searched"]
    rows = sweep(words, {"model.optim.lr": ["1e-4", "1e-2"]}, trials=2)
    rates = [float(row["model.optim.lr"]) for row in rows]
    assert len(set(rates)) == 2
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert sweep(words, {"model.optim.lr": ["1e-4", "1e-2"]}, trials=2) == rows


def test_a_grid_is_read_from_words():
    grid = read_grid(["model.optim.lr=[1e-4, 3e-4]", "data.augment.crop_scale=[[0.3,1.0],[0.6,1.0]]"])
    assert grid == {"model.optim.lr": ["1e-4", "3e-4"], "data.augment.crop_scale": ["[0.3,1.0]", "[0.6,1.0]"]}
    for word in ("model.optim.lr", "model.optim.lr=1e-4", "model.optim.lr=[]"):
        with pytest.raises(ValueError, match="--grid model.optim.lr="):
            read_grid([word])
    assert cli.main(["sweep", "--config", "quickstart"]) == 2


@pytest.mark.slow
def test_the_same_from_a_notebook(tmp_path, tiny):
    values = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "limit_train_batches": 2}
    rows = api.sweep(
        "digits_scratch",
        grid={"seed": [0, 1]},
        trainer={**values, "default_root_dir": str(tmp_path)},
        model={"encoder": {"width": 16, "depth": 1, "heads": 2}},
    )
    assert {row["seed"] for row in rows} == {"0", "1"}


def test_a_soup_is_at_least_as_good_as_its_best_checkpoint(tmp_path, tiny):
    run = session.fit([*tiny, "--trainer.max_epochs=4", "--soup=3", "--model.optim.lr=3e-2"])
    told = run.record["checkpoint"]["soup"]
    assert len(told["tried"]) == 3
    assert told["score"] >= max(own for _, own, *_ in told["tried"])
    assert run.record["val"]["acc"] == pytest.approx(told["score"]), "what is scored is what is kept"
    assert not (run.checkpoints / "draft.ckpt").exists()
    parts = [torch.load(run.checkpoints / name, weights_only=True)["state_dict"] for name in told["used"]]
    for name, value in torch.load(run.best, weights_only=True)["state_dict"].items():
        mean = sum(part[name].double() for part in parts) / len(parts)
        assert torch.allclose(value.double(), mean, atol=1e-6), name


def test_found_values_are_used_and_searched_only_once(tmp_path, tiny, capsys):
    run = session.fit([*tiny, "--find_lr", "--trainer.limit_train_batches=1.0", "--dry_run"], dry_run=True)
    assert run is None
    out = capsys.readouterr().out
    assert "model.optim.lr" in out
    assert "a tenth of where the loss was lowest" in out
