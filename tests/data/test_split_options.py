"""Groups, folds and split files, as options of any source."""

import collections

import numpy as np
import pyarrow.csv
import pytest

from vit.data import Folder, read_split, write_split
from vit.data.split import groups_by_pattern
from vit.data.stratify import TRAIN, VAL, fold_numbers, stratified_split


def table(root, **options):
    return Folder(root=str(root), **options).table()


def names(t, split):
    return {t.name(i) for i in t.rows(split)}


@pytest.fixture
def scenes(tmp_path, draw):
    """Two classes; seven scenes of 2 to 5 frames in each."""
    picture = draw()
    for c in "ab":
        (tmp_path / "scenes" / c).mkdir(parents=True)
        for scene in range(7):
            for frame in range(2 + scene % 4):
                picture.save(tmp_path / "scenes" / c / f"s{c}{scene}_{frame:03d}.png")
    return tmp_path / "scenes"


# A30
@pytest.mark.parametrize("pattern", [r"(s[ab]\d)_\d+", r"s[ab]\d(?=_)"])
def test_no_scene_stands_in_two_splits_and_every_class_in_all(scenes, pattern):
    t = table(scenes, group_pattern=pattern, val=0.2, test=0.2)
    where = collections.defaultdict(set)
    for i in t.rows():
        where[t.name(i).split("_")[0]].add(t.split(i))
        assert t.group(i) == t.name(i).split("_")[0].split("/")[1]
    assert {len(splits) for splits in where.values()} == {1}
    for split in ("train", "val", "test"):
        assert set(t.labels(split).tolist()) == {0, 1}
        wanted = {"train": 0.6, "val": 0.2, "test": 0.2}[split]
        assert len(t.rows(split)) / len(t) == pytest.approx(wanted, abs=0.1)
    assert names(table(scenes, val=0.2, test=0.2), "val") != names(t, "val")
    other = table(scenes, group_pattern=pattern, val=0.2, test=0.2, split_seed=1)
    assert names(other, "val") != names(t, "val")


# A30
def test_a_class_of_one_group_stays_in_train_and_is_named(plant, caplog):
    root = plant({"many/p1": 3, "many/p2": 3, "many/p3": 3, "rare/p4": 4})
    with caplog.at_level("WARNING", "vit.data"):
        t = table(root, group_pattern=r"p\d")
    assert {t.split(i) for i in t.rows() if t.label(i) == 1} == {"train"}
    assert "too few groups for the val split and stays out of it: rare" in caplog.text
    assert len(t.rows("val")) == len(t.rows("test")) == 3


def test_groups_that_cannot_be_held_out_are_refused(plant):
    root = plant({"a": 4, "b": 4})
    with pytest.raises(ValueError, match="holds whole classes"):
        table(root, group_pattern="^[ab]")
    with pytest.raises(ValueError, match=r"4 of 8 do not, such as b/"):
        table(root, group_pattern="^a")
    with pytest.raises(ValueError, match="regular expression"):
        table(root, group_pattern="(")


@pytest.mark.parametrize("seed", range(8))
def test_grouped_shares_are_met_as_nearly_as_groups_allow(seed):
    random = np.random.default_rng(seed)
    groups = random.integers(0, 60, 600)
    labels = random.choice(5, 600, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    paths = [f"{i}".encode() for i in range(600)]
    codes = stratified_split(labels, paths, val=0.15, test=0.15, seed=seed, groups=[str(g) for g in groups])
    for group in range(60):
        assert len(set(codes[groups == group])) <= 1
    overall = np.bincount(codes, minlength=3) / 600
    assert np.abs(overall - [0.7, 0.15, 0.15]).max() < 0.03
    for label in range(5):
        part = np.bincount(codes[labels == label], minlength=3) / (labels == label).sum()
        assert part.min() > 0.04
    shuffled = random.permutation(600)
    again = stratified_split(
        labels[shuffled],
        [paths[i] for i in shuffled],
        val=0.15,
        test=0.15,
        seed=seed,
        groups=[str(g) for g in groups[shuffled]],
    )
    assert np.array_equal(again, codes[shuffled])


def test_pictures_of_several_labels_are_shared_out_label_by_label():
    random = np.random.default_rng(0)
    labels = [sorted(set(random.integers(0, 6, 3).tolist())) for _ in range(300)]
    codes = stratified_split(labels, [str(i).encode() for i in range(300)], val=0.2, test=0.1, seed=0)
    assert {TRAIN, VAL} < set(codes.tolist())
    for label in range(6):
        part = np.bincount([c for c, several in zip(codes, labels, strict=True) if label in several], minlength=3)
        assert np.abs(part / part.sum() - [0.7, 0.2, 0.1]).max() < 0.03


@pytest.mark.parametrize("grouped", [False, True])
def test_folds_validate_every_picture_once_and_leave_the_test_alone(scenes, grouped):
    options = {"folds": 3, "test": 0.2, "group_pattern": r"s[ab]\d" if grouped else None}
    folds = [table(scenes, **options, fold=k) for k in range(3)]
    test = names(folds[0], "test")
    assert test
    assert all(names(t, "test") == test for t in folds)
    seen = [name for t in folds for name in names(t, "val")]
    assert len(seen) == len(set(seen)) == len(folds[0]) - len(test)
    for t in folds:
        assert names(t, "train") | names(t, "val") | test == names(t, None)
        assert set(t.labels("val").tolist()) == {0, 1}
        assert (t.info["folds"], t.info["fold"]) == (3, folds.index(t))
    if grouped:
        for t in folds:
            assert not {t.group(i) for i in t.rows("val")} & {t.group(i) for i in t.rows("train")}


def test_folds_are_equally_large_in_every_class():
    labels = np.repeat(np.arange(4), [10, 11, 3, 40])
    numbers = fold_numbers(labels, [str(i).encode() for i in range(64)], folds=5, seed=0)
    assert np.ptp(np.bincount(numbers)) <= 1
    for label in range(4):
        assert np.ptp(np.bincount(numbers[labels == label], minlength=5)) <= 1


def test_folds_that_cannot_be_made_are_refused(plant):
    with pytest.raises(ValueError, match="from 0 to folds - 1, but got fold=3 of 3"):
        Folder(root="x", folds=3, fold=3)
    with pytest.raises(ValueError, match="without folds"):
        Folder(root="x", fold=1)
    with pytest.raises(ValueError, match="folds of at least 2"):
        Folder(root="x", folds=1)
    with pytest.raises(ValueError, match=r"at least 20 pictures.*there are 6"):
        table(plant({"a": 3, "b": 3}), folds=20, test=0)
    with pytest.raises(ValueError, match="names its val pictures"):
        table(plant({"n/train/a": 3, "n/train/b": 3, "n/val/a": 1}) / "n", folds=2)


@pytest.mark.parametrize("form", ["split.parquet", "split.csv"])
def test_a_split_file_gives_the_same_split_whatever_the_seed(plant, tmp_path, form, caplog):
    root = plant({"a": 20, "b": 10})
    first = table(root, split_seed=5, val=0.3)
    write_split(first, tmp_path / form)
    again = table(root, split_file=str(tmp_path / form))
    assert [again.name(i) for i in again.rows()] == [first.name(i) for i in first.rows()]
    assert all(names(again, split) == names(first, split) for split in ("train", "val", "test"))
    assert again.info["split_file"] == str(tmp_path / form)
    assert read_split(tmp_path / form) == {first.name(i): first.split(i) for i in first.rows()}


def test_pictures_a_split_file_leaves_out_are_left_out_and_counted(plant, tmp_path, caplog):
    root = plant({"a": 4, "b": 4})
    lines = ["path,split", "a/000.png,train", "b/000.png,TRAINING", "a/001.png,val", "b/001.png,"]
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
    with caplog.at_level("WARNING", "vit.data"):
        t = table(root, split_file=str(tmp_path / "mine.csv"))
    assert [t.name(i) for i in t.rows()] == ["a/000.png", "b/000.png", "a/001.png"]
    assert [len(t.rows(split)) for split in ("train", "val", "test")] == [2, 1, 0]
    assert "5 of 8 pictures are not in" in caplog.text
    assert t.info["left_out_by_split_file"] == 5


def test_split_files_that_do_not_fit_are_refused(plant, tmp_path):
    root = plant({"a": 4, "b": 4})
    file = tmp_path / "mine.csv"
    for text, message in (
        ("path,split\nc/000.png,train\n", "1 of 1 are not there, such as c/000.png"),
        ("path,split\na/000.png,dev\n", "but got dev"),
        ("path,split\na/000.png,val\na/000.png,train\n", "a/000.png stands there 2 times"),
        ("path,label\na/000.png,val\n", "columns path and split"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            table(root, split_file=str(file))
    file.write_text("path,split\na/000.png,train\na/001.png,val\nb/000.png,train\n")
    with pytest.raises(ValueError, match="a in train and val"):
        table(root, split_file=str(file), group_pattern="^.")
    with pytest.raises(ValueError, match="split_file or folds"):
        Folder(root="x", split_file="y", folds=3)


def test_the_split_of_several_labels_is_written_too(tmp_path, draw):
    from vit.data import Table

    for i in range(4):
        draw(seed=i).save(tmp_path / f"{i}.png")
    (tmp_path / "t.csv").write_text("path,label\n0.png,x|y\n1.png,y\n2.png,x\n3.png,x|y\n")
    t = Table(file=str(tmp_path / "t.csv"), separator="|", val=0.25, test=0).table()
    write_split(t, tmp_path / "s.csv")
    columns = pyarrow.csv.read_csv(tmp_path / "s.csv").to_pydict()
    assert columns["label"] == [";".join(t.classes[k] for k in t.label(i)) for i in t.rows()]


def test_a_pattern_finds_groups_anywhere_in_a_path():
    assert groups_by_pattern(r"/(\d+)_", [b"a/12_x.png", b"b/3_y.png"]) == ["12", "3"]


# A29, A30
def test_a_runs_split_holds_where_the_pictures_have_changed(tmp_path, draw, caplog):
    root, file = tmp_path / "scenes", tmp_path / "split.parquet"

    def add(*paths):
        for path in paths:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            draw().save(root / path)

    def where(t):
        return {t.name(i): t.split(i) for i in t.rows()}

    add(*(f"train/{c}/{c}{scene}_{frame}.png" for c in "ab" for scene in range(8) for frame in range(2)))
    add("test/a/x0_0.png", "test/b/y0_0.png")
    options = {"group_pattern": r"([abxy]\d)_", "val": 0.5}
    first = table(root, **options)
    write_split(first, file)
    before = where(first)
    assert set(before.values()) == {"train", "val", "test"}
    source = Folder(root=str(root), **{**options, "split_seed": 3})
    assert where(source.table()) != before
    assert where(source.table(as_in=file)) == before
    assert not caplog.records
    gone, held_out, kept = (next(n for n, split in before.items() if split == s) for s in ("train", "val", "test"))
    (root / gone).unlink()
    (root / kept).unlink()
    (root / "train" / kept.split("/")[1]).mkdir(exist_ok=True)
    joined = held_out.replace("_0", "_7").replace("_1", "_7")
    add(joined, "train/a/a9_0.png", "test/b/y1_0.png")
    after = where(source.table(as_in=file))
    assert after == {
        **{name: split for name, split in before.items() if name not in (gone, kept)},
        joined: "val",  # with its group
        "train/a/a9_0.png": "train",
        "test/b/y1_0.png": "test",
    }
    assert "whose split is kept: 2 are gone, 3 are new, in the split that the data name" in caplog.text


def test_what_the_data_have_moved_since_a_run_stays_and_what_they_leave_open_is_left_out(plant, tmp_path, caplog):
    from vit.data import Table

    root = plant({"a": 6, "b": 6})
    rows = [f"{c}/{i:03d}.png,{c},{'test' if i == 5 else 'train'}" for c in "ab" for i in range(6)]
    (root / "t.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    source = Table(file=str(root / "t.csv"), val=0)
    first = source.table()
    write_split(first, tmp_path / "split.parquet")
    moved = [row.replace("train", "test") if row.startswith("a/000") else row for row in rows]
    (root / "t.csv").write_text("\n".join(["path,label,split", *moved]) + "\n")
    again = source.table(as_in=tmp_path / "split.parquet")
    assert names(again, "test") == names(first, "test") == {"a/005.png", "b/005.png"}
    assert "1 stand in another split by now, and count where they stood" in caplog.text
    caplog.clear()
    grown = Folder(root=str(plant({"a": 7, "b": 6})))
    assert len(grown.table(as_in=tmp_path / "split.parquet")) == 12
    assert "1 are new and left out" in caplog.text
