"""One picture decoded once, as training does, and what that tells about it."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray
from PIL import Image

from vit.data.arrays import decode_channels, is_array, is_numpy, is_tiff, stored_shape
from vit.data.decode import View, decode_view, named
from vit.data.header import MAX_PIXELS, ORIENTATION, DecodeError, read_header
from vit.data.table import DataTable
from vit.data.transforms import Preprocessing


class Facts(NamedTuple):
    """What decoding told about a row.

    Args:
        error: why it cannot be used, or None; then the rest is empty.
        format: of the content, such as JPEG.
        mode: Pillow's, as stored; of arrays the number of channels.
        channels: as stored.
        size: width and height of the decoded picture.
        orientation: EXIF orientation.
        frames: pictures in the file.
        digest: of the decoded pixels.
        thumbnail: (32, 32) grey.
    """

    error: str | None
    format: str = ""
    mode: str = ""
    channels: int = 0
    size: tuple[int, int] = (0, 0)
    orientation: int = 1
    frames: int = 1
    digest: bytes = b""
    thumbnail: UInt8[ndarray, "32 32"] | None = None

    @property
    def array(self) -> bool:
        """Whether it was read as an array of any number of channels, not as a picture that becomes RGB or grey."""
        return self.mode.endswith("channels")


class Look(NamedTuple):
    """A decoded picture, or the channels of an array, and what its file says of it; see `Facts`."""

    pixels: Image.Image | UInt8[ndarray, "c h w"]
    format: str
    mode: str
    channels: int
    orientation: int = 1
    frames: int = 1

    @property
    def picture(self) -> Image.Image:
        """The picture as it is; of an array the mean of its channels, in grey."""
        pixels = self.pixels
        return Image.fromarray(pixels.mean(0).astype(np.uint8)) if isinstance(pixels, ndarray) else pixels


def inspect(table: DataTable, row: int, preprocessing: Preprocessing, max_pixels: int = MAX_PIXELS) -> Facts:
    """Decode a row fully, as training does, and measure it."""
    name = table.name(row)
    try:
        seen = look(table.read(row), preprocessing, name=name, max_pixels=max_pixels)
    except OSError as error:
        return Facts(f"cannot be read ({error.strerror})")
    except DecodeError as error:
        return Facts(str(error).removeprefix(f"{name}: "))
    picture = seen.picture
    digest = hashlib.blake2b(repr(picture.size).encode() + seen.pixels.tobytes(), digest_size=16).digest()
    # Two steps, so that a picture of any size costs little.
    small = np.asarray(picture.resize((32, 32), Image.Resampling.BOX, reducing_gap=2.0).convert("L"))
    return Facts(
        None, seen.format, seen.mode, seen.channels, picture.size, seen.orientation, seen.frames, digest, small
    )


def look(data: bytes, preprocessing: Preprocessing, *, name: str, max_pixels: int) -> Look:
    """A picture as training decodes it for a model of 3 channels; arrays with the channels that they have.

    Arrays are NumPy files, and TIFFs that are no picture for Pillow.

    Raises:
        DecodeError: it cannot be used.
    """
    p, channels = preprocessing, 0
    if is_array(data, p.channels):
        channels = _channels(data)
    else:
        try:
            return named(lambda: _picture(data, p, max_pixels), name)
        except DecodeError as error:
            if not is_tiff(data):
                raise
            if find_spec("tifffile") is None:
                raise DecodeError(f"{error} If it has more than 4 channels: pip install tifffile") from error
            channels = _channels(data)
            if channels in (1, 3):
                raise
    planes = decode_channels(data, p.with_channels(channels), name=name, max_pixels=max_pixels)
    return Look(planes, "NumPy" if is_numpy(data) else "TIFF", f"{channels} channels", channels)


def _picture(data: bytes, p: Preprocessing, max_pixels: int) -> Look:
    header = read_header(data, max_pixels=max_pixels, orient=p.orient)
    stored, (width, height) = header.picture, header.size
    # Before loading, which turns a TIFF upright.
    kind, mode, channels = stored.format or "", stored.mode, len(stored.getbands())
    orientation = _or_one(lambda: stored.getexif().get(ORIENTATION, 1))
    pixels = decode_view(
        header,
        View((0, 0, width, height), width, height),
        Image.Resampling.NEAREST,
        channels=p.channels,
        background=p.background,
        value_range=p.value_range,
    )
    if kind == "MPO":  # a JPEG with previews behind it
        return Look(pixels, "JPEG", mode, channels, orientation)
    return Look(pixels, kind, mode, channels, orientation, _or_one(lambda: getattr(stored, "n_frames", 1)))


def _channels(data: bytes) -> int:
    """Channels of an array, where there are fewer of them than pixels per side; 1 of what cannot be read."""
    shape: tuple[int, ...] = ()
    with suppress(Exception):  # whatever is wrong with it, decoding says better
        shape = stored_shape(data)
    return min(shape[0], shape[-1]) if len(shape) == 3 else 1


def _or_one(count: Callable[[], Any]) -> int:
    """A number that a file tells beside its picture; 1 where that part is damaged, as decoding does not need it."""
    try:
        return int(count())
    except Exception:  # decoders of hostile files raise nearly anything
        return 1
