"""Pictures of any number of channels: NumPy files and multi-channel TIFF -> 8 bits per channel.

How many channels a picture has is never guessed; the model's preprocessing says it (C below), and each picture must
agree.
"""

import io
import math
import os
import sys
from dataclasses import replace

import numpy as np
from jaxtyping import Shaped, UInt8
from numpy import ndarray
from PIL import Image, ImageSequence
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor, cat

from vit.data.decode import decode, encoded, named, to_8_bits
from vit.data.header import MAX_PIXELS, DecodeError, Header, check_size, read_header, turned
from vit.data.transforms import Preprocessing, evaluation_transform

_NUMPY = b"\x93NUMPY"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_SAMPLES_PER_PIXEL = 277


def is_array(data: bytes, channels: int) -> bool:
    """Whether `decode_channels` reads this picture, and not `decode`: a NumPy file, or other than 1 or 3 channels."""
    return channels not in (1, 3) or is_numpy(data)


def decode_channels(
    data: bytes, preprocessing: Preprocessing, *, name: str, max_pixels: int = MAX_PIXELS
) -> UInt8[ndarray, "c h w"]:
    """Decode a picture of C channels, each 8 bits.

    A NumPy file (.npy) holds (C, h, w) or (h, w, C): the one of its first and last axes that is C long is the
    channels', and an array of which both are is refused; with one channel it may also hold (h, w). It is shown as
    stored: EXIF has no say. A TIFF holds one channel per page, or one page of C samples per pixel; beyond 4 samples it
    is read by the library tifffile, if it is installed, under the rule for NumPy files. Any other picture must have
    exactly C bands, such as RGBA for C = 4, which are taken as stored.

    Values of other types than uint8 become 8 bits by the preprocessing's value_range, which must then be declared.

    Args:
        data: the file's bytes.
        preprocessing: says C, value range and whether pictures are turned upright.
        name: what an error calls the picture.
        max_pixels: largest height times width.

    Raises:
        DecodeError: another shape, values that need a range, a damaged or too large picture.
    """

    def pixels() -> UInt8[ndarray, "c h w"]:
        if is_numpy(data):
            return _scaled(_channels_first(_from_numpy(data), preprocessing.channels, max_pixels), preprocessing)
        return _from_picture(data, preprocessing, max_pixels)

    return named(pixels, name)


def evaluated(
    source: bytes | str | os.PathLike[str],
    preprocessing: Preprocessing,
    *,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
) -> UInt8[Tensor, "c h w"]:
    """A picture of any number of channels, from its file to the tensor that is evaluated.

    Args:
        source: the file's bytes or its path.
        preprocessing: of the model.
        name: what an error calls the picture; default the path.
        max_pixels: largest height times width.

    Raises:
        DecodeError: the picture cannot be used.
    """
    p = preprocessing
    data, name = encoded(source, name)
    if not is_array(data, p.channels):
        picture = decode(
            data,
            name=name,
            channels=p.channels,
            background=p.background,
            value_range=p.value_range,
            max_pixels=max_pixels,
            orient=p.orient,
        )
        return evaluation_transform(p)(picture)
    planes = decode_channels(data, p, name=name, max_pixels=max_pixels)
    # One by one: Pillow has no pictures of n channels, and its resize treats channels apart anyway.
    each = (replace(p, mean=(mean,), std=(std,)) for mean, std in zip(p.mean, p.std, strict=True))
    return cat([evaluation_transform(one)(Image.fromarray(plane)) for one, plane in zip(each, planes, strict=True)])


def stored_shape(data: bytes) -> tuple[int, ...]:
    """The shape of a NumPy file, or of a TIFF that tifffile reads, without its pixels.

    Raises:
        Exception: nearly anything, where the file is damaged.
    """
    if is_numpy(data):
        return _numpy_header(io.BytesIO(data))[0]
    import tifffile

    with tifffile.TiffFile(io.BytesIO(data)) as file:
        return file.series[0].shape


def is_numpy(data: bytes) -> bool:
    """Whether these are the bytes of a NumPy file."""
    return data.startswith(_NUMPY)


def is_tiff(data: bytes) -> bool:
    """Whether these are the bytes of a TIFF."""
    return data.startswith(_TIFF)


def _numpy_header(file: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in read:
        raise DecodeError(f"expected a NumPy file of version 1.0 or 2.0, but it is {version}. Save it with numpy.save.")
    return read[version](file)


def _from_numpy(data: bytes) -> Shaped[ndarray, "..."]:
    file = io.BytesIO(data)
    shape, fortran, dtype = _numpy_header(file)
    if dtype.hasobject:
        raise DecodeError("expected numbers, but the array holds Python objects, which are never loaded.")
    expected, held = math.prod(shape) * dtype.itemsize, len(data) - file.tell()
    if expected != held:
        raise DecodeError(f"expected {expected:,} bytes of pixels, but the file holds {held:,}. Save it again.")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def _channels_first(array: Shaped[ndarray, "..."], channels: int, max_pixels: int) -> Shaped[ndarray, "c h w"]:
    """The array as (c, h, w), by the rule of `decode_channels`."""
    if channels == 1 and array.ndim == 2:
        array = array[None]
    wanted = f"({channels}, h, w) or (h, w, {channels})" + (" or (h, w)" if channels == 1 else "")
    first, last = (array.ndim == 3 and array.shape[axis] == channels for axis in (0, -1))
    if first and last and array.shape != (1, 1, 1):
        raise DecodeError(
            f"expected {wanted}, but {array.shape} may be either. Save a picture whose height and width are not the "
            "number of channels."
        )
    if not (first or last) or not array.size:
        raise DecodeError(
            f"expected an array of shape {wanted}, but got {array.shape}. Save it in one of these shapes."
        )
    array = array if first else array.transpose(2, 0, 1)
    check_size((array.shape[2], array.shape[1]), max_pixels)
    return array


def _scaled(array: Shaped[ndarray, "c h w"], preprocessing: Preprocessing) -> UInt8[ndarray, "c h w"]:
    if array.dtype == np.uint8:
        return np.array(array)  # a copy: what is read from bytes must not be written to
    if preprocessing.value_range is None or array.dtype.kind not in "buif":
        span = f", from {array.min()} to {array.max()}" if array.dtype.kind in "buif" else ""
        raise DecodeError(
            f"expected uint8 values, but got {array.dtype}{span}. Declare what is black and white with the data "
            "option value_range, or save uint8."
        )
    return to_8_bits(array, *preprocessing.value_range)


def _from_picture(data: bytes, preprocessing: Preprocessing, max_pixels: int) -> UInt8[ndarray, "c h w"]:
    channels = preprocessing.channels
    try:
        header = read_header(data, max_pixels=sys.maxsize, orient=preprocessing.orient)
    except DecodeError:
        if not is_tiff(data):
            raise
    else:
        check_size(header.size, max_pixels)
        planes, bands = _planes(header, channels), header.picture.getbands()
        if planes is not None:
            return _scaled(planes, preprocessing)
        if not is_tiff(data):
            raise DecodeError(
                f"expected {channels} channels, but the picture has {len(bands)} ({''.join(bands)}). Save it as .npy "
                "or TIFF with as many channels as the model takes."
            )
    # What Pillow does not know, or has fewer channels of.
    return _scaled(_channels_first(_from_tifffile(data, max_pixels), channels, max_pixels), preprocessing)


def _planes(header: Header, channels: int) -> Shaped[ndarray, "c h w"] | None:
    """Channels of a picture as Pillow reads it; None where it has another number of them."""
    picture, orientation = header.picture, header.orientation
    if isinstance(picture, TiffImageFile) and picture.n_frames == channels > 1:
        pages = [turned(page.copy(), orientation) for page in ImageSequence.Iterator(picture)]
        if all(len(page.getbands()) == 1 and page.mode != "P" and page.size == pages[0].size for page in pages):
            return np.stack([np.asarray(page) for page in pages])
        return None
    # Pillow reads some TIFFs of more samples as RGB and drops the others.
    bands = len(picture.getbands())
    samples = picture.tag_v2.get(_SAMPLES_PER_PIXEL, 1) if isinstance(picture, TiffImageFile) else bands
    if not samples == bands == channels:
        return None
    picture.load()
    pixels = np.asarray(turned(picture, orientation))
    return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None]


def _from_tifffile(data: bytes, max_pixels: int) -> Shaped[ndarray, "..."]:
    try:
        import tifffile
    except ImportError as error:
        raise DecodeError(
            "this TIFF is not one page per channel or one page of up to 4 channels, which Pillow reads. Install the "
            "library that reads others: pip install tifffile"
        ) from error
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        series = file.series[0]
        if math.prod(series.shape) > max_pixels * min(series.shape):
            raise DecodeError(f"expected at most {max_pixels:,} pixels, but the picture is of shape {series.shape}.")
        return series.asarray()
