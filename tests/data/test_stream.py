"""The batch stream of real pictures is one and the same, whoever decodes it and wherever a run was resumed."""

import sys

import pytest
import torch

from vit.data import Folder, ImageDataModule, Preprocessing

# Machines of tests have few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes")

EPOCHS = 2
SETTINGS = [
    {},
    {"repeats": 3},
    {"sampling": "balanced"},
    {"cache": "disk"},
]
ids = ["shuffle", "repeats", "balanced", "cache"]


def module(root, **options) -> ImageDataModule:
    if options.get("cache") == "disk":
        # A folder of its own: each run fills its cache while it is compared.
        options["cache_dir"] = str(root / f".kept-{options}".replace(" ", ""))
    data = ImageDataModule(Folder(**{"root": str(root), "batch_size": 5, "num_workers": 0, "seed": 1, **options}))
    data.preprocessing = Preprocessing(image_size=24)
    return data


def stream(data, epoch=0, pictures=0):
    loader = data.train_dataloader()
    loader.sampler.resume_at(epoch, pictures)
    for number in range(epoch, EPOCHS):
        loader.sampler.set_epoch(number)
        for batch in loader:
            yield batch.index.tolist(), batch.labels.tolist(), batch.images


def assert_equal(one, other):
    one, other = list(one), list(other)
    assert len(one) == len(other)
    for (index, labels, images), (their_index, their_labels, their_images) in zip(one, other, strict=True):
        assert (index, labels) == (their_index, their_labels)
        assert torch.equal(images, their_images)


@pytest.mark.skipif(sys.platform != "linux", reason="fork is Linux's")
@pytest.mark.parametrize("options", SETTINGS, ids=ids)
def test_forked_workers_give_the_stream_of_none(photos, options):
    expected = list(stream(module(photos, **options)))
    assert len(expected) == EPOCHS * 4
    for workers in (1, 2, 4):
        data = module(photos, **options, num_workers=workers, multiprocessing_context="fork")
        assert_equal(stream(data), expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", SETTINGS, ids=ids)
def test_spawned_workers_give_the_stream_of_none(photos, options):
    expected = list(stream(module(photos, **options)))
    for workers in (1, 2, 4):
        data = module(photos, **options, num_workers=workers, multiprocessing_context="spawn")
        assert_equal(stream(data), expected)


@pytest.mark.parametrize("options", SETTINGS, ids=ids)
def test_the_stream_goes_on_from_any_batch(photos, options):
    expected = list(stream(module(photos, **options)))
    for done in range(EPOCHS * 4):
        data = module(photos, **options)
        assert_equal(stream(data, epoch=done // 4, pictures=done % 4 * 5), expected[done:])


@pytest.mark.skipif(sys.platform != "linux", reason="fork is Linux's")
def test_two_workers_go_on_from_the_middle_of_an_epoch(photos):
    expected = list(stream(module(photos)))
    data = module(photos, num_workers=2, multiprocessing_context="fork")
    assert_equal(stream(data, epoch=1, pictures=10), expected[6:])
