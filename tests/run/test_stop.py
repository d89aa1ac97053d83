"""However a run ends, nothing is lost: Ctrl-C, SIGTERM, kill -9, and numbers that are not finite."""

import csv
import math
import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from test_resume import equal, weights

from vit import cli
from vit.run import session
from vit.run.folder import RunFolder
from vit.tasks import base
from vit.tasks.callbacks import save_whole

linux = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")


class At(Callback):
    """Do something before a given optimizer step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            self.action(trainer)


def log_of(run):
    with (run.path / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


@linux
@pytest.mark.parametrize(
    ("number", "code", "more"),
    [(signal.SIGINT, 130, []), (signal.SIGTERM, 143, []), (signal.SIGTERM, 143, ["--model.optim.ema=0.7"])],
    ids=["ctrl-c", "sigterm", "sigterm with an average"],
)
def test_a_signal_saves_at_the_step_and_the_run_goes_on_bit_for_bit(
    tmp_path, tiny, watched, capsys, number, code, more
):
    tiny = [*tiny, *more]
    unbroken = session.fit([*tiny, "--name=unbroken"])
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt) as stop:
        watched(At(8, lambda _: os.kill(os.getpid(), number)), [*tiny, "--name=cut"])
    assert 128 + stop.value.number == code
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    cut = RunFolder(tmp_path / "outputs" / "cut" / "1")
    out = capsys.readouterr().out
    assert "saving at the next step" in out
    assert f"stopped at step 9; go on with: vit fit --resume {cut.path}" in out
    assert torch.load(cut.last, weights_only=True)["global_step"] == 9
    resumed = session.fit([], resume=str(cut.path))
    assert equal(resumed.last, unbroken.last)
    kept = [torch.load(run.last, weights_only=True).get("averaging", {}).get("updates") for run in (resumed, unbroken)]
    assert kept[0] == kept[1]
    assert equal(resumed.best, unbroken.best)
    # Training values of the epoch that was cut are those of its later steps.
    assert [r["val_loss"] for r in log_of(resumed)] == [r["val_loss"] for r in log_of(unbroken)]
    assert log_of(resumed)[2] == log_of(unbroken)[2]


@linux
def test_a_signal_before_a_validation_inside_an_epoch_loses_none(tmp_path, tiny, watched):
    args = [*tiny, "--trainer.val_check_interval=3", "--trainer.max_epochs=2"]
    unbroken = session.fit([*args, "--name=unbroken"])
    with pytest.raises(KeyboardInterrupt):
        watched(At(8, lambda _: os.kill(os.getpid(), signal.SIGTERM)), [*args, "--name=cut"])
    cut = RunFolder(tmp_path / "outputs" / "cut" / "1")
    assert torch.load(cut.last, weights_only=True)["global_step"] == 10, "after the validation of step 9"
    resumed = session.fit([], resume=str(cut.path))
    assert equal(resumed.last, unbroken.last)
    assert equal(resumed.best, unbroken.best)


def test_the_command_ends_with_the_code_of_the_signal(monkeypatch):
    class Asked(KeyboardInterrupt):
        number = int(signal.SIGTERM)

    def stop(*args, **kwargs):
        raise Asked

    monkeypatch.setattr(session, "fit", stop)
    assert cli.main(["fit", "--config", "quickstart"]) == 143


@linux
def test_a_second_ctrl_c_ends_at_once_and_says_where_to_go_on(tmp_path, tiny, watched, capsys):
    def twice(trainer):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        watched(At(8, twice), tiny)
    folder = tmp_path / "outputs" / "quickstart" / "1"
    assert f"stopped at step 8; go on with: vit fit --resume {folder}" in capsys.readouterr().out
    assert torch.load(RunFolder(folder).last, weights_only=True)["global_step"] == 6, "the last whole epoch"


@linux
def test_a_signal_inside_a_window_of_accumulated_batches_waits_for_its_step(tmp_path, tiny, watched):
    class AtBatch(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.current_epoch == 1 and index == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    args = [*tiny, "--trainer.accumulate_grad_batches=2"]
    unbroken = session.fit([*args, "--name=unbroken"])
    with pytest.raises(KeyboardInterrupt):
        watched(AtBatch(), [*args, "--name=cut"])
    cut = RunFolder(tmp_path / "outputs" / "cut" / "1")
    assert torch.load(cut.last, weights_only=True)["global_step"] == 4
    assert equal(session.fit([], resume=str(cut.path)).last, unbroken.last)


def test_a_loss_that_is_not_finite_stops_before_it_spoils_a_weight(tmp_path, tiny, watched):  # C1
    def break_it(trainer):
        trainer.lightning_module.model.head.weight.data.fill_(float("inf"))

    with pytest.raises(ValueError, match=r"at step 9 the loss is (nan|inf).*lr.*vit fit --resume"):
        watched(At(9, break_it), tiny)
    run = RunFolder(tmp_path / "outputs" / "quickstart" / "1")
    for file in (run.best, run.last):
        assert all(torch.isfinite(value).all() for value in weights(file).values() if value.is_floating_point())
    assert session.fit([], resume=str(run.path)).record["epochs"] == 3


def test_a_gradient_that_is_not_finite_stops_too(tiny, watched):
    class Break(Callback):
        def on_after_backward(self, trainer, module):
            if trainer.global_step == 3:
                module.model.head.bias.grad.fill_(float("nan"))

    with pytest.raises(ValueError, match=r"at step 3 the loss is \d\S*, the gradient norm nan, with lr"):
        watched(Break(), tiny)


def test_a_checkpoint_is_written_beside_its_place_first(tmp_path, monkeypatch):
    file = tmp_path / "last.ckpt"
    file.write_bytes(b"old")
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)

    def save(path):
        path.write_bytes(b"half")
        assert file.read_bytes() == b"old", "the old checkpoint is whole while the new one is written"
        path.write_bytes(b"new")

    monkeypatch.setattr(trainer, "save_checkpoint", save)
    save_whole(trainer, file)
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["last.ckpt"]


@linux
@pytest.mark.slow
def test_kill_9_at_ten_random_moments_changes_nothing(tmp_path, tiny):
    args = [*tiny, "--trainer.max_epochs=6", "--save_every_n_steps=1", "--model.optim.ema=0.9"]
    # Children of a process that has only imported: after a backward pass torch refuses another one in a fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vit.run.session"])

    def child(words, limit=None, **options):
        """Fit in a process of its own, killed after so many seconds; whether it was, and how long it lived."""
        started = time.monotonic()
        process = context.Process(target=session.fit, args=(words,), kwargs=options)
        process.start()
        process.join(limit)
        killed = process.exitcode is None
        process.kill()
        process.join()
        assert killed or process.exitcode == 0
        return killed, time.monotonic() - started

    child(args, dry_run=True)  # starts the server, and writes the digits
    _, whole = child([*args, "--name=unbroken"])
    unbroken = RunFolder(tmp_path / "outputs" / "unbroken" / "1")
    draw, kills, resumed, finished = random.Random(0), 0, 0, []
    while kills < 10:
        cut = RunFolder(tmp_path / "outputs" / f"cut{len(finished)}" / "1")
        resume = str(cut.path) if cut.last.exists() else None
        resumed += resume is not None
        words = [] if resume else [*args, f"--name=cut{len(finished)}"]
        killed, _ = child(words, draw.uniform(0.1, 0.9) * whole, resume=resume)
        kills += killed
        if not killed:
            finished.append(cut)
        elif not cut.last.exists() and cut.path.exists():
            cut.path.rename(tmp_path / f"nothing-{kills}")
    if cut.last.exists() and cut not in finished:
        finished.append(session.fit([], resume=str(cut.path)))
        resumed += 1
    print(f"{kills} kills, {resumed} times resumed, {len(finished)} runs to their end")
    assert resumed >= 3
    assert finished
    for done in finished:
        assert equal(done.last, unbroken.last)
        states = [torch.load(run.last, weights_only=True) for run in (done, unbroken)]
        for left, right in zip(*(state["optimizer_states"][0]["state"].values() for state in states), strict=True):
            assert all(torch.equal(left[name], right[name]) for name in left)
        assert states[0]["global_step"] == states[1]["global_step"]
        assert [row["lr"] for row in log_of(done)] == [row["lr"] for row in log_of(unbroken)]
        assert [row["val_loss"] for row in log_of(done)] == [row["val_loss"] for row in log_of(unbroken)]


def test_the_loss_that_is_watched_is_the_batchs_own_also_when_batches_are_accumulated(tiny, monkeypatch):  # C1
    seen = []
    monkeypatch.setattr(base, "check_finite", lambda loss, norm, **told: seen.append(float(loss)))
    session.fit([*tiny, "--trainer.accumulate_grad_batches=3", "--trainer.max_epochs=1"])
    assert len(seen) == 2
    assert seen[0] == pytest.approx(math.log(10), abs=0.4), "a third of it would be told otherwise"
