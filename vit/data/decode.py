"""Bytes of any picture file -> an upright 8-bit picture, RGB or grey. Nothing is clipped, nothing guessed."""

import functools
import io
import logging
import os
import struct
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Shaped, UInt8
from numpy import ndarray
from PIL import (  # noqa: F401  (importing a plugin registers its format)
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

log = logging.getLogger("vit.data")

T = TypeVar("T")

# Pillow also opens PostScript, which runs an interpreter, and formats that no camera writes.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "HEIF")

SUFFIXES = frozenset(
    {
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".webp",
        ".gif",
        ".bmp",
        ".dib",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".avif",
        ".jp2",
    }
)

# The size at which Pillow itself refuses a file as a decompression bomb (twice its MAX_IMAGE_PIXELS).
MAX_PIXELS = 178_956_970

WHITE = (255, 255, 255)

_DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")

# The shares of a side at which Pillow's JPEG decoder can decode directly.
_DCT_SCALES = (8, 4, 2)

# Wanted pixels per side that are left for the resize, which smooths better than the decoder: with 1.25 the mean
# difference from a full decode is 0.4 grey levels on 1600 x 1200 photographs, with 1 it is 1.0.
VIEW_MARGIN = 1.25

# EXIF orientation -> what turns the stored pixels upright; 1 is upright.
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What undoes a turn, where it is another one.
_INVERSE = {6: 8, 8: 6}


class DecodeError(ValueError):
    """A picture that cannot be used; the message names its file."""

    def __init__(self, message: str) -> None:
        # A loader's worker process re-raises with its traceback in front of the message: keep the message.
        super().__init__(message.rpartition("DecodeError: ")[2].strip())


def is_picture(name: str) -> bool:
    """Whether a file's name ends like a picture's, in upper or lower case."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


class View(NamedTuple):
    """A part of an upright picture, and the size it is wanted at.

    Args:
        box: left, top, right, bottom in pixels of the upright picture.
        width: of the result, in pixels.
        height: of the result, in pixels.
    """

    box: tuple[float, float, float, float]
    width: int
    height: int


class Header(NamedTuple):
    """What is known of a picture before its pixels are decoded.

    Args:
        picture: opened, not loaded.
        orientation: how its pixels are to be turned, as the EXIF orientations 1 (not at all) to 8.
    """

    picture: Image.Image
    orientation: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright picture."""
        width, height = self.picture.size
        return (height, width) if self.orientation >= 5 else (width, height)


def decode(
    source: bytes | str | os.PathLike[str],
    *,
    name: str | None = None,
    channels: int = 3,
    background: tuple[int, int, int] = WHITE,
    value_range: tuple[float, float] | None = None,
    max_pixels: int = MAX_PIXELS,
    orient: bool = True,
) -> Image.Image:
    """Decode a picture to mode RGB (3 channels) or L (1 channel), upright, 8 bits.

    The format is told by the content, not by the name. The first frame of an animation is taken. Transparent
    pixels show the background. 16-bit pictures are divided by 257; integer and float pictures span 0 to 65535
    and 0 to 1 unless `value_range` declares otherwise.

    Args:
        source: the file's bytes or its path.
        name: what an error calls the picture; default the path.
        channels: 3 or 1.
        background: red, green, blue (0-255) behind transparent pixels.
        value_range: values of a 16-bit, 32-bit or float picture that stand for black and white; what lies
            outside becomes black or white.
        max_pixels: largest width times height; checked before the pixels are decoded.
        orient: turn by the EXIF orientation; False takes the pixels as stored.

    Raises:
        DecodeError: the file is missing, broken, too large or no picture.
    """
    data, name = encoded(source, name)

    def pixels() -> Image.Image:
        picture, orientation = read_header(data, max_pixels=max_pixels, orient=orient)
        picture.load()
        return _to_channels(_to_8_bit(turned(picture, orientation), value_range), channels, background)

    return named(pixels, name)


def encoded(source: bytes | str | os.PathLike[str], name: str | None = None) -> tuple[bytes, str]:
    """A picture's bytes and what an error calls it.

    Raises:
        DecodeError: the file cannot be read.
    """
    if isinstance(source, bytes):
        return source, name or "<bytes>"
    name = name or os.fspath(source)
    try:
        with open(source, "rb") as file:
            return file.read(), name
    except OSError as error:
        raise DecodeError(f"{name}: cannot be read ({error.strerror}).") from error


def named(work: Callable[[], T], name: str | Callable[[], str]) -> T:
    """Do work on a picture; whatever goes wrong becomes a `DecodeError` that names it."""

    def said() -> str:
        return name if isinstance(name, str) else name()

    try:
        return work()
    except DecodeError as error:
        raise DecodeError(f"{said()}: {error}") from error.__cause__
    except Exception as error:  # decoders of hostile files raise nearly anything
        raise DecodeError(f"{said()}: the picture is damaged ({error}). Replace or remove the file.") from error


def read_header(data: bytes, *, max_pixels: int = MAX_PIXELS, orient: bool = True) -> Header:
    """Open a picture without decoding its pixels.

    Raises:
        DecodeError: no picture, or one of more than `max_pixels`.
    """
    picture = _open(data)
    check_size(picture.size, max_pixels)
    orientation = _orientation(picture)
    if picture.format == "TIFF":  # Pillow turns these upright itself, whether one wants it or not
        return Header(picture, 1 if orient else _INVERSE.get(orientation, orientation))
    return Header(picture, orientation if orient else 1)


def decode_view(
    header: Header,
    view: View,
    resample: Image.Resampling,
    *,
    channels: int = 3,
    background: tuple[int, int, int] = WHITE,
    value_range: tuple[float, float] | None = None,
) -> Image.Image:
    """Decode a picture and resize a part of it, upright; a JPEG no larger than the part needs.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where the part then still has more pixels than are wanted.

    Args:
        header: of the picture.
        view: the part and the size wanted.
        resample: filter of the resize.
        channels, background, value_range: see `decode`.

    Raises:
        DecodeError: values that cannot become 8 bits, see `decode`. Damaged pixels raise what Pillow raises.
    """
    picture, orientation = header
    scale = dct_scale(header, view)
    left, top, right, bottom = (edge / scale for edge in _stored_box(view.box, header.size, orientation))
    if scale > 1:
        # A request for width // scale gets exactly that scale: Pillow takes the largest that still covers it.
        picture.draft(picture.mode, (max(1, picture.width // scale), max(1, picture.height // scale)))
    picture.load()
    picture = _to_channels(_to_8_bit(picture, value_range), channels, background)
    size = (view.height, view.width) if orientation >= 5 else (view.width, view.height)
    return turned(picture.resize(size, resample, box=(left, top, right, bottom)), orientation)


def dct_scale(header: Header, view: View) -> int:
    """The largest of 1, 2, 4, 8 by which a JPEG may shrink while the view keeps a quarter more pixels than wanted."""
    if header.picture.format not in ("JPEG", "MPO"):
        return 1
    left, top, right, bottom = view.box
    room = min((right - left) / view.width, (bottom - top) / view.height) / VIEW_MARGIN
    return next((scale for scale in _DCT_SCALES if scale <= room), 1)


def _stored_box(
    box: tuple[float, float, float, float], size: tuple[int, int], orientation: int
) -> tuple[float, float, float, float]:
    """Where a box of the upright picture lies in the stored one; size is the upright width and height."""
    left, top, right, bottom = box
    width, height = size
    return {
        1: (left, top, right, bottom),
        2: (width - right, top, width - left, bottom),
        3: (width - right, height - bottom, width - left, height - top),
        4: (left, height - bottom, right, height - top),
        5: (top, left, bottom, right),
        6: (top, width - right, bottom, width - left),
        7: (height - bottom, width - right, height - top, width - left),
        8: (height - bottom, left, height - top, right),
    }[orientation]


def _open(data: bytes) -> Image.Image:
    """`PIL.Image.open` without its process-wide pixel limit, for the formats of `FORMATS` only."""
    for format_name in FORMATS:
        if format_name not in Image.OPEN:
            continue
        factory, accept = Image.OPEN[format_name]
        if accept is not None and not _accepts(accept(data[:16])):
            continue
        try:
            return factory(io.BytesIO(data), "")
        except (SyntaxError, IndexError, TypeError, struct.error):
            continue  # accepted by its first bytes, refused by its header: another format may read it
    came = f"its first bytes are {data[:16]!r}" if data else "the file is empty"
    raise DecodeError(f"expected a picture ({', '.join(FORMATS)}), but {came}. Replace or remove the file.")


def _accepts(answer: object) -> bool:
    """A plugin answers with a text when it knows the format but lacks the library to read it."""
    return bool(answer) and not isinstance(answer, str)


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Refuse a picture of more pixels; size is width and height.

    Raises:
        DecodeError: it has more.
    """
    width, height = size
    if width * height > max_pixels:
        raise DecodeError(
            f"expected at most {max_pixels:,} pixels, but the picture has {width} x {height} = "
            f"{width * height:,}. If it is genuine, raise the data option max_pixels."
        )


def _orientation(picture: Image.Image) -> int:
    """EXIF orientation; a picture whose EXIF cannot be read is shown as stored, as viewers do."""
    try:
        orientation = picture.getexif().get(_ORIENTATION, 1)
    except Exception:  # EXIF is a small file format of its own, with all its ways to be damaged
        _say_once("some pictures have damaged EXIF data; they are taken as upright")
        return 1
    return orientation if orientation in _TURNS else 1


def turned(picture: Image.Image, orientation: int) -> Image.Image:
    """A stored picture, turned by its EXIF orientation."""
    if orientation == 1:
        return picture
    turned = picture.transpose(_TURNS[orientation])
    turned.info = picture.info
    return turned


def _to_8_bit(picture: Image.Image, value_range: tuple[float, float] | None) -> Image.Image:
    """Bring the modes with more than 8 bits per value to mode L."""
    if picture.mode not in _DEEP_MODES:
        return picture
    values = np.asarray(picture)
    if value_range is not None:
        low, high = value_range
    else:
        low, high = (0.0, 1.0) if picture.mode == "F" else (0.0, 65535.0)
        least, most = float(values.min()), float(values.max())
        if not (low <= least and most <= high):  # also true for nan
            raise DecodeError(
                f"expected values from {low:g} to {high:g} in a picture of mode {picture.mode}, but they "
                f"span {least:g} to {most:g}. Declare what is black and white with the "
                "data option value_range."
            )
    grey = Image.fromarray(to_8_bits(values, low, high))
    clear = picture.info.get("transparency")
    if clear is not None:
        grey.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey


def to_8_bits(values: Shaped[ndarray, "*s"], low: float, high: float) -> UInt8[ndarray, "*s"]:
    """Values from `low` (0) to `high` (255), rounded; what lies outside becomes black or white.

    Raises:
        DecodeError: nan or infinity.
    """
    scaled = (values.astype(np.float64) - low) * (255.0 / (high - low))
    if not np.isfinite(scaled).all():
        raise DecodeError("expected finite values, but the picture holds nan or infinity.")
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def _to_channels(picture: Image.Image, channels: int, background: tuple[int, int, int]) -> Image.Image:
    if channels not in (1, 3):
        raise ValueError(f"expected 1 or 3 channels, but got {channels}.")
    if picture.mode in _ALPHA_MODES or "transparency" in picture.info:
        rgba = picture.convert("RGBA")
        behind = Image.new("RGBA", rgba.size, (*background, 255))
        picture = Image.alpha_composite(behind, rgba).convert("RGB")
    if picture.mode == "CMYK":
        _say_once("some pictures are CMYK; they are turned into RGB without a colour profile")
    target = "RGB" if channels == 3 else "L"
    if picture.mode == target:
        return picture
    if picture.mode not in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"):
        raise DecodeError(f"pictures of mode {picture.mode} cannot be turned into {target}. Save it as RGB instead.")
    if target == "L" and picture.mode not in ("1", "L", "RGB"):
        picture = picture.convert("RGB")
    return picture.convert(target)


@functools.cache
def _say_once(line: str) -> None:
    log.warning(line)
