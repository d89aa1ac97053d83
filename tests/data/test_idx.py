import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import FashionMNIST as PublishedFashionMNIST
from torchvision.datasets.mnist import read_image_file, read_label_file

from vit.data import IDX, MNIST, FashionMNIST
from vit.data.decode import decode

COUNTS = {"train": 40, "t10k": 10}


def parts(kind: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(len(kind))
    labels = np.arange(COUNTS[kind], dtype=np.uint8) % 10
    return random.integers(0, 256, (COUNTS[kind], 28, 28), dtype=np.uint8), labels


def idx(array: np.ndarray) -> bytes:
    """The official format: two zero bytes, type, number of dimensions, big-endian sides, the values."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape) + array.tobytes()


def plant(root: Path, *, packed: bool = False, mark: str = "-", **changes: bytes) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for kind in COUNTS:
        for name, array in zip(("images", "labels"), parts(kind), strict=True):
            data = changes.get(f"{kind}_{name}", idx(array))
            data = gzip.compress(data) if packed else data
            (root / f"{kind}-{name}{mark}idx{array.ndim}-ubyte{'.gz' if packed else ''}").write_bytes(data)
    return root


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mark", ["-", "."])
def test_idx_files_are_read_packed_and_unpacked(tmp_path, packed, mark):
    root = plant(tmp_path, packed=packed, mark=mark)
    before = sorted(root.iterdir())
    t = MNIST(root=str(root), val=0.25).table()
    assert sorted(root.iterdir()) == before
    assert t.classes == tuple("0123456789")
    assert [len(t.rows(split)) for split in ("train", "val", "test")] == [30, 10, 10]
    for row in t.rows():
        kind, number = t.name(row).split("/")
        pixels, labels = parts(kind)
        assert np.array_equal(np.asarray(decode(t.read(row), channels=1)), pixels[int(number)])
        assert t.label(row) == labels[int(number)]
        assert (kind == "t10k") == (t.split(row) == "test")


def test_class_names_come_from_the_data_set_or_the_user(tmp_path):
    root = str(plant(tmp_path))
    assert IDX(root=root).table().classes == tuple("0123456789")
    assert list(FashionMNIST(root=root).table().classes) == PublishedFashionMNIST.classes
    assert IDX(root=root, classes=tuple("abcdefghij")).table().classes == tuple("abcdefghij")
    with pytest.raises(ValueError, match=r"labels below 2.*hold 9.*data\.classes"):
        IDX(root=root, classes=("a", "b")).table()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "begins with nothing"),
        (b"\x89PNG" + bytes(100), "begins with 89504e47"),
        (idx(np.zeros(40, np.uint8)), "begins with 00000801"),
        (idx(parts("train")[0])[:-1], "there are only 31,359"),
        (idx(parts("train")[0]) + b"x", "there are more"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "at most 2,000,000,000 bytes"),
        (idx(parts("t10k")[0]), "holds 10 and .* 40"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_files_that_are_not_what_their_header_says_are_refused(tmp_path, data, message, packed):
    root = plant(tmp_path, packed=packed, train_images=data)
    with pytest.raises(ValueError, match=message):
        MNIST(root=str(root)).table()


def test_damage_in_a_packed_file_is_found_by_its_checksum(tmp_path):
    root = plant(tmp_path, packed=True)
    file = root / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-8] + bytes(4) + whole[-4:], b"no gzip"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"train-images.*damaged.*Fetch it again"):
            MNIST(root=str(root)).table()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        IDX(root=str(tmp_path / "none")).table()
    root = plant(tmp_path / "part")
    (root / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"expected t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte\.gz in"):
        IDX(root=str(root)).table()


@pytest.mark.fashion_mnist
@pytest.mark.skipif(sys.platform == "win32", reason="a package of Debian")
def test_debians_fashion_mnist_is_read_as_torchvision_reads_it(fashion_mnist, tmp_path):
    t = FashionMNIST(root=str(fashion_mnist)).table()
    assert [len(t.rows(split)) for split in ("train", "val", "test")] == [54_000, 6_000, 10_000]
    assert np.bincount(t.labels("val")).tolist() == [600] * 10
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).write_bytes(gzip.decompress((fashion_mnist / f"{name}.gz").read_bytes()))
    pixels = read_image_file(str(tmp_path / "t10k-images-idx3-ubyte")).numpy()
    assert t.labels("test").tolist() == read_label_file(str(tmp_path / "t10k-labels-idx1-ubyte")).tolist()
    for row in t.rows("test")[::97]:
        number = int(t.name(row).split("/")[1])
        assert np.array_equal(np.asarray(decode(t.read(row), channels=1)), pixels[number])
