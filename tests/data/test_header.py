"""The short way to a JPEG's size says what Pillow says, or leaves the file to it."""

import io

import numpy as np
import pytest
from PIL import Image

from vit.data import header as header_module
from vit.data.decode import View, decode, decode_view
from vit.data.header import DecodeError, read_header


@pytest.fixture
def picture() -> Image.Image:
    """Of a size that tells width from height, with values of two bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (261, 517, 3), np.uint8)
    return Image.fromarray(pixels)


def jpeg(picture, **options) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", **options)
    return stream.getvalue()


def upright(orientation) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
# Each with whether its first bytes tell enough without Pillow.
KINDS = {
    "plain": ({}, True),
    "progressive": ({"progressive": True}, True),
    "not subsampled": ({"subsampling": 0}, True),
    "as RGB": ({"keep_rgb": True}, True),
    "with a comment": ({"comment": b"\xff\xc0 not a frame" * 50}, True),
    "with a profile": ({"icc_profile": bytes(70_000)}, True),
    "with restarts": ({"restart_marker_rows": 1}, True),
    "upright by EXIF": ({"exif": upright(1)}, False),
    "turned by EXIF": ({"exif": upright(6)}, False),
    "turned by XMP": ({"xmp": XMP}, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_size_and_place_are_those_that_pillow_tells(picture, kind, monkeypatch):
    options, short = KINDS[kind]
    data = jpeg(picture, **options)
    quick = read_header(data)
    with monkeypatch.context() as patch:
        patch.setattr(header_module, "_plain_jpeg", lambda data: None)
        full = read_header(data)
    facts = ("size", "orientation", "format", "mode")
    assert [getattr(quick, name) for name in facts] == [getattr(full, name) for name in facts]
    assert (quick._picture is None) == short
    view = View((3, 5, 200, 210), 50, 60)
    same = [np.asarray(decode_view(header, view, Image.Resampling.BICUBIC)) for header in (quick, full)]
    assert np.array_equal(*same)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_modes_are_left_to_pillow(picture, mode):
    header = read_header(jpeg(picture.convert(mode)))
    assert (header.mode, header.size) == (mode, picture.size)


def test_several_pictures_in_one_file_keep_their_own_format(picture):
    stream = io.BytesIO()
    picture.save(stream, "MPO", save_all=True, append_images=[picture])
    assert read_header(stream.getvalue()).format == "MPO"


def test_a_size_that_is_too_large_is_refused_before_anything_is_opened(picture, monkeypatch):
    monkeypatch.setattr(header_module, "_open", lambda data: pytest.fail("opened"))
    with pytest.raises(DecodeError, match="at most 1,000 pixels, but the picture has 517 x 261"):
        read_header(jpeg(picture), max_pixels=1000)


@pytest.mark.parametrize("length", [0, 2, 3, 4, 10, 20, 21, 100, 160, 170, 200, 600])
def test_whatever_is_cut_off_is_a_damaged_picture_not_a_crash(picture, length):
    with pytest.raises(DecodeError, match=r"cut\.jpg: "):
        decode(jpeg(picture)[:length], name="cut.jpg")


def test_no_byte_that_is_wrong_in_the_header_changes_what_is_read(picture, monkeypatch):
    data = bytearray(jpeg(picture))
    random = np.random.default_rng(1)
    plain = 0
    for _ in range(600):
        at, value = int(random.integers(2, 620)), int(random.integers(256))
        broken = bytes(data[:at]) + bytes([value]) + bytes(data[at + 1 :])
        size = header_module._plain_jpeg(broken)
        if size is None:
            continue
        try:
            opened = header_module._open(broken)
        except DecodeError:
            continue  # decoding will say so
        plain += 1
        assert (opened.format, opened.mode, opened.size) == ("JPEG", "RGB", size)
    assert plain > 300
