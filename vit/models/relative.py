"""What attention knows of places: a bias on its scores, or a rotation of queries and keys."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vit.models.attention import Mask
from vit.models.config import ViTConfig
from vit.models.positions import Grid, coordinates, same_grid, waves


class BiasTable(nn.Module):
    """A learned number for each head and each offset from query to key; 0 where a prefix token is one of them.

    Args:
        heads: number of heads.
        grid: rows and columns between whose patches offsets are counted.
    """

    def __init__(self, heads: int, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.zeros(heads, 2 * grid[0] - 1, 2 * grid[1] - 1))

    def forward(self, grid: Grid) -> Float[Tensor, "h n n"]:
        """The bias on the scores of queries (rows) with keys (columns)."""
        rows, columns = grid
        table = resample_offsets(self.table, grid)
        y, x = (torch.arange(side, device=table.device) for side in grid)
        down = (y - y[:, None] + rows - 1)[:, None, :, None].expand(rows, columns, rows, columns)
        right = (x - x[:, None] + columns - 1)[None, :, None, :].expand(rows, columns, rows, columns)
        return table[:, down, right].flatten(3, 4).flatten(1, 2)


def resample_offsets(table: Float[Tensor, "h y x"], grid: Grid) -> Float[Tensor, "h v w"]:
    """A bias table for another grid: offset 0 stays where it is, the largest offsets stay the largest.

    Args:
        table: per head, over offsets from -(rows - 1) to rows - 1 and the same for columns.
        grid: rows and columns wanted.
    """
    size = (2 * grid[0] - 1, 2 * grid[1] - 1)
    if same_grid((table.shape[1], table.shape[2]), size):
        return table
    return F.interpolate(table[None].float(), size=size, mode="bicubic", align_corners=True)[0].to(table.dtype)


class QuadraticBias(nn.Module):
    """-alpha · (‖δ‖² - 2Δ·δ) for the offset δ from query to key: highest at Δ, the sharper the larger alpha.

    This is v·r_δ of Cordonnier et al. (2020), theorem 1, with v = -alpha · (1, -2Δ) and r_δ = (‖δ‖², δ), so that
    heads can become the cells of a convolution's kernel. Offsets are counted in patches of `scale`.

    Args:
        heads: number of heads.
        scale: rows and columns.
    """

    def __init__(self, heads: int, scale: Grid) -> None:
        super().__init__()
        self.scale = scale
        self.sharpness = nn.Parameter(torch.empty(heads))
        self.centre = nn.Parameter(torch.empty(heads, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Flat enough to see some patches around, centres spread as in the paper's code."""
        nn.init.constant_(self.sharpness, 0.1)
        nn.init.normal_(self.centre, std=2.0)

    def forward(self, grid: Grid) -> Float[Tensor, "h n n"]:
        """The bias on the scores of queries (rows) with keys (columns)."""
        y, x = coordinates(grid, self.scale, self.centre.device)
        offsets = torch.stack([y - y[:, None], x - x[:, None]])  # (2, n, n)
        inner = torch.einsum("hc,cqk->hqk", self.centre, offsets)
        return -self.sharpness[:, None, None] * (offsets.square().sum(0) - 2 * inner)


class MixedRotation(nn.Module):
    """Learned frequencies of `rotary_mixed`, by axis (column, row), layer, head and pair.

    Args:
        depth: number of layers.
        heads: number of heads.
        head_dim: size of a head.
    """

    def __init__(self, depth: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.empty(2, depth, heads, head_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Two perpendicular directions per head, each with falling frequencies (Heo et al. 2024, 3.2)."""
        _, depth, heads, pairs = self.freqs.shape
        device = self.freqs.device
        size = waves(pairs // 2, 10.0, device)
        turn = torch.rand(depth, heads, 1, device=device) * 2 * math.pi
        turns = torch.cat([turn.expand(-1, -1, pairs // 2), turn.expand(-1, -1, pairs // 2) + math.pi / 2], dim=-1)
        with torch.no_grad():
            self.freqs.copy_(torch.stack([turns.cos(), turns.sin()]) * size.repeat(2))


def make_biases(config: ViTConfig) -> nn.ModuleList | None:
    """The modules whose bias is added to the scores: one per layer, or one for all; None where there is none."""
    c = config
    if c.relative_position not in ("bias", "quadratic"):
        return None
    count = 1 if c.position_at == "every_layer_shared" else c.depth
    if c.relative_position == "bias":
        return nn.ModuleList(BiasTable(c.heads, c.grid) for _ in range(count))
    return nn.ModuleList(QuadraticBias(c.heads, c.position_scale) for _ in range(count))


def biases(modules: nn.ModuleList | None, config: ViTConfig, grid: Grid) -> list[Float[Tensor, "h t t"] | None]:
    """For each layer, the bias on the scores of all tokens, 0 for prefix tokens.

    Args:
        modules: from `make_biases`.
        config: of the model.
        grid: rows and columns of the image's patches.
    """
    if modules is None:
        return [None] * config.depth
    p = config.prefix_tokens
    made: list[Tensor | None] = [F.pad(module(grid), (p, 0, p, 0)) for module in modules]
    return made if len(made) == config.depth else made * config.depth


def rotations(
    mixed: MixedRotation | None, config: ViTConfig, grid: Grid, device: torch.device
) -> list[Float[Tensor, "*h t e"] | None]:
    """For each layer, the angles of all tokens, 0 for prefix tokens; rows come first in axial kinds.

    Args:
        mixed: the learned frequencies of `rotary_mixed`.
        config: of the model.
        grid: rows and columns of the image's patches.
        device: of the angles.
    """
    c = config
    prefix = (0, 0, c.prefix_tokens, 0)
    if mixed is not None:
        y, x = _index(grid, c.position_scale, device)
        f = mixed.freqs.float()
        angles = x[:, None] * f[0, :, :, None] + y[:, None] * f[1, :, :, None]  # (layers, h, n, e/2)
        return list(F.pad(angles, prefix).unbind(0))
    if not c.relative_position.startswith("rotary"):
        return [None] * c.depth
    each = waves(c.head_width // 4, c.rotary_base, device)
    if c.relative_position == "rotary_index":
        y, x = _index(grid, c.position_scale, device)
    else:
        # 2π times the centre of each patch, the image reaching from -1 to 1.
        y, x = (2 * math.pi * p for p in coordinates(grid, (2, 2), device))
        y, x = y - math.pi, x - math.pi
    axial = torch.cat([y[:, None] * each, x[:, None] * each], dim=1)
    return [F.pad(axial, prefix)] * c.depth


def _index(grid: Grid, scale: Grid, device: torch.device) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Row and column of each patch; the first one is at 0 on any grid, as EVA-02 counts."""
    y, x = (
        torch.arange(new, device=device, dtype=torch.float32) / new * old for new, old in zip(grid, scale, strict=True)
    )
    return y[:, None].expand(*grid).flatten(), x.expand(*grid).flatten()


def add_bias(bias: Float[Tensor, "*b h t t"], mask: Mask | None) -> Float[Tensor, "..."]:
    """The bias where `mask` (as in `Attention`) allows looking, -inf elsewhere."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask


def select_rows(angles: Float[Tensor, "*h t e"], kept: Int[Tensor, "b m"]) -> Float[Tensor, "b h m e"]:
    """The angles of a selection of tokens, which differs from image to image.

    Args:
        angles: of all tokens, the same for all heads or per head.
        kept: where each token stood.
    """
    return angles[kept][:, None] if angles.ndim == 2 else angles[:, kept].transpose(0, 1)


def select_pairs(bias: Float[Tensor, "h t t"], kept: Int[Tensor, "b m"]) -> Float[Tensor, "b h m m"]:
    """The bias between a selection of tokens, which differs from image to image."""
    return bias[:, kept[:, :, None], kept[:, None, :]].transpose(0, 1)
