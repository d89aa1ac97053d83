"""What a classifier minimises: one scalar from logits and targets, whatever kind of targets the data have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

LossName = Literal["cross_entropy", "bce", "focal", "asymmetric"]
ClassWeights = Literal["none", "balanced"]
Distillation = Literal["soft", "hard"]

# Keeps powers, logarithms and their gradients finite where a probability is exactly 0 or 1 in float32.
_EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised. `None` leaves the choice to the data.

    Args:
        name: `cross_entropy`; `bce`, one binary question per class (the mean over classes); `focal` (Lin et al. 2017);
            `asymmetric` (Ridnik et al. 2021). None: `bce` where pictures have several labels, else `cross_entropy`.
        label_smoothing: share of the target spread over all classes (over yes and no with several labels), in [0, 1).
        focal_gamma: how much focal looks away from what is right already; 0 is cross-entropy.
        asymmetric_gammas: the same for the asymmetric loss, of the classes a picture has and of those it has not.
        asymmetric_margin: probability below which the asymmetric loss ignores a class that a picture has not.
        class_weights: `balanced` weighs class k by N / (K n_k), the inverse of its training frequency, so that
            the mean weight of training pictures is 1; with several labels it weighs yes by (N - n_k) / n_k.
        logit_adjustment: tau of Menon et al. 2021, equation 10: in training tau times the log of the training frequency
            is added to the logits, so that the plain logits suit classes that are equally frequent; 0 switches it off.
        teacher: distil from this model too: a run, a model folder, a file, or a timm name; see `vit.tasks.distill`.
        distillation: what is learned from the teacher: its probabilities (`soft`) or its decisions (`hard`).
        distillation_alpha: share of the teacher in the loss, in (0, 1].
        distillation_temperature: both sides' logits are divided by it in soft distillation.

    Raises:
        ValueError: a value out of its range.
    """

    name: LossName | None = None
    label_smoothing: float = 0.0
    focal_gamma: float = 2.0
    asymmetric_gammas: tuple[float, float] = (0.0, 4.0)
    asymmetric_margin: float = 0.05
    class_weights: ClassWeights = "none"
    logit_adjustment: float = 0.0
    teacher: str | None = None
    distillation: Distillation = "soft"
    distillation_alpha: float = 0.5
    distillation_temperature: float = 3.0

    def __post_init__(self) -> None:
        allowed = {"name": (None, *get_args(LossName)), "class_weights": get_args(ClassWeights)}
        for key, values in {**allowed, "distillation": get_args(Distillation)}.items():
            if getattr(self, key) not in values:
                raise ValueError(
                    f"expected loss.{key} to be one of {', '.join(map(str, values))}, but got {getattr(self, key)!r}."
                )
        for key in ("label_smoothing", "asymmetric_margin"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"expected loss.{key} in [0, 1), but got {getattr(self, key)}.")
        if not 0 < self.distillation_alpha <= 1:
            raise ValueError(f"expected loss.distillation_alpha in (0, 1], but got {self.distillation_alpha}.")
        if not 0 < self.distillation_temperature < math.inf:
            raise ValueError(
                f"expected a loss.distillation_temperature above 0, but got {self.distillation_temperature}."
            )
        for key in ("focal_gamma", "logit_adjustment"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"expected loss.{key} of at least 0, but got {getattr(self, key)}.")
        if len(self.asymmetric_gammas) != 2 or not all(0 <= g < math.inf for g in self.asymmetric_gammas):
            raise ValueError(f"expected two loss.asymmetric_gammas of at least 0, but got {self.asymmetric_gammas}.")
        self._check_used()

    def _check_used(self) -> None:
        """No option is passed over."""
        owners = {
            "focal_gamma": ("loss.name focal", self.name == "focal"),
            "asymmetric_gammas": ("loss.name asymmetric", self.name == "asymmetric"),
            "asymmetric_margin": ("loss.name asymmetric", self.name == "asymmetric"),
            "distillation": ("loss.teacher", self.teacher is not None),
            "distillation_alpha": ("loss.teacher", self.teacher is not None),
            "distillation_temperature": ("loss.teacher", self.teacher is not None),
        }
        for field in fields(self):
            owner, used = owners.get(field.name, ("", True))
            if not used and getattr(self, field.name) != field.default:
                raise ValueError(f"expected loss.{field.name} with {owner}: leave it out, or set that too.")

    @property
    def needs_counts(self) -> bool:
        """Whether the loss depends on how many training pictures each class has."""
        return self.class_weights != "none" or self.logit_adjustment > 0


class Loss(nn.Module):
    """A loss with what it knows of the classes, as buffers outside the state dict; made by `make_loss`.

    All is computed in float32. Pictures count equally: the loss is the mean of what each contributes.
    """

    weights: Tensor | None
    shift: Tensor | None

    def __init__(
        self, config: LossConfig, *, num_classes: int, multi_label: bool, weights: Tensor | None, shift: Tensor | None
    ) -> None:
        super().__init__()
        self.config, self.num_classes, self.multi_label = config, num_classes, multi_label
        self.register_buffer("weights", weights, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(
        self, logits: Float[Tensor, "b k"], targets: Int64[Tensor, " b"] | Float[Tensor, "b k"]
    ) -> Float[Tensor, ""]:
        """Mean loss of a batch.

        Args:
            logits: scores.
            targets: class numbers, shares of classes (rows sum to 1), or 0 and 1 per class with several labels.

        Raises:
            ValueError: targets of another shape.
        """
        self._check(logits, targets)
        logits = logits.float()
        if self.shift is not None:
            logits = logits + self.shift
        name, smoothing = self.config.name, self.config.label_smoothing
        if name == "cross_entropy" and self.weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=smoothing)
        wanted = targets.float() if targets.is_floating_point() else F.one_hot(targets, self.num_classes).float()
        if name == "cross_entropy":
            # As shares even for class numbers: torch would then divide by the batch's weights, not by its pictures.
            return F.cross_entropy(logits, wanted, weight=self.weights, label_smoothing=smoothing)
        if name == "focal" and not self.multi_label:
            return self._softmax_focal(logits, self._smoothed(wanted))
        terms = self._binary(logits, self._smoothed(wanted))
        if self.weights is not None and not self.multi_label:
            terms = terms * (wanted @ self.weights)[:, None]
        return terms.mean()

    def _smoothed(self, wanted: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        s = self.config.label_smoothing
        return wanted * (1 - s) + s * (0.5 if self.multi_label else 1 / self.num_classes) if s else wanted

    def _softmax_focal(self, logits: Float[Tensor, "b k"], wanted: Float[Tensor, "b k"]) -> Float[Tensor, ""]:
        """Equation 4 of Lin et al. with the softmax as p, for each class by its share of the target."""
        log_p = logits.log_softmax(1)
        away = (1 - log_p.exp()).clamp(_EPS, 1) ** self.config.focal_gamma
        terms = -wanted * away * log_p
        return (terms if self.weights is None else terms * self.weights).sum(1).mean()

    def _binary(self, logits: Float[Tensor, "b k"], wanted: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        """One question per class: yes with `wanted`, no with 1 - `wanted`; several labels may weigh yes."""
        c = self.config
        yes, no = F.logsigmoid(logits), F.logsigmoid(-logits)
        if c.name == "focal":
            # As torchvision has it for soft targets too: p is the probability given to the target.
            p = (yes.exp() * wanted + no.exp() * (1 - wanted)).clamp(0, 1)
            yes, no = (term * (1 - p).clamp(_EPS, 1) ** c.focal_gamma for term in (yes, no))
        elif c.name == "asymmetric":
            p = yes.exp()
            over = (p - c.asymmetric_margin).clamp(min=0)
            gamma_yes, gamma_no = c.asymmetric_gammas
            yes = yes * (1 - p).clamp(_EPS, 1) ** gamma_yes
            # Without a margin the plain logarithm has no gradient at p = 1, and logsigmoid has.
            missed = torch.log1p(-over) if c.asymmetric_margin else no
            no = missed * over.clamp(_EPS, 1) ** gamma_no
        if self.weights is not None and self.multi_label:
            yes = yes * self.weights
        return -(wanted * yes + (1 - wanted) * no)

    def _check(self, logits: Tensor, targets: Tensor) -> None:
        soft = targets.is_floating_point()
        if logits.shape[-1] != self.num_classes or tuple(targets.shape) != tuple(logits.shape[: 2 if soft else 1]):
            raise ValueError(
                f"expected logits (b, {self.num_classes}) and targets (b,) of class numbers or (b, {self.num_classes}) "
                f"of shares, but got {tuple(logits.shape)} and {tuple(targets.shape)} of {targets.dtype}."
            )
        if self.multi_label and not soft:
            raise ValueError("expected 0 and 1 per class as targets of several labels, but got class numbers.")


def resolve_loss(config: LossConfig, *, multi_label: bool) -> LossConfig:
    """The configuration with its name filled in.

    Raises:
        ValueError: options that do not go together, or not with these labels.
    """
    name: LossName = config.name or ("bce" if multi_label else "cross_entropy")
    if multi_label and name == "cross_entropy":
        raise ValueError(
            "expected loss.name bce, focal or asymmetric for pictures with several labels, but got cross_entropy, "
            "which has one answer per picture."
        )
    if config.logit_adjustment and (multi_label or name not in ("cross_entropy", "focal")):
        raise ValueError(
            f"expected loss.logit_adjustment with one label per picture and loss.name cross_entropy or focal, "
            f"but got {name}{' with several labels' if multi_label else ''}: choose class_weights=balanced there."
        )
    if config.logit_adjustment and config.class_weights != "none":
        raise ValueError(
            "expected either loss.logit_adjustment or loss.class_weights, but got both: each makes up for classes "
            "of different size."
        )
    return replace(config, name=name)


def make_loss(
    config: LossConfig,
    *,
    counts: Sequence[int] | None,
    num_classes: int,
    multi_label: bool,
    pictures: int | None = None,
) -> Loss:
    """The loss for these classes.

    Args:
        config: what to minimise.
        counts: training pictures of each class; None where the loss does not need them.
        num_classes: K.
        multi_label: whether a picture can have several labels, or none.
        pictures: training pictures; None is the sum of counts, right for one label per picture.

    Raises:
        ValueError: options that do not go together, or a class without training pictures.
    """
    config = resolve_loss(config, multi_label=multi_label)
    weights = shift = None
    if config.needs_counts:
        if counts is None or len(counts) != num_classes or min(counts) < 1:
            raise ValueError(
                f"expected at least one training picture of each of the {num_classes} classes for loss.class_weights "
                f"and loss.logit_adjustment, but the counts are {None if counts is None else list(counts)[:20]}."
            )
        n = torch.tensor(counts, dtype=torch.float64)
        total = float(n.sum()) if pictures is None else pictures
        if multi_label and total <= float(n.max()):
            raise ValueError("expected training pictures without each class for loss.class_weights balanced.")
        balanced = (total - n) / n if multi_label else total / (num_classes * n)
        weights = balanced.float() if config.class_weights == "balanced" else None
        tau = config.logit_adjustment
        shift = (tau * (n / total).log()).float() if tau else None
    return Loss(config, num_classes=num_classes, multi_label=multi_label, weights=weights, shift=shift)
