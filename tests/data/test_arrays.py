"""Pictures of any number of channels, from NumPy files and multi-channel TIFF."""

import io
import struct
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from vit.data import DecodeError, Folder, ImageDataModule, Preprocessing
from vit.data.arrays import decode_channels, evaluated
from vit.data.sampler import mix, seeded


def wanted(channels, **options) -> Preprocessing:
    options = {"image_size": 8, "crop_pct": 1.0, **options}
    return Preprocessing(mean=(0.5,) * channels, std=(0.5,) * channels, **options)


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def tiff(*pages, **options) -> bytes:
    file = io.BytesIO()
    pictures = [Image.fromarray(page) for page in pages]
    pictures[0].save(file, "TIFF", save_all=True, append_images=pictures[1:], **options)
    return file.getvalue()


def values(*shape, dtype=np.uint8, most=256) -> np.ndarray:
    return np.random.default_rng(0).integers(0, most, shape).astype(dtype)


def read(data, channels, **options) -> np.ndarray:
    return decode_channels(data, wanted(channels, **options), name="x")


def test_the_axis_as_long_as_the_models_channels_is_the_channels():  # A20
    array = values(5, 12, 9)
    for layout in (array, array.transpose(1, 2, 0), np.asfortranarray(array), array.transpose(1, 2, 0).copy()):
        assert np.array_equal(read(npy(layout), 5), array)
    assert np.array_equal(read(npy(array[0]), 1), array[:1])
    assert np.array_equal(read(npy(array[:3]), 3), array[:3])
    assert np.array_equal(read(npy(values(5, 12, 5)[:, :, :4]), 5), values(5, 12, 5)[:, :, :4])


@pytest.mark.parametrize(
    ("shape", "channels", "message"),
    [
        ((5, 12, 5), 5, "may be either"),
        ((1, 12, 1), 1, "may be either"),
        ((12, 9, 4), 5, r"of shape \(5, h, w\) or \(h, w, 5\), but got \(12, 9, 4\)"),
        ((12, 5, 9), 5, "of shape"),
        ((12, 9), 5, "of shape"),
        ((1, 5, 12, 9), 5, "of shape"),
        ((5, 0, 9), 5, "of shape"),
        ((12, 9, 3), 1, r"or \(h, w\), but got"),
        ((5, 100, 100), 5, "at most 9,999 pixels"),
    ],
)
def test_another_shape_is_an_error(shape, channels, message):
    with pytest.raises(DecodeError, match=f"^x: .*{message}"):
        decode_channels(npy(values(*shape)), wanted(channels), name="x", max_pixels=9_999)


def test_deeper_values_need_a_declared_range():  # A14
    deep = values(5, 6, 7, dtype=np.uint16, most=10_000)
    with pytest.raises(DecodeError, match=r"expected uint8 values, but got uint16, from \d+ to \d+.*value_range"):
        read(npy(deep), 5)
    by_hand = np.clip(np.rint(deep / 4000 * 255), 0, 255)
    assert np.array_equal(read(npy(deep), 5, value_range=(0.0, 4000.0)), by_hand)
    real = deep.astype(np.float32) / 5000 - 1
    assert np.abs(read(npy(real), 5, value_range=(-1.0, 1.0)) - np.rint(deep / 10_000 * 255)).max() <= 1
    real[0, 0, 0] = np.nan
    with pytest.raises(DecodeError, match="nan"):
        read(npy(real), 5, value_range=(-1.0, 1.0))
    assert np.array_equal(read(npy(values(5, 6, 7)), 5, value_range=(0.0, 9.0)), values(5, 6, 7))


def test_objects_are_never_loaded_and_cut_files_are_refused():
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    with pytest.raises(DecodeError, match="never loaded"):
        read(file.getvalue(), 5)
    with pytest.raises(DecodeError, match="the file holds"):
        read(npy(values(5, 6, 7))[:-1], 5)
    for end in (8, 40):
        with pytest.raises(DecodeError, match="^x: the picture is damaged"):
            read(npy(values(5, 6, 7))[:end], 5)


def test_a_tiff_of_pages_holds_a_channel_per_page():
    pages = values(5, 12, 9)
    assert np.array_equal(read(tiff(*pages), 5), pages)
    deep = values(5, 12, 9, dtype=np.uint16, most=2000)
    with pytest.raises(DecodeError, match="value_range"):
        read(tiff(*deep), 5)
    assert np.array_equal(read(tiff(*deep), 5, value_range=(0.0, 2000.0)), np.rint(deep / 2000 * 255))


@pytest.mark.parametrize("orientation", [3, 6])
def test_pages_are_turned_upright_as_one_picture_is(orientation):  # A16
    exif = Image.Exif()
    exif[0x0112] = orientation
    pages = values(5, 12, 9)
    one = io.BytesIO()
    Image.fromarray(pages[0]).save(one, "TIFF", exif=exif)
    upright = np.asarray(Image.open(one))
    data = tiff(*pages, exif=exif)
    with Image.open(io.BytesIO(data)) as pictures:
        stored = [pictures.seek(number) or pictures.getexif().get(0x0112, 1) for number in range(5)]
    assert np.array_equal(read(data, 5)[0], upright)
    assert np.array_equal(read(data, 5, orient=False)[0], pages[0])
    assert len(stored) == 5


def test_bands_are_taken_as_stored():
    four = values(12, 9, 4)
    for format_name in ("PNG", "TIFF"):
        file = io.BytesIO()
        Image.fromarray(four).save(file, format_name)
        assert np.array_equal(read(file.getvalue(), 4), four.transpose(2, 0, 1))
    file = io.BytesIO()
    Image.fromarray(four).save(file, "PNG")
    with pytest.raises(DecodeError, match=r"expected 5 channels, but the picture has 4 \(RGBA\)"):
        read(file.getvalue(), 5)


def chunky_tiff(array) -> bytes:
    """A bare TIFF of one strip, with any number of samples per pixel."""
    height, width, samples = array.shape
    tags = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    tags += [(273, 4, 1, 8), (277, 3, 1, samples), (278, 3, 1, height), (279, 4, 1, array.nbytes), (284, 3, 1, 1)]
    directory = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    head = struct.pack("<2sHI", b"II", 42, 8 + array.nbytes)
    return head + array.tobytes() + struct.pack("<H", len(tags)) + directory + bytes(4)


def test_a_tiff_of_many_samples_is_read_by_tifffile_if_it_is_there(monkeypatch):
    array = values(12, 9, 6)

    class TiffFile:  # as tifffile declares it
        def __init__(self, file):
            self.series = [self]
            self.shape = array.shape

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def asarray(self):
            return array

    library = ModuleType("tifffile")
    library.TiffFile = TiffFile
    monkeypatch.setitem(sys.modules, "tifffile", library)
    assert np.array_equal(read(chunky_tiff(array), 6), array.transpose(2, 0, 1))
    with pytest.raises(DecodeError, match="at most 100 pixels"):
        decode_channels(chunky_tiff(array), wanted(6), name="x", max_pixels=100)
    with pytest.raises(DecodeError, match=r"\(5, h, w\)"):
        read(chunky_tiff(array), 5)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(DecodeError, match="pip install tifffile"):
        read(chunky_tiff(array), 6)


def test_each_channel_is_evaluated_as_a_grey_picture_is():
    array = values(5, 20, 33)
    p = wanted(5, crop_pct=0.9)
    images = evaluated(npy(array), p, name="x")
    for plane, image in zip(array, images, strict=True):
        small = Image.fromarray(plane).resize((13, 8), Image.Resampling.BICUBIC)
        assert p.size == (8, 8)
        file = io.BytesIO()
        Image.fromarray(plane).save(file, "PNG")
        assert torch.equal(evaluated(file.getvalue(), wanted(1, crop_pct=0.9), name="x")[0], image)
    border = Preprocessing(
        image_size=8, crop_pct=1.0, crop_mode="border", mean=(0.0, 0.2, 0.4, 0.6, 1.0), std=(1.0,) * 5
    )
    assert evaluated(npy(array), border, name="x")[:, 0, 0].tolist() == [0, 51, 102, 153, 255]
    assert small.size == (13, 8)


@pytest.fixture
def bands(tmp_path):
    """Class folders of 12 arrays of 5 channels."""
    for number in range(12):
        folder = tmp_path / "bands" / ("train" if number < 8 else "val") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{number:02d}.npy", np.random.default_rng(number).integers(0, 256, (5, 40, 30), np.uint8))
    return tmp_path / "bands"


def module(root, preprocessing, **options) -> ImageDataModule:
    data = ImageDataModule(Folder(**{"root": str(root), "num_workers": 0, "batch_size": 4, **options}))
    data.preprocessing = preprocessing
    return data


@pytest.mark.parametrize("interpolation", ["bicubic", "lanczos"])
def test_training_crops_all_channels_alike(bands, interpolation, tmp_path):
    p = wanted(5, image_size=24, interpolation=interpolation)
    data = module(bands, p, suffixes=(".npy",), seed=3)
    pictures = data.train_dataloader().dataset
    resample = Image.Resampling[interpolation.upper()]
    for row in range(4):
        with seeded(mix(3, 0, row, 0)):
            view = pictures.transform.view(30, 40)
            flipped = float(torch.rand(())) < 0.5
        array = np.load(data.table.path(row))
        planes = [np.asarray(Image.fromarray(a).crop(view.box).resize((24, 24), resample)) for a in array]
        reference = np.stack(planes).astype(int)
        reference = reference[:, :, ::-1] if flipped else reference
        difference = np.abs(pictures[row].image.numpy() - reference)
        assert difference.mean() < 0.5 if interpolation == "bicubic" else not difference.any()
    batches = [batch.images for batch in data.train_dataloader()]
    assert all(images.shape == (4, 5, 24, 24) for images in batches)
    # Large enough for crops to 24 pixels, the pictures are kept as they are.
    kept = module(bands, p, suffixes=(".npy",), seed=3, cache="disk", cache_dir=str(tmp_path / "kept"))
    for _ in range(2):
        assert all(torch.equal(a, b.images) for a, b in zip(batches, kept.train_dataloader(), strict=True))
    assert next(iter(data.val_dataloader())).images.shape == (4, 5, 24, 24)


def test_arrays_are_listed_only_where_their_suffix_is_asked_for(bands, as_users_run):
    Image.new("RGB", (9, 9)).save(bands / "train" / "a" / "x.png")
    Image.new("RGB", (9, 9)).save(bands / "train" / "b" / "x.png")
    data = module(bands, wanted(3), val=0.0, suffixes=(".npy", ".png"))
    assert len(data.table) == 14
    with pytest.raises(ValueError, match="hold no picture"):
        module(bands, wanted(5)).table  # noqa: B018
    for suffixes in ((), ("npy",), (".NPY",)):
        with pytest.raises(ValueError, match="expected suffixes such as"):
            Folder(root="x", suffixes=suffixes)


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_of_1_and_3_channels_equal_the_same_picture_as_png(tmp_path, channels):
    picture = values(40, 30, 3) if channels == 3 else values(40, 30)
    for kind in ("npy", "png"):
        for split, name in (("train", "a"), ("train", "b"), ("val", "a")):
            folder = tmp_path / kind / split / name
            folder.mkdir(parents=True)
            np.save(folder / "x.npy", picture) if kind == "npy" else Image.fromarray(picture).save(folder / "x.png")
    of = {kind: module(tmp_path / kind, wanted(channels), suffixes=(f".{kind}",), seed=0) for kind in ("npy", "png")}
    for loader in ("val_dataloader", "train_dataloader"):
        one, other = (next(iter(getattr(of[kind], loader)())).images for kind in ("npy", "png"))
        assert (one.int() - other.int()).abs()[..., 2:-2, 2:-2].max() <= 1
