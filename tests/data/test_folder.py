import os
import unicodedata

import pytest
from PIL import Image

from vit.data import Folder
from vit.run.folder import CHOSEN_FOLDER


def table(root, **options):
    return Folder(root=str(root), **options).table()


def counts(t):
    return {split: len(t.rows(split)) for split in ("train", "val", "test")}


# A1
def test_hidden_folders_are_no_classes(plant, caplog):
    root = plant({"cat": 3, "dog": 3, ".ipynb_checkpoints": 1, "__MACOSX": 1, "@eaDir": 1})
    (root / "cat" / "._001.png").write_bytes(b"resource fork")
    with caplog.at_level("WARNING", "vit.data"):
        t = table(root)
    assert t.classes == ("cat", "dog")
    assert len(t) == 6
    assert len(caplog.records) == 1
    for name in (".ipynb_checkpoints", "__MACOSX", "@eaDir"):
        assert name in caplog.text


# A4
def test_other_files_are_skipped_and_counted(plant, caplog):
    root = plant({"cat": 3, "dog": 3})
    for name in ("Thumbs.db", "notes.txt", "more.TXT", "LICENSE"):
        (root / "cat" / name).write_text("x")
    with caplog.at_level("WARNING", "vit.data"):
        t = table(root)
    assert len(t) == 6
    assert t.info["skipped"] == {".db": 1, ".txt": 2, "no suffix": 1}
    assert "2 .txt" in caplog.text
    assert len(caplog.records) == 1


# A8
def test_suffixes_count_in_any_case(plant):
    root = plant({"a": 3, "b": 3})
    for old, new in (("000.png", "x.JPG"), ("001.png", "y.Png"), ("002.png", "z.JPEG")):
        (root / "a" / old).rename(root / "a" / new)
    t = table(root)
    assert {t.name(i) for i in t.rows() if t.label(i) == 0} == {"a/x.JPG", "a/y.Png", "a/z.JPEG"}


# A5
def test_an_empty_class_is_refused_in_train_and_kept_in_val(plant):
    root = plant({"train/a": 3, "train/b": 0, "train/c": 3})
    with pytest.raises(ValueError, match=r"every class to train on.* none in b "):
        table(root)
    plant({"train/b": 2, "val/a": 2, "val/b": 0}, root)
    t = table(root)
    assert t.classes == ("a", "b", "c")
    assert t.labels("val").tolist() == [0, 0]


# A6
def test_classes_of_train_count_for_every_split(plant):
    root = plant({"train/a": 2, "train/b": 2, "train/c": 2, "val/b": 2, "val/c": 2})
    assert set(table(root).labels("val").tolist()) == {1, 2}
    plant({"val/z": 1}, root)
    with pytest.raises(ValueError, match=r"the val folder also holds z"):
        table(root)


def test_a_given_class_list_orders_the_labels(plant):
    root = plant({"test/a": 2, "test/b": 2})
    with pytest.raises(ValueError, match="no train folder"):
        table(root)
    t = table(root, classes=("c", "b", "a"))
    assert t.labels("test").tolist() == [1, 1, 2, 2]
    assert counts(t) == {"train": 0, "val": 0, "test": 4}
    with pytest.raises(ValueError, match=r"data\.classes \(b\), .* holds a"):
        table(root, classes=("b",))


# A7
def test_classes_stand_in_plain_order_and_are_stored(plant):
    t = table(plant({"1": 3, "2": 3, "10": 3, "b": 3, "B": 3}))
    assert t.classes == ("1", "10", "2", "B", "b")
    assert type(t)(t.file).classes == t.classes


# A23
@pytest.mark.parametrize("names", [("train", "val", "test"), ("Training", "validation", "testing"), ("train", "valid")])
def test_split_folders_are_known_by_their_usual_names(plant, names):
    root = plant({f"{name}/{c}": 4 for name in names for c in "ab"})
    t = table(root)
    assert t.classes == ("a", "b")
    assert counts(t) == {"train": 8, "val": 8, "test": 8 if len(names) == 3 else 0}
    for i in t.rows("val"):
        assert t.name(i).startswith(names[1])


def test_a_root_one_level_too_high_is_refused(plant):
    root = plant({"data/train/a": 2, "data/train/b": 2, "data/val/a": 2})
    with pytest.raises(ValueError, match=r"root/train/<class>(?s:.*)one level too high.*data/train/") as caught:
        table(root)
    assert f"Give {root / 'data'} as data.root" in str(caught.value)


def test_split_names_are_never_classes(plant):
    root = plant({"train/train/a": 2, "train/val/a": 2})
    with pytest.raises(ValueError, match="named like splits: train, val"):
        table(root)
    root = plant({"car": 2, "plane": 2, "train": 2}, root / "flat")
    with pytest.raises(ValueError, match="named like a split and holds no class folders"):
        table(root)


def test_folders_beside_the_splits_are_left_out_and_named(plant, caplog):
    root = plant({"train/a": 2, "train/b": 2, "val/a": 1, "runs/x": 2})
    with caplog.at_level("WARNING", "vit.data"):
        t = table(root)
    assert (len(t), t.classes) == (5, ("a", "b"))
    assert "runs/" in caplog.text


def test_two_folders_for_one_split_are_refused(plant):
    with pytest.raises(ValueError, match="both val/ and valid/"):
        table(plant({"train/a": 2, "train/b": 2, "val/a": 1, "valid/b": 1}))


def test_roots_without_pictures_are_refused(tmp_path, plant, draw):
    with pytest.raises(ValueError, match="does not exist"):
        table(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        table(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no folders"):
        table(tmp_path / "empty")
    draw().save(tmp_path / "empty" / "a.png")
    with pytest.raises(ValueError, match="1 pictures and no folders"):
        table(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"hold no picture: a/, b/"):
        table(plant({"a": 0, "b": 0}))
    for name in "ab":
        (tmp_path / "arrays" / name).mkdir(parents=True)
        (tmp_path / "arrays" / name / "1.npy").touch()
    with pytest.raises(ValueError, match=r"Left out: 2 .npy. If these are pictures, .* data.suffixes"):
        table(tmp_path / "arrays")
    with pytest.raises(ValueError, match="single class, a"):
        table(plant({"a": 2}, tmp_path / "single"))


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_split_folder_without_pictures_is_refused(plant, split):
    root = plant({f"{name}/{c}": 0 if name == split else 2 for name in ("train", "val", "test") for c in "ab"})
    with pytest.raises(ValueError, match=f"the {split} folder of .* hold no picture"):
        table(root)


def test_train_and_test_alone_split_val_off_train(plant):
    root = plant({"train/a": 10, "train/b": 10, "test/a": 5, "test/b": 5})
    t = table(root, val=0.2)
    assert counts(t) == {"train": 16, "val": 4, "test": 10}
    assert all(t.name(i).startswith("test/") for i in t.rows("test"))
    assert all(t.name(i).startswith("train/") for i in t.rows("val"))


def test_train_alone_is_split_like_a_flat_folder(plant):
    t = table(plant({"train/a": 10, "train/b": 10}), val=0.2, test=0.3)
    assert counts(t) == {"train": 10, "val": 4, "test": 6}


def test_a_flat_folder_is_split_by_its_seed(plant):
    root = plant({"a": 20, "b": 10})
    first, again, other = table(root), table(root), table(root, split_seed=1)
    assert counts(first) == {"train": 24, "val": 3, "test": 3}
    assert first.file == again.file
    assert {first.name(i) for i in first.rows("test")} != {other.name(i) for i in other.rows("test")}


def test_a_class_with_one_picture_stays_in_train_and_is_named(plant, caplog):
    with caplog.at_level("WARNING", "vit.data"):
        t = table(plant({"many": 10, "rare": 1}))
    assert [t.split(i) for i in t.rows() if t.label(i) == 1] == ["train"]
    assert "rare" in caplog.text


def test_pictures_in_nested_folders_belong_to_the_class(plant):
    t = table(plant({"a/x/y": 2, "a": 2, "b": 4}))
    assert sorted(t.labels().tolist()) == [0] * 4 + [1] * 4


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_links_are_followed_without_loops(plant, tmp_path, caplog):
    elsewhere = plant({"c": 3}, tmp_path / "elsewhere")
    root = plant({"a": 3, "b": 3})
    (root / "c").symlink_to(elsewhere / "c", target_is_directory=True)
    (root / "b" / "loop").symlink_to(root, target_is_directory=True)
    (root / "a" / "up").symlink_to(root / "a", target_is_directory=True)
    with caplog.at_level("WARNING", "vit.data"):
        t = table(root)
    assert t.classes == ("a", "b", "c")
    assert [sum(t.label(i) == label for i in t.rows()) for label in range(3)] == [3, 3, 3]
    assert "a link to a folder above it" in caplog.text


@pytest.mark.skipif(os.name == "nt", reason="Windows and macOS file systems join the spellings")
def test_a_name_spelled_in_two_ways_of_unicode_is_one_class(plant):
    composed, split_up = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    t = table(plant({f"train/{composed}": 2, "train/tea": 2, f"val/{split_up}": 2}))
    assert t.classes == (composed, "tea")
    assert all(os.path.exists(t.path(i)) for i in t.rows())
    with pytest.raises(ValueError, match="two spellings"):
        table(plant({composed: 2, split_up: 2}, t.root / "flat"))


def test_a_split_seed_out_of_the_ordinary_is_taken(plant):
    root = plant({"a": 4, "b": 4})
    assert len(table(root, split_seed=-5)) == 8


def test_nested_folders_are_classes_of_their_own_if_asked(plant):
    root = plant({"dog/terrier": 3, "dog/poodle": 3, "cat": 3})
    assert table(root).classes == ("cat", "dog")
    t = table(root, nested=True)
    assert t.classes == ("cat", "dog/poodle", "dog/terrier")
    assert all(t.name(i).rpartition("/")[0] == t.classes[t.label(i)] for i in t.rows())
    split = plant({"train/dog/terrier": 2, "train/dog": 2, "val/dog/terrier": 1}, root.parent / "split")
    t = table(split, nested=True)
    assert t.classes == ("dog", "dog/terrier")
    assert t.labels("val").tolist() == [1]
    plant({"dog/empty": 0}, root)
    with pytest.raises(ValueError, match="none in dog/empty"):
        table(root, nested=True)


# A23
@pytest.mark.parametrize("place", ["outputs/quickstart/1", "quickstart/12"])
def test_runs_beside_the_classes_are_no_class(plant, caplog, place):
    root = plant({"a": 3, "b/deep": 3, "7/1": 2})  # numbers are names of classes too
    before = Folder(root=str(root)).scan()
    (root / place / "reconstructions").mkdir(parents=True)
    Image.new("L", (8, 8)).save(root / place / "reconstructions" / "epoch-0001.png")
    (root / place / "run.json").write_text("{}")
    (root / place).parent.joinpath("sweep.csv").write_text("")
    after = Folder(root=str(root)).scan()
    name = place.split("/")[0]
    assert after.classes == before.classes == ("7", "a", "b")
    assert after.paths == before.paths
    assert f"{name}/ (runs of this toolkit)" in caplog.text


# A23
def test_so_are_those_of_a_run_or_sweep_that_has_just_begun(plant, monkeypatch, tmp_path):
    root = plant({"a": 3, "b": 3})
    (root / "outputs" / "photos" / "1").mkdir(parents=True)
    with pytest.raises(ValueError, match="none in outputs"):
        Folder(root=str(root)).scan()
    monkeypatch.setenv(CHOSEN_FOLDER, str(root / "outputs" / "photos" / "1"))
    assert Folder(root=str(root)).scan().classes == ("a", "b")
    monkeypatch.setenv(CHOSEN_FOLDER, str(tmp_path / "elsewhere" / "1"))
    (root / "outputs" / "photos" / "sweep.json").write_text("{}")
    assert Folder(root=str(root)).scan().classes == ("a", "b")


def test_a_folder_that_may_not_be_read_is_no_matter_beside_splits(plant, monkeypatch):
    root = plant({"train/a": 1, "train/b": 1, "lost+found": 1})
    plain = os.scandir

    def scandir(folder):
        if str(folder).endswith("lost+found"):
            raise PermissionError(13, "Permission denied")
        return plain(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert Folder(root=str(root)).scan().classes == ("a", "b")
