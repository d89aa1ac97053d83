import logging
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vit.data import Table


@pytest.fixture
def folder(tmp_path, draw):
    """Pictures without class folders, one with a comma in its name."""
    for seed, name in enumerate(["a.png", "b.png", "c, d.png", "deep/e.PNG", "deep/f.png", "g.png"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        draw(seed=seed).save(tmp_path / name)
    return tmp_path


def table(folder, text, name="labels.csv", encoding="utf-8", **options):
    (folder / name).write_text(text, encoding=encoding)
    return Table(file=str(folder / name), **options).table()


def rows(t):
    return {t.name(i): (t.classes[t.label(i)], t.split(i)) for i in t.rows()}


FIVE = 'path,label\na.png,007\nb.png,7\n"c, d.png",007\ndeep/e.PNG,7\ndeep/f.png,007\n'


# A24
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_labels_stay_text_and_paths_may_hold_commas(folder, encoding):
    t = table(folder, FIVE, encoding=encoding, val=0, test=0)
    assert t.classes == ("007", "7")
    assert rows(t) == {
        "a.png": ("007", "train"),
        "b.png": ("7", "train"),
        "c, d.png": ("007", "train"),
        "deep/e.PNG": ("7", "train"),
        "deep/f.png": ("007", "train"),
    }
    assert all(os.path.isfile(t.path(i)) for i in t.rows())


# A24
def test_everything_wrong_with_a_table_is_said_at_once(folder, caplog):
    text = "path,label\na.png,x\nb.png,y\ngone.png,x\na.png,x\nb.png,x\ndeep/e.PNG,\ndeep\\f.png,y\n"
    with caplog.at_level(logging.WARNING, "vit.data"), pytest.raises(ValueError, match="Mend the table") as caught:
        table(folder, text)
    lines = str(caught.value).splitlines()[1:-1]
    assert lines == [
        "  1 rows with a blank label: row 6",
        "  2 missing files (paths have /, not \\): gone.png (row 3), deep\\f.png (row 7)",
        "  1 pictures with two labels: b.png ('y' in row 2, 'x' in row 5)",
    ]
    assert "1 rows of" in caplog.text
    assert "a.png (rows 1 and 4)" in caplog.text


def test_a_row_that_is_there_twice_counts_once_in_any_spelling(folder, caplog):
    with caplog.at_level(logging.WARNING, "vit.data"):
        t = table(folder, f"{FIVE}./a.png,007\ndeep/../b.png,7\n{folder}/deep/f.png,007\n")
    assert len(t) == 5
    assert t.info["rows_twice"] == 3
    assert "3 rows of" in caplog.text


@pytest.mark.parametrize("name", ["labels.tsv", "labels.TSV", "labels.parquet", "labels.txt"])
def test_tsv_parquet_and_other_delimiters_give_the_same_table(folder, name):
    expected = rows(table(folder, FIVE))
    options = {"delimiter": ";"} if name.endswith("txt") else {}
    lines = [("path", "label"), *((path, label) for path, (label, _) in expected.items())]
    if name.endswith("parquet"):
        pq.write_table(pa.table(dict(zip(lines[0], zip(*lines[1:], strict=True), strict=True))), folder / name)
        t = Table(file=str(folder / name)).table()
    else:
        between = ";" if options else "\t"
        t = table(folder, "".join(between.join(line) + "\n" for line in lines), name, **options)
    assert rows(t) == expected


def test_numbers_and_dictionaries_of_parquet_become_class_names(folder):
    paths = ["a.png", "b.png", "deep/e.PNG", "deep/f.png"]
    for labels, classes in (
        (pa.array([7, 10, 7, 10]), ("10", "7")),
        (pa.array(["x", "y", "x", "y"]).dictionary_encode(), ("x", "y")),
    ):
        pq.write_table(pa.table({"path": paths, "label": labels}), folder / "t.parquet")
        assert Table(file=str(folder / "t.parquet")).table().classes == classes
    pq.write_table(pa.table({"path": paths, "label": [1.0, 2.0, 1.0, 2.0]}), folder / "t.parquet")
    with pytest.raises(ValueError, match="text or whole numbers in the column 'label'"):
        Table(file=str(folder / "t.parquet")).table()


def test_a_split_column_decides_and_blank_counts_as_train(folder):
    text = "path,label,split\na.png,x,Train\nb.png,y,\ndeep/e.PNG,x,valid\ndeep/f.png,y,TEST\n"
    t = table(folder, text)
    assert {name: split for name, (_, split) in rows(t).items()} == {
        "a.png": "train",
        "b.png": "train",
        "deep/e.PNG": "val",
        "deep/f.png": "test",
    }
    assert len(table(folder, text, split_column=None, val=0, test=0).rows("train")) == 4
    with pytest.raises(ValueError, match=r"1 splits other than train, val, test: 'dev' in 1 rows"):
        table(folder, text.replace("valid", "dev"))
    with pytest.raises(ValueError, match=r"train rows \(x, y\), but .* holds z"):
        table(folder, text.replace("x,valid", "z,valid"))


def test_one_picture_in_two_splits_is_refused(folder):
    with pytest.raises(ValueError, match=r"1 pictures with two splits: a.png \('train' in row 1, 'val' in row 3\)"):
        table(folder, "path,label,split\na.png,x,train\nb.png,y,train\na.png,x,val\n")


def test_groups_and_weights_are_read_from_columns_of_any_name(folder):
    text = "image,kind,patient,w\na.png,x,p1,1\nb.png,y,p2,2.5\ndeep/e.PNG,x,p1,0\ndeep/f.png,y,p3,1e3\n"
    names = {"path_column": "image", "label_column": "kind", "group_column": "patient", "weight_column": "w"}
    t = table(folder, text, **names, val=0, test=0)
    assert [t.group(i) for i in t.rows()] == ["p1", "p2", "p1", "p3"]
    assert t.weights("train").tolist() == [1, 2.5, 0, 1000]
    with pytest.raises(ValueError, match=r"1 weights .*'-1' in row 1"):
        table(folder, text.replace("p1,1\n", "p1,-1\n"), **names)
    with pytest.raises(ValueError, match=r"1 rows with a blank group: row 2"):
        table(folder, text.replace("p2", ""), **names)
    with pytest.raises(ValueError, match=r"column 'path' in .* not among: 'image', 'kind'.*data.path_column"):
        table(folder, text)
    with pytest.raises(ValueError, match=r"column 'scene' in"):
        table(folder, text, **{**names, "group_column": "scene"})


def test_a_group_in_two_named_splits_is_refused(folder):
    text = "path,label,split,group\na.png,x,train,p1\nb.png,y,train,p2\ndeep/e.PNG,x,val,p1\n"
    with pytest.raises(ValueError, match="every group in one split.* p1 in train and val"):
        table(folder, text)
    assert len(table(folder, text, group_column=None)) == 3


def test_paths_may_be_relative_to_another_root(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    t = table(elsewhere, FIVE, root=str(folder))
    assert t.root == folder
    with pytest.raises(ValueError, match=r"5 missing files: a.png \(row 1\), b.png \(row 2\)"):
        table(elsewhere, FIVE)


def test_given_classes_order_the_labels(folder):
    assert table(folder, FIVE, classes=("7", "007")).classes == ("7", "007")
    with pytest.raises(ValueError, match=r"data.classes \(7, 8\), but .* holds 007"):
        table(folder, FIVE, classes=("7", "8"))


def test_tables_that_cannot_be_read_say_why(folder):
    with pytest.raises(ValueError, match="no such file"):
        Table(file=str(folder / "none.csv")).table()
    with pytest.raises(ValueError, match=r"ends in .csv"):
        table(folder, FIVE, "labels.xls")
    with pytest.raises(ValueError, match="header alone"):
        table(folder, "path,label\n")
    with pytest.raises(ValueError, match="cannot be read"):
        table(folder, "")
    with pytest.raises(ValueError, match=r"cannot be read: .*Expected 2 columns, got 3"):
        table(folder, "path,label\na.png,x,y\n")
    with pytest.raises(ValueError, match="at least two classes"):
        table(folder, "path,label\na.png,x\n")
    with pytest.raises(ValueError, match=r"'path;label'.*data.delimiter"):
        table(folder, "path;label\na.png;x\n")
    with pytest.raises(ValueError, match="cannot be read"):
        table(folder, "path,label\na.png,ä\n", encoding="latin-1")


def test_several_labels_per_picture_are_held_as_lists(folder):
    text = "path,label\na.png,red|round\nb.png,round\ndeep/e.PNG,red | square\ndeep/f.png,square\ng.png,red\n"
    t = table(folder, text, separator="|", val=0, test=0)
    assert t.classes == ("red", "round", "square")
    assert [t.label(i) for i in t.rows()] == [[0, 1], [1], [0, 2], [2], [0]]
    with pytest.raises(ValueError, match="one label per picture"):
        t.labels()
    held = table(folder, text, separator="|", val=0.3, test=0)
    assert {k for i in held.rows("train") for k in held.label(i)} == {0, 1, 2}
    assert len(held.rows("val")) >= 1


def test_a_link_to_nothing_is_missing(folder):
    (folder / "z.png").symlink_to(folder / "nowhere.png")
    with pytest.raises(ValueError, match=r"1 missing files: z.png"):
        table(folder, FIVE + "z.png,7\n")


def test_weights_of_the_table_steer_sampling(folder):
    text = "path,label,weight\na.png,x,0\nb.png,y,3\ndeep/e.PNG,x,1\ndeep/f.png,y,0\n"
    source = Table(file=str(folder / "labels.csv"), sampling="weighted", val=0, test=0)
    t = table(folder, text, val=0, test=0)
    drawn = np.bincount([key.position for key in source.sampler(t, seed=0)], minlength=4)
    assert drawn.tolist() == [0, 3, 1, 0]
    plain = table(folder, text, weight_column=None)
    with pytest.raises(ValueError, match="weight column"):
        source.sampler(plain, seed=0)


def test_rows_of_several_labels_are_counted_in_each_class_and_become_yes_and_no(folder):
    text = "path,label,split\na.png,x|z,train\nb.png,z,train\ng.png,y,train\n"
    t = table(folder, text, separator="|", val=0, test=0)
    assert t.several
    assert t.counts("train").tolist() == [1, 1, 2]
    assert t.counts("val").tolist() == [0, 0, 0]
    assert [t.target(i) for i in range(3)] == [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    one = table(folder, text.replace("x|z", "x"), val=0, test=0)
    assert one.counts().tolist() == [1, 1, 1]
    assert [one.target(i) for i in range(3)] == [0, 2, 1]
