"""A cache changes how often pictures are decoded, never what training sees."""

import gc
import io
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from vit.data import Augmentation, DecodeError, Digits, Folder, ImageDataModule, Preprocessing
from vit.data import batch as batch_module
from vit.data import cache as cache_module
from vit.data.cache import SHARED_MEMORY, RamFolder, _read, _write, shrunken_side
from vit.data.sampler import Key, mix, seeded

SMALL = Preprocessing(image_size=16)
# Machines of tests have few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes")
linux = pytest.mark.skipif(sys.platform != "linux", reason="fork and /dev/shm are Linux's")


@pytest.fixture
def make(photos, tmp_path):
    """A maker of datamodules on the photos, with a disk cache of the test's own."""

    def module(preprocessing=SMALL, **options) -> ImageDataModule:
        if options.setdefault("cache", "disk") == "disk":
            options.setdefault("cache_dir", str(tmp_path / "kept"))
        data = ImageDataModule(
            Folder(**{"root": str(photos), "batch_size": 5, "num_workers": 0, "drop_last": False, **options})
        )
        data.preprocessing = preprocessing
        return data

    return module


def stream(data, epochs=2):
    loader = data.train_dataloader()
    batches = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        batches += [(batch.index.tolist(), batch.images) for batch in loader]
    return batches


def assert_equal(first, second):
    assert len(first) == len(second)
    for (index, images), (other, others) in zip(first, second, strict=True):
        assert index == other
        assert torch.equal(images, others)


def kept(folder) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != "lock")


@pytest.fixture
def no_decoding(monkeypatch):
    """Fails where a picture is decoded."""

    def forbid():
        def decoded(*args, **kwargs):
            raise AssertionError("a picture was decoded")

        monkeypatch.setattr(batch_module, "read_header", decoded)
        monkeypatch.setattr(batch_module, "decode", decoded)

    return forbid


def test_later_epochs_decode_nothing_and_see_what_the_first_would(make, tmp_path, no_decoding):
    filling = stream(make())
    assert len(kept(tmp_path / "kept")) == 24  # of training alone
    no_decoding()
    assert_equal(stream(make()), filling)


def test_the_cache_in_memory_gives_the_same_and_decodes_once(make, no_decoding):
    if sys.platform != "linux":
        pytest.skip("/dev/shm is Linux's")
    filling = stream(make())
    data = make(cache="ram")
    assert_equal(stream(data), filling)
    no_decoding()
    assert_equal(stream(data), filling)


@linux
@pytest.mark.parametrize("cache", ["disk", "ram"])
@pytest.mark.parametrize("persistent", [True, False])
def test_forked_workers_share_one_cache(make, cache, persistent, photos):
    expected = stream(make(cache="disk", cache_dir=str(photos / ".other")))
    data = make(cache=cache, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent)
    loader = data.train_dataloader()
    assert_equal(stream(data), expected)
    folder = loader.dataset.cache.folder
    assert len(kept(folder)) == 24


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["disk", "ram"])
def test_spawned_workers_share_one_cache(make, cache, photos):
    if cache == "ram" and sys.platform != "linux":
        pytest.skip("/dev/shm is Linux's")
    expected = stream(make(cache="disk", cache_dir=str(photos / ".other")))
    for workers in (1, 4):
        data = make(cache=cache, num_workers=workers, multiprocessing_context="spawn")
        assert_equal(stream(data), expected)  # filled by one worker, then read by four


def test_a_full_cache_says_so_once_and_gives_the_same_pixels(make, tmp_path, caplog):
    large = Preprocessing(image_size=160)
    expected = stream(make(large, cache_dir=str(tmp_path / "roomy")))
    assert sum(file.stat().st_size for file in kept(tmp_path / "roomy")) > 1_000_000
    with caplog.at_level("WARNING", "vit.data"):
        assert_equal(stream(make(large, cache_size=1)), expected)
    assert len(caplog.records) == 1
    assert "is full, with 1 MB of this run's settings and 0 MB of others" in caplog.text
    assert 700_000 < sum(file.stat().st_size for file in kept(tmp_path / "kept")) <= 1_000_000
    assert_equal(stream(make(large, cache_size=1)), expected)
    assert sum(file.stat().st_size for file in kept(tmp_path / "kept")) <= 1_000_000


@linux
def test_two_writers_keep_to_the_bound(make, tmp_path):
    data = make(
        Preprocessing(image_size=160), cache_size=1, num_workers=2, multiprocessing_context="fork", batch_size=2
    )
    stream(data)
    assert 500_000 < sum(file.stat().st_size for file in kept(tmp_path / "kept")) <= 1_000_000


def test_a_disk_that_takes_nothing_costs_time_only(make, monkeypatch, caplog):
    expected = stream(make())

    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "_write", refuse)
    with caplog.at_level("WARNING", "vit.data"):
        assert_equal(stream(make(cache_dir=str(Path(make().source.cache_dir) / "empty"))), expected)
    assert caplog.text.count("the disk is full") == 1


def test_a_changed_picture_or_setting_is_decoded_anew(make, photos, tmp_path):
    first = stream(make(), 1)
    file = sorted(photos.glob("train/*/*.jpg"))[0]
    Image.new("RGB", (60, 60), (200, 10, 10)).save(file)
    second = stream(make(), 1)
    row = next(i for i in make().table.rows("train") if make().table.path(i) == str(file))
    for (index, images), (_, others) in zip(first, second, strict=True):
        for i, image, other in zip(index, images, others, strict=True):
            assert torch.equal(image, other) == (i != row)
    folders = {make().train_dataloader().dataset.cache.folder}
    for preprocessing, options in [
        (Preprocessing(image_size=17), {}),
        (SMALL.with_channels(1), {}),
        (SMALL, {"orient": False}),
        (SMALL, {"background": (0, 0, 0)}),
        (SMALL, {"value_range": (0.0, 9.0)}),
        (SMALL, {"max_pixels": 10**6}),
        (SMALL, {"augment": Augmentation(crop_scale=(0.5, 1.0))}),
        (Preprocessing(image_size=16, interpolation="bilinear"), {}),
    ]:
        folders.add(make(preprocessing, **options).train_dataloader().dataset.cache.folder)
    assert len(folders) == 9
    data = make()
    assert len(data.table.rows("train")) == 24
    file.unlink()
    with pytest.raises(DecodeError, match=f"{file.name}: cannot be read"):
        stream(data, 1)


def test_a_stored_picture_that_is_not_whole_is_not_read(make, tmp_path):
    expected = stream(make())
    files = kept(tmp_path / "kept")
    for file, size in zip(files, (0, 5, 20, 21, 100), strict=False):
        os.truncate(file, size)
    files[5].write_bytes(b"x" * 500)
    with files[6].open("ab") as stored:
        stored.write(b"x")
    assert_equal(stream(make()), expected)
    assert all(_read(file) is not None for file in files)


@linux
def test_a_writer_that_is_killed_leaves_whole_pictures_only(tmp_path):
    pixels = torch.arange(3_000_000).to(torch.uint8).view(1000, 1000, 3)

    def write():
        for number in range(10_000):
            _write(tmp_path / f"{number % 3}" / "x", pixels)

    left_behind = 0
    for attempt in range(6):
        for file in tmp_path.glob("*/x"):
            file.unlink()
        writer = multiprocessing.get_context("fork").Process(target=write)
        writer.start()
        while not list(tmp_path.glob("*/x")):
            time.sleep(0.001)
        time.sleep(0.0037 * attempt)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        left_behind += len(list(tmp_path.rglob("*.tmp")))
        assert all(torch.equal(_read(file), pixels) for file in tmp_path.glob("*/x"))
    assert left_behind > 0
    for draft in tmp_path.rglob("*.tmp"):
        assert _read(draft.with_suffix("")) is None
        os.utime(draft, (0, 0))
    cache_module.held_bytes(tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


@linux
def test_memory_is_given_back_at_the_end_and_after_a_kill(make):
    data = make(cache="ram")
    stream(data, 1)
    folder = data.train_dataloader().dataset.cache.folder.parent
    assert folder.parent == SHARED_MEMORY
    assert folder.is_dir()
    data.teardown("fit")
    assert not folder.exists()
    held = RamFolder(1, 1)
    folder = held.path
    del held
    gc.collect()
    assert not folder.exists()

    def hold(pipe):
        held = RamFolder(1, 1)
        pipe.send(str(held.path))
        time.sleep(60)

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(there,))
    process.start()
    left = Path(here.recv())
    living = RamFolder(1, 1)
    assert left.is_dir()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert left.is_dir()
    RamFolder(1, 1).close()
    assert not left.exists()
    assert living.path.is_dir()
    living.close()


@linux
def test_memory_is_bounded_by_what_is_free(monkeypatch):
    monkeypatch.setattr(cache_module, "available_memory", lambda: 10_000_000)
    folder = RamFolder(None, 2)
    assert folder.limit == folder.room == 2_500_000
    assert RamFolder(3, 1).limit == 3_000_000
    (folder.path / "x").write_bytes(b"x" * 1000)
    assert folder.room == 2_499_000
    folder.close()
    monkeypatch.setattr(cache_module, "SHARED_MEMORY", Path("/nowhere"))
    with pytest.raises(ValueError, match="Choose data.cache disk"):
        RamFolder(None, 1)


def test_evaluation_is_never_cached(make, tmp_path):
    plain, cached = make(cache="none"), make()
    for one, other in zip(plain.val_dataloader(), cached.val_dataloader(), strict=True):
        assert torch.equal(one.images, other.images)
    assert not (tmp_path / "kept").exists()


def test_pictures_without_files_are_cached_by_their_bytes(tmp_path, no_decoding):
    def digits():
        data = ImageDataModule(
            Digits(num_workers=0, val=0.5, test=0.4, cache="disk", cache_dir=str(tmp_path), batch_size=50)
        )
        data.preprocessing = Preprocessing(image_size=8)
        return stream(data, 1)

    first = digits()
    no_decoding()
    assert_equal(digits(), first)


def test_a_crop_of_the_mean_share_has_a_quarter_more_pixels_than_the_model():
    for width, height in [(400, 300), (300, 400), (300, 300), (1200, 300)]:
        scale, size = (0.08, 1.0), (96, 64)
        factor = shrunken_side(size, scale) / min(width, height)
        crop = (np.mean(scale) * width * factor * height * factor) ** 0.5
        assert crop >= 1.25 * max(size)
    assert shrunken_side((96, 64), (1.0, 1.0)) == 120


def test_a_cached_crop_has_the_pixels_of_a_full_decode_within_two_grey_levels(tmp_path):
    picture = Image.fromarray(load_sample_image("china.jpg")).resize((1600, 1066), Image.Resampling.BICUBIC)
    pixels = np.asarray(picture) + np.random.default_rng(0).normal(0, 4, (1066, 1600, 3))
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        stored = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stored, "JPEG", quality=90)
        (tmp_path / "train" / name / "x.jpg").write_bytes(stored.getvalue())
    augment = Augmentation(crop_scale=(0.35, 1.0), flip=0.0)
    source = Folder(
        root=str(tmp_path), num_workers=0, val=0.0, augment=augment, cache="disk", cache_dir=str(tmp_path / "kept")
    )
    data = ImageDataModule(source)
    data.preprocessing = Preprocessing(image_size=224)
    pictures = data.train_dataloader().dataset
    cache, whole = pictures.cache, Image.open(io.BytesIO(stored.getvalue()))
    differences = []
    for epoch in range(10):
        small = cache.view(*whole.size)
        with seeded(mix(0, epoch, 0, 0)):
            left, top, right, bottom = pictures.transform.view(small.width, small.height).box
        x, y = whole.width / small.width, whole.height / small.height
        box = (left * x, top * y, right * x, bottom * y)
        reference = np.asarray(whole.resize((224, 224), Image.Resampling.BICUBIC, box=box)).astype(float)
        image = pictures[Key(epoch, 0, 0)].image.permute(1, 2, 0).numpy()
        differences.append(np.abs(image - reference).mean())
    assert np.mean(differences) < 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "ramdisk"}, "expected cache none, ram or disk"),
        ({"cache_dir": "x"}, "expected cache_dir with cache disk alone"),
        ({"cache": "ram", "cache_dir": "x"}, "expected cache_dir with cache disk alone"),
        ({"cache_size": 5}, "expected cache_size with cache ram or disk"),
        ({"cache": "disk", "cache_size": 0}, "cache_size of at least 1"),
    ],
)
def test_options_of_the_cache_that_do_not_fit_are_refused(as_users_run, options, message):
    with pytest.raises(ValueError, match=message):
        Folder(root="x", **options)


def test_a_folder_that_cannot_be_made_is_said(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"expected a folder for decoded pictures at .*data\.cache_dir"):
        make(cache_dir=str(tmp_path / "file" / "x")).train_dataloader()
