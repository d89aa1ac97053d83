"""Each method inside a fit: what moves and what does not, that it learns, and how the head starts."""

import shutil
from typing import get_args

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifierCV
from test_methods import expected
from torch.utils.data import DataLoader

from vit.data import Folder, ImageDataModule
from vit.data.augment import Augmentation
from vit.data.batch import Batch, Pictures
from vit.data.mix import Mixing
from vit.evaluate.probe import features
from vit.models.weights import load_weights, read_checkpoint
from vit.tasks import Classifier, EncoderOptions, OptimConfig
from vit.tasks.methods import Method, TuningConfig

METHODS = get_args(Method)
CLASSES = ["blue", "green", "red"]
# LayerScale and several norms, so that every method has something to leave alone; three blocks, of which two are last.
ENCODER = EncoderOptions(
    image_size=16, patch_size=8, width=32, depth=3, heads=2, dropout=0.1, drop_path=0.1, layer_scale=0.1, init_std=0.1
)
QUIET = dict(
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
    use_distributed_sampler=False,
)


def colours(root, **options):
    return ImageDataModule(Folder(root=str(root), batch_size=6, num_workers=0, seed=1, **options))


def classifier(**options):
    torch.manual_seed(0)
    values = {"classes": CLASSES, "encoder": ENCODER, "optim": OptimConfig(lr=2e-3), "seed": 1}
    return Classifier(**{**values, **options})


@pytest.mark.parametrize("method", METHODS)
def test_two_epochs_with_validation_move_what_learns_and_nothing_else(tmp_path, tiny_folder, method):  # C11
    model = classifier(method=method)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers() if "metrics" not in name}
    Trainer(**QUIET, max_epochs=2).fit(model, colours(tiny_folder))
    after = model.state_dict()
    moved = {name.removeprefix("net.model.") for name in before if not torch.equal(before[name], after[name])}
    assert moved == {n.removeprefix("net.model.") for n in before if expected(n.removeprefix("net.model."), method)}
    assert all(torch.equal(tensor, dict(model.named_buffers())[name]) for name, tensor in buffers.items())


def test_features_of_a_frozen_backbone_stay_the_same_also_in_training_mode(tmp_path, tiny_folder):  # C11
    model = classifier(method="head")
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)

    def pooled():
        return model.model.pool(model.model.forward_features(model.net.normalise(images)))

    before = pooled()
    Trainer(**QUIET, max_epochs=2).fit(model, colours(tiny_folder))
    model.train()
    assert torch.equal(pooled(), before)


def test_gradual_unfreezing_moves_one_further_block_per_epoch(tmp_path, tiny_folder):
    model = classifier(tuning=TuningConfig(unfreeze_every=1), optim=OptimConfig(lr=2e-3, weight_decay=0.5))
    seen, last = [], {n: p.detach().clone() for n, p in model.model.named_parameters()}

    def note():
        now = {n: p.detach().clone() for n, p in model.model.named_parameters()}
        seen.append({".".join(n.split(".")[:2]) for n in now if not torch.equal(now[n], last[n])})
        last.update(now)

    plain = model.on_train_epoch_end
    model.on_train_epoch_end = lambda: (note(), plain())
    Trainer(**QUIET, max_epochs=5).fit(model, colours(tiny_folder))
    opened = [{name for name in moved if name.startswith("blocks")} for moved in seen]
    assert opened == [{f"blocks.{i}" for i in range(3 - n, 3)} for n in (0, 1, 2, 3, 3)]
    assert ["patch_embed.proj" in moved for moved in seen] == [False] * 4 + [True]
    assert all("head.weight" in moved and "norm.weight" in moved for moved in seen[1:])


class Digits(LightningDataModule):
    """scikit-learn's digits at 16 x 16 pixels, in memory, in batches as the toolkit's datamodule gives them."""

    def __init__(self, classes, *, mirrored):
        super().__init__()
        self.classes = tuple(classes)
        pictures, labels = load_digits(return_X_y=True)
        grey = torch.from_numpy(pictures).float().reshape(-1, 1, 8, 8) * (255 / 16)
        images = grey.repeat_interleave(2, -1).repeat_interleave(2, -2).round().byte()
        self.images = images.flip(-1) if mirrored else images
        self.labels = torch.from_numpy(labels)

    def loader(self, split, shuffle=False):
        rows = torch.arange(len(self.labels))
        rows = rows[rows % 4 == 0] if split == "val" else rows[rows % 4 != 0]
        rows = rows[torch.randperm(len(rows))] if shuffle else rows
        parts = [Batch(self.images[r], self.labels[r], r) for r in rows.split(64)]
        return DataLoader(parts, batch_size=None)

    def train_dataloader(self):
        return self.loader("train", shuffle=True)

    def val_dataloader(self):
        return self.loader("val")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of a model that was trained on the digits."""
    torch.manual_seed(0)
    encoder = EncoderOptions(image_size=16, patch_size=4, channels=1, width=32, depth=3, heads=2, init_std=0.18)
    model = Classifier(classes=list("0123456789"), encoder=encoder, optim=OptimConfig(lr=5e-3))
    trainer = Trainer(**QUIET, max_epochs=6)
    trainer.fit(model, Digits("0123456789", mirrored=False))
    assert float(trainer.callback_metrics["val_acc"]) > 0.8
    path = tmp_path_factory.mktemp("base") / "base.ckpt"
    trainer.save_checkpoint(path)
    return str(path)


NEW = "abcdefghij"


def tuned(base, *, lr=0.01, **options):
    """A classifier of mirrored digits, which are other signs, from weights of digits."""
    torch.manual_seed(0)
    values = {"classes": list(NEW), "weights": base, "optim": OptimConfig(lr=lr, layer_decay=1.0), "seed": 1}
    return Classifier(**{**values, **options})


@pytest.fixture
def mirrored():
    torch.manual_seed(0)
    return Digits(NEW, mirrored=True)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_mirrored_digits_from_a_backbone_of_digits(base, mirrored, method):
    trainer = Trainer(**QUIET, max_epochs=3)
    trainer.fit(tuned(base, method=method), mirrored)
    assert float(trainer.callback_metrics["val_acc"]) > (0.5 if method == "head" else 0.6)


def test_a_ridge_head_scores_as_scikit_learns_before_the_first_step(base, mirrored):
    model = tuned(base, tuning=TuningConfig(head_init="ridge"))
    model.trainer = Trainer(**QUIET)
    model.trainer._data_connector.attach_data(model, datamodule=mirrored)
    model.on_fit_start()
    train, val = features(model.net, mirrored.loader("train")), features(model.net, mirrored.loader("val"))
    theirs = RidgeClassifierCV(alphas=np.logspace(-3, 4, 29)).fit(train.x.numpy(), train.y.numpy())
    logits = model.model.head(val.x).detach()
    accuracy = float((logits.argmax(1) == val.y).float().mean())
    assert accuracy == pytest.approx(theirs.score(val.x.numpy(), val.y.numpy()), abs=0.01)
    assert accuracy > 0.6
    losses = [float(torch.nn.functional.cross_entropy(factor * logits, val.y)) for factor in (0.5, 1.0, 2.0)]
    assert min(losses) == losses[1]


def test_a_ridge_start_is_made_once_and_needs_a_datamodule_of_ours(base, mirrored, capsys):
    few = {**QUIET, "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
    ridge = TuningConfig(head_init="ridge")
    model, again = tuned(base, method="head", tuning=ridge), tuned(base, method="head", tuning=ridge)
    for one in (model, again):
        torch.manual_seed(2)
        Trainer(**few).fit(one, mirrored)
    assert torch.equal(model.model.head.weight, again.model.head.weight)
    assert capsys.readouterr().out.count("head: ridge regression on 1,347 pictures") == 2
    Trainer(**few).fit(model, mirrored)
    assert "ridge" not in capsys.readouterr().out
    loader = mirrored.loader("train")
    with pytest.raises(ValueError, match="head_init to zero"):
        Trainer(**few).fit(tuned(base, tuning=ridge), train_dataloaders=loader, val_dataloaders=loader)


def test_training_goes_on_from_a_ridge_start(base, mirrored):
    losses = []
    for start in ("zero", "ridge"):
        trainer = Trainer(**QUIET, max_epochs=1)
        trainer.fit(tuned(base, lr=1e-3, tuning=TuningConfig(head_init=start)), mirrored)
        losses.append(float(trainer.callback_metrics["val_loss"]))
    assert losses[1] < 0.7 * losses[0]


def test_readers_of_a_lora_checkpoint_get_the_merged_plain_model(tmp_path, tiny_folder, as_users_run):
    model = classifier(method="lora", tuning=TuningConfig(lora_rank=4, lora_alpha=8.0, lora_projections=("qkv", "fc2")))
    trainer = Trainer(**QUIET, max_epochs=2)
    trainer.fit(model, colours(tiny_folder))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    wanted = model.eval()(images)
    plain, _, classes = read_checkpoint(tmp_path / "x.ckpt")
    assert classes == CLASSES
    assert not any("lora" in name for name in plain.state_dict())
    torch.testing.assert_close(plain(model.net.normalise(images)), wanted, atol=1e-5, rtol=1e-5)
    started = load_weights(str(tmp_path / "x.ckpt"), classes=CLASSES).model
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in started.state_dict().items())
    again = Classifier.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    assert torch.equal(again(images), wanted)
    assert again.tuning == model.tuning


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "full"}, "method: checkpoint lora, now full"),
        ({"method": "lora", "tuning": TuningConfig(lora_rank=4)}, "tuning.lora_rank: checkpoint 8, now 4"),
    ],
)
def test_a_checkpoint_of_another_method_is_refused(tmp_path, tiny_folder, options, message):
    trainer = Trainer(**QUIET, max_epochs=1)
    trainer.fit(classifier(method="lora"), colours(tiny_folder))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=message):
        Trainer(**QUIET, max_epochs=2).fit(
            classifier(**options), colours(tiny_folder), ckpt_path=tmp_path / "x.ckpt", weights_only=True
        )


class Decoded:
    """Counts the pictures that are decoded."""

    def __init__(self, monkeypatch):
        self.count, plain = 0, Pictures._sample

        def counted(pictures, *where):
            self.count += 1
            return plain(pictures, *where)

        monkeypatch.setattr(Pictures, "_sample", counted)


@pytest.mark.parametrize(
    ("options", "augment", "decoded"),
    [
        ({}, {"preset": "none"}, 36 + 18),
        ({"tuning": TuningConfig(head_init="ridge")}, {"preset": "none"}, 36 + 18),
        ({}, {}, 3 * 36 + 18),
        ({"mixing": Mixing(mixup=0.2)}, {"preset": "none"}, 3 * 36 + 18),
    ],
    ids=["nothing is drawn", "and a ridge start", "crops", "mixup"],
)
def test_a_frozen_backbone_sees_each_picture_once_where_nothing_is_drawn(
    tiny_folder, monkeypatch, options, augment, decoded
):
    fits = []
    for stored in (True, False):
        with monkeypatch.context() as patch:
            if not stored:
                patch.setattr("vit.tasks.classify.store_features", lambda *_, **__: None)
            seen, model = Decoded(patch), classifier(method="head", optim=OptimConfig(lr=0.02), **options)
            trainer = Trainer(**QUIET, max_epochs=3, num_sanity_val_steps=0)
            trainer.fit(model, colours(tiny_folder, augment=Augmentation(**augment)))
            fits.append((model.state_dict(), trainer.callback_metrics))
            assert stored == (seen.count == decoded)
    for name, tensor in fits[0][0].items():
        torch.testing.assert_close(tensor, fits[1][0][name], atol=1e-5, rtol=1e-4)
    assert float(fits[0][1]["val_loss"]) == pytest.approx(float(fits[1][1]["val_loss"]), rel=1e-3)


def test_a_picture_that_is_skipped_leaves_no_label_behind(tiny_folder, tmp_path):
    root = shutil.copytree(tiny_folder, tmp_path / "damaged")
    for i in range(3):
        (root / "train" / "blue" / f"{i}.png").write_bytes(b"no picture")

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            self.samples = [trainer.train_dataloader.dataset[position] for position in range(36)]

    data, seen = colours(root, augment=Augmentation(preset="none"), on_error="skip"), Look()
    Trainer(**QUIET, max_epochs=1, callbacks=[seen]).fit(classifier(method="head"), data)
    assert all(sample.image.ndim == 1 for sample in seen.samples), "features are stored"
    names = {f"train/blue/{i}.png" for i in range(3)}
    damaged = {row for row in data.table.rows("train") if data.table.name(row) in names}
    assert len(damaged) == 3
    assert not damaged & {sample.row for sample in seen.samples}
    assert all(sample.label == data.table.target(sample.row) for sample in seen.samples)


def test_features_that_do_not_fit_into_memory_are_computed_in_every_epoch(tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr("vit.tasks.headstart.available_memory", lambda: 2 * 4 * 32 * (36 + 18) - 2)
    seen, model = Decoded(monkeypatch), classifier(method="head", optim=OptimConfig(lr=0.02))
    assert model.model.config.width == 32
    data = colours(tiny_folder, augment=Augmentation(preset="none"))
    Trainer(**QUIET, max_epochs=2, num_sanity_val_steps=0).fit(model, data)
    assert seen.count == 2 * (36 + 18)
    assert "more than half of the free memory" in capsys.readouterr().out
