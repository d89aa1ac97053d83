"""An unreadable picture ends training, or is replaced in the same way every time."""

import pytest
import torch

from vit.data import Folder, ImageDataModule, Preprocessing


def module(root, **options) -> ImageDataModule:
    data = ImageDataModule(Folder(**{"root": str(root), "batch_size": 4, "num_workers": 0, **options}))
    data.preprocessing = Preprocessing(image_size=8, crop_pct=1.0)
    return data


@pytest.fixture
def damaged(plant):
    root = plant({"train/a": 8, "train/b": 8, "val/a": 2, "val/b": 2})
    (root / "train" / "a" / "003.png").write_bytes(b"")
    return root


# A10
def test_a_bad_picture_ends_training_with_its_name(damaged):
    with pytest.raises(ValueError, match=r"003\.png: expected a picture.*the file is empty"):
        list(module(damaged).train_dataloader())


# A10
def test_a_skipped_picture_is_replaced_said_once_and_the_same_for_any_workers(damaged, caplog):
    data = module(damaged, on_error="skip")
    with caplog.at_level("WARNING", "vit.data"):
        batches = [batch for _ in range(2) for batch in data.train_dataloader()]
    assert caplog.text.count("a/003.png") == 2  # once for each loader
    assert "1 skipped so far" in caplog.text
    assert [len(batch.images) for batch in batches] == [4] * 8
    assert all("a/003.png" not in data.table.name(i) for batch in batches for i in batch.index.tolist())
    forked = module(damaged, on_error="skip", num_workers=2, multiprocessing_context="fork", persistent_workers=False)
    for one, other in zip(batches, forked.train_dataloader(), strict=False):
        assert torch.equal(one.index, other.index)
        assert torch.equal(one.images, other.images)


# A10
def test_too_many_bad_pictures_end_training(damaged):
    with pytest.raises(ValueError, match="max_errors is 0.*vit check"):
        list(module(damaged, on_error="skip", max_errors=0).train_dataloader())
    for file in damaged.glob("train/*/*.png"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="the file is empty"):
        list(module(damaged, on_error="skip").train_dataloader())


def test_evaluation_never_replaces_a_picture(damaged):
    (damaged / "val" / "a" / "001.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"001\.png"):
        list(module(damaged, on_error="skip").val_dataloader())


# A16
def test_the_switch_for_orientation_reaches_the_pictures_and_the_model(plant):
    root = plant({"train/a": 1, "train/b": 1})
    assert module(root).preprocessing.orient
    assert not module(root, orient=False).preprocessing.orient


def test_an_impossible_reaction_is_refused(as_users_run):
    with pytest.raises(ValueError, match="on_error"):
        Folder(root="x", on_error="ignore")
