"""Several runs: seeds, folds and sweeps, each with what they say together."""

import csv
import json
import statistics

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from vit import api, cli
from vit.run import score, session
from vit.run.finding import make_soup
from vit.run.folder import RunFolder
from vit.run.many import fit_many
from vit.run.sweep import read_grid, sweep

SHAPE = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 1, "heads": 2}
ENCODER = [f"--model.encoder.{key}={value}" for key, value in SHAPE.items()]


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


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        MisconfigurationException("no such device"),
    ],
)
def test_a_combination_that_does_not_fit_the_machine_does_not_end_the_sweep(tiny, monkeypatch, error):
    plain = session.fit

    def fit(words, **more):
        if "--data.batch_size=99" in words:
            raise error
        return plain(words, **more)

    monkeypatch.setattr(session, "fit", fit)
    rows = sweep([*tiny, "--trainer.max_epochs=1"], {"data.batch_size": ["99", "8"]})
    assert [row["run"] for row in rows] == ["1", None]
    assert rows[1]["trouble"] == str(error)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry_run"], "no dry_run for vit sweep"),
        (["--seeds=2"], "no seeds for vit sweep"),
        (["--folds=2"], "no folds for vit sweep"),
        (["--data.val=0.0"], "a val split, by which vit sweep ranks"),
    ],
)
def test_a_sweep_refuses_what_it_would_pass_over_before_it_trains(tmp_path, tiny, words, message):
    with pytest.raises(ValueError, match=message):
        sweep([*tiny, *words], {"model.optim.lr": ["1e-3"]})
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "grid", "message"),
    [
        ([], {"model.optim.lrr": ["1e-4", "3e-4"]}, "no option --model.optim.lrr. Did you mean --model.optim.lr"),
        ([], {"model.optim.lr": ["1e-4", "fast"]}, "--model.optim.lr to be a number, but got 'fast'"),
        (["--trainer.limit_val_batches=0"], {"model.optim.lr": ["1e-3"]}, "runs that look at val pictures"),
        (["--trainer.fast_dev_run=true"], {"model.optim.lr": ["1e-3"]}, "runs that look at val pictures"),
        (["--recipe=paper", "--model.optim.lr=0.005"], {}, "set by hand"),
        (["--recipe=paper", "--model.optim.name=adamw"], {}, "set by hand"),
    ],
)
def test_a_sweep_that_cannot_work_ends_before_it_trains(tmp_path, tiny, words, grid, message):  # D13
    with pytest.raises(ValueError, match=message):
        sweep([*tiny, *words], grid)
    assert not (tmp_path / "outputs").exists()


def test_a_sweep_of_the_paper_recipe_tries_the_papers_rates(tiny, monkeypatch):
    tried = []

    def fit(words, **more):
        tried.append(words[-1])
        raise ValueError("not today")

    monkeypatch.setattr(session, "fit", fit)
    words = ["--data=Digits", *tiny[1:], "--recipe=paper"]
    sweep(words, {})
    assert tried == [f"--model.optim.lr={rate}" for rate in (0.001, 0.003, 0.01, 0.03)]
    assert cli.main(["sweep", *words]) == 1, "no run went well"
    assert len(tried) == 8, "what failed is tried again"
    sweep([*words, "--name=twice"], {"model.optim.lr": ["1e-3", "1e-3"]})
    assert len(tried) == 9, "but once in a sweep"


def test_a_sweep_does_not_go_on_with_another_configuration(tmp_path, tiny):
    file = tmp_path / "own.yaml"
    file.write_text("model:\n  optim: {weight_decay: 0.1}\n")
    words, grid = [*tiny, f"--config={file}"], {"model.optim.lr": ["1e-3"]}
    rows = sweep(words, grid)
    assert sweep(words, grid) == rows
    file.write_text("model:\n  optim: {weight_decay: 0.2}\n")
    with pytest.raises(ValueError, match=r"changed since in model\.optim\.weight_decay\. Choose another --name"):
        sweep(words, grid)


@pytest.mark.parametrize("option", ["seeds: 3", "folds: 2", "resume: outputs/x/1"])
def test_a_file_does_not_ask_for_several_runs_in_vain(tmp_path, tiny, option):
    file = tmp_path / "own.yaml"
    file.write_text(option + "\n")
    with pytest.raises(ValueError, match=f"expected --{option.partition(':')[0]} among the words"):
        session.fit([*tiny, f"--config={file}"])


def test_a_file_may_ask_for_the_plan_alone(tmp_path, tiny, capsys):
    file = tmp_path / "own.yaml"
    file.write_text("dry_run: true\n")
    assert session.fit([*tiny, f"--config={file}"]) is None
    assert "Plan" in capsys.readouterr().out
    assert not (tmp_path / "outputs").exists()


def test_a_dry_run_of_folds_plans_the_first_fold(tiny, capsys):
    assert fit_many([*tiny, "--data.test=0.0"], folds=3, dry_run=True) == []
    assert "train 1,198, val 599" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--soup=2", "--data.val=0.0"], "a val split for --soup 2"),
        (["--monitor=val_loss", "--data.val=0.0"], "a val split for --monitor val_loss"),
        (["--patience=2", "--trainer.limit_val_batches=0"], "--patience 2, but no val picture is looked at"),
    ],
)
def test_what_val_pictures_decide_is_refused_without_them(tmp_path, tiny, words, message):
    with pytest.raises(ValueError, match=message):
        session.fit([*tiny, *words])
    assert not list((tmp_path / "outputs").glob("*/*"))


def test_a_run_without_val_pictures_goes_on(tiny):
    run = session.fit([*tiny, "--data.val=0.0"])
    assert run.record["checkpoint"] == {"file": "last.ckpt", "chosen_by": None, "split": None}
    assert session.fit(["--trainer.max_epochs=2"], resume=str(run.path)).record["epochs"] == 2


def test_a_fit_that_looks_at_no_val_pictures_ends_well_and_they_can_be_scored_later(tiny):
    run = session.fit([*tiny, "--trainer.limit_val_batches=0", "--trainer.max_epochs=1"])
    assert "val" not in run.record
    assert run.model.is_dir()
    assert score.evaluate("validate", str(run.path), [])["pictures"] == 179


def test_runs_of_other_tasks_are_summed_up_too(tiny, capsys):
    decoder = ["--model.decoder.width=16", "--model.decoder.depth=1", "--model.decoder.heads=2"]
    words = ["--model=MAE", *ENCODER, *decoder, "--data=Digits", "--trainer.limit_train_batches=2"]
    runs = fit_many([*words, *(word for word in tiny if word.startswith("--trainer."))], seeds=2)
    mean = statistics.fmean(run.record["val"]["val_loss"] for run in runs)
    assert f"loss {mean:.4f} ±" in capsys.readouterr().out


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


def test_a_run_that_goes_on_never_loses_a_better_soup(tmp_path):
    run = RunFolder(tmp_path)
    run.checkpoints.mkdir()

    def write(file, weight):
        torch.save({"state_dict": {"w": torch.tensor(weight)}, "averaging": {"used": ("a", "b")}}, file)

    def weight(file):
        return float(torch.load(file, weights_only=True)["state_dict"]["w"])

    def soup():
        return make_soup(run, lambda file: {"loss": abs(weight(file) - 1)}, "val_loss", higher_is_better=False)

    write(run.checkpoints / "soup-a.ckpt", 0.0)
    write(run.checkpoints / "soup-b.ckpt", 2.0)
    write(run.best, 0.0)
    first = soup()
    assert (weight(run.best), first["score"], len(first["used"])) == (1, 0, 2)
    # Training goes on: one checkpoint falls out, a single one becomes the best.
    (run.checkpoints / "soup-b.ckpt").rename(run.checkpoints / "soup-c.ckpt")
    write(run.checkpoints / "soup-a.ckpt", 0.5)
    write(run.checkpoints / "soup-c.ckpt", -3.0)
    write(run.best, 0.5)
    second = soup()
    assert weight(run.best) == 1
    assert (second["score"], second["used"]) == (0, first["used"])
    assert [own for _, own, *_ in second["tried"]] == [0.5, 4]
    # And on without a soup, to a single checkpoint that is better than any.
    write(run.checkpoints / "soup.ckpt", 3.0)
    write(run.best, 0.9)
    third = soup()
    assert (third["score"], third["used"]) == (pytest.approx(0.1), ["best.ckpt"])
    assert weight(run.best) == pytest.approx(0.9)
    # And to one that is kept for a soup.
    write(run.checkpoints / "soup-c.ckpt", 1.0)
    fourth = soup()
    assert (fourth["score"], fourth["used"], weight(run.best)) == (0, ["soup-c.ckpt"], 1)


def test_found_values_are_used_and_searched_only_once(tmp_path, tiny, capsys):
    outs = []
    for _ in range(2):
        run = session.fit([*tiny, "--find_lr", "--trainer.limit_train_batches=1.0", "--dry_run"], dry_run=True)
        assert run is None
        outs.append(capsys.readouterr().out)
    out = outs[0]
    assert outs[0] == outs[1], "the same run finds the same"
    assert "model.optim.lr" in out
    assert "a tenth of where the loss was lowest" in out


def test_dino_can_look_for_its_rate_and_plans_its_views(tmp_path, capsys):
    words = ["--model=DINO", *ENCODER, "--model.projection.hidden=16", f"--trainer.default_root_dir={tmp_path}"]
    words += ["--model.projection.bottleneck=8", "--model.projection.outputs=32", "--model.views.local_views=0"]
    words += ["--data=Digits", "--data.batch_size=8", "--trainer.accelerator=cpu", "--dry_run"]
    # Schedules of DINO's teacher look at the length of the run; this tiny one never gets better, which is said.
    with pytest.raises(ValueError, match="steps: set optim.lr by hand"):
        session.fit([*words, "--find_lr=true"])
    assert session.fit(words) is None
    assert "2 views of 40-100 % of the area, each on its own" in capsys.readouterr().out
