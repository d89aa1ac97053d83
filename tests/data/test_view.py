"""What training decodes: only as much of a picture as its crop needs, with the pixels of a full decode."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from vit.data import Augmentation, Folder, ImageDataModule, Preprocessing
from vit.data.decode import View, dct_scale, decode, decode_view
from vit.data.header import read_header
from vit.data.jpeg import decode_tensor_view, fits_tensors
from vit.data.sampler import Key, mix, seeded

BICUBIC = Image.Resampling.BICUBIC
CROP = Augmentation(flip=0.0)


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """A real photograph with a camera's noise, 640 x 424, sides that whole blocks of 8 pixels fill."""
    return noisy(640, 424)


def noisy(width, height) -> Image.Image:
    picture = Image.fromarray(load_sample_image("china.jpg")[:424]).resize((width, height), BICUBIC)
    pixels = np.asarray(picture) + np.random.default_rng(0).normal(0, 4, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def jpeg(picture, orientation=1, **options) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=90, exif=exif, **options)
    return stream.getvalue()


def by_hand(data, view, **options) -> np.ndarray:
    """The whole picture, upright, then the crop, as torchvision takes it."""
    whole = decode(data, **options).crop(view.box)
    return np.asarray(whole.resize((view.width, view.height), BICUBIC)).astype(float)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("side", "scale"), [(20, 8), (48, 4), (110, 2), (150, 1)])
def test_a_view_is_that_of_the_picture_shrunk_by_the_scale_in_every_orientation(photograph, orientation, side, scale):
    data = jpeg(photograph, orientation)  # A16
    header, view = read_header(data), View((30, 50, 330, 390), width=side, height=side)
    assert dct_scale(header, view) == scale
    small = decode(data).reduce(scale)
    reference = small.resize((side, side), BICUBIC, box=tuple(edge / scale for edge in view.box))
    result = np.asarray(decode_view(header, view, BICUBIC)).astype(float)
    assert header.picture.width == -(-640 // scale)
    assert np.abs(result - np.asarray(reference)).mean() < 1.5


def test_the_mean_difference_of_training_pictures_is_below_one_grey_level(tmp_path):
    for number, size in enumerate([(500, 375), (1600, 1200), (3000, 2250)]):
        for name in "ab":
            (tmp_path / "train" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "train" / name / f"{number}.jpg").write_bytes(jpeg(noisy(*size)))
    data = ImageDataModule(Folder(root=str(tmp_path), num_workers=0, val=0.0, augment=CROP, seed=0))
    data.preprocessing = Preprocessing(image_size=224)
    pictures = data.train_dataloader().dataset
    differences = []
    for position in range(len(pictures)):
        sample = pictures[Key(0, 0, position)]
        file = pictures.table.path(sample.row)
        with seeded(mix(0, 0, sample.row, 0)):
            view = pictures.transform.view(*read_header(Path(file).read_bytes()).size)
        reference = by_hand(file, view)
        differences.append(np.abs(sample.image.permute(1, 2, 0).numpy() - reference).mean())
    assert np.mean(differences) < 1


def test_torchvisions_way_equals_pillows(photograph):
    view = View((30, 50, 330, 390), width=224, height=200)
    data = jpeg(photograph)
    assert fits_tensors(read_header(data), view, BICUBIC, 3)
    tensor = decode_tensor_view(data, view, BICUBIC)
    assert np.abs(tensor.permute(1, 2, 0).numpy() - by_hand(data, view)).mean() < 0.1
    assert decode_tensor_view(data[: len(data) // 2], view, BICUBIC) is None


@pytest.mark.parametrize("why", ["grey", "cmyk", "turned", "one channel", "lanczos", "large"])
def test_what_torchvision_reads_otherwise_goes_pillows_way(photograph, why):
    picture = photograph.convert({"grey": "L", "cmyk": "CMYK"}.get(why, "RGB"))
    data = jpeg(picture, 6 if why == "turned" else 1)
    side = 100 if why == "large" else 224
    resample = Image.Resampling.LANCZOS if why == "lanczos" else BICUBIC
    channels = 1 if why == "one channel" else 3
    view = View((0, 0, 300, 300), width=side, height=side)
    header = read_header(data)
    assert not fits_tensors(header, view, resample, channels)
    result = np.asarray(decode_view(header, view, resample, channels=channels))
    reference = np.asarray(decode(data, channels=channels).crop(view.box).resize((side, side), resample))
    assert result.shape == reference.shape
    assert np.abs(result[1:-1, 1:-1].astype(float) - reference[1:-1, 1:-1]).mean() < (3 if why == "large" else 1)


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (15, 16), (17, 33), (8, 641)])
def test_no_size_is_too_small_or_odd_for_a_view(photograph, size):
    data = jpeg(photograph.resize(size))
    for side in (1, 2, 5):
        view = View((0, 0, *size), width=side, height=side)
        assert decode_view(read_header(data), view, BICUBIC).size == (side, side)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_name", ["PNG", "TIFF", "JPEG"])
def test_turning_upright_can_be_switched_off(draw, orientation, format_name):  # A16
    picture, exif, stream = draw(12, 8), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    picture.save(stream, format_name, exif=exif)
    stored = decode(stream.getvalue(), orient=False)
    assert stored.size == (12, 8)
    if format_name != "JPEG":
        assert np.array_equal(np.asarray(stored), np.asarray(picture))
    view = View((2, 1, 8, 7), width=6, height=6)
    part = decode_view(read_header(stream.getvalue(), orient=False), view, BICUBIC)
    assert np.array_equal(np.asarray(part), np.asarray(stored.crop(view.box)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_view_at_full_size_is_the_crop_of_the_upright_picture(draw, orientation):
    exif, stream = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    draw(12, 9).save(stream, "PNG", exif=exif)
    view = View((1, 2, 6, 8), width=5, height=6)
    part = decode_view(read_header(stream.getvalue()), view, BICUBIC)
    assert np.array_equal(np.asarray(part), np.asarray(decode(stream.getvalue()).crop(view.box)))


def test_a_cut_jpeg_is_named_in_training(photograph, tmp_path):  # A10
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "cut.jpg").write_bytes(jpeg(photograph)[:9000])
    data = ImageDataModule(Folder(root=str(tmp_path), num_workers=0, val=0.0))
    for image_size in (32, 224):
        data.preprocessing = Preprocessing(image_size=image_size)
        with pytest.raises(ValueError, match=r"cut\.jpg: the picture is damaged"):
            list(data.train_dataloader())
