"""DINO: a student learns to say of every view what its own average says of another (Caron et al. 2021)."""

from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit.data.batch import Batch
from vit.data.multicrop import MultiCrop, Views
from vit.models.vit import VisionTransformer
from vit.tasks.dino_teacher import Spread, TeacherConfig, cosine, cross_entropies
from vit.tasks.options import plain, rebuilt
from vit.tasks.pretrain import Pretraining, init_parts

_VIEWS, _TEACHER = MultiCrop(), TeacherConfig()


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The projection head; the defaults are those of the paper (appendix C).

    Args:
        hidden: size of its hidden layers.
        bottleneck: size of the normalised layer before the last.
        outputs: number of prototypes K.

    Raises:
        ValueError: a value below 1.
    """

    hidden: int = 2048
    bottleneck: int = 256
    outputs: int = 65536

    def __post_init__(self) -> None:
        if min(self.hidden, self.bottleneck, self.outputs) < 1:
            raise ValueError(f"expected sizes of the head of at least 1, but got {self}.")


class DINOHead(nn.Module):
    """Three dense layers, a unit vector, and its cosines with K prototypes (appendix C).

    Args:
        width: D of the pooled features.
        config: its sizes.
    """

    def __init__(self, width: int, config: HeadConfig) -> None:
        super().__init__()
        sizes = [width, config.hidden, config.hidden, config.bottleneck]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.last = nn.Linear(config.bottleneck, config.outputs, bias=False)

    def forward(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b k"]:
        """Outputs in [-1, 1], not yet divided by a temperature."""
        x = features
        for i, layer in enumerate(self.layers):
            x = layer(F.gelu(x)) if i else layer(x)
        # Prototypes of length 1 are weight normalisation with its gain fixed, which keeps training stable.
        return F.linear(F.normalize(x.float(), dim=-1), F.normalize(self.last.weight.float(), dim=-1)).float()


class DINO(Pretraining):
    """Self-distillation without labels (Caron et al. 2021).

    The student sees all views of a picture, the teacher, an exponential average of the student, its two global ones;
    the student learns the teacher's answer to every other view. The teacher's outputs are centred and sharpened,
    which together keep them from collapsing. The teacher's encoder is what checkpoints and model folder hold.

    `val_loss` says how far student and teacher are apart on the same val picture; it falls too when all answers
    become the same, so that it chooses no checkpoint: the last one counts. `val_entropy` is the mean entropy of the
    teacher's answers, `val_spread` that of their mean, both as shares of ln K: a spread near 0 or an entropy near 1
    mean collapse. Nothing is drawn, since it makes no picture.

    Args:
        views: the views of each picture.
        projection: the projection head.
        teacher: how the teacher follows.
        student_temperature: of the student's softmax.
        freeze_last: epochs in which the prototypes stay as they are.
        final_weight_decay: weight decay in the last step, reached on a cosine; None leaves it at `optim.weight_decay`
            (the paper goes from 0.04 to 0.4).

    Raises:
        ValueError: a value out of its range, or local views that the patches do not divide.
    """

    centre: Tensor
    makes_pictures = False

    def __init__(
        self,
        *,
        views: MultiCrop = _VIEWS,
        projection: HeadConfig = HeadConfig(),
        teacher: TeacherConfig = _TEACHER,
        student_temperature: float = 0.1,
        freeze_last: int = 1,
        final_weight_decay: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if student_temperature <= 0 or freeze_last < 0 or (final_weight_decay is not None and final_weight_decay < 0):
            raise ValueError(
                "expected student_temperature above 0, freeze_last and final_weight_decay of at least 0, but got "
                f"{student_temperature}, {freeze_last} and {final_weight_decay}."
            )
        if self.resolved.optim.ema is not None:
            raise ValueError(
                "expected no optim.ema with DINO, whose teacher already is an average of the student and is what is "
                f"kept, but got {self.resolved.optim.ema}. Leave it out; teacher.momentum says how slowly it follows."
            )
        self.views = self._sized(rebuilt(MultiCrop, views))
        self.projection, self.teacher = rebuilt(HeadConfig, projection), rebuilt(TeacherConfig, teacher)
        self.student_temperature, self.freeze_last = student_temperature, freeze_last
        self.final_weight_decay = final_weight_decay
        # Positions are resampled for local views; parameters are the same for any size.
        self.student = VisionTransformer(replace(self.config, dynamic_size=True))
        self.student.load_state_dict(self.model.state_dict())
        self.student_head = DINOHead(self.config.width, self.projection)
        init_parts(self.student_head, self.config.init_std)
        self.teacher_head = deepcopy(self.student_head)
        self.model.requires_grad_(False)
        self.teacher_head.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(self.projection.outputs))
        self._spread = Spread(self.projection.outputs)
        self.train(True)
        self.keep_options(
            views=plain(asdict(self.views)),
            projection=asdict(self.projection),
            teacher=asdict(self.teacher),
            student_temperature=student_temperature,
            freeze_last=freeze_last,
            final_weight_decay=final_weight_decay,
        )

    def _sized(self, views: MultiCrop) -> MultiCrop:
        p, side = self.config.patch_size, views.local_size
        if side is None:
            side = max(1, round(min(self.config.size) * 3 / 7 / p)) * p
        elif side % p:
            raise ValueError(f"expected a views.local_size that the patch size {p} divides, but got {side}.")
        return replace(views, local_size=side)

    @property
    def trained(self) -> VisionTransformer:
        """The student."""
        return self.student

    @property
    def monitors(self) -> dict[str, str]:
        """None: no value tells a good teacher from a collapsed one, so the last checkpoint counts."""
        return {}

    @property
    def logged(self) -> dict[str, str]:
        """How far teacher and student are apart, and how the teacher's answers are spread."""
        return {"train_loss": "min", "val_loss": "min", "val_entropy": "min", "val_spread": "max"}

    def train(self, mode: bool = True) -> "DINO":
        """Switch to training; the teacher drops nothing."""
        super().train(mode)
        self.net.eval()
        if hasattr(self, "teacher_head"):
            self.teacher_head.eval()
        return self

    def on_train_batch_start(self, batch: Batch | Views, batch_idx: int) -> None:
        """Set the step's learning rates, seed and weight decay."""
        super().on_train_batch_start(batch, batch_idx)
        first, last = self.resolved.optim.weight_decay, self.final_weight_decay
        if last is not None and first is not None:
            decay = cosine(first, last, self.trainer.global_step, self.lr_factor.total)
            for group in self.trainer.optimizers[0].param_groups:
                if not group["name"].endswith("(no decay)"):
                    group["weight_decay"] = decay

    def training_step(self, batch: Views, batch_idx: int) -> Float[Tensor, ""]:  # type: ignore[override]
        """Mean cross-entropy of all pairs of a teacher's view and another one; moves the centre."""
        views, pictures = batch.images.shape[:2]
        large = self.net.normalise(batch.images.flatten(0, 1))
        with torch.no_grad():
            teacher = self.teacher_head(self.model(large)).unflatten(0, (views, pictures))
        student = self.student_head(self.student(large)).unflatten(0, (views, pictures))
        if batch.local is not None:
            small = self.student_head(self.student(self.net.normalise(batch.local.flatten(0, 1))))
            student = torch.cat([student, small.unflatten(0, batch.local.shape[:2])])
        temperature = self.teacher.temperature_at(self.trainer.global_step, self.lr_factor.total)
        pairs = cross_entropies(student, teacher, self.centre, (self.student_temperature, temperature))
        loss = pairs[self._others(pairs)].mean()
        self._move_centre(teacher)
        self._train_loss.add(loss, pictures)
        return loss

    def _others(self, pairs: Float[Tensor, "g v"]) -> Bool[Tensor, "g v"]:
        """All pairs but those of a view with itself."""
        return ~torch.eye(*pairs.shape, dtype=torch.bool, device=pairs.device)

    @torch.no_grad()
    def _move_centre(self, teacher: Float[Tensor, "g b k"]) -> None:
        mean = self.trainer.strategy.reduce(teacher.mean((0, 1)), reduce_op="mean")
        keep = self.teacher.centre_momentum
        self.centre.mul_(keep).add_(mean, alpha=1 - keep)

    def on_after_backward(self) -> None:
        """Keep the prototypes as they are in the first epochs."""
        if self.trainer.current_epoch < self.freeze_last:
            self.student_head.last.weight.grad = None

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then let the teacher follow; here and not later, so that no checkpoint holds one without the other."""
        super().optimizer_step(*args, **kwargs)
        self.follow(self.teacher.momentum_at(self.trainer.global_step, self.lr_factor.total))

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """Move the teacher towards the student.

        Args:
            momentum: share of itself that it keeps.
        """
        pairs = ((self.model, self.student), (self.teacher_head, self.student_head))
        for teacher, student in pairs:
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 1 - momentum)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count how far teacher and student are apart on a batch, and how the teacher's answers are spread."""
        x = self.net.normalise(batch.images)
        teacher, student = self.teacher_head(self.model(x)), self.student_head(self.student(x))
        temperatures = (self.student_temperature, self.teacher.temperature)
        loss = cross_entropies(student[None], teacher[None], self.centre, temperatures)[0, 0]
        self._val_loss.add(loss, len(batch.index))
        self._spread.update(((teacher - self.centre) / temperatures[1]).softmax(-1))

    def on_validation_epoch_end(self) -> None:
        """Log the mean loss, and how the teacher's answers are spread."""
        super().on_validation_epoch_end()
        if self._spread.update_called:
            self.log_dict({f"val_{name}": value for name, value in self._spread.compute().items()})
        self._spread.reset()
