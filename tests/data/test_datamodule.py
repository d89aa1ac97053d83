import dataclasses
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from vit.data import (
    Augmentation,
    Batch,
    DecodeError,
    Digits,
    Folder,
    ImageDataModule,
    Preprocessing,
    evaluation_transform,
)
from vit.data import source as source_module
from vit.data.decode import decode
from vit.data.sampler import Key
from vit.data.source import available_cores, choose_workers

SMALL = Preprocessing(image_size=8, crop_pct=1.0)


def module(source, preprocessing=SMALL) -> ImageDataModule:
    data = ImageDataModule(source)
    data.preprocessing = preprocessing
    return data


def folder(root, **options) -> ImageDataModule:
    return module(Folder(root=str(root), num_workers=0, **options))


def stream(data: ImageDataModule, epochs=2) -> list[Batch]:
    loader = data.train_dataloader()
    batches = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        batches += list(loader)
    return batches


def assert_equal(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.index, other.index)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.images, other.images)


# D3
def test_classes_are_known_before_any_setup(plant):
    data = folder(plant({"cat": 3, "dog": 3, "owl": 3}))
    assert data.num_classes == 3
    assert data.classes == ("cat", "dog", "owl")


def test_nothing_is_scanned_before_it_is_asked_for(tmp_path):
    data = folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="does not exist"):
        _ = data.num_classes


def test_batches_hold_what_the_contract_says(plant):
    data = folder(plant({"a": 10, "b": 10}), batch_size=4)
    for batch in (*data.train_dataloader(), *data.val_dataloader(), *data.test_dataloader()):
        assert isinstance(batch, Batch)
        assert batch.images.dtype == torch.uint8
        assert batch.images.shape[1:] == (3, 8, 8)
        assert batch.labels.dtype == batch.index.dtype == torch.int64
        assert batch.labels.tolist() == [data.table.label(i) for i in batch.index.tolist()]
        assert batch.weight is None


def test_evaluation_pixels_equal_a_picture_decoded_by_hand(plant):
    data = folder(plant({"a": 10, "b": 10}))
    p = Preprocessing(image_size=(6, 7), crop_pct=0.9)
    data.preprocessing = p
    batch = next(iter(data.test_dataloader()))
    for image, index in zip(batch.images, batch.index.tolist(), strict=True):
        assert torch.equal(image, evaluation_transform(p)(Image.open(data.table.path(index)).convert("RGB")))


# A25
def test_validation_is_never_augmented_and_training_differs_by_epoch(plant):
    data = folder(plant({"a": 20, "b": 20}))
    val, train = data.val_dataloader().dataset, data.train_dataloader().dataset
    for position in range(len(val)):
        assert torch.equal(val[position].image, val[position].image)
        assert torch.equal(
            val[position].image,
            evaluation_transform(SMALL)(decode(data.table.path(val[position].row))),
        )
    assert torch.equal(train[Key(0, 0, 3)].image, train[Key(0, 0, 3)].image)
    assert not torch.equal(train[Key(0, 0, 3)].image, train[Key(1, 0, 3)].image)
    assert not torch.equal(train[Key(0, 0, 3)].image, train[Key(0, 1, 3)].image)
    assert {train[i].row for i in range(len(train))}.isdisjoint({val[i].row for i in range(len(val))})


# A32, C19
def test_the_seed_decides_order_and_pixels(plant, monkeypatch):
    root = plant({"a": 10, "b": 10})
    assert_equal(stream(folder(root, seed=1)), stream(folder(root, seed=1)))
    one, two = stream(folder(root, seed=1))[0], stream(folder(root, seed=2))[0]
    assert one.index.tolist() != two.index.tolist()
    same = {i: image for i, image in zip(one.index.tolist(), one.images, strict=True)}
    assert any(not torch.equal(image, same[i]) for i, image in zip(two.index.tolist(), two.images, strict=True))
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    assert_equal(stream(folder(root)), stream(folder(root, seed=2)))


def test_every_epoch_has_its_own_order_and_pixels(plant):
    first, second = stream(folder(plant({"a": 10, "b": 10}), batch_size=16))
    assert first.index.tolist() != second.index.tolist()
    pixels = dict(zip(first.index.tolist(), first.images, strict=True))
    assert all(not torch.equal(image, pixels[i]) for i, image in zip(second.index.tolist(), second.images, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="fork is Linux's")
def test_the_stream_is_the_same_for_0_1_and_2_forked_workers(plant):
    root = plant({"a": 20, "b": 20})
    expected = stream(folder(root, batch_size=4))
    for workers in (1, 2):
        source = Folder(root=str(root), batch_size=4, num_workers=workers, multiprocessing_context="fork")
        assert_equal(stream(module(source)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_the_stream_is_the_same_for_spawned_workers(plant, context):
    if context == "forkserver" and sys.platform == "win32":
        pytest.skip("Windows has no forkserver")
    root = plant({"a": 20, "b": 20})
    expected = stream(folder(root, batch_size=4))
    source = Folder(root=str(root), batch_size=4, num_workers=2, multiprocessing_context=context)
    assert_equal(stream(module(source)), expected)


def test_drawing_in_the_loader_does_not_touch_trainings_generator(plant):
    data = folder(plant({"a": 10, "b": 10}))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    stream(data)
    assert torch.equal(torch.rand(3), expected)


def test_what_workers_receive_is_small(plant):
    data = folder(plant({"a": 100, "b": 100}))
    assert len(pickle.dumps(data.train_dataloader().dataset)) < 4000
    assert len(pickle.dumps(data.val_dataloader().dataset)) < 4000


@pytest.mark.slow
def test_importing_sources_leaves_lightning_alone():
    code = "import sys, vit.data; assert 'lightning' not in sys.modules; vit.data.ImageDataModule"
    subprocess.run([sys.executable, "-c", code], check=True)


# A26
def test_a_batch_larger_than_train_is_lowered_with_a_line(plant, caplog):
    data = folder(plant({"train/a": 2, "train/b": 1, "val/a": 1}), batch_size=8)
    with caplog.at_level("WARNING", "vit.data"):
        batches = list(data.train_dataloader())
        assert len(data.train_dataloader()) == 1
    assert len(caplog.records) == 1
    assert [len(batch.images) for batch in batches] == [3]
    assert "batch_size lowered from 8 to 3" in caplog.text
    assert data.describe()["batch_size"] == 3


def test_the_last_smaller_batch_is_left_out_or_kept(plant):
    root = plant({"train/a": 5, "train/b": 5, "val/a": 3})
    sizes = {
        drop: [len(b.images) for b in stream(folder(root, batch_size=4, drop_last=drop), 1)] for drop in (True, False)
    }
    assert sizes == {True: [4, 4], False: [4, 4, 2]}
    data = folder(root, batch_size=4, eval_batch_size=2)
    assert [len(b.images) for b in data.val_dataloader()] == [2, 1]
    assert [len(b.images) for b in folder(root, batch_size=4).val_dataloader()] == [3]


def test_each_split_option_moves_pictures(plant):
    root = plant({"a": 20, "b": 20})
    base = folder(root).table
    assert len(folder(root, val=0.3).table.rows("val")) > len(base.rows("val"))
    assert len(folder(root, test=0.3).table.rows("test")) > len(base.rows("test"))
    assert folder(root, split_seed=1).table.file != base.file


def test_an_empty_split_is_an_error_that_counts_the_splits(plant):
    data = folder(plant({"train/a": 2, "train/b": 2, "val/a": 1}))
    with pytest.raises(ValueError, match=r"in the test split .*train 4, val 1, test 0"):
        data.test_dataloader()


# A17, A14, A13
def test_declared_background_range_and_limit_reach_the_decoder(plant):
    root = plant({"train/a": 1, "train/b": 1, "val/a": 1, "val/b": 1})
    Image.new("RGBA", (8, 8), (9, 9, 9, 0)).save(root / "val" / "a" / "000.png")
    Image.fromarray(np.full((8, 8), 2000, np.uint16)).save(root / "val" / "b" / "000.png")

    def val(**options):
        return next(iter(folder(root, **options).val_dataloader())).images

    assert val()[0].unique().tolist() == [255]
    assert val(background=(1, 2, 3))[0].amax((1, 2)).tolist() == [1, 2, 3]
    assert val()[1].unique().tolist() == [round(2000 / 257)]
    assert val(value_range=(0.0, 4000.0))[1].unique().tolist() == [128]
    with pytest.raises(DecodeError, match="max_pixels"):
        val(max_pixels=63)
    assert folder(root, background=(1, 2, 3)).preprocessing.background == (1, 2, 3)


# A20
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_have_the_models_channels(plant, channels):
    data = folder(plant({"a": 5, "b": 5}))
    data.preprocessing = SMALL.with_channels(channels)
    assert next(iter(data.train_dataloader())).images.shape[1:] == (channels, 8, 8)


# A10
@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_file_is_named_alone(plant, workers):
    root = plant({"train/a": 2, "train/b": 2, "val/a": 1})
    broken = root / "train" / "a" / "001.png"
    broken.write_bytes(broken.read_bytes()[:60])
    data = module(Folder(root=str(root), num_workers=workers))
    with pytest.raises(DecodeError) as caught:
        list(data.train_dataloader())
    assert str(caught.value).startswith(str(broken))
    assert "Traceback" not in str(caught.value)
    broken.unlink()
    with pytest.raises(DecodeError, match="cannot be read"):
        list(data.train_dataloader())


def test_the_plan_is_plain_values(plant):
    root = plant({"a": 10, "b": 20})
    (root / "a" / "notes.txt").write_text("")
    plan = folder(root).describe()
    assert json.loads(json.dumps(plan)) == plan
    assert plan["source"] == "Folder"
    assert plan["root"] == str(root)
    assert plan["pictures"] == {"train": 24, "val": 3, "test": 3}
    assert plan["pictures_per_class"]["b"] == {"train": 16, "val": 2, "test": 2}
    assert plan["skipped"] == {".txt": 1}
    assert plan["num_workers_reason"] == "as asked for"


def test_workers_follow_the_amount_of_data_and_the_cores(plant, monkeypatch):
    table = folder(plant({"a": 10, "b": 10})).table
    assert choose_workers(table, on_gpu=True, processes=1)[0] == 0
    monkeypatch.setattr(source_module, "_size", lambda table, row: 10_000_000)
    monkeypatch.setattr(source_module, "available_cores", lambda: 16)
    assert choose_workers(table, on_gpu=True, processes=2)[0] == 8
    assert choose_workers(table, on_gpu=False, processes=1)[0] == 4
    assert choose_workers(table, on_gpu=False, processes=16)[0] == 1


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_quota_limits_the_cores(tmp_path, monkeypatch, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert source_module._cgroup_quota(tmp_path) == quota
    monkeypatch.setattr(source_module, "_cgroup_quota", lambda folder: 0.5)
    assert available_cores() == 1


@pytest.mark.parametrize(
    "change", [{"batch_size": 0}, {"num_workers": -1}, {"max_pixels": 0}, {"val": 0.6, "test": 0.4}]
)
def test_impossible_options_are_refused(change):
    with pytest.raises(ValueError, match="expected"):
        Digits(**change)


def test_each_loading_option_reaches_the_loader(plant):
    root = str(plant({"a": 5, "b": 5}))
    plain = module(Folder(root=root, num_workers=0)).train_dataloader()
    assert isinstance(plain, DataLoader)
    assert (plain.num_workers, plain.persistent_workers, plain.pin_memory) == (0, False, torch.cuda.is_available())
    busy = Folder(root=root, num_workers=2, multiprocessing_context="spawn", pin_memory=True)
    loader = module(busy).train_dataloader()
    assert loader.num_workers == 2
    assert loader.persistent_workers
    assert loader.pin_memory
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert not module(dataclasses.replace(busy, persistent_workers=False)).train_dataloader().persistent_workers
    gentle = Augmentation(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)
    still = module(Folder(root=root, num_workers=0, augment=gentle))
    row = still.train_dataloader().dataset[0]
    assert torch.equal(row.image, evaluation_transform(SMALL)(decode(still.table.path(row.row))))
