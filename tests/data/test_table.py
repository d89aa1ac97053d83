import multiprocessing
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from vit.data.digits import write_digits
from vit.data.table import SPLITS, DataTable, Rows, cache_folder, write_table


def rows(count=9, **changes) -> Rows:
    return Rows(
        **{
            "classes": ("b", "a"),
            "root": Path("/pictures"),
            "paths": [f"b/{i}.png".encode() for i in range(count)],
            "labels": np.arange(count) % 2,
            "splits": np.arange(count)[::-1] % 3,
            **changes,
        }
    )


def test_a_split_is_a_range_and_rows_keep_their_order_within():
    table = write_table(rows())
    assert [table.rows(name) for name in SPLITS] == [range(0, 3), range(3, 6), range(6, 9)]
    assert [table.split(i) for i in table.rows()] == ["train"] * 3 + ["val"] * 3 + ["test"] * 3
    assert [table.name(i) for i in table.rows("val")] == ["b/1.png", "b/4.png", "b/7.png"]
    assert [table.label(i) for i in table.rows("val")] == [1, 0, 1]
    assert table.labels("val").tolist() == [1, 0, 1]
    assert table.path(0) == os.path.join("/pictures", "b/2.png")
    assert table.classes == ("b", "a")


def test_anyone_can_read_the_file_with_arrow():
    table = write_table(rows(weights=np.arange(9.0), groups=[f"g{i}" for i in range(9)]))
    columns = pa.ipc.open_file(str(table.file)).read_all()
    assert columns.column_names == ["path", "label", "split", "group", "weight"]
    assert columns["split"].to_pylist() == [table.split(i) for i in table.rows()]
    assert [table.weight(i) for i in table.rows("train")] == [2, 5, 8]
    assert table.group(0) == "g2"


def test_a_table_is_pickled_as_its_path():
    table = write_table(rows(20_000))
    assert len(pickle.dumps(table)) < 300
    again = pickle.loads(pickle.dumps(table))
    assert (len(again), again.name(7)) == (len(table), table.name(7))


def test_equal_rows_make_one_file_and_others_another():
    first, second, third = write_table(rows()), write_table(rows()), write_table(rows(10))
    assert first.file == second.file != third.file
    assert list(first.file.parent.glob("*.tmp")) == []


def test_a_table_may_carry_its_pictures():
    table = write_table(rows(3, images=[b"zero", b"one", b"two"], splits=np.array([1, 0, 0])))
    assert [table.read(i) for i in table.rows()] == [b"one", b"two", b"zero"]
    assert table.size(1) == 3


def test_several_and_soft_labels_fit():
    several = write_table(rows(2, labels=[[0, 1], []], splits=np.array([0, 0])))
    assert [several.label(i) for i in (0, 1)] == [[0, 1], []]
    soft = write_table(rows(2, labels=[[0.25, 0.75], [1.0, 0.0]], splits=np.array([0, 0])))
    assert soft.label(0) == [0.25, 0.75]
    with pytest.raises(ValueError, match="one label per picture"):
        soft.labels()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names that are no text")
def test_names_that_are_no_text_are_found_again(tmp_path):
    name = os.fsdecode(b"caf\xe9.png")
    (tmp_path / name).write_bytes(b"x")
    table = write_table(rows(1, root=tmp_path, paths=[os.fsencode(name)], splits=np.array([0])))
    assert table.read(0) == b"x"
    assert table.name(0) == "caf\\xe9.png"


def test_rows_outside_of_the_table_are_refused():
    table = write_table(rows())
    for index in (-1, 9):
        with pytest.raises(IndexError):
            table.path(index)
    with pytest.raises(ValueError, match="'dev'"):
        table.rows("dev")


def test_tables_without_rows_or_splits_are_refused():
    with pytest.raises(ValueError, match="at least one picture"):
        write_table(rows(0))
    with pytest.raises(ValueError, match="some have none"):
        write_table(rows(splits=np.full(9, -1)))


def test_a_damaged_table_says_what_to_do(tmp_path):
    file = tmp_path / "broken.arrow"
    for content in (b"", b"ARROW1 and then nothing"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.arrow.*Delete the file"):
            DataTable(file)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("VIT_CACHE")
    assert cache_folder().name == "vit-toolkit"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="VIT_CACHE"):
        write_table(rows())


def write_many(start):
    digits = write_digits()
    pictures = sum(1 for _ in digits.glob("*/*.png"))
    return pictures, [str(write_table(rows(start + i)).file) for i in range(20)]


@pytest.mark.slow
def test_two_processes_make_tables_and_digits_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_CACHE", str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(write_many, [1, 1])
    assert first == second
    assert first[0] == 1797
    assert [len(DataTable(file)) for file in first[1]] == list(range(1, 21))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits", "tables"]
