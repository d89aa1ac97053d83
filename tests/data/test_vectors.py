"""Stored vectors come in the place of pictures, in the same order, and only to fits."""

from itertools import islice

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from vit.data import Digits, ImageDataModule
from vit.data.augment import Augmentation
from vit.data.multicrop import MultiCrop
from vit.data.vectors import Vectors


class FakeTrainer:
    """Just what a datamodule asks its trainer."""

    world_size, global_rank, num_devices, current_epoch, limit_val_batches = 1, 0, 1, 0, 1.0

    def __init__(self, fn):
        self.state = type("State", (), {"fn": fn})
        device = torch.device("cpu")
        self.strategy = type("Strategy", (), {"root_device": device})


def module(fn=TrainerFn.FITTING, **options):
    data = ImageDataModule(Digits(batch_size=100, num_workers=0, seed=3, **options))
    data.trainer = FakeTrainer(fn)
    return data


def test_a_fit_gets_vectors_with_the_labels_and_order_of_its_pictures():
    pictures, stored = module(), module()
    rows = {name: torch.tensor(list(pictures.table.rows(name))) for name in ("train", "val")}
    stored.features = {name: (torch.arange(float(len(index)))[:, None], index) for name, index in rows.items()}
    for loader in ("train_dataloader", "val_dataloader"):
        want, got = (list(islice(getattr(data, loader)(), 2)) for data in (pictures, stored))
        assert [b.index.tolist() for b in got] == [b.index.tolist() for b in want]
        assert [b.labels.tolist() for b in got] == [b.labels.tolist() for b in want]
        index = rows["train" if loader.startswith("train") else "val"]
        assert all(index[int(x)] == row for b in got for (x,), row in zip(b.images, b.index.tolist(), strict=True))


def test_a_picture_that_took_the_place_of_a_damaged_one_brings_its_own_label():
    table = module().table
    rows = list(table.rows("val"))
    replaced = torch.tensor([rows[-1], *rows[1:]])
    sample = Vectors(table, "val", torch.zeros(179, 3), replaced)[0]
    assert sample.row == rows[-1]
    assert sample.label == table.target(rows[-1]) != table.target(rows[0])


def test_vectors_are_for_one_fit_alone():
    data = module(TrainerFn.VALIDATING)
    data.features = {"val": (torch.zeros(179, 3), torch.tensor(list(data.table.rows("val"))))}
    assert next(iter(data.val_dataloader())).images.ndim == 4
    data.setup("fit")
    assert data.features == {}


def test_training_sees_what_evaluation_sees_only_without_augmentation_and_views():
    assert module(augment=Augmentation(preset="none")).trains_as_evaluated
    assert not module().trains_as_evaluated
    assert not module(augment=Augmentation(preset="none", flip=0.5)).trains_as_evaluated
    several = module(augment=Augmentation(preset="none"))
    several.views = MultiCrop()
    assert not several.trains_as_evaluated


def test_another_number_of_vectors_is_refused():
    with pytest.raises(ValueError, match="each of the 179 pictures of val, but got 3"):
        Vectors(module().table, "val", torch.zeros(3, 2), torch.arange(3))
