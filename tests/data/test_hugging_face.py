"""Data sets of the library `datasets`, against what the library itself reads."""

import builtins
import io

import datasets
import numpy as np
import pytest
from PIL import Image

from vit.api import check_command
from vit.data import HuggingFace, ImageDataModule, Preprocessing
from vit.data.decode import decode

CLASSES = ["cat", "dog", "eel"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The library's cache, in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()


def make(draw, count, kind=None, mode="RGB", start=0, label=None):
    """A data set of PNG pictures with the labels 0, 1, 2, 0, ..."""
    values = {
        "image": [draw(seed=start + i, mode=mode) for i in range(count)],
        "label": label or [i % 3 for i in range(count)],
    }
    features = {"image": datasets.Image(), "label": kind or datasets.ClassLabel(names=CLASSES)}
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def same(table, split, reference):
    """Whether a split of the table holds the pictures and labels of a data set, in its order."""
    rows = table.rows(split)
    assert len(rows) == len(reference)
    for row, theirs in zip(rows, reference, strict=True):
        grey = theirs["image"].mode == "L"
        assert np.array_equal(np.asarray(decode(table.read(row), channels=1 if grey else 3)), theirs["image"])
        assert table.label(row) == theirs["label"]
        assert table.size(row) == len(table.read(row))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_saved_data_set_is_read_in_place(draw, tmp_path, mode):
    data = datasets.DatasetDict(
        train=make(draw, 9, mode=mode), validation=make(draw, 3, mode=mode, start=50), extra=make(draw, 3)
    )
    data.save_to_disk(tmp_path / "saved", num_shards={"train": 2, "validation": 1, "extra": 1})
    table = HuggingFace(root=str(tmp_path / "saved"), test=0.0).table()
    assert table.classes == tuple(CLASSES)
    stored = datasets.load_from_disk(str(tmp_path / "saved"))
    same(table, "train", stored["train"])
    same(table, "val", stored["validation"])
    assert len(table) == 12
    assert table.file.stat().st_size < 20_000, "pictures are not copied"
    assert table.name(0).startswith("train/0000000")


def test_one_split_is_split_and_a_named_one_counts_alone(draw, tmp_path):
    make(draw, 30).save_to_disk(tmp_path / "one")
    table = HuggingFace(root=str(tmp_path / "one"), val=0.2, test=0.2).table()
    assert [len(table.rows(split)) for split in ("train", "val", "test")] == [18, 6, 6]
    data = datasets.DatasetDict(part_a=make(draw, 9), test=make(draw, 6, start=40))
    data.save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match=r"expected a split train in .*part_a, test.*data\.train_split"):
        HuggingFace(root=str(tmp_path / "two")).table()
    table = HuggingFace(root=str(tmp_path / "two"), train_split="part_a", val=0.0, test=0.0).table()
    assert len(table) == 9
    assert len(HuggingFace(root=str(tmp_path / "two"), train_split="part_a", val_split="test").table()) == 15
    with pytest.raises(ValueError, match="expected a split nothing"):
        HuggingFace(root=str(tmp_path / "two"), train_split="nothing").table()


def test_parquet_and_arrow_files_are_read(draw, tmp_path):
    make(draw, 9).to_parquet(tmp_path / "all.parquet")
    reference = datasets.load_dataset("parquet", data_files=str(tmp_path / "all.parquet"))["train"]
    same(HuggingFace(root=str(tmp_path / "all.parquet"), val=0.0, test=0.0).table(), "train", reference)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, count in (("train", 9), ("test", 3)):
        make(draw, count, start=count).to_parquet(folder / f"{name}.parquet")
    table = HuggingFace(root=str(folder), val=0.0).table()
    same(table, "train", datasets.load_dataset(str(folder))["train"])
    same(table, "test", datasets.load_dataset(str(folder))["test"])
    make(draw, 9).save_to_disk(tmp_path / "saved")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    same(HuggingFace(root=str(arrow), val=0.0, test=0.0).table(), "train", reference)


def test_picture_folders_are_read_from_their_own_files(plant):
    root = plant({"train/a": 3, "train/b": 3, "test/a": 2, "test/b": 2})
    table = HuggingFace(root=str(root), val=0.0).table()
    assert table.classes == ("a", "b")
    assert sorted(table.name(row) for row in table.rows()) == sorted(
        str(file.relative_to(root)) for file in root.rglob("*.png")
    )
    same(table, "test", datasets.load_dataset(str(root))["test"])


def test_labels_without_class_names_and_several_labels(draw, tmp_path):
    many = datasets.List(datasets.ClassLabel(names=CLASSES))
    several = make(draw, 3, kind=many, label=[[0, 2], [1], []])
    several.save_to_disk(tmp_path / "several")
    table = HuggingFace(root=str(tmp_path / "several"), val=0.0, test=0.0).table()
    assert [table.label(row) for row in table.rows()] == [[0, 2], [1], []]
    assert table.classes == tuple(CLASSES)
    texts = make(draw, 4, kind=datasets.Value("string"), label=["b", "a", "b", "a"])
    texts.save_to_disk(tmp_path / "texts")
    table = HuggingFace(root=str(tmp_path / "texts"), val=0.0, test=0.0).table()
    assert (table.classes, table.labels().tolist()) == (("a", "b"), [1, 0, 1, 0])
    numbers = make(draw, 6, kind=datasets.Value("int64"))
    numbers.save_to_disk(tmp_path / "numbers")
    table = HuggingFace(root=str(tmp_path / "numbers"), classes=tuple("xyz"), val=0.0, test=0.0).table()
    assert (table.classes, table.labels().tolist()) == (("x", "y", "z"), [0, 1, 2, 0, 1, 2])


def test_missing_labels_are_refused_and_their_split_can_be_left_out(draw, tmp_path):
    data = datasets.DatasetDict(train=make(draw, 6), test=make(draw, 3, label=[-1, -1, -1]))
    data.save_to_disk(tmp_path / "hidden")
    with pytest.raises(ValueError, match=r"class numbers from 0 .*there is -1.*Leave out the split"):
        HuggingFace(root=str(tmp_path / "hidden")).table()
    assert len(HuggingFace(root=str(tmp_path / "hidden"), train_split="train", val=0.0, test=0.0).table()) == 6
    make(draw, 3, label=[0, None, 1]).save_to_disk(tmp_path / "gaps")
    with pytest.raises(ValueError, match="number 1 is None"):
        HuggingFace(root=str(tmp_path / "gaps")).table()


def test_columns_are_found_by_type_or_named(draw, tmp_path):
    pictures = [draw(seed=i) for i in range(3)]
    label = datasets.ClassLabel(names=CLASSES)
    features = datasets.Features(
        {
            "left": datasets.Image(),
            "right": datasets.Image(),
            "fine": label,
            "coarse": label,
            "raw": datasets.Value("binary"),
        }
    )
    data = io.BytesIO()
    pictures[0].save(data, "PNG")
    columns = {
        "left": pictures,
        "right": pictures[::-1],
        "fine": [0, 1, 2],
        "coarse": [0, 0, 1],
        "raw": [data.getvalue()] * 3,
    }
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "wide")
    root, rest = str(tmp_path / "wide"), {"val": 0.0, "test": 0.0}
    with pytest.raises(ValueError, match=r"one image column, but there are left, right .*data\.image_column"):
        HuggingFace(root=root, **rest).table()
    with pytest.raises(ValueError, match=r"one label column, but there are fine, coarse .*data\.label_column"):
        HuggingFace(root=root, image_column="right", **rest).table()
    table = HuggingFace(root=root, image_column="right", label_column="coarse", **rest).table()
    assert table.labels().tolist() == [0, 0, 1]
    assert np.array_equal(np.asarray(decode(table.read(0))), np.asarray(pictures[2]))
    table = HuggingFace(root=root, image_column="raw", label_column="fine", **rest).table()
    assert np.array_equal(np.asarray(decode(table.read(2))), np.asarray(pictures[0]))
    with pytest.raises(ValueError, match=r"images, or their bytes, in the column fine"):
        HuggingFace(root=root, image_column="fine", label_column="fine", **rest).table()


def test_pictures_that_are_missing_are_refused(draw, tmp_path):
    pictures = [draw(), None, draw(seed=1)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    data = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1, 2]}, features=features)
    data.save_to_disk(tmp_path / "gaps")
    with pytest.raises(ValueError, match="some have neither"):
        HuggingFace(root=str(tmp_path / "gaps")).table()


def test_what_cannot_be_opened_is_said_in_one_error(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no such file or folder"):
        HuggingFace(root=str(tmp_path / "nowhere")).table()
    with pytest.raises(ValueError, match=r"expected a data set at someone/something on the hub"):
        HuggingFace(hub="someone/something").table()
    for options in ({}, {"root": "x", "hub": "y"}, {"root": "x", "revision": "main"}):
        with pytest.raises(ValueError, match="root"):
            HuggingFace(**options)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r'pip install "vit-toolkit\[huggingface\]"'):
        HuggingFace(root=str(tmp_path)).table()


def test_batches_come_from_workers_too(draw, tmp_path):
    make(draw, 12).save_to_disk(tmp_path / "saved")

    def images(workers):
        data = ImageDataModule(HuggingFace(root=str(tmp_path / "saved"), num_workers=workers, seed=0, batch_size=4))
        data.preprocessing = Preprocessing(image_size=8)
        return [(batch.index.tolist(), batch.images.numpy().tobytes()) for batch in data.train_dataloader()]

    assert images(0) == images(2)


def test_alpha_and_jpeg_are_kept_as_they_were_encoded(tmp_path):
    encoded = io.BytesIO()
    Image.new("RGB", (9, 7), (10, 20, 30)).save(encoded, "JPEG")
    data = {"image": [{"bytes": encoded.getvalue(), "path": "a/photo.jpg"}] * 2, "label": [0, 1]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])})
    datasets.Dataset.from_dict(data, features=features).save_to_disk(tmp_path / "jpegs")
    table = HuggingFace(root=str(tmp_path / "jpegs"), val=0.0, test=0.0).table()
    assert table.read(1) == encoded.getvalue()
    assert table.name(1) == "train/0000001/photo.jpg"


def test_the_check_takes_a_data_set(draw, tmp_path, capsys):
    make(draw, 9).save_to_disk(tmp_path / "saved")
    words = ["--data=HuggingFace", f"--data.root={tmp_path / 'saved'}", f"--out={tmp_path}"]
    assert check_command(words) == 0
    assert (tmp_path / "check.html").is_file()
