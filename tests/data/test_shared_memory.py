"""Shared memory that would not hold the workers' batches is said before they start."""

import shutil

import pytest

from vit.data import Digits, ImageDataModule, Preprocessing, module
from vit.data import source as source_module
from vit.data.multicrop import MultiCrop
from vit.data.source import _cgroup_room, available_memory, scarce_memory


# A33
def test_the_estimate_is_workers_times_batches_in_advance_times_bytes():
    batch = 64 * 3 * 224 * 224
    assert scarce_memory(4, batch, free=8 * batch) is None
    line = scarce_memory(4, batch, free=8 * batch - 1)
    assert "4 workers with 2 batches of 9.6 MB each need 77 MB" in line
    assert "has 77 MB free" in line
    assert "num_workers" in line
    assert "--shm-size" in line
    assert scarce_memory(4, batch, processes=2, free=8 * batch) is not None
    assert scarce_memory(0, batch, free=0) is None


# A33
def test_a_system_without_such_a_folder_has_no_bound(tmp_path):
    assert scarce_memory(4, 10**15, folder=tmp_path / "nowhere") is None
    assert scarce_memory(4, 10**15, folder=tmp_path) is not None


# A33
def test_loaders_say_once_that_memory_is_scarce(monkeypatch, caplog):
    free = shutil._ntuple_diskusage(64_000_000, 64_000_000, 0)
    monkeypatch.setattr(source_module.shutil, "disk_usage", lambda folder: free)
    data = ImageDataModule(Digits(num_workers=2, batch_size=64))
    data.preprocessing = Preprocessing(image_size=8)
    assert data.table.rows()
    monkeypatch.setattr(source_module.Path, "is_dir", lambda path: True)
    with caplog.at_level("WARNING", "vit.data"):
        for _ in range(2):
            data.train_dataloader()
            data.val_dataloader()
    assert caplog.text.count("of shared memory, but /dev/shm has 0 MB free") == 1


# A33
def test_several_views_need_the_memory_of_them_all(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "scarce_memory", lambda workers, bytes_, **more: asked.append(bytes_))
    data = ImageDataModule(Digits(num_workers=2, batch_size=64))
    data.preprocessing = Preprocessing(image_size=16)
    data.views = MultiCrop(local_views=8, local_size=8)
    batch = next(iter(data.train_dataloader()))
    assert asked == [batch.images.nbytes + batch.local.nbytes]
    data.val_dataloader()
    assert asked[1] == 64 * 3 * 16 * 16


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({"memory.max": "1000\n", "memory.current": "300\n"}, 700),
        ({"memory.max": "max\n", "memory.current": "300\n"}, None),
        ({"memory/memory.limit_in_bytes": "50\n", "memory/memory.usage_in_bytes": "80\n"}, 0),
        ({}, None),
    ],
)
def test_a_containers_limit_counts_as_memory(tmp_path, monkeypatch, files, room):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _cgroup_room(tmp_path) == room
    monkeypatch.setattr(source_module, "_cgroup_room", lambda folder: 5)
    assert available_memory() == 5
