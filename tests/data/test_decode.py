import contextlib
import io
import pickle

import numpy as np
import pytest
from PIL import Image, ImageOps

from vit.data.decode import decode, is_picture
from vit.data.header import FORMATS, DecodeError, say_once


def saved(picture, format_name, **options) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, format_name, **options)
    return stream.getvalue()


def values(picture) -> np.ndarray:
    return np.asarray(picture)


# A8
@pytest.mark.parametrize("name", ["x.JPG", "y.Png", "z.JPEG", "a.tif", "b.WebP", "c.bmp"])
def test_suffixes_of_pictures_count_in_any_case(name):
    assert is_picture(name)


@pytest.mark.parametrize("name", ["Thumbs.db", "notes.txt", "jpg", "a.jpg.txt", "x.eps", "x.svg"])
def test_other_files_are_no_pictures(name):
    assert not is_picture(name)


# A16
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_name", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_every_exif_orientation_is_turned_upright(draw, orientation, format_name):
    upright = draw(48, 32) if format_name != "JPEG" else Image.linear_gradient("L").resize((48, 32)).convert("RGB")
    undo = {
        1: lambda p: p,
        2: ImageOps.mirror,
        3: lambda p: p.rotate(180),
        4: ImageOps.flip,
        5: lambda p: p.transpose(Image.Transpose.TRANSPOSE),
        6: lambda p: p.rotate(90, expand=True),
        7: lambda p: p.transpose(Image.Transpose.TRANSVERSE),
        8: lambda p: p.rotate(-90, expand=True),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format_name == "WEBP" else {}
    data = saved(undo[orientation](upright), format_name, exif=exif, **options)
    difference = np.abs(values(decode(data)).astype(int) - values(upright))
    assert difference.max() <= (3 if format_name == "JPEG" else 0)


# A17
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("background", [(255, 255, 255), (10, 20, 30)])
def test_transparent_pixels_show_the_background(mode, background):
    picture = Image.new("RGBA", (6, 4), (255, 0, 0, 0))
    picture.paste((0, 0, 255, 255), (0, 0, 3, 4))
    if mode == "P":
        picture = Image.new("P", (6, 4), 1)
        picture.putpalette([0, 0, 255, 255, 0, 0])
        picture.paste(0, (0, 0, 3, 4))
        data = saved(picture, "PNG", transparency=1)
    else:
        data = saved(picture.convert(mode), "PNG")
    result = values(decode(data, background=background))
    assert (result[:, 3:] == background).all()
    assert len(np.unique(result[:, :3].reshape(-1, 3), axis=0)) == 1
    assert not (result[:, :3] == background).all()


def test_half_transparent_pixels_mix_with_the_background():
    data = saved(Image.new("RGBA", (2, 2), (200, 100, 0, 128)), "PNG")
    expected = np.array([200, 100, 0]) * 128 / 255 + 255 * 127 / 255
    assert np.abs(values(decode(data))[0, 0] - expected).max() <= 1


def test_a_colour_declared_transparent_shows_the_background():
    picture = Image.new("RGB", (2, 1), (1, 2, 3))
    picture.putpixel((1, 0), (9, 9, 9))
    result = values(decode(saved(picture, "PNG", transparency=(1, 2, 3))))
    assert result.tolist() == [[[255, 255, 255], [9, 9, 9]]]


# A19
def test_cmyk_becomes_rgb_and_is_said_once(caplog):

    say_once.cache_clear()
    data = saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100)
    with caplog.at_level("WARNING", "vit.data"):
        for _ in range(2):
            result = values(decode(data))
            assert np.abs(result.astype(int) - [255, 0, 0]).max() <= 4
    assert len(caplog.records) == 1


# A14
@pytest.mark.parametrize("format_name", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(format_name):
    ramp = np.linspace(0, 65535, 4096).round().astype(np.uint16).reshape(64, 64)
    result = values(decode(saved(Image.fromarray(ramp), format_name)))[..., 0]
    assert np.array_equal(result, np.rint(ramp / 257).astype(np.uint8))
    assert (np.diff(result.ravel().astype(int)) >= 0).all()
    assert (result.min(), result.max()) == (0, 255)


def test_big_endian_sixteen_bits_are_read_in_their_order(tmp_path):
    ramp = np.linspace(0, 65535, 256).round().astype(">u2").reshape(16, 16)
    data = b"P5 16 16 65535\n" + ramp.tobytes()
    assert np.array_equal(values(decode(data, channels=1)), np.rint(ramp / 257.0).astype(np.uint8))


def test_float_pictures_span_zero_to_one():
    ramp = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    assert np.array_equal(values(decode(saved(Image.fromarray(ramp), "TIFF"), channels=1)).ravel(), range(256))


def test_values_outside_of_the_range_are_refused_until_it_is_declared():
    twelve_bits = np.linspace(0, 4095, 256, dtype=np.float32).reshape(16, 16)
    data = saved(Image.fromarray(twelve_bits), "TIFF")
    with pytest.raises(DecodeError, match=r"scan\.tif: .*0 to 1 .*4095.*value_range"):
        decode(data, name="scan.tif")
    assert np.array_equal(values(decode(data, channels=1, value_range=(0.0, 4095.0))).ravel(), range(256))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("value_range", [None, (0.0, 1.0)])
def test_float_pictures_with_nan_are_refused(bad, value_range):
    data = saved(Image.fromarray(np.full((4, 4), bad, dtype=np.float32)), "TIFF")
    with pytest.raises(DecodeError):
        decode(data, value_range=value_range)


# A20
@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_channels_are_as_the_model_wants_them(draw, mode):
    picture = draw(mode=mode)
    data = saved(picture, "PNG")
    assert np.array_equal(values(decode(data, channels=3)), values(picture.convert("RGB")))
    grey = picture.convert("RGB").convert("L") if mode in ("P", "RGB") else picture.convert("L")
    assert np.array_equal(values(decode(data, channels=1)), values(grey))


def test_a_deep_grey_declared_transparent_shows_the_background():
    picture = Image.fromarray(np.array([[3000, 65535], [3001, 0]], np.uint16))
    result = values(decode(saved(picture, "PNG", transparency=3000), channels=1, background=(9, 9, 9)))
    assert result.tolist() == [[9, 255], [12, 0]]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP"])
def test_damaged_exif_does_not_cost_the_picture(draw, caplog, format_name):
    say_once.cache_clear()
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "Maker"
    picture = draw(12, 8)
    plain = values(decode(saved(picture, format_name, lossless=True)))
    with caplog.at_level("WARNING", "vit.data"):
        for length in (8, 12, 20, 30):
            damaged = exif.tobytes()[:length]
            assert np.array_equal(values(decode(saved(picture, format_name, lossless=True, exif=damaged))), plain)
    assert len(caplog.records) <= 1


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    for format_name in ("GIF", "WEBP", "PNG"):
        data = saved(frames[0], format_name, save_all=True, append_images=frames[1:])
        assert np.abs(values(decode(data)).astype(int) - [255, 0, 0]).max() <= 2


@pytest.mark.parametrize("format_name", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "GIF"])
def test_pixels_equal_pillows(draw, format_name):
    data = saved(draw(31, 17), format_name, **({"lossless": True} if format_name == "WEBP" else {}))
    assert np.array_equal(values(decode(data)), values(Image.open(io.BytesIO(data)).convert("RGB")))


# A13
def test_the_pixel_limit_is_an_option_and_pillows_own_stays(tmp_path):
    before = Image.MAX_IMAGE_PIXELS
    data = saved(Image.new("1", (20000, 20000)), "PNG")
    with pytest.raises(DecodeError, match=r"scan\.png: .*400,000,000.*max_pixels"):
        decode(data, name="scan.png")
    assert decode(data, channels=1, max_pixels=400_000_000).size == (20000, 20000)
    with pytest.raises(DecodeError, match="max_pixels"):
        decode(data, max_pixels=399_999_999)
    assert before == Image.MAX_IMAGE_PIXELS


# A10, A11
def test_a_damaged_file_is_named(tmp_path, draw):
    whole = saved(draw(64, 64), "JPEG")
    broken = {
        "cut.jpg": whole[: len(whole) // 2],
        "empty.jpg": b"",
        "page.jpg": b"<html><body>not found</body></html>",
        "cut.png": saved(draw(64, 64), "PNG")[:500],
        "cut.tif": saved(draw(64, 64), "TIFF")[:500],
    }
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DecodeError) as caught:
            decode(tmp_path / name)
        assert str(caught.value).startswith(str(tmp_path / name))
    with pytest.raises(DecodeError, match=r"missing\.png: cannot be read"):
        decode(tmp_path / "missing.png")


# A11
def test_the_content_tells_the_format_not_the_name(tmp_path, draw):
    file = tmp_path / "z.jpg"
    file.write_bytes(saved(draw(), "PNG"))
    assert np.array_equal(values(decode(file)), values(draw()))


def test_formats_beyond_pictures_are_refused():
    assert "EPS" not in FORMATS
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    with pytest.raises(DecodeError, match="expected a picture"):
        decode(script)


def test_an_error_from_a_worker_keeps_its_message_alone():
    error = DecodeError(
        "Caught DecodeError in DataLoader worker process 0.\nOriginal Traceback (most recent "
        "call last):\n  File x\nvit.data.header.DecodeError: a.png: is broken\n"
    )
    assert str(error) == "a.png: is broken"
    assert str(pickle.loads(pickle.dumps(error))) == "a.png: is broken"


@pytest.mark.parametrize("seed", range(4))
def test_mutated_files_give_a_picture_or_a_decode_error(draw, seed):
    random = np.random.default_rng(seed)
    exif = Image.Exif()
    exif[0x0112] = 6
    for format_name in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        data = np.frombuffer(saved(draw(16, 16), format_name, exif=exif), np.uint8)
        for _ in range(20):
            mutant = data.copy()
            mutant[random.integers(0, len(data), 3)] = random.integers(0, 256, 3)
            with contextlib.suppress(DecodeError):
                assert decode(mutant.tobytes(), max_pixels=1_000_000).mode == "RGB"
