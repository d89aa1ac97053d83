import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from vit.data import Digits
from vit.data.decode import decode
from vit.data.digits import write_digits


def test_digits_are_scikit_learns_as_class_folders():
    table = Digits().table()
    assert table.classes == tuple("0123456789")
    assert len(table) == 1797
    reference = load_digits()
    for index in range(0, 1797, 97):
        number = int(table.name(index).split("/")[1].removesuffix(".png"))
        assert table.label(index) == reference.target[number]
        pixels = np.asarray(decode(table.path(index), channels=1))
        assert np.array_equal(np.rint(pixels / 255 * 16), reference.images[number])
    with Image.open(table.path(0)) as picture:
        assert (picture.format, picture.mode, picture.size) == ("PNG", "L", (8, 8))


def test_enough_digits_are_held_out():
    table = Digits().table()
    assert len(table.rows("test")) >= 360
    assert len(table.rows("val")) >= 170
    shares = np.bincount(table.labels("test")) / np.bincount(table.labels())
    assert shares.min() > 0.2
    assert shares.max() < 0.22


def test_digits_are_never_flipped_by_default():
    assert Digits().augment.flip == 0


def test_digits_are_written_once(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_CACHE", str(tmp_path))
    folder = write_digits()
    before = (folder / "0" / "0000.png").stat().st_mtime_ns
    assert write_digits() == folder
    assert (folder / "0" / "0000.png").stat().st_mtime_ns == before
    (folder / "0" / "0000.png").unlink()
    with pytest.raises(ValueError, match=r"1797 digits .* found 1796"):
        Digits().table()


def test_a_cut_write_leaves_no_half_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_CACHE", str(tmp_path))
    saved = Image.Image.save

    def fail_late(self, path, *args, **options):
        if path.name == "1000.png":
            raise OSError(28, "No space left on device")
        saved(self, path, *args, **options)

    monkeypatch.setattr(Image.Image, "save", fail_late)
    with pytest.raises(ValueError, match="No space left"):
        write_digits()
    assert list(tmp_path.iterdir()) == []
