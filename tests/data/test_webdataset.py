"""Tar shards, against what the library webdataset yields."""

import builtins
import io
import tarfile
from contextlib import ExitStack

import numpy as np
import pytest
import webdataset
from webdataset.tariterators import group_by_keys, tar_file_expander

from vit.api import check_command
from vit.data import ImageDataModule, Preprocessing, WebDataset
from vit.data.decode import decode


def png(picture) -> bytes:
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()


@pytest.fixture
def shards(tmp_path, draw):
    """Write shards with the library; `change` makes a sample from its number."""

    def write(names, per_shard=4, change=lambda number, sample: sample):
        number = 0
        for name in names:
            with webdataset.TarWriter(str(tmp_path / name)) as writer:
                for _ in range(per_shard):
                    picture, label = png(draw(seed=number)), number % 3
                    sample = {"__key__": f"sub/{number:05d}", "png": picture, "cls": label, "txt": "abc"[label]}
                    sample["json"] = {"name": "abc"[label], "id": label, "all": [label, (label + 1) % 3]}
                    writer.write(change(number, sample))
                    number += 1
        return str(tmp_path)

    return write


def streamed(root, pattern):
    """What the library yields, in its order, still encoded."""
    # The library leaves the files that it opens to the garbage collector, which warns.
    with ExitStack() as stack:
        urls = webdataset.shardlists.expand_urls(f"{root}/{pattern}")
        opened = [{"url": url, "stream": stack.enter_context(open(url, "rb"))} for url in urls]
        return list(group_by_keys(tar_file_expander(opened)))


def test_shards_are_read_as_the_library_reads_them(shards):
    root = shards(["a-000.tar", "a-001.tar", "a-002.tar", "b.tar"])
    table = WebDataset(root=root, train_shards="a-{000..002}.tar", val_shards="b.tar", test=0.0).table()
    for split, pattern in (("train", "a-{000..002}.tar"), ("val", "b.tar")):
        raw = streamed(root, pattern)
        reference = webdataset.decode()(raw)
        assert len(raw) == len(table.rows(split)) > 0
        for row, theirs, bare in zip(table.rows(split), reference, raw, strict=True):
            assert table.read(row) == bare["png"]
            assert table.label(row) == theirs["cls"]
            assert table.name(row).endswith(f"{theirs['__key__']}.png")
            assert table.size(row) == len(bare["png"])
    assert table.classes == ("0", "1", "2")
    assert not table.rows("test")


def test_every_kind_of_label_is_read(shards, tmp_path):
    root = shards(["a.tar", "b.tar"], per_shard=3)
    common = {"root": root, "train_shards": "a.tar::b.tar", "val": 0.0, "test": 0.0}
    numbers = [0, 1, 2, 0, 1, 2]
    (tmp_path / "names.txt").write_text("x\ny\nz\n")
    for options, classes in (
        ({}, ("0", "1", "2")),
        ({"classes": ("p", "q", "r")}, ("p", "q", "r")),
        ({"classes_file": "names.txt"}, ("x", "y", "z")),
        ({"label": "txt"}, ("a", "b", "c")),
        ({"label": "json.name"}, ("a", "b", "c")),
        ({"label": "json.id"}, ("0", "1", "2")),
    ):
        table = WebDataset(**common, **options).table()
        assert table.classes == classes
        assert table.labels().tolist() == numbers
    table = WebDataset(**common, label="txt", classes=("c", "b", "a")).table()
    assert table.labels().tolist() == [2, 1, 0, 2, 1, 0]
    table = WebDataset(**common, label="json.all").table()
    assert [table.label(row) for row in table.rows()] == [sorted([k, (k + 1) % 3]) for k in numbers]


def test_names_in_cls_are_names(shards):
    root = shards(["a.tar"], change=lambda n, s: {**s, "cls": b"wolf" if n % 2 else b"fox"})
    table = WebDataset(root=root, train_shards="a.tar", val=0.0, test=0.0).table()
    assert (table.classes, table.labels().tolist()) == (("fox", "wolf"), [0, 1, 0, 1])
    root = shards(["b.tar"], change=lambda n, s: {**s, "cls": b"wolf" if n % 2 else b"1"})
    with pytest.raises(ValueError, match="class numbers or class names .* both"):
        WebDataset(root=root, train_shards="b.tar").table()


def test_a_sample_needs_one_picture_and_its_label(shards):
    def without(*kinds):
        return lambda n, s: {k: v for k, v in s.items() if n != 2 or k not in kinds}

    root = shards(["a.tar"], change=without("png"))
    with pytest.raises(ValueError, match=r"one picture per sample .*sub/00002 has cls, json, txt"):
        WebDataset(root=root, train_shards="a.tar").table()
    root = shards(["b.tar"], change=without("cls"))
    with pytest.raises(ValueError, match=r"expected sub/00002\.cls beside sub/00002\.png"):
        WebDataset(root=root, train_shards="b.tar").table()
    root = shards(["c.tar"], change=lambda n, s: {**s, "left.png": s["png"]})
    with pytest.raises(ValueError, match=r"data\.picture"):
        WebDataset(root=root, train_shards="c.tar").table()
    table = WebDataset(root=root, train_shards="c.tar", picture="left.png", val=0.0, test=0.0).table()
    assert table.name(0) == "c.tar/sub/00000.left.png"
    root = shards(["d.tar"])
    with pytest.raises(ValueError, match=r"a field kind in sub/00000\.json"):
        WebDataset(root=root, train_shards="d.tar", label="json.kind").table()
    with pytest.raises(ValueError, match=r"class numbers below 2.*holds 2"):
        WebDataset(root=root, train_shards="d.tar", classes=("a", "b")).table()
    shards(["e.tar"], per_shard=3, change=lambda n, s: {**s, "__key__": ("x", "y", "x")[n]})
    with pytest.raises(ValueError, match=r"e\.tar/x\.png comes 2 times"):
        WebDataset(root=root, train_shards="e.tar").table()


def entry(name, data=b"1", **changes):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, data


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (entry("../a.cls"), "climbs out"),
        (entry("x/../../a.cls"), "climbs out"),
        (entry("/etc/a.cls"), "climbs out"),
        (entry("a.cls", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "link or device"),
        (entry("a.cls", b"", type=tarfile.LNKTYPE, linkname="a.png"), "link or device"),
        (entry("a.cls", b"", type=tarfile.CHRTYPE), "link or device"),
    ],
)
def test_members_that_are_no_plain_files_inside_are_refused(tmp_path, draw, member, message):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for info, data in (entry("a.png", png(draw())), member):
            archive.addfile(info, io.BytesIO(data))
    with pytest.raises(ValueError, match=message):
        WebDataset(root=str(tmp_path), train_shards="a.tar").table()
    assert [file.name for file in tmp_path.iterdir()] == ["a.tar"]


def test_folders_and_the_librarys_own_members_are_passed_over(tmp_path, draw):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        parts = [entry("sub", b"", type=tarfile.DIRTYPE), entry("__meta__", b"{}"), entry("README", b"no extension")]
        for key in "ab":
            parts += [entry(f"sub/{key}.png", png(draw())), entry(f"sub/{key}.cls", str(ord(key) - 97).encode())]
        for info, data in parts:
            archive.addfile(info, io.BytesIO(data))
    table = WebDataset(root=str(tmp_path), train_shards="a.tar", val=0.0, test=0.0).table()
    assert [table.name(row) for row in table.rows()] == ["a.tar/sub/a.png", "a.tar/sub/b.png"]
    assert len(table) == len(streamed(tmp_path, "a.tar"))


def test_damaged_packed_missing_and_distant_shards_are_refused(shards, tmp_path):
    root = shards(["a.tar"])
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:3000])
    (tmp_path / "none.tar").write_bytes(b"")
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as archive:
        archive.add(tmp_path / "a.tar", "a.tar")
    for pattern, message in (
        ("cut.tar", "cut.tar"),
        ("none.tar", "uncompressed tar"),
        ("packed.tar", "uncompressed tar"),
        ("missing-{0..2}.tar", r"missing-0\.tar, but there is no such file"),
        ("https://example.org/a.tar", "fetch the shards first"),
        ("../a.tar", "as files in data.root"),
        ("a.tar::a.tar", "named twice"),
    ):
        with pytest.raises(ValueError, match=message):
            WebDataset(root=root, train_shards=pattern).table()
    for options in ({"label": "png"}, {"label": "json."}, {"classes": ("a",), "classes_file": "b"}):
        with pytest.raises(ValueError, match="label|classes"):
            WebDataset(root=root, train_shards="a.tar", **options)


def test_a_changed_shard_is_indexed_again_and_one_that_is_cut_later_is_an_error(shards, tmp_path):
    root = shards(["a.tar"])
    source = WebDataset(root=root, train_shards="a.tar", val=0.0, test=0.0)
    first = source.table()
    assert source.table().file == first.file
    shards(["a.tar"], per_shard=7)
    second = source.table()
    assert len(second) == 7
    assert np.array_equal(np.asarray(decode(second.read(6))), np.asarray(decode(streamed(root, "a.tar")[6]["png"])))
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:3000])
    with pytest.raises(OSError, match="the shard ends"):
        second.read(6)


def test_batches_are_the_same_from_any_number_of_workers(shards):
    root = shards(["a-0.tar", "a-1.tar"], per_shard=6)

    def images(workers):
        source = WebDataset(root=root, train_shards="a-{0..1}.tar", num_workers=workers, seed=0, batch_size=4)
        data = ImageDataModule(source)
        data.preprocessing = Preprocessing(image_size=8)
        return [(batch.index.tolist(), batch.images.numpy().tobytes()) for batch in data.train_dataloader()]

    assert images(0) == images(2)


def test_a_missing_library_is_named(shards, monkeypatch):
    root = shards(["a.tar"])
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("webdataset"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r'pip install "vit-toolkit\[streaming\]"'):
        WebDataset(root=root, train_shards="a.tar").table()


def test_the_check_takes_shards(shards, tmp_path, capsys):
    root = shards(["a.tar"], per_shard=9)
    words = ["--data=WebDataset", f"--data.root={root}", "--data.train_shards=a.tar", f"--out={tmp_path}"]
    assert check_command(words) == 0
    assert (tmp_path / "check.html").is_file()
