"""What is watched while a model trains: collapsed answers, wrong directions, numbers that are not finite."""

import logging

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from vit.data.batch import Batch
from vit.run.screen import result_line
from vit.tasks.guards import NonFiniteError, OneClass, check_directions, check_finite

LOGGED = {"train_loss": "min", "train_acc": "max", "val_acc": "max", "val_loss": "min"}


class Stub:
    """As much of a Trainer as `OneClass` looks at."""

    sanity_checking = False
    global_step = 100
    estimated_stepping_batches = 1000
    classes = ("cat", "dog", "fox")


def told(caplog, answers, labels, *, step=100, of=1000, times=1):
    """Messages after validations with these answers and labels."""
    caplog.clear()
    watch, trainer = OneClass(), Stub()
    trainer.global_step, trainer.estimated_stepping_batches = step, of
    for _ in range(times):
        watch.on_validation_epoch_start(trainer, Stub)
        for answer, label in zip(answers, labels, strict=True):
            logits = torch.nn.functional.one_hot(torch.tensor(answer), 3).float()
            images, index = torch.zeros(len(label), 3, 2, 2, dtype=torch.uint8), torch.arange(len(label))
            watch.on_validation_batch_end(trainer, Stub, logits, Batch(images, torch.tensor(label), index), 0)
        watch.on_validation_end(trainer, Stub)
    return [record.message for record in caplog.records]


def test_one_answer_to_every_picture_is_said_once(caplog, as_users_run):  # C3
    caplog.set_level(logging.WARNING)
    messages = told(caplog, [[1, 1], [1]], [[0, 1], [2]], times=3)
    assert len(messages) == 1
    assert "every val picture is named dog after 100 steps" in messages[0]
    assert not told(caplog, [[1, 1], [2]], [[0, 1], [2]])
    assert not told(caplog, [[1, 1], [1]], [[1, 1], [1]]), "pictures of one class are rightly named alike"
    assert not told(caplog, [[1, 1], [1]], [[0, 1], [2]], step=29), "a head of zeros gives one answer at first"
    assert told(caplog, [[1, 1], [1]], [[0, 1], [2]], step=15, of=15), "but not at the end of the shortest run"


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (EarlyStopping("val_acc", mode="min"), "mode max for val_acc, whose larger values are better"),
        (ModelCheckpoint(monitor="val_loss", mode="max"), "mode min for val_loss, whose smaller"),
        (EarlyStopping("val_acuracy", mode="max"), "got 'val_acuracy', which is never logged"),
        (EarlyStopping("train_acc", mode="min"), "mode max for train_acc"),
    ],
)
def test_what_watches_the_wrong_way_or_nothing_is_refused(callback, message):  # C23, C24
    with pytest.raises(ValueError, match=message):
        check_directions([callback], LOGGED)


def test_checkpoints_may_follow_the_steps():
    check_directions([ModelCheckpoint(monitor="step", mode="max"), ModelCheckpoint(monitor="epoch", mode="max")], {})
    with pytest.raises(ValueError, match="got 'step'"):
        check_directions([EarlyStopping("step", mode="max")], LOGGED)


def test_val_values_are_never_logged_without_a_validation():  # C24
    callbacks = [EarlyStopping("val_acc", mode="max"), EarlyStopping("train_loss", mode="min"), ModelCheckpoint()]
    check_directions(callbacks, LOGGED)
    check_directions(callbacks[1:], LOGGED, validates=False)
    with pytest.raises(ValueError, match="one of train_loss, train_acc, but got 'val_acc'"):
        check_directions(callbacks, LOGGED, validates=False)


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_numbers_that_are_not_finite_name_step_loss_norm_and_rate(loss, norm):  # C1
    with pytest.raises(
        NonFiniteError, match=f"step 7 the loss is {loss:.3g}, the gradient norm {norm:.3g}, with lr 0.1"
    ):
        check_finite(torch.tensor(loss), torch.tensor(norm), step=7, lr=0.1)
    check_finite(torch.tensor(1.0), torch.tensor(2.0), step=7, lr=0.1)


def test_a_loss_scaler_skips_gradients_that_are_not_finite_but_no_loss_is():  # C1
    infinite, nan = torch.tensor(float("inf")), torch.tensor(float("nan"))
    check_finite(torch.tensor(1.0), infinite, step=7, lr=0.1, skips=True)
    with pytest.raises(NonFiniteError, match="the loss is nan, the gradient norm inf"):
        check_finite(nan, infinite, step=7, lr=0.1, skips=True)


def test_a_val_loss_that_is_not_finite_is_said_in_the_result():
    values = {"acc": 0.5, "balanced_acc": 0.5, "loss": None, "acc_95": [0.4, 0.6], "pictures": 10}
    assert result_line("val", values).endswith("loss not finite")
