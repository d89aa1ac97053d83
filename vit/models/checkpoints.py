"""Files of weights, opened by what is in them and not by their names; no code in them ever runs."""

import argparse
import json
import pickle
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_WRAPPERS = ("state_dict", "teacher", "model", "module", "model_state", "model_ema", "params", "target")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Tensors as their author named them, and what stands beside them.

    Args:
        state: tensors by name; a JAX tree has names with slashes.
        config: of a `config.json` in the same folder; empty where there is none.
        preprocessor: of a `preprocessor_config.json` in the same folder.
        ours: what a training checkpoint of this toolkit says about its model; empty in others'.
    """

    state: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=dict)
    preprocessor: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a file of weights, or a folder with one.

    Args:
        path: a safetensors, torch or NumPy file under any name, or a folder with one of them.

    Raises:
        ValueError: there is none, it is broken, or it needs code to be opened.
    """
    file = path if path.is_file() else _weights_in(path)
    whole = _read(file)
    state, ours = _unwrap(whole, file), {}
    if isinstance(whole.get("vit_toolkit"), dict):
        ours = whole["vit_toolkit"]
    config = _json(file.parent / "config.json")
    config |= {"open_clip": c} if (c := _json(file.parent / "open_clip_config.json")) else {}
    return Checkpoint(
        state=state, config=config, preprocessor=_json(file.parent / "preprocessor_config.json"), ours=ours
    )


def _weights_in(folder: Path) -> Path:
    named = [folder / name for name in WEIGHT_NAMES if (folder / name).is_file()]
    if named:
        return named[0]
    kinds = (".safetensors", ".pth", ".pt", ".bin", ".npz", ".ckpt")
    others = sorted(p for p in folder.iterdir() if p.suffix in kinds) if folder.is_dir() else []
    if len(others) != 1:
        found = ", ".join(p.name for p in others[:5]) or "none"
        raise ValueError(f"expected one file of weights in {folder}, but found {found}: give the file itself.")
    return others[0]


def _read(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        head = opened.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"expected weights in {file}, but it is a Git LFS pointer: download the file itself.")
    if head[8:9] == b"{":
        try:
            # Copies, because safetensors maps the file into memory.
            return {name: tensor.clone() for name, tensor in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"expected a whole safetensors file at {file}, but got: {error}.") from error
    if head.startswith(b"PK"):
        try:
            names = zipfile.ZipFile(file).namelist()
        except zipfile.BadZipFile as error:
            raise ValueError(f"expected a whole file of weights at {file}, but it is cut or damaged.") from error
        if names and all(name.endswith(".npy") for name in names):
            return _read_arrays(file)
        if any(name.endswith("constants.pkl") for name in names):
            raise ValueError(f"expected tensors in {file}, but it is a TorchScript program: save its state_dict.")
    elif not head.startswith(b"\x80"):
        raise ValueError(f"expected weights at {file} (safetensors, torch or .npz), but it begins with {head[:12]!r}.")
    try:
        # Old checkpoints keep their command line, a Namespace: plain values under names.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle's age, where an error says all
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"expected plain tensors in {file}, but opening it would run code, or it is damaged: {reason} "
            "Ask its author for a safetensors file."
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"expected named tensors in {file}, but got a {type(loaded).__name__}.")
    return loaded


def _read_arrays(file: Path) -> dict[str, Any]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(_plain(arrays[name])) for name in arrays.files}
    except ValueError as error:
        raise ValueError(f"expected plain arrays in {file}, but opening it would run code: {error}") from error


def _plain(array: np.ndarray) -> np.ndarray:
    # bfloat16 arrays of JAX come as two bytes without a type: the upper half of a float32.
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


def _unwrap(whole: dict[str, Any], file: Path) -> dict[str, Tensor]:
    """The dictionary of tensors inside training state; the teacher of self-distillation, not the student."""
    inner: Any = whole
    while not any(isinstance(value, Tensor) and value.ndim > 1 for value in inner.values()):
        nested = [inner[name] for name in _WRAPPERS if isinstance(inner.get(name), dict)]
        if not nested:
            raise ValueError(f"expected named tensors in {file}, but got {', '.join(map(str, list(inner)[:8]))}.")
        inner = nested[0]
    return {str(name): value for name, value in inner.items() if isinstance(value, Tensor)}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, but got: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object in {path}, but got a {type(values).__name__}.")
    return values
