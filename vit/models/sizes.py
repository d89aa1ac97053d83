"""The sizes of the literature by name: `vit_config("B/16")`."""

import difflib
from typing import Any, NamedTuple

from vit.models.config import ViTConfig


class Size(NamedTuple):
    """One row: D, L, heads, MLP size."""

    width: int
    depth: int
    heads: int
    mlp_dim: int


SIZES = {
    "Ti": Size(192, 12, 3, 768),  # Touvron et al. 2021 (DeiT), table 1
    "S": Size(384, 12, 6, 1536),  # Touvron et al. 2021 (DeiT), table 1
    "B": Size(768, 12, 12, 3072),  # ViT, table 1
    "L": Size(1024, 24, 16, 4096),  # ViT, table 1
    "H": Size(1280, 32, 16, 5120),  # ViT, table 1
    "g": Size(1408, 40, 16, 6144),  # Zhai et al. 2022 (Scaling Vision Transformers), table 2
}
PATCHES = range(4, 33)


def vit_config(
    name: str, *, image_size: int | tuple[int, int] = 224, num_classes: int = 1000, **options: Any
) -> ViTConfig:
    """The configuration of a size, as the papers write it: letters, a slash, the patch side in pixels.

    Args:
        name: one of Ti, S, B, L, H, g, then a patch size from 4 to 32, such as "B/16".
        image_size: side, or (height, width), in pixels.
        num_classes: K; 0 for pooled features.
        options: further options of `ViTConfig`; they win over the row of the table.

    Raises:
        ValueError: an unknown name (the message has the nearest right ones), or one of those of `ViTConfig`.
    """
    letters, _, patch = name.partition("/")
    if letters not in SIZES or not patch.isdecimal() or int(patch) not in PATCHES:
        known = {f"{size}/{side}".lower(): f"{size}/{side}" for size in SIZES for side in (4, 8, 14, 16, 32)}
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4) or known
        raise ValueError(
            f"expected a size out of {', '.join(SIZES)} with a patch from {PATCHES[0]} to {PATCHES[-1]}, "
            f"but got {name!r}: did you mean {', '.join(known[key] for key in near)}?"
        )
    named = {"image_size": image_size, "num_classes": num_classes, "patch_size": int(patch)}
    return ViTConfig.from_dict({**SIZES[letters]._asdict(), **named, **options})
