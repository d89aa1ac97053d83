"""Presets and single options of the augmentation."""

import dataclasses
import pickle

import pytest
import torch
from torchvision.transforms import v2

from vit.data import Augmentation, Digits, Folder, ImageDataModule, Preprocessing, evaluation_transform
from vit.data.augment import PRESETS, Drawn
from vit.data.sampler import seeded
from vit.data.transforms import training_transform
from vit.run.options import Options

RGB = Preprocessing(image_size=32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
GREY = RGB.with_channels(1)
STILL = Augmentation(preset="none")
ALONE = {
    "crop_scale": {"crop_scale": (0.3, 0.5), "crop_ratio": (1.0, 1.0)},
    "flip": {"flip": 1.0},
    "trivial": {"policy": "trivial"},
    "rand": {"policy": "rand"},
    "augmix": {"policy": "augmix"},
    "three": {"policy": "three"},
    "color_jitter": {"color_jitter": 0.5},
    "erasing": {"erasing": 1.0},
}


def drawn(picture, augmentation, seed=0, preprocessing=RGB):
    with seeded(seed):
        return training_transform(preprocessing, augmentation)(picture)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_each_option_alone_changes_pictures_and_comes_from_the_seed(draw, name, mode):
    picture, preprocessing = draw(40, 30, mode=mode), RGB if mode == "RGB" else GREY
    option = Augmentation(preset="none", **ALONE[name])
    still = drawn(picture, STILL, preprocessing=preprocessing)
    results = [drawn(picture, option, seed, preprocessing) for seed in range(12)]
    assert all(r.dtype == torch.uint8 and r.shape == still.shape for r in results)
    assert sum(not torch.equal(r, still) for r in results) >= 3
    assert all(torch.equal(r, drawn(picture, option, seed, preprocessing)) for seed, r in enumerate(results))
    if name not in ("flip",):
        assert len({r.numpy().tobytes() for r in results}) >= 3


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_presets_take_colour_and_grey_and_differ_in_strength(draw, preset, mode):
    picture, preprocessing = draw(64, 48, mode=mode), RGB if mode == "RGB" else GREY
    results = {drawn(picture, Augmentation(preset=preset), s, preprocessing).numpy().tobytes() for s in range(6)}
    assert len(results) == (1 if preset == "none" else 6)


def test_none_is_what_evaluation_shows_bit_for_bit(draw):
    for crop_mode in ("center", "squash", "border"):
        p = dataclasses.replace(RGB, crop_mode=crop_mode)
        assert torch.equal(drawn(draw(50, 37), STILL, preprocessing=p), evaluation_transform(p)(draw(50, 37)))


def test_policies_are_torchvisions(draw):
    look = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": [102.0, 128.0, 153.0]}
    published = {
        "trivial": v2.TrivialAugmentWide(**look),
        "rand": v2.RandAugment(num_ops=2, magnitude=9, **look),
        "augmix": v2.AugMix(severity=3, all_ops=False, **look),
    }
    picture = draw(40, 40)
    still = drawn(picture, STILL)
    for name, reference in published.items():
        for seed in range(8):
            with seeded(seed):
                torch.rand(())  # whether to flip
                theirs = reference(still)
            assert torch.equal(drawn(picture, Augmentation(preset="none", policy=name), seed), theirs)


def test_three_augment_is_grey_or_solarised_or_blurred(draw):
    picture = draw(40, 40)
    still = drawn(picture, STILL)
    grey = v2.functional.rgb_to_grayscale(still, num_output_channels=3)
    solarised = torch.where(still >= 128, 255 - still, still)
    kinds = []
    for seed in range(20):
        result = drawn(picture, Augmentation(preset="none", policy="three"), seed)
        blurred = float(result.float().std()) <= float(still.float().std())  # equal where the least blur is drawn
        kinds.append("grey" if torch.equal(result, grey) else "sol" if torch.equal(result, solarised) else blurred)
    assert set(kinds) == {"grey", "sol", True}


def test_strength_counts(draw):
    picture = draw(40, 40)
    still = drawn(picture, STILL).float()

    def change(**options):
        results = [drawn(picture, Augmentation(preset="none", **options), seed).float() for seed in range(20)]
        return sum(float((r - still).abs().mean()) for r in results)

    assert change(policy="rand", strength=2) < change(policy="rand") < change(policy="rand", strength=25)
    assert change(policy="augmix", strength=1) < change(policy="augmix", strength=10)
    assert change(color_jitter=0.1) < change(color_jitter=0.8)


def test_erasing_makes_a_rectangle_noise_that_is_standard_normal_for_the_model(draw):
    plain = draw(64, 64).point(lambda _: 200)
    p = dataclasses.replace(RGB, image_size=64, crop_pct=1.0)
    values = []
    for seed in range(30):
        result = drawn(plain, Augmentation(preset="none", erasing=1.0), seed, p)
        changed = (result != 200).any(0)
        rows, columns = (torch.nonzero(changed.any(axis)).flatten() for axis in (1, 0))
        inside = result[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert 0.01 < inside[0].numel() / 64**2 < 0.35
        assert not changed[: rows[0]].any()
        values.append((inside / 255 - torch.tensor(p.mean)[:, None, None]) / torch.tensor(p.std)[:, None, None])
    flat = torch.cat([v.flatten() for v in values])
    assert abs(flat.mean()) < 0.05
    assert abs(flat.std() - 1) < 0.1
    untouched = sum(
        torch.equal(drawn(plain, Augmentation(preset="none", erasing=0.25), s, p), p_still)
        for s, p_still in enumerate([drawn(plain, STILL, 0, p)] * 40)
    )
    assert 22 <= untouched <= 38


def test_options_win_over_the_preset_and_the_line_says_so():
    chosen = Augmentation(preset="strong", flip=0.0, policy="rand", strength=5)
    assert chosen.resolve() == Drawn(
        crop_scale=(0.08, 1.0), crop_ratio=(3 / 4, 4 / 3), flip=0.0, policy="rand", strength=5, erasing=0.25
    )
    assert chosen.describe() == (
        "strong but for flip, policy, strength: crops of 8-100 % of the area, width/height 0.75-1.33, "
        "policy rand at strength 5, erasing 0.25"
    )
    assert STILL.describe() == "none: the whole of what evaluation shows"
    assert Augmentation().resolve() == PRESETS["standard"]
    assert pickle.loads(pickle.dumps(chosen)) == chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "wild"}, "preset out of none, light"),
        ({"policy": "auto"}, "policy out of none, trivial"),
        ({"preset": "none", "crop_ratio": (1.0, 1.0)}, "crop_scale and crop_ratio together"),
        ({"strength": 3}, "strength with the policy rand or augmix, but the policy is none"),
        ({"policy": "augmix", "strength": 20}, "strength from 1 to 10"),
        ({"erasing": 2.0}, "erasing"),
        ({"color_jitter": -1.0}, "color_jitter"),
    ],
)
def test_impossible_options_are_refused(options, message, as_users_run):
    with pytest.raises(ValueError, match=message):
        Augmentation(**options)


@pytest.mark.parametrize("options", [{"policy": "rand"}, {"color_jitter": 0.1}])
def test_colours_of_other_than_1_or_3_channels_are_refused(options):
    five = dataclasses.replace(Drawn(crop_scale=None, crop_ratio=None), **options)
    from vit.data.augment import Finish

    with pytest.raises(ValueError, match=r"1 or 3 channels.*there are 5"):
        Finish(five, mean=(0.5,) * 5, std=(0.5,) * 5)
    rest = Finish(dataclasses.replace(PRESETS["strong"], policy="none"), mean=(0.5,) * 5, std=(0.5,) * 5)
    assert rest(torch.zeros(5, 16, 16, dtype=torch.uint8)).shape == (5, 16, 16)


def test_the_command_line_and_yaml_choose_presets_and_values(tmp_path):
    words = ["--data=Digits", "--data.augment.preset=strong"]
    augment = Options("fit", words).parser.instantiate(Options("fit", words).config).data.augment
    assert augment == dataclasses.replace(Digits().augment, preset="strong")
    assert augment.resolve() == dataclasses.replace(PRESETS["strong"], flip=0.0)
    file = tmp_path / "c.yaml"
    file.write_text(
        "data: {class_path: Folder, init_args: {root: x, augment: {preset: strong, flip: 0.0, policy: augmix}}}\n"
    )
    for more, expected in (
        ([], Augmentation(preset="strong", flip=0.0, policy="augmix")),
        (["--data.augment.preset=light"], Augmentation(preset="light", flip=0.0, policy="augmix")),
        (["--data.augment.strength=7"], Augmentation(preset="strong", flip=0.0, policy="augmix", strength=7)),
    ):
        options = Options("fit", ["-c", str(file), *more])
        assert options.parser.instantiate(options.config).data.augment == expected
    with pytest.raises(ValueError, match="none, light, standard, strong"):
        Options("fit", ["--data=Digits", "--data.augment.preset=strnog"])


def test_digits_are_never_mirrored_by_a_preset():
    assert Digits().augment.resolve() == dataclasses.replace(PRESETS["light"], flip=0.0)
    assert all(dataclasses.replace(Digits().augment, preset=p).resolve().flip == 0 for p in PRESETS)


def test_strong_pictures_are_the_same_from_any_number_of_workers(plant):
    root = str(plant({"train/a": 6, "train/b": 6, "val/a": 1}))

    def images(workers):
        strong = Augmentation(preset="strong", policy="augmix", color_jitter=0.3, erasing=0.5)
        data = ImageDataModule(Folder(root=root, num_workers=workers, augment=strong, seed=1, batch_size=4))
        data.preprocessing = RGB
        return torch.cat([batch.images for batch in data.train_dataloader()])

    torch.manual_seed(5)
    alone = images(0)
    assert torch.equal(alone, images(2))
