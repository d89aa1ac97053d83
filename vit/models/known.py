"""Good known weights to start from, and the command `vit weights`."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from vit.models.weights import Loaded, load_weights


class StartingPoint(NamedTuple):
    """One row of the table that `vit weights` prints.

    Args:
        name: in timm.
        millions: of parameters, without a head that is replaced anyway.
        size: of the pictures in pixels that the weights were last trained at.
        licence: of the weights; those that forbid commercial use or set terms of their own say so by their name.
        good_for: what to take it for.
    """

    name: str
    millions: float
    size: int
    licence: str
    good_for: str


KNOWN = (
    StartingPoint("fashion_mnist_28", 0.7, 28, "apache-2.0", "small grey pictures; needs no network, comes with vit"),
    StartingPoint("vit_small_patch14_reg4_dinov2.lvd142m", 22.1, 518, "apache-2.0", "few pictures; features as is"),
    StartingPoint("vit_base_patch14_reg4_dinov2.lvd142m", 86.6, 518, "apache-2.0", "the same, better and slower"),
    StartingPoint("vit_large_patch14_reg4_dinov2.lvd142m", 304.4, 518, "apache-2.0", "the best features, on a GPU"),
    StartingPoint("vit_small_patch14_dinov2.lvd142m", 22.1, 518, "apache-2.0", "DINOv2 as first published"),
    StartingPoint("vit_small_patch16_dinov3.lvd1689m", 21.6, 256, "dinov3-license", "features of large pictures"),
    StartingPoint("vit_base_patch16_dinov3.lvd1689m", 85.6, 256, "dinov3-license", "the same, better and slower"),
    StartingPoint("vit_tiny_patch16_224.augreg_in21k_ft_in1k", 5.5, 224, "apache-2.0", "a laptop; a first try"),
    StartingPoint(
        "vit_small_patch16_224.augreg_in21k_ft_in1k", 21.7, 224, "apache-2.0", "fine-tuning; everyday objects"
    ),
    StartingPoint("vit_base_patch16_224.augreg2_in21k_ft_in1k", 85.8, 224, "apache-2.0", "the paper's ViT-B/16"),
    StartingPoint("deit3_small_patch16_224.fb_in22k_ft_in1k", 21.7, 224, "apache-2.0", "fine-tuning; everyday objects"),
    StartingPoint("eva02_small_patch14_336.mim_in22k_ft_in1k", 21.8, 336, "mit", "high accuracy for its size"),
    StartingPoint("vit_base_patch16_siglip_224.v2_webli", 92.9, 224, "apache-2.0", "logos, signs, text in pictures"),
    StartingPoint("vit_base_patch16_clip_quickgelu_224.openai", 85.8, 224, "apache-2.0", "pictures of every style"),
    StartingPoint("vit_base_patch16_224.mae", 85.8, 224, "cc-by-nc-4.0", "long fine-tuning; weak as it is"),
    StartingPoint("vit_small_patch16_224.dino", 21.7, 224, "apache-2.0", "attention maps that show objects"),
)


def command(words: Sequence[str]) -> int:
    """`vit weights`: a table of starting points; `vit weights FILE|NAME`: what becomes of each of its tensors."""
    parser = argparse.ArgumentParser(
        prog="vit weights",
        description="List good known weights, or show what loads from a file, a folder or a timm name.",
        allow_abbrev=False,
    )
    parser.add_argument("source", nargs="?", help="a file, a folder, a run or a timm name; none lists starting points")
    parser.add_argument("--image_size", type=int, help="side in pixels to load at")
    parser.add_argument("--patch_size", type=int, help="side of the patches in pixels to load at")
    given = parser.parse_args(words)
    if given.source is None:
        print(table())
        return 0
    options = {n: v for n, v in (("image_size", given.image_size), ("patch_size", given.patch_size)) if v is not None}
    print(describe(load_weights(given.source, **options)))
    return 0


def table() -> str:
    """The starting points as text; any other timm name of a plain ViT works too."""
    rows = [("model.weights", "parameters", "pixels", "licence", "good for")]
    rows += [(k.name, f"{k.millions} M", str(k.size), k.licence, k.good_for) for k in KNOWN]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(
        [
            *lines,
            "",
            "Use one with --model.weights NAME; vit weights NAME shows what loads from it. Other sizes work too:",
            "--model.encoder.image_size 224. Licences are those that timm states; read them before you publish.",
        ]
    )


def describe(loaded: Loaded) -> str:
    """What loaded: the model, its preprocessing and the report of its tensors."""
    c, prepared = loaded.model.config, loaded.preprocessing
    millions = sum(p.numel() for p in loaded.model.parameters()) / 1e6
    names = ", ".join(loaded.classes[:5]) + (", ..." if len(loaded.classes) > 5 else "")
    return "\n".join(
        [
            f"{'model':<18}{c.size[0]}x{c.size[1]} pixels, patches of {c.patch_size}, width {c.width}, "
            f"{c.depth} blocks, {c.heads} heads, {millions:.1f} M parameters",
            f"{'pooling':<18}{c.pool}, {c.last_norm} norm, eps {c.norm_eps:g}",
            f"{'MLP':<18}{c.mlp}, {c.activation if c.mlp == 'dense' else 'silu'}",
            f"{'preprocessing':<18}" + ", ".join(f"{name} {value}" for name, value in prepared.items()),
            f"{'classes':<18}{len(loaded.classes)}" + (f": {names}" if names else ""),
            loaded.report.table(),
        ]
    )
