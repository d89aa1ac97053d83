"""Bytes of any picture file -> an upright 8-bit picture, RGB or grey. Nothing is clipped, nothing guessed."""

import functools
import io
import logging
import os
import struct

import numpy as np
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


class DecodeError(ValueError):
    """A picture that cannot be used; the message names its file."""

    def __init__(self, message: str) -> None:
        # A loader's worker process re-raises with its traceback in front of the message: keep the message.
        super().__init__(message.rpartition("DecodeError: ")[2].strip())


def is_picture(name: str) -> bool:
    """Whether a file's name ends like a picture's, in upper or lower case."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def decode(
    source: bytes | str | os.PathLike[str],
    *,
    name: str | None = None,
    channels: int = 3,
    background: tuple[int, int, int] = WHITE,
    value_range: tuple[float, float] | None = None,
    max_pixels: int = MAX_PIXELS,
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

    Raises:
        DecodeError: the file is missing, broken, too large or no picture.
    """
    if isinstance(source, bytes):
        data, name = source, name or "<bytes>"
    else:
        name = name or os.fspath(source)
        try:
            with open(source, "rb") as file:
                data = file.read()
        except OSError as error:
            raise DecodeError(f"{name}: cannot be read ({error.strerror}).") from error
    try:
        picture = _open(data)
        _check_size(picture, max_pixels)
        picture.load()
        picture = _to_8_bit(_upright(picture), value_range)
        return _to_channels(picture, channels, background)
    except DecodeError as error:
        raise DecodeError(f"{name}: {error}") from error.__cause__
    except Exception as error:  # decoders of hostile files raise nearly anything
        raise DecodeError(f"{name}: the picture is damaged ({error}). Replace or remove the file.") from error


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


def _check_size(picture: Image.Image, max_pixels: int) -> None:
    width, height = picture.size
    if width * height > max_pixels:
        raise DecodeError(
            f"expected at most {max_pixels:,} pixels, but the picture has {width} x {height} = "
            f"{width * height:,}. If it is genuine, raise the data option max_pixels."
        )


def _upright(picture: Image.Image) -> Image.Image:
    """Turn by the EXIF orientation; a picture whose EXIF cannot be read is shown as stored, as viewers do."""
    try:
        turn = _TURNS.get(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # EXIF is a small file format of its own, with all its ways to be damaged
        _say_once("some pictures have damaged EXIF data; they are taken as upright")
        return picture
    if turn is None:
        return picture
    turned = picture.transpose(turn)
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
    scaled = (values.astype(np.float64) - low) * (255.0 / (high - low))
    if not np.isfinite(scaled).all():
        raise DecodeError("expected finite values, but the picture holds nan or infinity.")
    grey = Image.fromarray(np.clip(np.rint(scaled), 0, 255).astype(np.uint8))
    clear = picture.info.get("transparency")
    if clear is not None:
        grey.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey


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
