"""Position embeddings, and how they move to another grid of patches."""

from jaxtyping import Float
from torch import SymInt, Tensor, cat
from torch.nn import functional as F

Grid = tuple[int, int]


def resample_table(table: Float[Tensor, "1 t d"], old: Grid, new: Grid, *, prefix: int) -> Float[Tensor, "1 u d"]:
    """A learned position table for another grid, interpolated in 2-D by position in the image (ViT, 3.2).

    Bicubic with antialiasing, in float32 and to an explicit size, as timm does it. Prefix rows stay as they
    are; the same grid gives the same tensor.

    Args:
        table: rows of the prefix tokens, then of the patches in raster order.
        old: rows and columns of the table's grid.
        new: rows and columns wanted.
        prefix: number of prefix rows.

    Raises:
        ValueError: the table does not have prefix + rows · columns rows.
    """
    if table.shape[1] != prefix + old[0] * old[1]:
        raise ValueError(
            f"expected a position table of {prefix} prefix rows and {old[0]}x{old[1]} patches, "
            f"but got {table.shape[1]} rows."
        )
    # While `torch.export` traces, a comparison would tie the graph to one size.
    if not any(isinstance(side, SymInt) for side in new) and old == new:
        return table
    grid = table[:, prefix:].float().unflatten(1, old).permute(0, 3, 1, 2)  # (1, d, rows, columns)
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=True)
    patches = grid.flatten(2).transpose(1, 2).to(table.dtype)
    return cat([table[:, :prefix], patches], dim=1) if prefix else patches
