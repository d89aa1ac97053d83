"""`ViTConfig`: every choice that makes one Vision Transformer differ from another, as plain values."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from vit.models.layers import Activation, MlpKind

Position = Literal["learned", "learned_2d", "sine", "sine_2d", "none"]
PositionAt = Literal["stem", "every_layer", "every_layer_shared"]
RelativePosition = Literal["none", "bias", "quadratic", "rotary", "rotary_index", "rotary_mixed"]
Pool = Literal["token", "mean", "attention"]
BlockNorm = Literal["pre", "post"]
FinalNorm = Literal["before_pool", "after_pool", "none"]
Head = Literal["linear", "mlp", "distilled"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """What a `VisionTransformer` is built from; the defaults are ViT-B/16 at 224 pixels (ViT, table 1).

    Args:
        image_size: side H = W in pixels, or (height, width); P divides both.
        patch_size: side P in pixels.
        channels: C of the images.
        width: D.
        depth: L, the number of blocks.
        heads: heads of each attention.
        mlp_dim: size of the MLPs' hidden layer, behind the gate where there is one; None is 4 · width.
        head_dim: size of a head; None is width / heads.
        class_token: put a learned token before the patches.
        registers: number of further learned tokens, after the class token (Darcet et al. 2024).
        position: position embedding that is added to tokens (ViT, eq. 1 and D.4); `learned`: 1-D, a row per patch;
            `learned_2d`: half of the width from a row per row, half from one per column; `sine`: Vaswani et al., 3.5,
            over the raster; `sine_2d`: half of the width for each axis, as in MAE.
        position_at: where positions are added (ViT, D.4): once at the stem, at every layer from a table of its
            own, or at every layer from one. A relative bias stands in every layer anyway; the last shares its table.
        prefix_position: class token and registers have rows in the position table too.
        position_grid: (rows, columns) in whose patches sine, index, mixed and quadratic positions are counted, whatever
            the image size; None is the model's own grid.
        position_antialias: smooth a learned table when it moves to a smaller grid.
        relative_position: what attention knows of places; `bias`: a learned number per head and offset;
            `quadratic`: -a(‖δ‖² - 2Δδ) with a and Δ learned per head (Cordonnier et al. 2020, theorem 1); `rotary`:
            queries and keys are rotated by their place in [-1, 1] (DINOv3); `rotary_index`: by row and column
            (EVA-02); `rotary_mixed`: by learned mixtures of both (Heo et al. 2024).
        rotary_base: ratio of the longest to the shortest wavelength of `rotary` (100) and `rotary_index` (10000).
        pool: what represents the image: the class token, the mean of the patches, or attention over them.
        patch_bias: the patch embedding has a bias.
        norm_pre: a further LayerNorm before the first block, as in CLIP.
        block_norm: LayerNorm before each sub-layer (ViT), or after each sum (Vaswani et al.).
        final_norm: where the last LayerNorm stands. None chooses `before_pool` (ViT, eq. 4), but
            `after_pool` with mean pooling and `none` with post-norm blocks.
        norm_eps: eps of all LayerNorms.
        qkv_bias: queries, keys and values have a bias.
        key_bias: with qkv_bias, keys have one too; EVA and DINOv3 have it on queries and values only.
        qk_norm: LayerNorm over the queries and keys of each head.
        attention_norm: LayerNorm over the heads' joint output, before its projection.
        proj_bias: attention's output projection has a bias.
        layer_scale: first value of LayerScale on both residual branches; None leaves it out.
        mlp: `dense`: two layers; `swiglu`: the hidden layer is silu(xG) · xV (Shazeer 2020); `swiglu_packed`: the same
            with G and V in one weight.
        mlp_bias: the MLPs' layers have biases.
        mlp_norm: LayerNorm over the MLPs' hidden layer.
        activation: of dense MLPs.
        dropout: rate after every dense layer but those to q, k, v (ViT, B.1).
        position_dropout: rate directly after adding positions; None is `dropout`, as in the paper.
        attention_dropout: rate on the attention probabilities.
        drop_path: rate of stochastic depth in the last block; it grows linearly from 0 in the first.
        init_std: standard deviation of new dense weights, tokens and positions; 0.02 suits wide models, narrow ones
            (below 200) learn much sooner from about 1/√width.
        num_classes: K; 0 leaves out the head, so that the model gives pooled features.
        head: `linear`: one layer D x K; `mlp`: a hidden tanh layer before it, to pre-train (ViT, 3.1); `distilled`: one
            layer for the class token and one for the first register, DeiT's distillation token, averaged.
        dynamic_size: take any image size that P divides, with the position table resampled to its grid.
        fused: attention path: None chooses by device and dtype, see `Attention`.

    Raises:
        ValueError: a value out of its range, or two that do not go together.
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int = 16
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int | None = None
    head_dim: int | None = None
    class_token: bool = True
    registers: int = 0
    position: Position = "learned"
    position_at: PositionAt = "stem"
    prefix_position: bool = True
    position_grid: tuple[int, int] | None = None
    position_antialias: bool = True
    relative_position: RelativePosition = "none"
    rotary_base: float = 100.0
    pool: Pool = "token"
    patch_bias: bool = True
    norm_pre: bool = False
    block_norm: BlockNorm = "pre"
    final_norm: FinalNorm | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    key_bias: bool = True
    qk_norm: bool = False
    attention_norm: bool = False
    proj_bias: bool = True
    layer_scale: float | None = None
    mlp: MlpKind = "dense"
    mlp_bias: bool = True
    mlp_norm: bool = False
    activation: Activation = "gelu"
    dropout: float = 0.0
    position_dropout: float | None = None
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    init_std: float = 0.02
    num_classes: int = 1000
    head: Head = "linear"
    dynamic_size: bool = False
    fused: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.image_size, tuple):
            if len(self.image_size) != 2:
                raise ValueError(f"expected image_size as a side or (height, width), but got {self.image_size}.")
            height, width = self.image_size
            # One spelling per size, whether it comes from Python, YAML or JSON.
            object.__setattr__(self, "image_size", height if height == width else (height, width))
        self._check_numbers()
        self._check_names()
        self._check_positions()
        check_divisible(self.size, self.patch_size)
        if self.width % self.heads and (self.head_dim is None or self.pool == "attention"):
            hint = "attention pooling needs it." if self.head_dim else "or set head_dim."
            raise ValueError(
                f"expected a width that heads divide, but got width={self.width} and heads={self.heads}: "
                f"change one of them; {hint}"
            )
        if self.head == "distilled" and (self.pool != "token" or self.registers < 1):
            raise ValueError(
                'expected pool="token" and registers of at least 1, the first of which is the distillation token, for '
                f'head="distilled", but got pool={self.pool!r} and registers={self.registers}.'
            )
        if self.pool == "token" and not self.class_token:
            raise ValueError(
                'expected class_token=True for pool="token": set it, or choose pool="mean" or "attention".'
            )

    def _check_numbers(self) -> None:
        counts = ("patch_size", "channels", "width", "depth", "heads", "mlp_dim", "head_dim")
        values = {name: getattr(self, name) for name in counts}
        for name, value in (*values.items(), ("image_size", self.size[0]), ("image_size", self.size[1])):
            if value is not None and (not _is_integer(value) or value < 1):
                raise ValueError(f"expected {name} to be a whole number of at least 1, but got {value!r}.")
        for name in ("registers", "num_classes"):
            if not _is_integer(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(
                    f"expected {name} to be a whole number of at least 0, but got {getattr(self, name)!r}."
                )
        for name in ("dropout", "position_dropout", "attention_dropout", "drop_path"):
            rate = getattr(self, name)
            if rate is not None and not (_is_number(rate) and 0 <= rate < 1):
                raise ValueError(f"expected {name} to be a rate in [0, 1), but got {rate!r}.")
        for name in ("norm_eps", "layer_scale", "init_std", "rotary_base"):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0) and not (value is None and name == "layer_scale"):
                raise ValueError(f"expected {name} to be a number above 0, but got {value!r}.")

    def _check_names(self) -> None:
        choices: dict[str, tuple[str | None, ...]] = {
            "position": get_args(Position),
            "position_at": get_args(PositionAt),
            "relative_position": get_args(RelativePosition),
            "mlp": get_args(MlpKind),
            "pool": get_args(Pool),
            "block_norm": get_args(BlockNorm),
            "final_norm": (None, *get_args(FinalNorm)),
            "activation": get_args(Activation),
            "head": get_args(Head),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                shown = ", ".join(map(str, allowed))
                raise ValueError(f"expected {name} to be one of {shown}, but got {value!r}.")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"expected {name} to be true or false, but got {getattr(self, name)!r}.")
        if self.fused is not None and not isinstance(self.fused, bool):
            raise ValueError(f"expected fused to be None, true or false, but got {self.fused!r}.")

    def _check_positions(self) -> None:
        grid = self.position_grid
        if grid is not None and not (len(grid) == 2 and all(_is_integer(side) and side > 0 for side in grid)):
            raise ValueError(f"expected position_grid as (rows, columns) of at least 1, but got {grid!r}.")
        sides = {"learned_2d": 2, "sine": 2, "sine_2d": 4}
        if self.width % sides.get(self.position, 1):
            raise ValueError(
                f"expected a width that {sides[self.position]} divides for position={self.position!r}, "
                f"but got {self.width}."
            )
        if self.relative_position.startswith("rotary") and self.head_width % 4:
            raise ValueError(
                f"expected heads of a size that 4 divides for relative_position={self.relative_position!r}, "
                f"but got {self.head_width}: change width, heads or head_dim."
            )
        if self.position_at != "stem" and self.position == "none" and self.relative_position not in _OF_ATTENTION:
            raise ValueError(f"expected positions to add for position_at={self.position_at!r}, but there are none.")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image_size if isinstance(self.image_size, tuple) else (self.image_size, self.image_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.size[0] // self.patch_size, self.size[1] // self.patch_size

    @property
    def position_scale(self) -> tuple[int, int]:
        """`position_grid` with its default filled in."""
        return self.position_grid or self.grid

    @property
    def head_width(self) -> int:
        """`head_dim` with its default filled in."""
        return self.head_dim or self.width // self.heads

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches: class token and registers."""
        return int(self.class_token) + self.registers

    @property
    def mlp_width(self) -> int:
        """`mlp_dim` with its default filled in."""
        return self.mlp_dim or 4 * self.width

    @property
    def last_norm(self) -> FinalNorm:
        """`final_norm` with its default filled in."""
        if self.final_norm is not None:
            return self.final_norm
        if self.block_norm == "post":
            return "none"
        return "after_pool" if self.pool == "mean" else "before_pool"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, YAML and checkpoints; `from_dict` reads them back."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ViTConfig":
        """Rebuild from `to_dict`; options left out take their defaults.

        Raises:
            ValueError: an unknown option, or one of those of `ViTConfig`.
        """
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1) or names
                raise ValueError(f"expected options of ViTConfig, but got {name!r}: did you mean {', '.join(near)}?")
        plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**plain)


_SWITCHES = (
    *("class_token", "prefix_position", "position_antialias", "patch_bias", "norm_pre", "qkv_bias", "key_bias"),
    *("qk_norm", "attention_norm", "proj_bias", "mlp_bias", "mlp_norm", "dynamic_size"),
)
_OF_ATTENTION = ("bias", "quadratic")


def check_divisible(size: tuple[int, int], patch_size: int) -> None:
    """Refuse an image size that the patch does not divide.

    Raises:
        ValueError: names the nearest sizes that it divides.
    """
    for side in size:
        if side % patch_size or side < patch_size:
            below = side // patch_size * patch_size
            near = f"{below} or {below + patch_size}" if below else f"{patch_size}"
            shown = f"{size[0]}x{size[1]}"
            raise ValueError(
                f"expected an image size that the patch size {patch_size} divides, but got {shown}: "
                f"use {near} for {side}, or another patch size."
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
