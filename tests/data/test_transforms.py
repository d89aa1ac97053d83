import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch
from timm.data import create_transform
from torchvision.transforms import v2

from vit.data import Augmentation, Preprocessing, evaluation_transform, training_transform
from vit.data.transforms import Training, draw_crop

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


# B15
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0])
@pytest.mark.parametrize("image_size", [32, 224, (48, 64), (65, 31)])
def test_evaluation_equals_timms_bit_for_bit(draw, image_size, crop_pct, crop_mode, interpolation):
    ours = Preprocessing(
        image_size=image_size, crop_pct=crop_pct, crop_mode=crop_mode, interpolation=interpolation, **IMAGENET
    )
    timms = create_transform(
        (3, *ours.size),
        is_training=False,
        interpolation=interpolation,
        crop_pct=crop_pct,
        crop_mode=crop_mode,
        normalize=False,
        **IMAGENET,
    )
    for width, height in [(50, 37), (37, 50), (301, 200), (224, 224), (33, 240), (8, 8)]:
        picture = draw(width, height)
        result = evaluation_transform(ours)(picture)
        assert result.dtype == torch.uint8
        assert torch.equal(result, timms(picture))


# B16
def test_shrinking_smooths_as_the_tensor_path_with_antialias(draw):
    picture = draw(240, 180)
    ours = evaluation_transform(Preprocessing(image_size=64, crop_pct=1.0))(picture)
    tensors = v2.Compose([v2.Resize(64, v2.InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(64)])
    theirs = tensors(v2.functional.pil_to_tensor(picture))
    assert (ours.float() - theirs.float()).abs().mean() < 1


# A20
def test_one_channel_takes_the_mean_of_three(draw):
    grey = Preprocessing(image_size=16, **IMAGENET).with_channels(1)
    assert grey.mean == pytest.approx((np.mean(IMAGENET["mean"]),))
    assert grey.std == pytest.approx((np.mean(IMAGENET["std"]),))
    assert evaluation_transform(grey)(draw(mode="L")).shape == (1, 16, 16)
    assert grey.with_channels(3).mean == pytest.approx(grey.mean * 3)
    assert evaluation_transform(dataclasses.replace(grey, crop_mode="border"))(draw(20, 9, mode="L")).shape[0] == 1


def test_preprocessing_survives_json_and_timm():
    chosen = Preprocessing(image_size=(48, 64), crop_pct=0.95, value_range=(0.0, 4095.0), **IMAGENET)
    assert Preprocessing.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen
    back = Preprocessing.from_timm(json.loads(json.dumps(chosen.to_timm())))
    assert back == dataclasses.replace(chosen, value_range=None)


def test_timms_own_configuration_is_read():
    import timm

    config = timm.get_pretrained_cfg("vit_base_patch16_224.augreg_in1k").to_dict()
    ours = Preprocessing.from_timm(config)
    data = timm.data.resolve_data_config(pretrained_cfg=config)
    assert ours.to_timm() == {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 0}, "image_size"),
        ({"mean": (0.5, 0.5)}, "mean"),
        ({"std": (0.0, 1.0, 1.0)}, "std"),
        ({"crop_pct": 0.0}, "crop_pct"),
        ({"value_range": (1.0, 0.0)}, "value_range"),
    ],
)
def test_impossible_preprocessing_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(**change)
    with pytest.raises(ValueError, match="zoom"):
        Preprocessing.from_dict({"zoom": 2})


@pytest.mark.parametrize(
    "change",
    [{"crop_scale": (0.5, 0.1)}, {"crop_scale": (0.0, 1.0)}, {"crop_ratio": (2.0, 1.0)}, {"flip": 1.5}],
)
def test_impossible_augmentation_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Augmentation(**change)


def test_training_without_randomness_is_a_plain_resize(draw):
    picture = draw(40, 40)
    still = Augmentation(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)
    p = Preprocessing(image_size=16, crop_pct=1.0)
    assert torch.equal(training_transform(p, still)(picture), evaluation_transform(p)(picture))
    flipped = training_transform(p, dataclasses.replace(still, flip=1.0))(picture)
    mirrored = evaluation_transform(p)(picture.transpose(0))
    assert torch.equal(flipped, mirrored)


def test_training_crops_as_torchvision_does(draw):
    picture = draw(6, 4).resize((300, 200), 3)
    augmentation = Augmentation(crop_scale=(0.1, 0.9), flip=0.0)
    ours = training_transform(Preprocessing(image_size=(48, 64)), augmentation)
    theirs = v2.RandomResizedCrop(
        (48, 64), scale=(0.1, 0.9), interpolation=v2.InterpolationMode.BICUBIC, antialias=True
    )
    for seed in range(5):
        torch.manual_seed(seed)
        mine = ours(picture)
        torch.manual_seed(seed)
        reference = v2.functional.pil_to_tensor(theirs(picture))
        assert (mine.float() - reference.float()).abs().mean() < 1


def test_crops_are_those_of_torchvision_also_where_none_fits():
    for width, height in ((300, 200), (40, 400), (900, 20), (1, 1), (3, 2)):
        for scale, ratio in (((0.08, 1.0), (0.75, 4 / 3)), ((0.9, 1.0), (0.9, 1.1)), ((1.0, 1.0), (1.0, 1.0))):
            theirs = v2.RandomResizedCrop(8, scale=scale, ratio=ratio, antialias=True)
            for seed in range(20):
                torch.manual_seed(seed)
                box = theirs.make_params([torch.empty(3, height, width)])
                torch.manual_seed(seed)
                assert draw_crop(width, height, scale, ratio) == (box["left"], box["top"], box["width"], box["height"])


@pytest.mark.parametrize(("width", "height"), [(400, 100), (100, 400)])
def test_crops_of_squashed_pictures_have_the_shape_of_the_picture(width, height):
    made = {}
    for mode in ("center", "squash"):
        drawn = Augmentation(crop_scale=(0.6, 1.0), crop_ratio=(0.9, 1.1)).resolve()
        training = Training(Preprocessing(image_size=28, crop_mode=mode), drawn)
        boxes = []
        for seed in range(20):
            torch.manual_seed(seed)
            boxes.append(training.view(width, height).box)
        made[mode] = [(right - left, bottom - top) for left, top, right, bottom in boxes]
    assert all(abs(w / h / (width / height) - 1) < 0.13 and w * h >= 0.58 * 40_000 for w, h in made["squash"])
    assert all(w * h < 0.3 * 40_000 for w, h in made["center"]), "a square sees no more of a long picture"


def test_each_augmentation_option_changes_the_picture(draw):
    picture, p = draw(64, 64), Preprocessing(image_size=32)
    base = Augmentation(flip=0.0)
    for change in ({"crop_scale": (0.5, 0.6)}, {"crop_ratio": (2.0, 3.0)}, {"flip": 1.0}):
        torch.manual_seed(3)
        before = training_transform(p, base)(picture)
        torch.manual_seed(3)
        assert not torch.equal(before, training_transform(p, dataclasses.replace(base, **change))(picture))


def test_transforms_travel_to_spawned_workers():
    p = Preprocessing()
    assert len(pickle.dumps(evaluation_transform(p))) < 2000
    assert len(pickle.dumps(training_transform(p, Augmentation()))) < 3000
