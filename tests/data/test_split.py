import numpy as np
import pyarrow.parquet as pq
import pytest

from vit.data.split import read_split, write_split
from vit.data.stratify import TEST, TRAIN, VAL, held_out, stratified_split
from vit.data.table import SPLITS, Rows, write_table


def split(counts, val=0.1, test=0.1, seed=0, order=None):
    labels = np.repeat(np.arange(len(counts)), counts)
    names = [f"{label}/{i}.png".encode() for i, label in enumerate(labels)]
    order = np.arange(len(labels)) if order is None else order
    codes = stratified_split(labels[order], [names[i] for i in order], val=val, test=test, seed=seed)
    return {names[i]: int(code) for i, code in zip(order, codes, strict=True)}, labels


def test_each_class_is_held_out_by_its_share():
    codes, labels = split([10, 20, 100, 33], val=0.2, test=0.1)
    table = np.array([np.bincount(np.array(list(codes.values()))[labels == c], minlength=3) for c in range(4)])
    assert table.tolist() == [[7, 2, 1], [14, 4, 2], [70, 20, 10], [23, 7, 3]]


# A30
@pytest.mark.parametrize(("size", "expected"), [(1, (0, 0)), (2, (1, 0)), (3, (1, 1)), (4, (1, 1))])
def test_the_smallest_classes_stay_in_train_first(size, expected):
    assert held_out(size, 0.1, 0.1) == expected


@pytest.mark.parametrize("val", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("test", [0.0, 0.05, 0.3])
def test_train_always_keeps_a_picture(val, test):
    if val + test >= 1:
        return
    for size in range(1, 60):
        counts = held_out(size, val, test)
        assert min(counts) >= 0
        assert sum(counts) < size
        assert (counts[0] > 0) == (val > 0 and size >= 2)
        assert (counts[1] > 0) == (test > 0 and size >= (3 if val > 0 else 2))


def test_a_split_depends_on_seed_and_names_not_on_order():
    first, _ = split([50, 50])
    shuffled, _ = split([50, 50], order=np.random.default_rng(0).permutation(100))
    other, _ = split([50, 50], seed=1)
    assert first == shuffled
    assert first != other


def test_a_picture_more_moves_hardly_any_other():
    labels, names = np.zeros(200, dtype=int), [f"{i}.png".encode() for i in range(200)]
    before = stratified_split(labels, names, val=0.2, test=0.2, seed=0)
    after = stratified_split(np.zeros(201, dtype=int), [*names, b"new.png"], val=0.2, test=0.2, seed=0)
    assert (before != after[:200]).sum() <= 2
    assert not ((before == VAL) & (after[:200] == TEST)).any()


@pytest.mark.parametrize(("val", "test"), [(0.5, 0.5), (-0.1, 0.1), (0.1, 1.0)])
def test_impossible_shares_are_refused(val, test):
    with pytest.raises(ValueError, match=r"val \+ test < 1"):
        split([10], val=val, test=test)


def test_a_split_file_is_read_back(tmp_path):
    codes, labels = split([20, 20])
    table = write_table(
        Rows(
            classes=("ä", "b"),
            root=tmp_path,
            paths=list(codes),
            labels=labels,
            splits=np.array(list(codes.values())),
        )
    )
    write_split(table, tmp_path / "split.parquet")
    columns = pq.read_table(tmp_path / "split.parquet").to_pydict()
    assert list(columns) == ["index", "path", "label", "split"]
    assert columns["label"] == [table.classes[table.label(i)] for i in columns["index"]]
    assert columns["path"] == [table.name(i) for i in columns["index"]]
    back = read_split(tmp_path / "split.parquet")
    assert back == {name.decode(): SPLITS[code] for name, code in codes.items()}
    assert {TRAIN, VAL, TEST} == set(codes.values())
    with pytest.raises(ValueError, match="Parquet"):
        read_split(tmp_path / "none.parquet")
