"""Archives in the exact official format, with few pictures; their checksums cannot be the published ones."""

import contextlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets.cifar import CIFAR10 as PublishedCIFAR10

from vit.data import CIFAR10, CIFAR100
from vit.data import cifar as module
from vit.data.cifar import read_plain
from vit.data.decode import decode

FINE = [b"apple", b"bear", b"crab", b"dolphin"]
COARSE = [b"food", b"animals"]


def python2_pickle(values: dict) -> bytes:
    """Protocol 2 as Python 2 wrote it: texts as byte strings, arrays through numpy.core.multiarray."""
    out = [b"\x80\x02"]

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + len(text).to_bytes(4, "little") + text

    def write(value) -> None:
        if isinstance(value, bytes):
            out.append(short(value))
        elif isinstance(value, int):
            out.append(b"J" + value.to_bytes(4, "little", signed=True))
        elif isinstance(value, list):
            out.append(b"](")
            for item in value:
                write(item)
            out.append(b"e")
        elif isinstance(value, dict):
            out.append(b"}(")
            for key, item in value.items():
                write(key)
                write(item)
            out.append(b"u")
        else:
            assert isinstance(value, np.ndarray)
            assert value.dtype == np.uint8
            out.append(b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R")
            shape = b"".join(b"J" + side.to_bytes(4, "little") for side in value.shape)
            out.append(b"(K\x01(" + shape + b"t")
            out.append(b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb")
            out.append(b"\x89" + short(value.tobytes()) + b"tb")

    write(values)
    return b"".join([*out, b"."])


def pixels(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def cifar10_files(pickled=python2_pickle) -> dict[str, bytes]:
    files = {}
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        files[name] = pickled(
            {
                b"data": pixels(12, seed),
                b"labels": [i % 3 for i in range(12)],
                b"batch_label": name.encode(),
                b"filenames": [f"x_{i}.png".encode() for i in range(12)],
            }
        )
    files["batches.meta"] = pickled(
        {b"num_cases_per_batch": 12, b"label_names": [b"airplane", b"automobile", b"bird"], b"num_vis": 3072}
    )
    return files


def cifar100_files() -> dict[str, bytes]:
    files = {}
    for seed, (name, count) in enumerate([("train", 40), ("test", 12)]):
        fine = [i % 4 for i in range(count)]
        files[name] = python2_pickle(
            {
                b"data": pixels(count, seed),
                b"fine_labels": fine,
                b"coarse_labels": [min(label, 1) for label in fine],
                b"filenames": [b"x.png"] * count,
                b"batch_label": b"one",
            }
        )
    files["meta"] = python2_pickle({b"fine_label_names": FINE, b"coarse_label_names": COARSE})
    return files


def pack(archive: Path, base: str, files: dict[str, bytes]) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{base}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive


def unpack(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def source(root, kind=CIFAR10, **options):
    return kind(root=str(root), download=False, checksum=False, **options)


def test_the_fabricated_pickles_are_what_pickle_reads():
    values = pickle.loads(cifar10_files()["test_batch"], encoding="bytes")
    assert np.array_equal(values[b"data"], pixels(12, 5))
    assert values[b"labels"] == [i % 3 for i in range(12)]


@pytest.mark.parametrize("form", ["archive", "folder of the archive", "folder", "folder above"])
def test_cifar10_is_read_packed_and_unpacked(tmp_path, form):
    if form.endswith("archive"):
        root = pack(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", cifar10_files())
        root = root.parent if form == "folder of the archive" else root
    else:
        root = unpack(tmp_path / "cifar-10-batches-py", cifar10_files())
        root = root.parent if form == "folder above" else root
    before = sorted(tmp_path.rglob("*"))
    table = source(root).table()
    assert sorted(tmp_path.rglob("*")) == before
    assert table.classes == ("airplane", "automobile", "bird")
    assert [len(table.rows(name)) for name in ("train", "val", "test")] == [54, 6, 12]
    for row in [*table.rows("test"), *table.rows("val")]:
        batch, number = table.name(row).split("/")
        seed = 5 if batch == "test_batch" else int(batch[-1]) - 1
        expected = pixels(12, seed)[int(number)].reshape(3, 32, 32).transpose(1, 2, 0)
        assert np.array_equal(np.asarray(decode(table.read(row))), expected)
        assert table.label(row) == int(number) % 3
    assert all(table.name(row).startswith("test_batch/") for row in table.rows("test"))


def test_the_official_test_set_is_test_whatever_the_seed(tmp_path):
    root = unpack(tmp_path / "cifar-10-batches-py", cifar10_files())
    first, second = (source(root, split_seed=seed).table() for seed in (0, 1))
    assert [first.name(i) for i in first.rows("test")] == [second.name(i) for i in second.rows("test")]
    assert {first.name(i) for i in first.rows("val")} != {second.name(i) for i in second.rows("val")}
    assert np.bincount(first.labels("val")).tolist() == [2, 2, 2]


@pytest.mark.parametrize(("labels", "names"), [("fine", FINE), ("coarse", COARSE)])
def test_cifar100_has_fine_and_coarse_labels(tmp_path, labels, names):
    archive = pack(tmp_path / "cifar-100-python.tar.gz", "cifar-100-python", cifar100_files())
    table = source(archive, CIFAR100, labels=labels).table()
    assert table.classes == tuple(name.decode() for name in names)
    fine = [int(table.name(row).split("/")[1]) % 4 for row in table.rows()]
    assert table.labels().tolist() == [label if labels == "fine" else min(label, 1) for label in fine]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_batches_pickled_by_python_3_are_read_too(protocol):
    data = pixels(3, 0)
    values = read_plain(pickle.dumps({b"data": data, b"labels": [1, 2, 3]}, protocol=protocol), "x")
    assert np.array_equal(values[b"data"], data)
    assert values[b"labels"] == [1, 2, 3]


class Evil:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


# H3
def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    marker = tmp_path / "ran"
    crafted = [
        pickle.dumps(Evil(Path.touch, marker), protocol=2),
        pickle.dumps({b"data": Evil(eval, f"open({str(marker)!r}, 'w')")}, protocol=2),
        pickle.dumps({b"data": Evil(np.load, str(marker))}, protocol=2),
        f"cos\nsystem\n(S'touch {marker}'\ntR.".encode(),
        f"c__builtin__\neval\n(S'open({str(marker)!r}, \"w\")'\ntR.".encode(),
        # Attributes of what is admitted must not open a way either.
        b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dump\x93.",
        b"cnumpy.core.multiarray\n_reconstruct\n}S'__call__'\nS'x'\nsb.",
    ]
    for number, data in enumerate(crafted):
        files = cifar10_files() | {"test_batch": data}
        root = unpack(tmp_path / str(number) / "cifar-10-batches-py", files)
        with pytest.raises(ValueError, match=r"test_batch.*made to run code"):
            source(root).table()
        assert not marker.exists()


def test_arrays_of_anything_but_bytes_are_refused():
    for array in (np.array([object()]), np.zeros(3), np.array(["x"])):
        with pytest.raises(ValueError, match="arrays of bytes"):
            read_plain(pickle.dumps({b"data": array}, protocol=2), "x")
    # A shape that its bytes do not fill.
    data = python2_pickle({b"data": pixels(1, 0)}).replace(b"J\x00\x0c\x00\x00", b"J\xff\xff\xff\x7f")
    with pytest.raises(ValueError, match="arrays of bytes"):
        read_plain(data, "x")


@pytest.mark.parametrize("seed", range(3))
def test_mutated_pickles_give_values_or_a_clear_error(seed):
    random = np.random.default_rng(seed)
    whole = np.frombuffer(python2_pickle({b"data": pixels(1, 0)[:, :40], b"labels": [1, 2]}), np.uint8)
    for _ in range(300):
        mutant = whole.copy()
        mutant[random.integers(0, len(whole), 2)] = random.integers(0, 256, 2)
        with contextlib.suppress(ValueError):
            assert isinstance(read_plain(mutant.tobytes(), "x"), dict)


# H4
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../escaped", tarfile.REGTYPE),
        ("/tmp/vit-escaped", tarfile.REGTYPE),
        ("cifar-10-batches-py/../../escaped", tarfile.REGTYPE),
        ("cifar-10-batches-py/test_batch", tarfile.SYMTYPE),
        ("cifar-10-batches-py/extra", tarfile.LNKTYPE),
    ],
)
def test_archives_with_members_that_climb_out_are_refused_and_nothing_is_written(tmp_path, name, kind):
    archive = pack(tmp_path / "whole.tar.gz", "cifar-10-batches-py", cifar10_files())
    with tarfile.open(archive) as whole, tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
        for member in whole:
            tar.addfile(member, whole.extractfile(member))
        bad = tarfile.TarInfo(name)
        bad.type, bad.linkname = kind, "/etc/passwd"
        tar.addfile(bad)
    archive.unlink()
    with pytest.raises(ValueError, match=r"but it holds .*(outside of it|no file but a link)"):
        source(tmp_path).table()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["cifar-10-python.tar.gz"]
    assert not Path("/tmp/vit-escaped").exists()


def binary(count: int, seed: int, *labels: list[int]) -> bytes:
    """Label bytes, then the red, green and blue plane, picture by picture."""
    columns = [np.array(part, np.uint8)[:, None] for part in labels]
    return np.concatenate([*columns, pixels(count, seed)], axis=1).tobytes()


def binary_files(kind) -> tuple[str, str, dict[str, bytes]]:
    if kind is CIFAR10:
        names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
        files = {name: binary(12, seed, [i % 3 for i in range(12)]) for seed, name in enumerate(names)}
        files["batches.meta.txt"] = b"airplane\nautomobile\nbird\n\n"
        return "cifar-10-binary.tar.gz", "cifar-10-batches-bin", files
    files = {}
    for seed, (name, count) in enumerate([("train", 40), ("test", 12)]):
        fine = [i % 4 for i in range(count)]
        files[f"{name}.bin"] = binary(count, seed, [min(label, 1) for label in fine], fine)
    files |= {"fine_label_names.txt": b"\n".join(FINE), "coarse_label_names.txt": b"\n".join(COARSE)}
    return "cifar-100-binary.tar.gz", "cifar-100-binary", files


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("kind", "options"), [(CIFAR10, {}), (CIFAR100, {}), (CIFAR100, {"labels": "coarse"})])
def test_the_binary_form_gives_what_the_python_form_gives(tmp_path, kind, options, packed):
    archive, base, files = binary_files(kind)
    if packed:
        pack(tmp_path / archive, base, files)
    else:
        unpack(tmp_path / base, files)
    python = unpack(tmp_path / "py" / "x", cifar10_files() if kind is CIFAR10 else cifar100_files())
    ours, theirs = source(tmp_path, kind, **options).table(), source(python, kind, **options).table()
    assert ours.classes == theirs.classes

    def rows(t):
        return {(t.name(i).replace(".bin", ""), t.label(i), t.read(i), t.split(i) == "test") for i in t.rows()}

    assert rows(ours) == rows(theirs)
    assert len(ours.rows("val")) == len(theirs.rows("val"))


@pytest.mark.parametrize("packed", [True, False])
def test_the_binary_form_is_checked_too(tmp_path, packed):
    archive, base, files = binary_files(CIFAR10)
    root = pack(tmp_path / archive, base, files) if packed else unpack(tmp_path / base, files)
    message = r"published checksum c32a1d4ab5" if packed else r"official 30,730,000 bytes"
    with pytest.raises(ValueError, match=rf"{message}.*data\.checksum"):
        CIFAR10(root=str(root), download=False).table()
    files["test_batch.bin"] = files["test_batch.bin"][:-1]
    with pytest.raises(ValueError, match=r"multiple of 3,073 bytes in test_batch.bin"):
        source(unpack(tmp_path / "short", files)).table()
    files["test_batch.bin"] = binary(12, 0, [7] * 12)
    with pytest.raises(ValueError, match=r"labels from 0 to 2"):
        source(unpack(tmp_path / "labels", files)).table()


def test_the_published_checksum_is_asked_for(tmp_path):
    root = unpack(tmp_path / "cifar-10-batches-py", cifar10_files())
    with pytest.raises(ValueError, match=rf"checksum .* for .*{root}.*data\.checksum"):
        CIFAR10(root=str(root), download=False).table()


def test_damaged_archives_say_what_to_do(tmp_path):
    archive = tmp_path / "cifar-10-python.tar.gz"
    archive.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="damaged"):
        source(archive).table()
    whole = pack(archive, "cifar-10-batches-py", cifar10_files()).read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"damaged|lacks"):
        source(archive).table()
    root = unpack(tmp_path / "cifar-10-batches-py", {"test_batch": cifar10_files()["test_batch"]})
    with pytest.raises(ValueError, match=r"data_batch_1.* is missing"):
        source(root).table()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"labels": [0] * 11}, "12 labels from 0 to 2"),
        ({b"labels": [3] * 12}, "12 labels from 0 to 2"),
        ({b"labels": b"000"}, "labels as a list"),
        ({b"data": pixels(12, 0)[:, :100]}, "3,072"),
    ],
)
def test_batches_that_do_not_fit_are_refused(tmp_path, change, message):
    batch = {b"data": pixels(12, 0), b"labels": [0] * 12} | change
    root = unpack(tmp_path / "cifar-10-batches-py", cifar10_files() | {"test_batch": python2_pickle(batch)})
    with pytest.raises(ValueError, match=f"{message}(?s:.*)test_batch|test_batch(?s:.*){message}|{message}"):
        source(root).table()


def test_a_missing_archive_names_the_file_and_the_place(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=rf"cifar-10-python\.tar\.gz.* in {tmp_path}.*{PublishedCIFAR10.url}"):
        CIFAR10(root=str(tmp_path), download=False).table()

    def no_network(*args, **options):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(module, "download_url", no_network)
    with pytest.raises(ValueError, match=rf"Network is unreachable.*cifar-100-python\.tar\.gz into {tmp_path}"):
        CIFAR100(root=str(tmp_path)).table()
    assert list(tmp_path.iterdir()) == []


def test_a_download_lands_whole_and_is_read(tmp_path, monkeypatch):
    def fetch(url, root, filename, md5):
        assert (url, md5) == (PublishedCIFAR10.url, PublishedCIFAR10.tgz_md5)
        pack(Path(root) / filename, "cifar-10-batches-py", cifar10_files())

    monkeypatch.setattr(module, "download_url", fetch)
    table = CIFAR10(root=str(tmp_path / "new"), checksum=False).table()
    assert len(table) == 72
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["cifar-10-python.tar.gz"]


def test_pictures_of_the_table_are_files_that_any_viewer_opens(tmp_path):
    root = unpack(tmp_path / "cifar-10-batches-py", cifar10_files())
    table = source(root).table()
    with Image.open(io.BytesIO(table.read(0))) as picture:
        assert (picture.format, picture.size) == ("PPM", (32, 32))
