"""Sources on the command line, as the `vit` command declares them."""

import dataclasses

import pytest
from jsonargparse import ArgumentParser
from lightning import LightningDataModule

import vit.data  # noqa: F401  (sources are known by their bare names once imported)
from vit.data import (
    CIFAR10,
    CIFAR100,
    IDX,
    MNIST,
    Augmentation,
    Digits,
    FashionMNIST,
    Folder,
    HuggingFace,
    ImageDataModule,
    ImageNet,
    Source,
    Table,
    WebDataset,
)


def parse(*words):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments((Source, LightningDataModule), "data")
    return parser.instantiate(parser.parse_args(list(words))).data


def test_a_source_is_chosen_by_its_bare_name():
    assert parse("--data", "Folder", "--data.root", "photos", "--data.batch_size", "8") == Folder(
        root="photos", batch_size=8
    )
    assert parse("--data=Digits") == Digits()
    assert parse("--data=CIFAR10", "--data.download=false") == CIFAR10(download=False)
    assert parse("--data=Table", "--data.file=t.csv", "--data.split_column=null") == Table(
        file="t.csv", split_column=None
    )
    assert parse("--data=ImageNet", "--data.root=x", "--data.subset=imagewoof") == ImageNet(
        root="x", subset="imagewoof"
    )
    assert parse("--data=FashionMNIST", "--data.root=x") == FashionMNIST(root="x")
    assert parse("--data=Digits", "--data.folds=5", "--data.fold=2") == Digits(folds=5, fold=2)
    assert parse("--data=HuggingFace", "--data.hub=uoft-cs/cifar10") == HuggingFace(hub="uoft-cs/cifar10")
    assert parse("--data=WebDataset", "--data.root=x", "--data.train_shards=a-{0..9}.tar") == WebDataset(
        root="x", train_shards="a-{0..9}.tar"
    )
    assert parse("--data=CIFAR100", "--data.labels=coarse") == CIFAR100(labels="coarse")


def test_one_value_of_the_augmentation_changes_alone():
    source = parse("--data=Digits", "--data.augment.crop_scale=[0.9, 1]")
    assert source.augment == dataclasses.replace(Digits().augment, crop_scale=(0.9, 1.0))
    assert parse("--data=Folder", "--data.root=x", "--data.augment.flip=0").augment == Augmentation(flip=0.0)


def test_lists_become_the_tuples_that_sources_hold():
    source = parse("--data=Folder", "--data.root=x", "--data.classes=[b, a]", "--data.background=[0, 0, 0]")
    assert source.classes == ("b", "a")
    assert source.background == (0, 0, 0)


@pytest.mark.parametrize("word", ["--data.batchsize=3", "--data.batch_size=many", "--data.augment.flap=1"])
def test_wrong_options_are_refused(word):
    with pytest.raises(Exception, match=r"batchsize|batch_size|flap"):
        parse("--data=Digits", word)


def test_every_source_is_frozen_and_keyword_only():
    for kind in (Folder, Table, ImageNet, Digits, CIFAR10, CIFAR100, IDX, MNIST, FashionMNIST, HuggingFace, WebDataset):
        assert kind.__dataclass_params__.frozen
        assert all(field.kw_only for field in dataclasses.fields(kind))
        assert issubclass(kind, Source)


def test_sampling_reaches_the_batches_and_shows_copies_that_differ(plant):
    root = plant({"train/many": 12, "train/rare": 3, "val/many": 1})
    common = {"root": str(root), "batch_size": 5, "num_workers": 0, "seed": 0}

    def drawn(**options):
        data = ImageDataModule(Folder(**common, **options))
        batches = list(data.train_dataloader())
        return [label for b in batches for label in b.labels.tolist()], [i for b in batches for i in b.images]

    shuffled, _ = drawn()
    balanced, images = drawn(sampling="balanced")
    assert sum(shuffled) == 3
    assert 7 <= sum(balanced) <= 8
    assert len({image.numpy().tobytes() for image in images}) == len(images) == 15
    repeated, images = drawn(repeats=3)
    assert repeated != shuffled
    assert len({image.numpy().tobytes() for image in images}) == 15
    with pytest.raises(ValueError, match="repeats with sampling shuffle"):
        Folder(root="x", sampling="balanced", repeats=2)
