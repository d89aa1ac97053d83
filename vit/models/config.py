"""`ViTConfig`: every choice that makes one Vision Transformer differ from another, as plain values."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from vit.models.layers import Activation

Position = Literal["learned", "none"]
Pool = Literal["token", "mean", "attention"]
BlockNorm = Literal["pre", "post"]
FinalNorm = Literal["before_pool", "after_pool", "none"]
Head = Literal["linear", "mlp"]


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
        mlp_dim: size of the MLPs' hidden layer; None is 4 · width.
        head_dim: size of a head; None is width / heads.
        class_token: put a learned token before the patches.
        registers: number of further learned tokens, after the class token (Darcet et al. 2024).
        position: position embedding; `learned`: 1-D, added after the patch embedding (ViT, eq. 1).
        prefix_position: class token and registers have rows in the position table too.
        pool: what represents the image: the class token, the mean of the patches, or attention over them.
        block_norm: LayerNorm before each sub-layer (ViT), or after each sum (Vaswani et al.).
        final_norm: where the last LayerNorm stands. None chooses `before_pool` (ViT, eq. 4), but
            `after_pool` with mean pooling and `none` with post-norm blocks.
        norm_eps: eps of all LayerNorms.
        qkv_bias: queries, keys and values have a bias.
        qk_norm: LayerNorm over the queries and keys of each head.
        layer_scale: first value of LayerScale on both residual branches; None leaves it out.
        activation: of the MLPs.
        dropout: rate after every dense layer but those to q, k, v (ViT, B.1).
        position_dropout: rate directly after adding positions; None is `dropout`, as in the paper.
        attention_dropout: rate on the attention probabilities.
        drop_path: rate of stochastic depth in the last block; it grows linearly from 0 in the first.
        init_std: standard deviation of new dense weights, tokens and positions; 0.02 suits wide models, narrow ones
            (below 200) learn much sooner from about 1/√width.
        num_classes: K; 0 leaves out the head, so that the model gives pooled features.
        head: `linear`: one layer D x K; `mlp`: a hidden tanh layer before it, to pre-train (ViT, 3.1).
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
    prefix_position: bool = True
    pool: Pool = "token"
    block_norm: BlockNorm = "pre"
    final_norm: FinalNorm | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    qk_norm: bool = False
    layer_scale: float | None = None
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
        check_divisible(self.size, self.patch_size)
        if self.width % self.heads and (self.head_dim is None or self.pool == "attention"):
            hint = "attention pooling needs it." if self.head_dim else "or set head_dim."
            raise ValueError(
                f"expected a width that heads divide, but got width={self.width} and heads={self.heads}: "
                f"change one of them; {hint}"
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
        for name in ("norm_eps", "layer_scale", "init_std"):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0) and not (value is None and name == "layer_scale"):
                raise ValueError(f"expected {name} to be a number above 0, but got {value!r}.")

    def _check_names(self) -> None:
        choices: dict[str, tuple[str | None, ...]] = {
            "position": get_args(Position),
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
        for name in ("class_token", "prefix_position", "qkv_bias", "qk_norm", "dynamic_size"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"expected {name} to be true or false, but got {getattr(self, name)!r}.")
        if self.fused is not None and not isinstance(self.fused, bool):
            raise ValueError(f"expected fused to be None, true or false, but got {self.fused!r}.")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image_size if isinstance(self.image_size, tuple) else (self.image_size, self.image_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.size[0] // self.patch_size, self.size[1] // self.patch_size

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
