"""Knowledge distillation: what a trained teacher says of the same pictures, and how it enters the loss."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from vit.models.normalise import Normalise
from vit.models.weights import load_weights
from vit.tasks.losses import LossConfig


@dataclass
class Teacher:
    """A trained model that looks at the student's pictures; no part of the student, its checkpoint or its optimizer.

    Args:
        net: pixels to logits, in evaluation mode.
        size: height and width of its pictures.
        channels: of its pictures.
        columns: which of its logits are the student's classes, in the student's order; None for all as they are.
    """

    net: Normalise
    size: tuple[int, int]
    channels: int
    columns: list[int] | None

    @torch.no_grad()
    def __call__(self, images: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        """Logits of the student's classes for the student's (augmented, mixed) pictures, resized where sizes differ.

        Raises:
            ValueError: the teacher wants another number of channels.
        """
        if images.shape[1] == 1 and self.channels == 3:
            images = images.expand(-1, 3, -1, -1)
        if images.shape[1] != self.channels:
            raise ValueError(
                f"expected a teacher for pictures of {images.shape[1]} channels, but it wants {self.channels}: choose "
                "another loss.teacher."
            )
        if next(self.net.parameters()).device != images.device:
            self.net.to(images.device)
        values = images.float() / 255
        if tuple(images.shape[-2:]) != self.size:
            values = F.interpolate(values, self.size, mode="bicubic", antialias=True).clamp(0, 1)
        logits = self.net(values).float()
        return logits if self.columns is None else logits[:, self.columns]


def load_teacher(source: str, *, classes: Sequence[str], several: bool = False) -> Teacher:
    """A teacher of these classes.

    Args:
        source: a run, a model folder, a checkpoint or file of any known family, a folder that timm wrote, or the name
            of any timm model with pre-trained weights, a ViT or not.
        classes: of the student. A teacher that knows the names of its own classes must know all of these; one that
            does not must have as many.
        several: the student's pictures have several labels each; so must the teacher's, where it tells.

    Raises:
        ValueError: there is no such model, or it has other classes, or another kind of labels.
    """
    path = Path(source.removeprefix("local-dir:")).expanduser()
    if path.exists() and not _is_timm_folder(path):
        loaded = load_weights(source)
        if loaded.several != several:
            kinds = {True: "several labels", False: "one label"}
            raise ValueError(
                f"expected a teacher that gives a picture {kinds[several]}, as the data do, but {source} gives "
                f"{kinds[loaded.several]}."
            )
        model: nn.Module = loaded.model
        size, channels = loaded.model.config.size, loaded.model.config.channels
        mean, std = loaded.preprocessing["mean"], loaded.preprocessing["std"]
        numbers = tuple(map(str, range(len(loaded.classes))))
        count, names = len(loaded.classes), None if loaded.classes == numbers else loaded.classes
    else:
        model, config = _from_timm(f"local-dir:{path}" if path.exists() else source)
        channels, *sides = config["input_size"]
        size = (int(sides[0]), int(sides[1]))
        mean, std = config["mean"], config["std"]
        count, names = config["num_classes"], config.get("label_names")
    columns = _columns(source, count, names, classes)
    model.requires_grad_(False)
    net = Normalise(model, mean=tuple(mean), std=tuple(std), pixels="float").eval()
    return Teacher(net, size, channels, columns)


def _is_timm_folder(path: Path) -> bool:
    """Whether timm wrote the folder; our own folders hold timm's keys too."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return "architecture" in config and "vit_toolkit" not in config


def _from_timm(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Any model of timm with its weights, and what it says of its pictures and classes."""
    import timm  # takes a second, which runs without a teacher do not need

    short = name.removeprefix("timm/").removeprefix("hf-hub:timm/")
    if not name.startswith("local-dir:") and not (timm.is_model(short) and timm.is_model_pretrained(short)):
        raise ValueError(
            f"expected loss.teacher to be a run folder, a model folder, a file or the name of a pre-trained timm "
            f"model, but found none at {name}."
        )
    try:
        model = timm.create_model(name if name.startswith("local-dir:") else short, pretrained=True)
    except Exception as error:
        raise ValueError(
            f"expected to load the teacher {name}, but it is neither here nor can it be downloaded "
            f"({type(error).__name__}: {error}). Give loss.teacher a folder that holds its config.json and "
            "model.safetensors."
        ) from error
    told: Any = model
    classes = told.num_classes
    return model, {**told.pretrained_cfg, **timm.data.resolve_model_data_config(model), "num_classes": classes}


def _columns(source: str, count: int, names: Sequence[str] | None, classes: Sequence[str]) -> list[int] | None:
    if names is not None and len(names) == count:
        if missing := [name for name in classes if name not in names]:
            raise ValueError(
                f"expected a teacher that knows the classes of the data, but {source} does not know "
                f"{', '.join(missing[:10])}: choose one that was trained on these classes."
            )
        where = [list(names).index(name) for name in classes]
        return None if where == list(range(count)) else where
    if count != len(classes):
        raise ValueError(
            f"expected a teacher of the {len(classes)} classes of the data, but {source} has {count}: choose one that "
            "was trained on these classes."
        )
    return None


def distillation_loss(
    config: LossConfig, student: Float[Tensor, "b k"], teacher: Float[Tensor, "b k"], *, multi_label: bool = False
) -> Float[Tensor, ""]:
    """How far the student is from the teacher.

    `soft`: the Kullback-Leibler divergence of both distributions at temperature T, times T² (Hinton et al. 2015; DeiT,
    Touvron et al. 2021, equation 2). `hard`: cross-entropy with the teacher's decisions (DeiT, equation 3). With
    several labels both are binary cross-entropies per class.

    Args:
        config: kind and temperature.
        student: logits.
        teacher: logits.
        multi_label: whether pictures can have several labels.
    """
    s, t, heat = student.float(), teacher.float(), config.distillation_temperature
    if multi_label:
        if config.distillation == "hard":
            return F.binary_cross_entropy_with_logits(s, (t > 0).float())
        return F.binary_cross_entropy_with_logits(s / heat, (t / heat).sigmoid()) * heat**2
    if config.distillation == "hard":
        return F.cross_entropy(s, t.argmax(1))
    ours, theirs = (s / heat).log_softmax(1), (t / heat).log_softmax(1)
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * heat**2
