"""`vit check` finds what was planted and nothing else."""

import csv
import re
import shutil

import numpy as np
import pyarrow.csv
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from vit.api import check_command
from vit.data import Folder
from vit.data.audit import audit

SIDE = 64


def real_pictures(root, step=SIDE) -> None:
    """Parts of two photographs, sorted into two classes and three splits; saved as PNG and JPEG in turn."""
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        picture, number = Image.fromarray(pixels), 0
        for top in range(0, picture.height - SIDE, step):
            for left in range(0, picture.width - SIDE, step):
                split = ("train", "train", "val", "test")[number % 4]
                folder = root / split / name
                folder.mkdir(parents=True, exist_ok=True)
                part = picture.crop((left, top, left + SIDE, top + SIDE))
                part.save(folder / (f"{number:04d}.png" if number % 2 else f"{number:04d}.jpg"), quality=95)
                number += 1


def plant_faults(root) -> set[tuple[str, frozenset[str]]]:
    """Twenty faults; what is expected to be said of which files."""
    china, flower = root / "train" / "china", root / "train" / "flower"
    texture = [p for p in sorted(china.iterdir()) if np.asarray(Image.open(p).convert("L")).std() > 30]
    expected: set[tuple[str, frozenset[str]]] = set()

    def expect(kind, *files):
        expected.add((kind, frozenset(str(file.relative_to(root)) for file in files)))

    whole = texture[0].read_bytes()
    damaged = {"empty.jpg": b"", "page.jpg": b"<html></html>", "cut.jpg": b"", "cut.png": b""}
    jpg, png = next(p for p in texture if p.suffix == ".jpg"), next(p for p in texture if p.suffix == ".png")
    damaged |= {"cut.jpg": jpg.read_bytes()[:1200], "cut.png": png.read_bytes()[:2000]}
    for name, data in damaged.items():
        (china / name).write_bytes(data)
        expect("unreadable", china / name)
    draw = np.random.default_rng(0)

    def new(width, height):
        coarse = Image.fromarray(draw.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        return coarse.resize((width, height), Image.Resampling.BICUBIC)

    for name, form, kind in (("a.jpg", "PNG", "mislabelled"), ("b.png", "JPEG", "mislabelled")):
        new(SIDE, SIDE).save(china / name, form)
        expect(kind, china / name)
    exif = Image.Exif()
    for orientation in (3, 6):
        exif[0x0112] = orientation
        new(SIDE, SIDE).save(flower / f"turned{orientation}.jpg", exif=exif)
        expect("rotated", flower / f"turned{orientation}.jpg")
    for name, size in (("tiny", (9, 9)), ("huge", (600, 600))):
        new(*size).save(flower / f"{name}.png")
        expect(name, flower / f"{name}.png")
    Image.new("RGB", (SIDE, SIDE), (9, 9, 9)).save(flower / "blank.png")
    expect("blank", flower / "blank.png")
    copies = iter(texture[2:])
    targets = {
        "duplicate": [china, china],
        "conflict": [flower, flower],
        "leak": [root / "val" / "china", root / "test" / "china"],
    }
    for kind, folders in targets.items():
        for number, folder in enumerate(folders):
            source, copy = next(copies), folder / f"{kind}{number}.png"
            Image.open(source).convert("RGB").save(copy)
            expect(kind, source, copy)
    for kind, folder in (("duplicate", china), ("conflict", flower), ("leak", root / "val" / "china")):
        source, copy = next(copies), folder / f"again-{kind}.jpg"
        Image.open(source).convert("RGB").save(copy, quality=60)
        expect(f"{kind} (near)", source, copy)
    assert len(whole) > 0
    assert len(expected) == 20
    return expected


def found(file) -> set[tuple[str, frozenset[str]]]:
    findings: dict[str, tuple[str, set[str]]] = {}
    with open(file, encoding="utf-8", newline="") as opened:
        for line in csv.DictReader(opened):
            findings.setdefault(line["finding"], (line["kind"], set()))[1].add(line["path"])
    return {(kind, frozenset(paths)) for kind, paths in findings.values()}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_all_of_twenty_planted_faults_are_found_and_nothing_else(tmp_path, capsys):  # A10, A11, A16, A29
    root, out = tmp_path / "pictures", tmp_path / "out"
    real_pictures(root)
    assert check_command([str(root), "--out", str(out)]) == 0
    before = found(out / "check.csv")
    assert before == set()
    expected = plant_faults(root)
    manifest = tmp_path / "split.csv"
    assert check_command([str(root), f"--out={out}", "--write_split", str(manifest)]) == 1
    assert found(out / "check.csv") == expected
    assert "4 x unreadable" in capsys.readouterr().out
    page = (out / "check.html").read_text(encoding="utf-8")
    assert page.count("<li class=") == 20
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert page.count("<img") == page.count('<img alt="') == 16 + 9
    kept = set(pyarrow.csv.read_csv(manifest)["path"].to_pylist())
    leaks = [paths for kind, paths in expected if kind.startswith("leak")]
    assert all({p for p in paths if not p.startswith("train/")} == kept & paths for paths in leaks)
    assert len(kept) == len(Folder(root=str(root)).table()) - 3


def test_a_missing_file_is_unreadable_and_imbalance_is_said(tmp_path, plant):
    root = plant({"train/a": 30, "train/b": 3, "val/a": 2, "val/b": 2})
    table = Folder(root=str(root)).table()
    assert {f.kind for f in audit(table).findings} == {"imbalance"}
    shutil.rmtree(root / "val" / "b")
    result = audit(table)
    assert [f.kind for f in result.findings] == ["unreadable", "unreadable", "imbalance"]
    assert result.errors == 2


def test_other_sources_are_checked_and_wrong_words_refused(tmp_path):
    assert check_command(["--data", "Digits", "--out", str(tmp_path)]) in (0, 1)
    with pytest.raises(ValueError, match="ot"):
        check_command([str(tmp_path), "--ot", "x"])
    with pytest.raises(ValueError, match="does not exist"):
        check_command([str(tmp_path / "nowhere")])
