"""Position embeddings that are added to tokens, and how they move to another grid of patches.

What attention knows of places stands in `relative`.
"""

import torch
from jaxtyping import Float
from torch import SymInt, Tensor, cat, nn
from torch.nn import functional as F

from vit.models.config import ViTConfig

Grid = tuple[int, int]


def resample_table(
    table: Float[Tensor, "1 t d"], old: Grid, new: Grid, *, prefix: int, antialias: bool = True
) -> Float[Tensor, "1 u d"]:
    """A learned position table for another grid, interpolated in 2-D by position in the image (ViT, 3.2).

    Bicubic, in float32 and to an explicit size, as timm does it. Prefix rows stay as they are; the same grid gives
    the same tensor.

    Args:
        table: rows of the prefix tokens, then of the patches in raster order.
        old: rows and columns of the table's grid.
        new: rows and columns wanted.
        prefix: number of prefix rows.
        antialias: smooth on the way to a smaller grid, as timm does; DINOv2 without registers did not.

    Raises:
        ValueError: the table does not have prefix + rows · columns rows.
    """
    if table.shape[1] != prefix + old[0] * old[1]:
        raise ValueError(
            f"expected a position table of {prefix} prefix rows and {old[0]}x{old[1]} patches, "
            f"but got {table.shape[1]} rows."
        )
    if same_grid(old, new):
        return table
    grid = table[:, prefix:].float().unflatten(1, old).permute(0, 3, 1, 2)  # (1, d, rows, columns)
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=antialias)
    patches = grid.flatten(2).transpose(1, 2).to(table.dtype)
    return cat([table[:, :prefix], patches], dim=1) if prefix else patches


def same_grid(old: Grid, new: Grid) -> bool:
    """Whether both have the same sides; never for sides that an export leaves free."""
    # While `torch.export` traces, a comparison would tie the graph to one size.
    return not any(isinstance(side, SymInt) for side in new) and old == new


def make_table(config: ViTConfig) -> nn.Parameter | nn.ParameterDict | None:
    """New parameters, not yet filled, of one position embedding; None where it has none.

    Args:
        config: of the model. `learned` has one parameter (1, rows, d); `learned_2d` has `rows` and `columns` of half
            the width, and `prefix`.
    """
    prefix = config.prefix_tokens if config.prefix_position else 0
    rows, columns = config.grid
    if config.position == "learned":
        return nn.Parameter(torch.empty(1, prefix + rows * columns, config.width))
    if config.position == "learned_2d":
        half = config.width // 2
        sizes = {"rows": (1, rows, half), "columns": (1, columns, half), "prefix": (1, prefix, config.width)}
        return nn.ParameterDict({name: torch.empty(size) for name, size in sizes.items() if size[1]})
    return None


def position_table(
    stored: nn.Parameter | nn.ParameterDict | None, config: ViTConfig, grid: Grid, device: torch.device
) -> Float[Tensor, "1 t d"] | None:
    """What is added to the tokens of an image: a row per prefix token (0 where it has no position) and per patch.

    Args:
        stored: from `make_table`.
        config: of the model.
        grid: rows and columns of the image's patches.
        device: of the tokens.
    """
    c = config
    own = c.prefix_tokens if c.prefix_position else 0
    if isinstance(stored, nn.Parameter):
        table = resample_table(stored, c.grid, grid, prefix=own, antialias=c.position_antialias)
    elif isinstance(stored, nn.ParameterDict):
        table = _join_axes(stored, c, grid)
    elif c.position == "none":
        return None
    else:
        own = 0
        table = sine_table(c, grid, device)[None]
    return F.pad(table, (0, 0, c.prefix_tokens - own, 0)) if c.prefix_tokens > own else table


def _join_axes(stored: nn.ParameterDict, c: ViTConfig, grid: Grid) -> Float[Tensor, "1 t d"]:
    rows, columns = (
        resample_table(stored[name], (old, 1), (new, 1), prefix=0, antialias=c.position_antialias)
        for name, old, new in zip(("rows", "columns"), c.grid, grid, strict=True)
    )
    both = cat([rows[:, :, None].expand(-1, -1, grid[1], -1), columns[:, None].expand(-1, grid[0], -1, -1)], dim=-1)
    patches = both.flatten(1, 2)
    return cat([stored["prefix"], patches], dim=1) if "prefix" in stored else patches


def sine_table(config: ViTConfig, grid: Grid, device: torch.device) -> Float[Tensor, "n d"]:
    """Sine and cosine positions of the patches, counted in patches of `position_scale`.

    `sine` interleaves sines and cosines over the raster (Vaswani et al., 3.5). `sine_2d` has the same waves for the
    column in the first half of the width and for the row in the second, sines before cosines (He et al. 2022, MAE).

    Args:
        config: of the model.
        grid: rows and columns of the image's patches.
        device: of the table.
    """
    y, x = coordinates(grid, config.position_scale, device)
    if config.position == "sine":
        angles = (y * config.position_scale[1] + x)[:, None] * waves(config.width // 2, 10000.0, device)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    each = waves(config.width // 4, 10000.0, device)
    x_angles, y_angles = x[:, None] * each, y[:, None] * each
    return cat([x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()], dim=1)


def waves(count: int, base: float, device: torch.device) -> Float[Tensor, " w"]:
    """`count` angular frequencies from 1 down towards 1 / base, in a geometric row."""
    return base ** -(torch.arange(count, device=device, dtype=torch.float32) / count)


def coordinates(grid: Grid, scale: Grid, device: torch.device) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Row and column of each patch's centre, in raster order, in patches of the grid `scale`.

    Args:
        grid: rows and columns of the image's patches.
        scale: the grid that covers the same image and whose first patch is at 0, the next at 1, and so on.
        device: of the coordinates.
    """
    axes = []
    for new, old in zip(grid, scale, strict=True):
        steps = torch.arange(new, device=device, dtype=torch.float32)
        axes.append(steps if same_grid((old, old), (new, new)) else (steps + 0.5) * (old / new) - 0.5)
    return axes[0][:, None].expand(*grid).flatten(), axes[1].expand(*grid).flatten()
