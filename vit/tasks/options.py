"""Options that stay open until the weights, the size or the data fill them in."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, make_dataclass
from typing import Any, TypeVar

from vit.data.transforms import Preprocessing
from vit.models.config import ViTConfig

T = TypeVar("T")


def _open_options(
    name: str, of: type, *, meaning: str, leave_out: str, first: Sequence[tuple[str, Any, str]] = ()
) -> type:
    """A dataclass with the fields of another, each `None` until it is set, and with their descriptions."""
    options = [(f.name, f.type | None, None) for f in fields(of) if f.name != leave_out]  # type: ignore[operator]
    made = make_dataclass(name, [*((n, kind, None) for n, kind, _ in first), *options], frozen=True, kw_only=True)
    arguments = (inspect.getdoc(of) or "").partition("Args:\n")[2].partition("\n\nRaises:")[0]
    described = [f"    {n}: {text}" for n, _, text in first]
    entries = re.split(r"\n(?=    \w)", arguments)
    described += [entry for entry in entries if not entry.strip().startswith(f"{leave_out}:")]
    made.__doc__ = "\n".join([meaning, "", "Args:", *described])
    made.__module__ = __name__
    return made


EncoderOptions = _open_options(
    "EncoderOptions",
    ViTConfig,
    meaning="The Vision Transformer. What is not set comes from `size`, from the weights, or is that of ViT-B/16.",
    leave_out="num_classes",
    first=[("size", str | None, "a name such as S/16: Ti, S, B, L, H or g, and the patch size.")],
)

PreprocessingOptions = _open_options(
    "PreprocessingOptions",
    Preprocessing,
    meaning="How pictures become tensors. What is not set comes from the weights.",
    leave_out="image_size",
)


def given(options: Any) -> dict[str, Any]:
    """The options that are set, as a dictionary; sequences are tuples whatever file they came from."""
    values = dict(options) if isinstance(options, Mapping) else asdict(options)
    set_ones = {name: value for name, value in values.items() if value is not None}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in set_ones.items()}


def rebuilt(cls: type[T], options: T | Mapping[str, Any]) -> T:
    """A configuration from itself, or from the plain dictionary that a checkpoint holds."""
    return cls(**given(options)) if isinstance(options, Mapping) else options


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with lists for tuples, as YAML, JSON and safe checkpoints want it."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
