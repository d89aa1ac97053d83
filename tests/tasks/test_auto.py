"""A recipe's choices follow from what it looks at."""

import dataclasses

import pytest

from vit.tasks.auto import auto
from vit.tasks.facts import Facts, Start
from vit.tasks.paper import paper, paper_rates

LARGE = Start(parameters=22_000_000, width=384, patch_size=14, image_size=518)
SMALL = Start(parameters=700_000, width=96, patch_size=7, image_size=28)
PHOTOS = Facts(
    pictures=2000, val=300, classes=("cat", "dog"), multi_label=False, side=480, start=LARGE, cores=8, gpu=True
)


def values(facts, recipe=auto):
    return {name: choice.value for name, choice in recipe(facts).items()}


def changed(**changes):
    return values(dataclasses.replace(PHOTOS, **changes))


def changed_paper(**changes):
    return values(dataclasses.replace(PHOTOS, **changes), paper)


def test_every_choice_has_a_reason_and_plain_values():
    for facts in (PHOTOS, dataclasses.replace(PHOTOS, start=None), dataclasses.replace(PHOTOS, start=SMALL, gpu=False)):
        for recipe in (auto, paper):
            for name, choice in recipe(facts).items():
                assert name.split(".")[0] in ("data", "model", "monitor", "trainer")
                assert choice.why
                assert isinstance(choice.value, (int, float, str, tuple))


def test_small_pictures_get_few_patches_and_no_small_crops():
    assert changed(side=28)["model.encoder.image_size"] == 112
    assert changed(side=28)["data.augment.preset"] == "light"
    assert changed()["model.encoder.image_size"] == 224
    assert changed()["data.augment.crop_scale"] == (0.3, 1.0)


def test_small_weights_keep_their_own_size():
    assert "model.encoder.image_size" not in changed(start=SMALL, side=28)


def test_more_pictures_mean_fewer_epochs_and_larger_batches():
    few, many = changed(pictures=80), changed(pictures=30_000)
    assert few["trainer.max_epochs"] > changed()["trainer.max_epochs"] > many["trainer.max_epochs"]
    assert few["data.batch_size"] < changed()["data.batch_size"] < many["data.batch_size"]


def test_large_weights_see_few_pictures_fewer_times_than_small_ones():
    def epochs(pictures):
        return [changed(pictures=pictures, start=start)["trainer.max_epochs"] for start in (LARGE, SMALL)]

    assert epochs(30) == [50, 50], "a few steps more cost nothing"
    assert epochs(160) == [20, 50]
    assert epochs(4000) == [10, 10]


def test_a_slow_machine_gets_fewer_patches_then_fewer_epochs_then_the_head_alone():
    laptop = changed(gpu=False, cores=2)
    assert laptop["model.encoder.image_size"] < 224
    assert laptop["trainer.max_epochs"] < changed()["trainer.max_epochs"]
    hopeless = changed(gpu=False, cores=2, pictures=40_000)
    assert hopeless["model.method"] == "head"
    assert hopeless["data.augment.preset"] == "none"
    assert "model.method" not in changed()


@pytest.mark.parametrize(("classes", "flips"), [(tuple("0123"), False), (("a", "B"), False), (("cat", "4"), True)])
def test_letters_and_digits_are_not_flipped(classes, flips):
    assert ("data.augment.flip" not in changed(classes=classes)) == flips


def test_several_labels_are_not_smoothed_and_start_from_a_ridge_regression_too():
    chosen = changed(multi_label=True)
    assert chosen["model.tuning.head_init"] == changed()["model.tuning.head_init"] == "ridge"
    assert "model.loss.label_smoothing" not in chosen
    assert "model.loss.label_smoothing" in changed()


def test_wider_weights_learn_more_slowly():
    wide = dataclasses.replace(LARGE, width=768)
    assert changed(start=wide)["model.optim.lr"] < changed()["model.optim.lr"]


def test_large_weights_start_slowly_and_keep_all_their_layers():
    small = dataclasses.replace(LARGE, parameters=700_000)
    assert changed()["model.optim.lr"] < changed(start=small)["model.optim.lr"] / 2
    assert changed()["model.schedule.warmup"] > 0.1
    assert "model.schedule.warmup" not in changed(start=small)
    assert "model.encoder.drop_path" not in changed(pictures=500)


def test_large_weights_are_averaged_over_a_tenth_of_the_steps_where_all_of_them_learn():
    few = changed()  # 20 epochs of 62 steps
    assert few["model.optim.ema_warmup"] is False
    assert 1 / (1 - few["model.optim.ema"]) == pytest.approx(20 * 62 / 10, rel=0.01)
    assert 1 / (1 - changed(pictures=40)["model.optim.ema"]) == pytest.approx(50 * 2 / 10, rel=0.05)
    assert changed(pictures=1_000_000)["model.optim.ema"] == 0.999
    assert changed(typed={"trainer.max_steps": 18})["model.optim.ema"] == 0.5, "ten steps would reach back to the start"
    for other in ({"start": SMALL}, {"start": None}, {"sharded": True}, {"gpu": False, "cores": 2, "pictures": 40_000}):
        assert not {"model.optim.ema", "model.optim.ema_warmup"} & changed(**other).keys()


def typed(**options):
    return changed(typed={name.replace("__", "."): value for name, value in options.items()})


def test_a_typed_batch_sets_the_rate():
    assert typed(data__batch_size=256)["model.optim.lr"] == pytest.approx(
        2 * typed(data__batch_size=64)["model.optim.lr"]
    )
    assert typed(data__batch_size=32)["model.optim.lr"] == changed()["model.optim.lr"], "32 is what auto takes here"
    four = 2 * changed()["model.optim.lr"]
    assert typed(trainer__accumulate_grad_batches=4)["model.optim.lr"] == pytest.approx(four, rel=0.05)
    assert changed(devices=4)["model.optim.lr"] == pytest.approx(four, rel=0.05)


def test_typed_epochs_steps_and_batches_set_the_length_of_the_average():
    def reach(**options):
        return 1 / (1 - typed(**options)["model.optim.ema"])

    assert reach(trainer__max_epochs=10) == pytest.approx(10 * 62 / 10, rel=0.05)
    assert reach(trainer__max_steps=400) == pytest.approx(40, rel=0.05)
    assert reach(trainer__max_steps=-1) == reach(), "-1 is Lightning's word for no limit"
    assert reach(trainer__accumulate_grad_batches=4) == pytest.approx(20 * 16 / 10, rel=0.05)
    assert reach(trainer__limit_train_batches=10) == pytest.approx(20 * 10 / 10, rel=0.05)
    assert reach(trainer__max_epochs=10, data__batch_size=4) == pytest.approx(10 * 500 / 10, rel=0.05)


@pytest.mark.parametrize("method", ["lora", "bitfit", "norms"])
def test_methods_that_train_few_parameters_keep_their_own_rates(method):
    rates = {"model.optim.lr", "model.optim.weight_decay", "model.optim.layer_decay", "model.optim.ema", "monitor"}
    for start in (LARGE, SMALL):
        chosen = changed(start=start, typed={"model.method": method})
        assert not rates & chosen.keys()
        assert chosen["trainer.max_epochs"] == changed(start=start)["trainer.max_epochs"]
        assert chosen["model.tuning.head_init"] == "ridge"


def test_a_typed_head_is_treated_as_a_chosen_one():
    hopeless = changed(gpu=False, cores=2, pictures=40_000)
    asked = typed(model__method="head")
    assert "model.method" not in asked
    for name in ("model.optim.weight_decay", "data.augment.preset", "trainer.max_epochs"):
        assert asked[name] == hopeless[name]
    assert asked["model.optim.lr"] < hopeless["model.optim.lr"] < 2 * asked["model.optim.lr"], "by the batch alone"
    assert "model.optim.ema" not in asked


def test_a_head_that_knows_the_classes_is_kept():
    kept = dataclasses.replace(LARGE, keeps_head=True)
    assert "model.tuning.head_init" not in changed(start=kept)
    assert changed(start=kept)["model.optim.ema_warmup"] is False, "such a head is a good start too"
    assert "model.optim.ema_warmup" not in changed(pictures=60_000), "a head of zeros is none"


def test_other_optimizers_are_not_given_the_rates_of_adamw():
    rates = {"model.optim.lr", "model.optim.weight_decay", "model.optim.layer_decay", "model.schedule.warmup"}
    assert not rates & typed(model__optim__name="sgd").keys()
    assert typed(model__optim__name="adamw") == changed()


def test_other_optimizers_get_no_rates_from_scratch_or_from_the_paper():
    rates = {"model.optim.lr", "model.optim.weight_decay", "model.optim.momentum"}
    for name in ("sgd", "lion"):
        assert not rates & changed(start=None, typed={"model.optim.name": name}).keys()
    for name in ("adamw", "lion"):
        assert not rates & changed_paper(typed={"model.optim.name": name}).keys()
    assert rates <= changed_paper(typed={"model.optim.name": "sgd"}).keys()


def test_a_head_of_zeros_that_was_asked_for_is_no_good_start_of_an_average():
    for typed in ({"model.tuning.head_init": "zero"}, {"model.encoder.head": "mlp"}):
        assert "model.optim.ema_warmup" not in changed(typed=typed)
        assert "model.optim.ema" in changed(typed=typed)


def test_classes_shown_equally_often_do_not_leave_the_choice_to_the_plain_loss():
    assert "monitor" not in changed(typed={"data.sampling": "balanced"})


@pytest.mark.parametrize("loss", ["name", "class_weights", "logit_adjustment"])
def test_losses_that_shift_classes_do_not_leave_the_choice_to_the_plain_loss(loss):
    assert "monitor" not in changed(typed={f"model.loss.{loss}": "x"})
    assert changed(typed={"model.loss.label_smoothing": 0.0})["monitor"] == "val_loss"


def test_a_gpu_is_given_a_night_and_a_typed_length_is_not_questioned():
    base = dataclasses.replace(LARGE, parameters=86_000_000, width=768)
    million = changed(start=base, pictures=1_000_000)
    assert "model.method" not in million
    assert (million["trainer.max_epochs"], million["data.batch_size"]) == (5, 128)
    slow = {"gpu": False, "cores": 2, "pictures": 40_000}
    assert changed(**slow)["model.method"] == "head"
    assert "model.method" not in changed(**slow, typed={"trainer.max_epochs": 30})


def test_a_batch_is_no_larger_than_the_data():
    assert changed(pictures=6)["data.batch_size"] == 6
    assert auto(dataclasses.replace(PHOTOS, pictures=6))["data.batch_size"].why == "1 batches an epoch"


def test_a_typed_augmentation_is_not_laid_over_none():
    assert "data.augment.preset" not in changed(typed={"model.method": "head", "data.augment.flip": 0.0})


def test_strong_augmentation_is_for_grey_and_colour_alone():
    scratch = {"start": None, "pictures": 3000}
    assert changed(**scratch)["data.augment.preset"] == "strong"
    assert changed(**scratch, typed={"model.encoder.channels": 5})["data.augment.preset"] == "standard"


@pytest.mark.parametrize(("patch", "pixels"), [(16, 384), (14, 378), (7, 385), (32, 384)])
def test_the_paper_recipe_takes_whole_patches(patch, pixels):
    start = dataclasses.replace(LARGE, patch_size=patch)
    assert changed_paper(start=start)["model.encoder.image_size"] == pixels


@pytest.mark.parametrize(
    ("typed", "warmup"),
    [
        ({}, 50),
        ({"trainer.max_steps": 100}, 10),
        ({"trainer.max_epochs": 10}, 3),
        ({"trainer.max_epochs": 10, "data.batch_size": 20}, 100),
    ],
)
def test_the_warm_up_of_the_paper_recipe_fits_into_the_run(typed, warmup):
    assert changed_paper(typed=typed)["model.schedule.warmup"] == warmup


def test_a_typed_method_is_not_given_up_for_want_of_time():
    slow = changed(gpu=False, cores=2, pictures=40_000, typed={"model.method": "full"})
    assert "model.method" not in slow
    assert slow["trainer.max_epochs"] == 1


def test_a_typed_size_counts_in_the_time():
    laptop = {"gpu": False, "cores": 2}
    small, wide, large = (
        changed(**laptop, typed={"model.encoder.image_size": size}) for size in (112, [112, 224], 224)
    )
    assert small["trainer.max_epochs"] > wide["trainer.max_epochs"] > large["trainer.max_epochs"]


def test_few_val_pictures_choose_large_weights_by_their_loss():
    assert changed()["monitor"] == "val_loss"
    for other in ({"val": 0}, {"val": 5000}, {"start": SMALL}, {"start": None}):
        assert "monitor" not in changed(**other)


def test_long_pictures_are_squashed_rather_than_cut():
    assert changed(aspect=2.0)["model.preprocessing.crop_mode"] == "squash"
    assert changed(start=None, aspect=2.0)["model.preprocessing.crop_mode"] == "squash"
    assert "model.preprocessing.crop_mode" not in changed(aspect=1.5), "photographs keep their shape"


def test_small_pictures_are_shown_to_their_edges():
    assert changed(side=28)["model.preprocessing.crop_pct"] == 1.0
    assert "model.preprocessing.crop_pct" not in changed(side=200)


def test_small_pictures_from_scratch_get_small_patches():  # C2
    chosen = changed(start=None, side=32)
    assert (chosen["model.encoder.image_size"], chosen["model.encoder.patch_size"]) == (32, 4)
    assert chosen["trainer.max_epochs"] > changed()["trainer.max_epochs"]


def test_the_paper_recipe_is_table_4():
    sixteen = dataclasses.replace(LARGE, patch_size=16)
    cifar = changed_paper(pictures=50_000, start=sixteen)
    assert cifar["trainer.max_steps"] == 10_000
    assert values(dataclasses.replace(PHOTOS, pictures=3680), paper)["trainer.max_steps"] == 500
    assert values(dataclasses.replace(PHOTOS, pictures=1_281_167), paper)["trainer.max_steps"] == 20_000
    sgd = {"model.optim.name": "sgd", "model.optim.momentum": 0.9, "model.optim.weight_decay": 0.0}
    assert sgd.items() <= cifar.items()
    assert (cifar["data.batch_size"], cifar["model.encoder.image_size"]) == (512, 384)
    assert paper_rates(50_000) == (0.001, 0.003, 0.01, 0.03)
    assert paper_rates(1_281_167) == (0.003, 0.01, 0.03, 0.06)
