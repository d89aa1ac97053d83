"""What a picture's first bytes say: its format, its size, how it lies; no pixel is decoded."""

import functools
import io
import logging
import struct

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

# The size at which Pillow itself refuses a file as a decompression bomb (twice its MAX_IMAGE_PIXELS).
MAX_PIXELS = 178_956_970

# EXIF orientation -> what turns the stored pixels upright; 1 is upright.
ORIENTATION = 0x0112
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

# JPEG (ITU-T T.81, table B.1): frames of Huffman-coded blocks, and the segments that may come before one without
# saying anything of how the picture lies: not APP1, which holds EXIF and XMP.
_FRAMES = (0xC0, 0xC1, 0xC2)
_PASSED = frozenset({0xC4, 0xDB, 0xDD, 0xE0, 0xFE, *range(0xE2, 0xF0)})


class DecodeError(ValueError):
    """A picture that cannot be used; the message names its file."""

    def __init__(self, message: str) -> None:
        # A loader's worker process re-raises with its traceback in front of the message: keep the message.
        super().__init__(message.rpartition("DecodeError: ")[2].strip())


class Header:
    """What is known of a picture before its pixels are decoded.

    Args:
        data: the file's bytes.
        stored: width and height as stored.
        orientation: how its pixels are to be turned, as the EXIF orientations 1 (not at all) to 8.
        format: as Pillow names it.
        mode: of its pixels, as Pillow names it.
        picture: the picture, where it was opened to know all this.
    """

    def __init__(
        self,
        data: bytes,
        *,
        stored: tuple[int, int],
        orientation: int,
        format: str | None,
        mode: str,
        picture: Image.Image | None = None,
    ) -> None:
        self.orientation, self.format, self.mode = orientation, format, mode
        self._data, self._stored, self._picture = data, stored, picture

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright picture."""
        width, height = self._stored
        return (height, width) if self.orientation >= 5 else (width, height)

    @property
    def picture(self) -> Image.Image:
        """The picture, opened at the first call, not loaded.

        Raises:
            DecodeError: its first bytes looked better than they are.
        """
        if self._picture is None:
            self._picture = _open(self._data)
        return self._picture


def read_header(data: bytes, *, max_pixels: int = MAX_PIXELS, orient: bool = True) -> Header:
    """Look at a picture without decoding its pixels.

    Raises:
        DecodeError: no picture, or one of more than `max_pixels`.
    """
    size = _plain_jpeg(data)
    if size is not None:
        check_size(size, max_pixels)
        return Header(data, stored=size, orientation=1, format="JPEG", mode="RGB")
    picture = _open(data)
    check_size(picture.size, max_pixels)
    orientation = _orientation(picture)
    if picture.format == "TIFF":  # Pillow turns these upright itself, whether one wants it or not
        orientation = 1 if orient else _INVERSE.get(orientation, orientation)
    elif not orient:
        orientation = 1
    return Header(
        data,
        stored=picture.size,
        orientation=orientation,
        format=picture.format,
        mode=picture.mode,
        picture=picture,
    )


def _plain_jpeg(data: bytes) -> tuple[int, int] | None:
    """Width and height of a JPEG in colour of which nothing else is to be known; None for any other file.

    Pillow takes a fifth of a millisecond to open a file, a tenth of what all else costs at 500 x 375.
    """
    if data[:3] != b"\xff\xd8\xff":
        return None
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker in _FRAMES:
            bits, components = data[at + 4], data[at + 9]
            height, width = data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
            return (width, height) if (bits, components) == (8, 3) and width and height else None
        # APP2 may hold several pictures (MPF), which Pillow calls another format.
        if marker not in _PASSED or data[at + 4 : at + 8] == b"MPF\0":
            return None
        at += 2 + length
    return None


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
            f"{width * height:,}. If it is genuine, raise max_pixels (of a fit "
            "data.max_pixels, of vit predict --max_pixels)."
        )


def _orientation(picture: Image.Image) -> int:
    """EXIF orientation; a picture whose EXIF cannot be read is shown as stored, as viewers do."""
    try:
        orientation = picture.getexif().get(ORIENTATION, 1)
    except Exception:  # EXIF is a small file format of its own, with all its ways to be damaged
        say_once("some pictures have damaged EXIF data; they are taken as upright")
        return 1
    return orientation if orientation in _TURNS else 1


def turned(picture: Image.Image, orientation: int) -> Image.Image:
    """A stored picture, turned by its EXIF orientation."""
    if orientation == 1:
        return picture
    turned = picture.transpose(_TURNS[orientation])
    turned.info = picture.info
    return turned


@functools.cache
def say_once(line: str) -> None:
    """Log a warning that later pictures would only repeat."""
    log.warning(line)
