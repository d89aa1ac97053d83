"""Trees in the official layouts, with few pictures."""

import json

import numpy as np
import pytest
from scipy.io import savemat

from vit.data import ImageNet
from vit.data.imagenet import class_names, subset_synsets

SYNSETS = ("n01440764", "n01443537", "n02012849", "n03126707")  # tench, goldfish, and two cranes
VAL = [SYNSETS[k] for k in (2, 0, 1, 1, 3, 0, 2, 3)]


@pytest.fixture
def train(tmp_path, draw):
    """The official train folder, ten pictures a class."""
    for synset in SYNSETS:
        (tmp_path / "train" / synset).mkdir(parents=True)
        for i in range(10):
            draw(seed=i).save(tmp_path / "train" / synset / f"{synset}_{i * 37}.JPEG")
    return tmp_path


@pytest.fixture
def flat(train, draw):
    """The official val folder: numbered pictures without class folders."""
    (train / "val").mkdir()
    for i in range(len(VAL)):
        draw(seed=i).save(train / "val" / f"ILSVRC2012_val_{i + 1:08d}.JPEG")
    return train


def table(root, **options):
    return ImageNet(root=str(root), **options).table()


def val_synsets(t, split="val"):
    return {t.name(i).rpartition("/")[2]: t.info["synsets"][t.label(i)] for i in t.rows(split)}


EXPECTED = {f"ILSVRC2012_val_{i + 1:08d}.JPEG": synset for i, synset in enumerate(VAL)}


def test_val_folders_of_classes_are_read(train, draw):
    for i, synset in enumerate(VAL):
        (train / "val" / synset).mkdir(parents=True, exist_ok=True)
        draw().save(train / "val" / synset / f"ILSVRC2012_val_{i + 1:08d}.JPEG")
    t = table(train)
    assert t.classes == ("tench", "goldfish", "crane (n02012849)", "crane (n03126707)")
    assert [len(t.rows(split)) for split in ("train", "val", "test")] == [40, 8, 0]
    assert val_synsets(t) == EXPECTED
    assert all(t.name(i).split("/")[1] == SYNSETS[t.label(i)] for i in t.rows("train"))
    assert table(train, names="synsets").classes == SYNSETS


def devkit(root):
    """Numbers of ILSVRC's own, which are not the sorted order, with the table that explains them."""
    numbers = {synset: 4 - k for k, synset in enumerate(SYNSETS)}
    folder = root / "ILSVRC2012_devkit_t12" / "data"
    folder.mkdir(parents=True)
    entries = np.array(
        [(n, s, "words") for s, n in numbers.items()], [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O")]
    )
    savemat(folder / "meta.mat", {"synsets": entries[:, None]})
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{numbers[s]}\n" for s in VAL))


def kaggle(root):
    lines = [f"ILSVRC2012_val_{i + 1:08d},{s} 85 1 499 272 {s} 3 1 4 2 " for i, s in enumerate(VAL)]
    (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "\n".join(reversed(lines)) + "\n")


def synset_labels(root):
    (root / "imagenet_2012_validation_synset_labels.txt").write_text("\n".join(VAL) + "\n")


@pytest.mark.parametrize("truth", [devkit, kaggle, synset_labels])
def test_a_flat_val_folder_is_read_by_its_ground_truth(flat, truth):
    truth(flat)
    t = table(flat)
    assert val_synsets(t) == EXPECTED
    held = table(flat, official="test", val=0.2)
    assert val_synsets(held, "test") == EXPECTED
    assert np.bincount(held.labels("val")).tolist() == [2, 2, 2, 2]
    part = table(flat, synsets=(SYNSETS[3], SYNSETS[0]))
    assert val_synsets(part) == {name: s for name, s in EXPECTED.items() if s in (SYNSETS[3], SYNSETS[0])}
    assert part.info["synsets"] == [SYNSETS[3], SYNSETS[0]]


def test_kaggles_folders_are_found_from_above(flat, tmp_path_factory):
    root = tmp_path_factory.mktemp("kaggle")
    (root / "ILSVRC" / "Data").mkdir(parents=True)
    flat.rename(root / "ILSVRC" / "Data" / "CLS-LOC")
    kaggle(root)
    assert val_synsets(table(root)) == EXPECTED


def test_a_flat_val_folder_without_or_with_wrong_truth_is_refused(flat, tmp_path):
    with pytest.raises(ValueError, match=r"no such file for the 8 pictures in .*val.*data\.ground_truth"):
        table(flat)
    file = tmp_path / "truth.txt"
    for text, message in (
        ("\n".join(VAL[:-1]), "7 lines for 8 pictures"),
        ("\n".join("12345678"), "meta.mat, which is not beside it"),
        ("\n".join(f"x{i}.JPEG\t{s}" for i, s in enumerate(VAL)), "none for ILSVRC2012_val_00000001"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            table(flat, ground_truth=str(file))
    with pytest.raises(ValueError, match="but there is none"):
        table(flat, ground_truth=str(tmp_path / "none.txt"))


def test_tiny_imagenet_is_read(tmp_path, draw):
    for synset in SYNSETS[:3]:
        (tmp_path / "train" / synset / "images").mkdir(parents=True)
        for i in range(5):
            draw(64, 64, seed=i).save(tmp_path / "train" / synset / "images" / f"{synset}_{i}.JPEG")
        (tmp_path / "train" / synset / f"{synset}_boxes.txt").write_text(f"{synset}_0.JPEG\t0\t0\t63\t63\n")
    lines = []
    for split in ("val", "test"):
        (tmp_path / split / "images").mkdir(parents=True)
        for i in range(6):
            draw(64, 64, seed=i).save(tmp_path / split / "images" / f"{split}_{i}.JPEG")
            lines += [f"val_{i}.JPEG\t{SYNSETS[i % 3]}\t0\t32\t44\t62\n"] if split == "val" else []
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(lines))
    (tmp_path / "wnids.txt").write_text("\n".join(reversed(SYNSETS[:3])) + "\n")
    t = table(tmp_path)
    assert t.classes == ("tench", "goldfish", "crane")
    assert [len(t.rows(split)) for split in ("train", "val", "test")] == [15, 6, 0]
    assert val_synsets(t) == {f"val_{i}.JPEG": SYNSETS[i % 3] for i in range(6)}


def test_names_beyond_imagenet_1k_come_from_words(tmp_path):
    (tmp_path / "words.txt").write_text("n00001740\tentity\nn00001930\tphysical entity, thing\n")
    names = class_names(("n01440764", "n00001930", "n99999999"), tmp_path)
    assert names == ("tench", "physical entity", "n99999999")


@pytest.mark.shared
def test_the_known_subsets_are_the_published_ones(shared):
    assert subset_synsets() == json.loads((shared / "data" / "imagenet_subsets.json").read_text())


@pytest.mark.parametrize(("subset", "count"), [("imagenette", 10), ("imagewoof", 10), ("imagenet100", 100)])
def test_subsets_by_name_take_their_classes_in_sorted_order(tmp_path, draw, subset, count):
    synsets = subset_synsets()[subset]
    for synset in {*synsets, *SYNSETS}:
        (tmp_path / "train" / synset).mkdir(parents=True)
        draw().save(tmp_path / "train" / synset / f"{synset}_1.JPEG")
    t = table(tmp_path, subset=subset)
    assert t.info["synsets"] == sorted(synsets)
    assert len(t) == len(t.classes) == count


def test_the_first_classes_and_lists_of_classes_are_taken(train):
    assert table(train, first=2).classes == ("tench", "goldfish")
    assert table(train, synsets=("n01443537", "n01440764")).classes == ("goldfish", "tench")
    for options, message in (
        ({"first": 5}, "expected 5 classes .* there are 4"),
        ({"first": 1}, "first 2 classes"),
        ({"synsets": ("n01440764", "n99999999")}, "1 are not there: n99999999"),
        ({"synsets": ("n01440764", "n01440764")}, "each once, but got n01440764"),
        ({"subset": "imagenette"}, "9 are not there"),
        ({"subset": "imagenette", "first": 3}, "at most one of"),
        ({"fraction": 0.0}, "fraction above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            table(train, **options)
    with pytest.raises(ValueError, match="holds no train folder"):
        table(train / "train")


def test_a_fraction_is_taken_of_every_class_by_the_seed_and_grows_by_addition(train):
    def names(**options):
        t = table(train, val=0, test=0, **options)
        assert len(set(np.bincount(t.labels()))) == 1
        return {t.name(i) for i in t.rows()}

    some, more, other = names(fraction=0.2), names(fraction=0.5), names(fraction=0.2, split_seed=1)
    assert (len(some), len(more)) == (8, 20)
    assert some < more
    assert some == names(fraction=0.2) != other
    assert len(names(fraction=0.01)) == 4
