"""What watches a run, chooses for it or looks on: each is at work in a whole run, not only by itself."""

import csv
import logging

import pytest
import torch
from test_resume import Cut, equal, fit_with

from vit.run import session


def test_a_run_that_gives_one_answer_says_so(tiny, caplog):  # C3
    caplog.set_level(logging.WARNING)
    words = [*tiny, "--trainer.max_epochs=1", "--trainer.limit_train_batches=30", "--model.optim.lr=1e-12"]
    session.fit([*words, "--trainer.precision=32-true"])
    assert "every val picture is named" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.callbacks.monitor=val_acuracy", "--trainer.callbacks.mode=max"], "got 'val_acuracy', which is"),
        (["--trainer.callbacks.monitor=val_acc", "--trainer.callbacks.mode=min"], "mode max for val_acc"),
    ],
)
def test_callbacks_of_ones_own_are_looked_at_before_the_first_step(tmp_path, tiny, words, message):  # C23, C24
    with pytest.raises(ValueError, match=message):
        session.fit([*tiny, "--trainer.callbacks=EarlyStopping", *words])
    assert not list((tmp_path / "outputs").glob("*/*"))


def test_so_are_those_of_an_objective_that_chooses_no_checkpoint(tmp_path):  # C24
    encoder = ["--model.encoder.image_size=16", "--model.encoder.patch_size=4", "--model.encoder.width=16"]
    words = ["--data=Digits", "--model=DINO", *encoder, "--model.encoder.depth=1", "--model.encoder.heads=2"]
    words += ["--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=1"]
    words += ["--model.projection.hidden=16", "--model.projection.outputs=32", "--trainer.callbacks=EarlyStopping"]
    with pytest.raises(ValueError, match="one of train_loss, val_loss, val_entropy, val_spread, but got 'val_entropi'"):
        session.fit([*words, "--trainer.callbacks.monitor=val_entropi"])


def test_patience_ends_a_run_that_does_not_get_better(tiny):
    run = session.fit([*tiny, "--trainer.max_epochs=20", "--model.optim.lr=1e-12", "--patience=2"])
    with (run.path / "metrics.csv").open(newline="") as file:
        scores = [float(row["val_acc"]) for row in csv.DictReader(file)]
    assert len(scores) == scores.index(max(scores)) + 1 + 2 < 20


def test_more_logging_changes_no_weight(tmp_path, tiny):  # C22
    plain = session.fit([*tiny, "--trainer.max_epochs=2", "--name=plain"])
    words = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path / 'csv'}", "--name=logged"]
    words += ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks+=DeviceStatsMonitor"]
    words += ["--trainer.log_every_n_steps=1", "--trainer.deterministic=warn"]
    try:
        logged = session.fit([*(w for w in tiny if "logger" not in w), "--trainer.max_epochs=2", *words])
    finally:
        torch.use_deterministic_algorithms(False)
    assert list((tmp_path / "csv").rglob("metrics.csv"))
    assert equal(logged.last, plain.last)
    assert equal(logged.best, plain.best)


def test_the_paper_recipe_fills_in_its_table_in_a_run(tiny, capsys):
    run = session.fit([*(w for w in tiny if "max_epochs" not in w), "--recipe=paper", "--trainer.max_steps=7"])
    model = run.record["config"]["model"]
    assert (model["optim"]["name"], model["optim"]["momentum"], model["optim"]["layer_decay"]) == ("sgd", 0.9, 1)
    assert run.record["config"]["data"]["init_args"]["batch_size"] == 8, "what is typed wins"
    assert run.record["steps"] == 7
    assert "recipe       paper; what is set by hand wins" in capsys.readouterr().out


def test_a_run_that_learns_from_a_teacher_goes_on_bit_for_bit(tmp_path, tiny, watched):  # C14
    teacher = session.fit([*tiny, "--trainer.max_epochs=1", "--name=teacher"])
    rates = [*tiny, "--trainer.max_epochs=2", "--data.num_workers=0", "--save_every_n_steps=1"]
    args = [*rates, f"--model.loss.teacher={teacher.path}", "--model.loss.distillation=hard"]
    unbroken = session.fit([*args, "--name=unbroken"])
    fit_with(Cut(9), [*args, "--name=cut"], Cut.Now, watched)
    assert equal(session.fit([], resume=str(tmp_path / "outputs" / "cut" / "1")).last, unbroken.last)
    assert not equal(session.fit([*rates, "--name=untaught"]).last, unbroken.last)


@pytest.mark.parametrize(
    "words",
    [["name=focal", "focal_gamma=4"], ["class_weights=balanced"], ["logit_adjustment=1.0"], ["label_smoothing=0.3"]],
    ids=" ".join,
)
def test_losses_are_options_of_a_run_which_it_remembers(tmp_path, tiny, words):
    told = [*tiny, "--trainer.max_epochs=1", *(f"--model.loss.{word}" for word in words)]
    run, plain = session.fit([*told, "--name=told"]), session.fit([*tiny, "--trainer.max_epochs=1", "--name=plain"])
    assert not equal(run.last, plain.last)
    again = session.fit(["--config", str(run.config), "--name=again"])
    assert equal(again.last, run.last)


def test_pictures_that_nobody_can_draw_are_said_in_the_plan(tmp_path, capsys):
    shape = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 1, "heads": 2}
    words = ["--data=Digits", "--model=MAE", *(f"--model.encoder.{key}={value}" for key, value in shape.items())]
    words += ["--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}", "--dry_run"]
    assert session.fit([*words, "--data.val=0"]) is None
    assert "reconstructions are drawn of val pictures, of which none is looked at" in capsys.readouterr().out
    assert session.fit(words) is None
    assert "reconstructions" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["--model.optim.name=adam", "--model.optim.lr=1e-2"], "0.0005 to 0.0025"),
        (["--model.method=lora", "--model.optim.lr=1"], "0.005 to 0.025"),
        (["--model.optim.name=lion", "--model.optim.lr=5e-3"], "0.00015 to 0.00075"),
        (["--model.optim.name=sgd", "--model.optim.lr=0.5"], "0.01 to 0.05"),
        (["--model.method=head", "--model.optim.lr=0.5"], None),
        (["--model.optim.name=adam", "--model.optim.lr=4e-3"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_rates_that_may_wipe_weights_out_are_said(capsys, words, limit):  # C3
    session.fit(["--config=quickstart", "--trainer.accelerator=cpu", "--dry_run", *words])
    out = capsys.readouterr().out
    assert "Plan" in out
    assert ("is high for pre-trained weights" in out) == (limit is not None)
    assert limit is None or limit in out
