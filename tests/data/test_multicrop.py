"""Several views of a picture: their sizes, what is drawn for each, and that nothing depends on who draws it."""

import numpy as np
import pytest
import torch
from PIL import Image

from vit.data import Folder, ImageDataModule
from vit.data.augment import Augmentation
from vit.data.batch import Batch
from vit.data.multicrop import MultiCrop, ViewsTransform
from vit.data.transforms import Preprocessing

VIEWS = MultiCrop(local_views=3, local_size=12)


def module(root, *, workers=0, **options):
    data = ImageDataModule(Folder(root=str(root), batch_size=6, num_workers=workers, seed=1, **options))
    data.preprocessing = Preprocessing(image_size=28)
    data.views = VIEWS
    return data


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("views")
    draw = np.random.default_rng(0)
    for name in ("a", "b"):
        (root / name).mkdir()
        for i in range(12):
            Image.fromarray(draw.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(root / name / f"{i}.png")
    return root


def test_training_batches_have_global_and_local_views_and_val_batches_one(pictures):
    data = module(pictures)
    batch = next(iter(data.train_dataloader()))
    assert batch.images.shape == (2, 6, 3, 28, 28)
    assert batch.local.shape == (3, 6, 3, 12, 12)
    assert batch.images.dtype == batch.local.dtype == torch.uint8
    assert batch.labels.tolist() == [data.table.label(i) for i in batch.index.tolist()]
    assert not torch.equal(batch.images[0], batch.images[1])
    assert not torch.equal(batch.local[0], batch.local[1])
    val = next(iter(data.val_dataloader()))
    assert type(val) is Batch
    assert val.images.shape[1:] == (3, 28, 28)


def test_views_are_the_same_for_any_number_of_workers_and_differ_between_epochs(pictures):
    alone, helped = module(pictures).train_dataloader(), module(pictures, workers=2).train_dataloader()
    for one, other in zip(alone, helped, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.local, other.local)
    first = {int(i): view for batch in alone for i, view in zip(batch.index, batch.images[0], strict=True)}
    alone.sampler.set_epoch(1)
    again = {int(i): view for batch in alone for i, view in zip(batch.index, batch.images[0], strict=True)}
    assert not any(torch.equal(first[i], again[i]) for i in first.keys() & again.keys())


def test_global_views_show_more_of_the_picture_than_local_ones():
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8)[None, :, None], (200, 1, 3)))
    drawn = ViewsTransform(Preprocessing(image_size=28), Augmentation(preset="light", flip=0.0), VIEWS)
    made = [drawn(ramp) for _ in range(100)]
    spans, local = (torch.stack([part[i] for part in made]).float().flatten(2) for i in (0, 1))
    spans, local = (part.amax(2) - part.amin(2) for part in (spans, local))
    # A share s of the area spans about the root of s of the width, of which the filter hides a little.
    assert spans.min() > 0.4**0.5 * 200 * 0.8
    assert local.max() < 0.4**0.5 * 200 * 1.12
    assert local.min() < 0.1**0.5 * 200 * 1.1


def test_without_local_views_there_are_none_and_flips_follow_the_augmentation(pictures):
    data = module(pictures)
    data.views = MultiCrop(local_views=0)
    assert next(iter(data.train_dataloader())).local is None
    half = Image.fromarray(np.repeat([[[0] * 3] * 20 + [[255] * 3] * 20], 40, 0).astype(np.uint8))
    whole = MultiCrop(global_scale=(1.0, 1.0), local_views=0)
    for flip in (0.0, 1.0):
        augment = Augmentation(crop_ratio=(1.0, 1.0), flip=flip)
        (views,) = ViewsTransform(Preprocessing(image_size=28), augment, whole)(half)
        assert views[0, 0, 14, 0] == (0 if flip == 0 else 255)
    with pytest.raises(ValueError, match="model.views.global_scale and local_scale"):
        ViewsTransform(Preprocessing(image_size=28), Augmentation(crop_scale=(0.1, 0.2)), whole)


def test_a_cache_and_values_out_of_range_are_refused(pictures, as_users_run):
    with pytest.raises(ValueError, match="data.cache none"):
        module(pictures, cache="ram").train_dataloader()
    for options in ({"global_scale": (0.5, 0.4)}, {"local_scale": (0.0, 0.4)}, {"local_views": -1}, {"local_size": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            MultiCrop(**options)
