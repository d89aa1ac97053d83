"""Bytes of any picture file -> an upright 8-bit picture, RGB or grey. Nothing is clipped, nothing guessed."""

import os
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Shaped, UInt8
from numpy import ndarray
from PIL import Image

from vit.data.header import MAX_PIXELS, DecodeError, Header, read_header, say_once, turned

T = TypeVar("T")

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

WHITE = (255, 255, 255)

_DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")

# The shares of a side at which Pillow's JPEG decoder can decode directly.
_DCT_SCALES = (8, 4, 2)

# Wanted pixels per side that are left for the resize, which smooths better than the decoder: with 1.25 the mean
# difference from a full decode is 0.4 grey levels on 1600 x 1200 photographs, with 1 it is 1.0.
VIEW_MARGIN = 1.25


def is_picture(name: str, suffixes: Collection[str] = SUFFIXES) -> bool:
    """Whether a file's name ends like a picture's, in upper or lower case.

    Args:
        name: of the file.
        suffixes: endings of pictures, in lower case.
    """
    return os.path.splitext(name)[1].lower() in suffixes


def check_suffixes(suffixes: Collection[str]) -> None:
    """Refuse endings that no file name would be compared with.

    Raises:
        ValueError: none, or one without its dot or with capitals.
    """
    if not suffixes or any(suffix[:1] != "." or suffix != suffix.lower() for suffix in suffixes):
        raise ValueError(f"expected suffixes such as .npy, in lower case, but got {', '.join(suffixes) or 'none'}.")


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
        header = read_header(data, max_pixels=max_pixels, orient=orient)
        header.picture.load()
        upright = turned(header.picture, header.orientation)
        return _to_channels(_to_8_bit(upright, value_range), channels, background)

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
    picture, orientation = header.picture, header.orientation
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
    if header.format not in ("JPEG", "MPO"):
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
        say_once("some pictures are CMYK; they are turned into RGB without a colour profile")
    target = "RGB" if channels == 3 else "L"
    if picture.mode == target:
        return picture
    if picture.mode not in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"):
        raise DecodeError(f"pictures of mode {picture.mode} cannot be turned into {target}. Save it as RGB instead.")
    if target == "L" and picture.mode not in ("1", "L", "RGB"):
        picture = picture.convert("RGB")
    return picture.convert(target)
