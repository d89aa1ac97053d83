"""A run that was cut and resumed sees the same pictures as one that was not, bit for bit."""

import logging
import sys
from functools import partial

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from vit.data import Folder, ImageDataModule, Preprocessing

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*"),
]


class Model(lightning.LightningModule):
    """Records what it sees; dropout draws from (seed, step) as our tasks do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(192, 10)
        self.seen = []

    def on_train_batch_start(self, batch, batch_idx):
        torch.manual_seed(self.global_step)

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch.index.tolist(), int(batch.images.long().sum())))
        x = torch.nn.functional.dropout(batch.images.flatten(1) / 255, 0.3)
        return torch.nn.functional.cross_entropy(self.layer(x), batch.labels)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0  # makes the loaders before the loops are restored
        return torch.optim.AdamW(self.parameters(), 1e-2)


class SaveAt(Callback):
    """Saves when a hook is called for the n-th time."""

    def __init__(self, hook, count, file):
        self.hook, self.count, self.file = hook, count, file

    def _called(self, hook, trainer):
        if hook == self.hook and not trainer.sanity_checking:
            self.count -= 1
            if self.count == 0:
                trainer.save_checkpoint(self.file)

    def on_train_batch_end(self, trainer, *args):
        self._called("batch", trainer)

    def on_validation_end(self, trainer, *args):
        self._called("validation", trainer)

    def on_train_epoch_end(self, trainer, *args):
        self._called("epoch", trainer)


def run(data, callbacks=(), checkpoint=None, **options):
    model = Model()
    trainer = lightning.Trainer(
        **{
            "max_epochs": 3,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "callbacks": list(callbacks),
            **options,
        }
    )
    trainer.fit(model, data, ckpt_path=checkpoint, weights_only=True)
    return model


@pytest.fixture
def small(plant):
    """A maker of datamodules: 42 training pictures, 4 batches of 10 an epoch."""
    root = plant({f"{split}/{name}": 21 for split in ("train", "val") for name in "ab"})

    def make(**options):
        data = ImageDataModule(Folder(**{"root": str(root), "batch_size": 10, "num_workers": 0, **options}))
        data.preprocessing = Preprocessing(image_size=8, crop_pct=1.0)
        return data

    return make


PLACES = [("batch", n) for n in (1, 3, 4, 5, 8, 10)] + [("validation", 1), ("epoch", 1), ("epoch", 2)]


def assert_resumes(tmp_path, make, places, **options):
    whole = run(make(), **options)
    for hook, count in places:
        file = tmp_path / f"{hook}-{count}.ckpt"
        run(make(), [SaveAt(hook, count, file)], **options)
        resumed = run(make(), checkpoint=file, **options)
        assert 0 < len(resumed.seen) < len(whole.seen)
        assert resumed.seen == whole.seen[-len(resumed.seen) :], (hook, count)
        for name, value in whole.state_dict().items():
            assert torch.equal(value, resumed.state_dict()[name]), (hook, count)


# C14
def test_a_resumed_run_goes_on_with_the_next_picture(tmp_path, small):
    assert_resumes(tmp_path, small, PLACES)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="fork is Linux's")
def test_a_resumed_run_goes_on_with_two_kept_workers(tmp_path, small):
    places = [("batch", 1), ("batch", 4), ("batch", 6), ("validation", 1), ("epoch", 1)]
    assert_resumes(tmp_path, partial(small, num_workers=2, multiprocessing_context="fork"), places)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"accumulate_grad_batches": 2}, [("batch", 2), ("batch", 4), ("batch", 6)]),
        ({"limit_train_batches": 3}, [("batch", 1), ("batch", 3), ("batch", 4), ("validation", 1), ("epoch", 1)]),
        ({"val_check_interval": 2}, [("batch", 1), ("batch", 2), ("validation", 1), ("validation", 3)]),
    ],
)
def test_a_resumed_run_goes_on_under_trainer_options(tmp_path, small, options, places):
    assert_resumes(tmp_path, small, places, **options)


class Peek(Callback):
    """Asks for a loader of its own before training."""

    def on_fit_start(self, trainer, pl_module):
        assert len(trainer.datamodule.train_dataloader()) == 4


def test_a_loader_made_in_between_does_not_cost_the_position(tmp_path, small):
    file = tmp_path / "x.ckpt"
    whole = run(small(), [SaveAt("batch", 6, file)])
    assert run(small(), [Peek()], checkpoint=file).seen == whole.seen[6:]
    reloading = run(small(), checkpoint=file, reload_dataloaders_every_n_epochs=1)
    assert reloading.seen == whole.seen[6:]


def test_the_state_is_plain_and_small(tmp_path, small):
    file = tmp_path / "x.ckpt"
    run(small(), [SaveAt("batch", 6, file)])
    state = torch.load(file, weights_only=True)["ImageDataModule"]
    assert (state["epoch"], state["pictures"]) == (1, 2 * 10)
    assert state["classes"] == ["a", "b"]


def test_a_new_run_with_the_same_data_starts_at_the_beginning(small):
    data = small()
    first = run(data)
    assert run(data).seen == first.seen


def test_resuming_with_other_classes_is_refused(tmp_path, plant, small):
    file = tmp_path / "x.ckpt"
    run(small(), [SaveAt("batch", 1, file)], max_epochs=1)
    other = ImageDataModule(Folder(root=str(plant({"c": 9, "d": 9}, tmp_path / "others")), num_workers=0))
    with pytest.raises(ValueError, match=r"classes of the checkpoint \(a, b\).*data has c, d"):
        run(other, checkpoint=file)


def test_resuming_with_another_seed_is_said(tmp_path, caplog, small):
    file = tmp_path / "x.ckpt"
    run(small(), [SaveAt("batch", 1, file)], max_epochs=1)
    with caplog.at_level(logging.WARNING, "vit.data"):
        run(small(seed=1), checkpoint=file, max_epochs=1)
    assert "seed" in caplog.text


@pytest.mark.filterwarnings("ignore:You requested to overfit.*")
def test_fit_never_opens_a_test_picture(plant):
    root = plant({f"{split}/{c}": 3 for split in ("train", "val", "test") for c in "ab"})
    for bomb in (root / "test").glob("*/*.png"):
        bomb.unlink()
        bomb.symlink_to(root / "nowhere.png")
    data = ImageDataModule(Folder(root=str(root)))
    data.preprocessing = Preprocessing(image_size=8, crop_pct=1.0)
    assert len(run(data).seen) == 3
    with pytest.raises(ValueError, match="cannot be read"):
        list(data.test_dataloader())
    data = ImageDataModule(Folder(root=str(root)))
    data.preprocessing = Preprocessing(image_size=8, crop_pct=1.0)
    assert len(run(data, overfit_batches=1).seen) == 3


def test_fit_runs_without_a_val_split(plant, tmp_path):
    root = plant({"train/a": 5, "train/b": 5}, tmp_path / "train alone")
    data = ImageDataModule(Folder(root=str(root), val=0.0, test=0.0))
    data.preprocessing = Preprocessing(image_size=8, crop_pct=1.0)
    assert len(run(data, max_epochs=1).seen) == 1
    with pytest.raises(ValueError, match="in the val split"):
        lightning.Trainer(accelerator="cpu", logger=False).validate(Model(), data)


class Predictor(Model):
    def predict_step(self, batch, batch_idx):
        return batch.index


def test_predicting_goes_through_the_table_in_order(small):
    data = small()
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    index = torch.cat(trainer.predict(Predictor(), data))
    assert index.tolist() == list(range(84))
