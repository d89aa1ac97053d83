"""The fast way to a part of a picture: which decoder and which resize, by what the header says."""

import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.io import ImageReadMode
from torchvision.transforms.v2 import functional as F

from vit.data.decode import View, dct_scale
from vit.data.header import Header

_RGB = ImageReadMode.RGB.value

# torch resizes 8-bit tensors with these filters as Pillow does, within rounding, in a third of the time.
_TENSOR_FILTERS = {
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
}


def fits_tensors(header: Header, view: View, resample: Image.Resampling, channels: int) -> bool:
    """Whether torchvision's decoder and resize are the faster way, with equal pixels.

    Only Pillow decodes a JPEG at a part of its size, so it is faster wherever the view allows that.
    """
    return (
        header.format == "JPEG"
        and header.mode == "RGB"
        and channels == 3
        and header.orientation == 1
        and resample in _TENSOR_FILTERS
        and dct_scale(header, view) == 1
    )


def decode_tensor_view(data: bytes, view: View, resample: Image.Resampling) -> UInt8[Tensor, "3 h w"] | None:
    """The view of an upright colour JPEG; the filter stops at the edge of its box.

    Returns:
        None for a file that torchvision refuses: Pillow may read it, or says better why not.
    """
    try:
        # The operator itself: torchvision 0.29 warns about its Python function, whose decoders are to move away.
        pixels = torch.ops.image.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), _RGB, False)
    except (RuntimeError, AttributeError):
        return None
    return part_of(pixels, view, resample)


def part_of(pixels: UInt8[Tensor, "c height width"], view: View, resample: Image.Resampling) -> UInt8[Tensor, "c h w"]:
    """A view of decoded pixels, of any number of channels; the filter stops at the edge of its box."""
    left, top, right, bottom = (int(edge) for edge in view.box)
    part, size = pixels[:, top:bottom, left:right], (view.height, view.width)
    if part.shape[1:] == size:
        return part
    if resample in _TENSOR_FILTERS:
        if len(part) == 3:
            # The resize takes whole interleaved pictures in two thirds of the time of a part, with equal pixels.
            part = part.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        return interpolate(part[None], size, mode=_TENSOR_FILTERS[resample], antialias=True)[0]
    planes = [Image.fromarray(plane.numpy()).resize(size[::-1], resample) for plane in part]
    return torch.cat([F.pil_to_tensor(plane) for plane in planes])
