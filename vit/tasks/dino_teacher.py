"""The teacher of self-distillation: how it follows, what is learned from it, and how to see that it collapses."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """How the teacher follows the student and what makes its answers sharp but not all the same.

    Args:
        momentum: share of itself that the teacher keeps in the first step; it rises on a cosine to 1 in the last.
        temperature: of its softmax, from `warmup` on; low is sharp.
        first_temperature: in the first step; it rises linearly.
        warmup: share of the run in which it rises (30 of 100 epochs in the paper).
        centre_momentum: share of itself that the centre of the teacher's outputs keeps.

    Raises:
        ValueError: a value out of its range.
    """

    momentum: float = 0.996
    temperature: float = 0.07
    first_temperature: float = 0.04
    warmup: float = 0.3
    centre_momentum: float = 0.9

    def __post_init__(self) -> None:
        if min(self.temperature, self.first_temperature) <= 0:
            raise ValueError(f"expected temperatures above 0, but got {self}.")
        if not all(0 <= value <= 1 for value in (self.momentum, self.warmup, self.centre_momentum)):
            raise ValueError(f"expected momentum, warmup and centre_momentum in [0, 1], but got {self}.")

    def momentum_at(self, step: int, total: int) -> float:
        """The share at optimizer step `step` of `total`."""
        return cosine(self.momentum, 1.0, step, total)

    def temperature_at(self, step: int, total: int) -> float:
        """The temperature at optimizer step `step` of `total`."""
        share = min(1.0, step / (self.warmup * total)) if self.warmup else 1.0
        return self.first_temperature + share * (self.temperature - self.first_temperature)


def cosine(first: float, last: float, step: int, total: int) -> float:
    """From `first` at step 0 to `last` at the end of `total` steps, on half a cosine."""
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, total - 1))))


def cross_entropies(
    student: Float[Tensor, "v b k"],
    teacher: Float[Tensor, "g b k"],
    centre: Float[Tensor, " k"],
    temperatures: tuple[float, float],
) -> Float[Tensor, "g v"]:
    """Mean over pictures of -Σ P_teacher log P_student (eq. 2), for each view of the teacher with each of the student.

    Args:
        student: outputs of the student.
        teacher: outputs of the teacher.
        centre: running mean of the teacher's outputs (eq. 4).
        temperatures: of student and teacher.
    """
    targets = ((teacher - centre) / temperatures[1]).softmax(-1)
    logs = (student / temperatures[0]).log_softmax(-1)
    return -torch.einsum("gbk,vbk->gv", targets, logs) / student.shape[1]


class Spread(Metric):
    """Entropy of the answers to single pictures, and of the mean answer, as shares of ln K.

    Args:
        outputs: K.
    """

    full_state_update = False
    entropy: Tensor
    answers: Tensor
    count: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.add_state("entropy", torch.zeros(()), "sum")
        self.add_state("answers", torch.zeros(outputs), "sum")
        self.add_state("count", torch.zeros(()), "sum")

    def update(self, answers: Float[Tensor, "b k"]) -> None:
        """Count the probabilities of a batch."""
        self.entropy += torch.special.entr(answers).sum()
        self.answers += answers.sum(0)
        self.count += len(answers)

    def compute(self) -> dict[str, Tensor]:
        """Both shares."""
        most = math.log(max(2, len(self.answers)))
        spread = torch.special.entr(self.answers / self.count).sum() / most
        return {"entropy": self.entropy / self.count / most, "spread": spread}
