"""A run that goes on equals one that was never cut, bit for bit on the CPU."""

import csv
import shutil
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from vit.run import session
from vit.run.options import Options


class Cut(Callback):
    """Break off after a given number of optimizer steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.after:
            raise Cut.Now

    class Now(Exception):
        pass


class CutBeforeValidation(Callback):
    """Break off between an optimizer step and the validation that follows it."""

    def on_validation_start(self, trainer, *args):
        if trainer.global_step == 9:
            raise Cut.Now


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


def equal(a, b):
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def fit_with(callback, args, expected, watched):
    """A fit with one more callback, which ends it with an exception."""
    with pytest.raises(expected):
        watched(callback, args)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("after", [12, 9], ids=["after an epoch", "inside an epoch"])
def test_a_cut_run_goes_on_bit_for_bit(tmp_path, tiny, workers, after, watched):  # C14
    args = [*tiny, f"--data.num_workers={workers}", "--save_every_n_steps=1"]
    unbroken = session.fit([*args, "--name=unbroken"])
    fit_with(Cut(after), [*args, "--name=cut"], Cut.Now, watched)
    broken = tmp_path / "outputs" / "cut" / "1"
    assert not equal(broken / "checkpoints" / "last.ckpt", unbroken.last)
    resumed = session.fit([], resume=str(broken))
    assert resumed.path == broken
    assert equal(resumed.last, unbroken.last)
    assert equal(resumed.best, unbroken.best)
    assert _losses(resumed) == _losses(unbroken)
    assert resumed.record["val"]["loss"] == unbroken.record["val"]["loss"]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("cut", "saved"), [(CutBeforeValidation(), {1: 8, 3: 6}), (Cut(10), {1: 10, 3: 9})])
def test_no_save_stands_between_a_step_and_its_validation(tmp_path, tiny, every, cut, saved, watched):  # C14
    args = [*tiny, "--data.num_workers=0", "--trainer.max_epochs=2", "--trainer.val_check_interval=3"]
    args += [f"--save_every_n_steps={every}", "--model.optim.ema=0.7", "--soup=4"]  # one for each validation
    unbroken = session.fit([*args, "--name=unbroken"])
    fit_with(cut, [*args, "--name=cut"], Cut.Now, watched)
    broken = tmp_path / "outputs" / "cut" / "1"
    assert torch.load(broken / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == saved[every]
    resumed = session.fit([], resume=str(broken))
    assert equal(resumed.last, unbroken.last)
    assert equal(resumed.best, unbroken.best)
    kept = [{file.name for file in run.checkpoints.glob("soup-*.ckpt")} for run in (resumed, unbroken)]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 4


@pytest.mark.parametrize(("first", "then"), [("adamw", "sgd"), ("sgd", "adamw")])
def test_another_optimizer_is_refused_before_anything_is_written(tiny, first, then):  # D6
    run = session.fit([*tiny, "--trainer.max_epochs=1", f"--model.optim.name={first}", "--model.optim.lr=0.01"])
    before = run.config.read_text()
    with pytest.raises(ValueError, match=f"optimizer of the checkpoint, {first}, but got {then}"):
        session.fit(["--trainer.max_epochs=2", f"--model.optim.name={then}"], resume=str(run.path))
    assert run.config.read_text() == before


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("--model.weights=fashion_mnist_28", "model.weights"),
        ("--model.tuning.head_init=ridge", "model.tuning.head_init"),
        ("--find_lr", "find_lr"),
        ("--recipe=paper", "recipe"),
    ],
)
def test_what_only_a_new_run_looks_at_is_refused(tiny, word, name):  # D6
    run = session.fit([*tiny, "--trainer.max_epochs=1"])
    before = run.config.read_text(), run.plan.read_text()
    with pytest.raises(ValueError, match=f"expected {name} as the run had it"):
        session.fit(["--trainer.max_epochs=2", word], resume=str(run.path))
    assert (run.config.read_text(), run.plan.read_text()) == before


def test_the_plan_tells_what_a_run_that_goes_on_does_otherwise(tiny):  # D6
    run = session.fit([*tiny, "--trainer.max_epochs=1"])
    assert "(was" not in run.plan.read_text()
    words = [
        *tiny,
        "--trainer.max_epochs=2",
        "--model.optim.lr=0.5",
        "--data.batch_size=4",
    ]  # with the same words again
    session.fit(words, resume=str(run.path))
    told = run.plan.read_text()
    assert "model.optim.lr 0.5 (was 0.003)" in told
    assert "trainer.max_epochs 2 (was 1)" in told
    assert "data.batch_size 4 (was 8)" in told
    assert told.count("(was") == 3
    session.fit(["--trainer.max_epochs=3"], resume=str(run.path))
    assert "changed      trainer.max_epochs 3 (was 2)\n  data" in run.plan.read_text()


def test_the_words_that_a_run_was_started_with_may_stand_there_again(tiny, capsys, monkeypatch):
    searched = []

    def find_lr(*args):
        searched.append(args)
        return SimpleNamespace(lr=0.002, rates=[0.1])

    monkeypatch.setattr("vit.run.finding.find_lr", find_lr)
    first = session.fit([*tiny, "--trainer.max_epochs=1", "--name=first"])
    words = ["--data=Digits", *(word for word in tiny[1:] if "model.encoder" not in word)]
    words += [f"--model.weights={first.path}", "--find_lr", "--recipe=auto"]
    run = session.fit([*words, "--trainer.max_epochs=1"])
    before = run.record["config"]
    shutil.rmtree(first.path)  # what it started from need not be there any more
    capsys.readouterr()
    session.fit([*words, "--trainer.max_epochs=2"], resume=str(run.path))
    after = run.record["config"]
    assert after["model"]["weights"] == before["model"]["weights"] == str(first.path)
    assert (after["find_lr"], after["recipe"]) == (before["find_lr"], before["recipe"]) == (False, "auto")
    assert "changed      trainer.max_epochs 2 (was 1)\n  data" in capsys.readouterr().out
    assert len(searched) == 1


def test_a_run_goes_on_inside_an_epoch_with_another_accumulation(tmp_path, tiny, watched):
    args = [*tiny, "--data.num_workers=0", "--save_every_n_steps=1", "--name=cut"]
    fit_with(Cut(9), args, Cut.Now, watched)
    run = session.fit(["--trainer.accumulate_grad_batches=2"], resume=str(tmp_path / "outputs" / "cut" / "1"))
    assert run.record["epochs"] == 3


def by_steps(tiny, steps, *more):
    """Options of a run whose length is given in steps; an epoch has 6."""
    same_for_all_lengths = ["--model.schedule.name=constant", "--model.schedule.warmup=0", "--data.num_workers=0"]
    return [*tiny, "--trainer.max_epochs=-1", f"--trainer.max_steps={steps}", *same_for_all_lengths, *more]


@pytest.mark.parametrize("after", [6, 8], ids=["after an epoch", "inside an epoch"])
def test_a_cut_run_by_steps_goes_on_bit_for_bit(tmp_path, tiny, after, watched):  # C14
    args = by_steps(tiny, 15, "--save_every_n_steps=4", "--patience=9")
    unbroken = session.fit([*args, "--name=unbroken"])
    fit_with(Cut(after), [*args, "--name=cut"], Cut.Now, watched)
    resumed = session.fit([], resume=str(tmp_path / "outputs" / "cut" / "1"))
    assert equal(resumed.last, unbroken.last)
    assert equal(resumed.best, unbroken.best)
    assert _losses(resumed) == _losses(unbroken)


@pytest.mark.parametrize("val", [[], ["--trainer.limit_val_batches=0"]], ids=["with val", "without val"])
def test_a_run_by_steps_that_gets_more_of_them_goes_on_inside_its_epoch(tiny, val):
    long = session.fit([*by_steps(tiny, 15, *val), "--name=long"])
    short = session.fit([*by_steps(tiny, 9, *val), "--name=short"])
    assert torch.load(short.last, weights_only=True)["global_step"] == 9
    assert not equal(short.last, long.last)
    longer = session.fit(["--trainer.max_steps=15"], resume=str(short.path))
    assert equal(longer.last, long.last)


@pytest.mark.parametrize(("steps", "validations"), [(9, ["0-6", "1-9"]), (4, ["0-4"]), (6, ["0-6"])])
def test_a_run_by_steps_ends_with_a_validation(tiny, steps, validations):
    run = session.fit(by_steps(tiny, steps, "--soup=4", "--patience=2"))
    assert sorted(file.stem for file in run.checkpoints.glob("soup-*.ckpt")) == [
        "soup-epoch={}-step={}".format(*v.split("-")) for v in validations
    ]
    assert run.best.exists()
    assert len({loss for _, loss, _ in _losses(run)}) == len(validations)


def test_a_run_that_ends_in_the_middle_of_accumulated_gradients_leaves_a_checkpoint(tiny, watched):
    class Enough(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 2  # as the Trainer's max_time does

    run = watched(Enough(), [*tiny, "--trainer.accumulate_grad_batches=2"])
    assert torch.load(run.last, weights_only=True)["global_step"] == 1


def test_the_log_leaves_val_values_out_where_no_validation_ran(tiny):
    run = session.fit([*tiny, "--trainer.check_val_every_n_epoch=2"])
    assert [bool(loss) for _, loss, _ in _losses(run)] == [False, True, False]


def test_a_cut_run_that_mixes_pictures_goes_on_bit_for_bit(tmp_path, tiny, watched):  # C14
    args = [*tiny, "--model.mixing.mixup=0.8", "--model.mixing.cutmix=1.0", "--save_every_n_steps=1"]
    args += ["--data.num_workers=0", "--trainer.max_epochs=2"]
    unbroken = session.fit([*args, "--name=unbroken"])
    fit_with(Cut(9), [*args, "--name=cut"], Cut.Now, watched)
    resumed = session.fit([], resume=str(tmp_path / "outputs" / "cut" / "1"))
    assert equal(resumed.last, unbroken.last)
    plain = session.fit([*args, "--name=plain", "--model.mixing.mixup=0", "--model.mixing.cutmix=0"])
    assert not equal(plain.last, unbroken.last)


def _losses(run):
    with (run.path / "metrics.csv").open(newline="") as file:
        return [(row["epoch"], row["val_loss"], row["lr"]) for row in csv.DictReader(file)]


def test_two_epochs_and_one_more_equal_three(tmp_path, tiny):  # C14
    args = [*tiny, "--model.schedule.steps=18", "--data.num_workers=0"]
    three = session.fit([*args, "--name=three"])
    two = session.fit([*args, "--name=two", "--trainer.max_epochs=2"])
    assert not equal(two.last, three.last)
    more = session.fit(["--trainer.max_epochs=3"], resume=str(two.path))
    assert more.path == two.path
    assert equal(more.last, three.last)
    assert more.record["epochs"] == 3


def test_a_run_goes_on_past_its_planned_end_and_keeps_its_best(tmp_path, tiny):
    run = session.fit([*tiny, "--trainer.max_epochs=1"])
    score = torch.load(run.best, weights_only=True)["callbacks"]
    moved = run.path.parent / "moved"
    run.path.rename(moved)
    more = session.fit(["--trainer.max_epochs=3"], resume=str(moved))
    assert more.path == moved
    rows = _losses(more)
    assert [epoch for epoch, *_ in rows] == ["1", "2", "3"]
    state = torch.load(more.last, weights_only=True)["callbacks"]
    key = next(k for k in score if "val_acc" in k)
    assert state[key]["best_model_score"] >= score[key]["best_model_score"]
    assert str(moved) in state[key]["best_model_path"]


def test_typed_options_win_over_the_checkpoint_when_a_run_goes_on(tmp_path, tiny):  # D6
    run = session.fit([*tiny, "--trainer.max_epochs=1"])
    session.fit(["--trainer.max_epochs=2", "--model.optim.lr=0.5"], resume=str(run.path))
    with (run.path / "metrics.csv").open(newline="") as file:
        rates = [float(row["lr"]) for row in csv.DictReader(file)]
    assert max(rates) < 0.6
    groups = torch.load(run.last, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert Options("fit", ["--config", str(run.config)]).config.model.optim.lr == 0.5
    assert groups[0]["lr"] == pytest.approx(0.0, abs=0.5)
    with pytest.raises(ValueError, match="differs in width: checkpoint 16, now 32"):
        session.fit(["--model.encoder.width=32", "--trainer.max_epochs=3"], resume=str(run.path))
    assert session.fit(["--trainer.max_epochs=3"], resume=str(run.path)).record["epochs"] == 3


def test_the_same_seed_gives_the_same_run_and_another_does_not(tiny):  # C22
    a = session.fit([*tiny, "--trainer.max_epochs=1"])
    b = session.fit([*tiny, "--trainer.max_epochs=1"])
    other = session.fit([*tiny, "--trainer.max_epochs=1", "--seed=1"])
    assert a.path != b.path
    assert equal(a.last, b.last)
    assert not equal(a.last, other.last)
