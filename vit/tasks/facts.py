"""What a recipe looks at: pictures, weights, machine, and what was set by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vit.tasks.accumulate import epoch_batches, planned_steps


class Choice(NamedTuple):
    """A value and why."""

    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """The weights that training starts from.

    Args:
        parameters: number of them.
        width: D.
        patch_size: P in pixels, as it is going to be.
        image_size: side in pixels that they were trained at.
        keeps_head: their head is for the classes of the data, so that it goes on.
    """

    parameters: int
    width: int
    patch_size: int
    image_size: int
    keeps_head: bool = False

    @property
    def large(self) -> bool:
        """Whether single steps upset them, as was seen of DINOv2-S."""
        return self.parameters >= LARGE


LARGE = 10_000_000

# Rough speeds in operations per second, only to tell minutes from hours: one core in float32, and one GPU.
_CORE, _GPU = 40e9, 60e12

# What decides the number of steps, as Lightning has it where nothing is set.
_TRAINER = {
    "max_steps": -1,
    "limit_train_batches": None,
    "accumulate_grad_batches": 1,
    "fast_dev_run": False,
    "overfit_batches": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a recipe looks at.

    Args:
        pictures: to train on.
        val: pictures that choose the checkpoint.
        classes: their names.
        multi_label: pictures have several labels.
        side: median of the pictures' shorter sides in pixels.
        aspect: median of longer over shorter side.
        start: the weights; None from scratch.
        cores: processor cores.
        gpu: whether a GPU computes.
        devices: processes that train together, each with a batch of its own.
        sharded: the weights are divided among processes (FSDP, DeepSpeed).
        typed: options that were set by hand, by dotted name: choices follow from them.
    """

    pictures: int
    val: int
    classes: tuple[str, ...]
    multi_label: bool
    side: int
    start: Start | None
    cores: int
    gpu: bool
    aspect: float = 1.0
    devices: int = 1
    sharded: bool = False
    typed: Mapping[str, Any] = field(default_factory=dict)

    def settled(self, name: str, choice: Choice) -> Any:
        """The value that an option is going to have: the typed one, or else the recipe's.

        Args:
            name: of the option.
            choice: of the recipe.
        """
        return self.typed.get(name, choice.value)

    def sets(self, *prefixes: str) -> bool:
        """Whether an option was set by hand.

        Args:
            prefixes: what its name begins with.
        """
        return any(name.startswith(prefixes) for name in self.typed)

    @property
    def length_is_set(self) -> bool:
        """Whether the length of the run was set by hand."""
        return self.sets("trainer.max_epochs", "trainer.max_steps", "trainer.max_time")

    @property
    def minutes(self) -> int:
        """What a run may take before a recipe gives something up: half an hour of a processor, a night of a GPU."""
        return 8 * 60 if self.gpu else 30

    def seconds(self, parameters: int, tokens: int) -> float:
        """Of an epoch: two operations per parameter and token forward, twice that backward."""
        speed = self.devices * _GPU if self.gpu else _CORE * self.cores
        return 6 * parameters * tokens * self.pictures / speed

    def pictures_per_step(self, batch: int) -> int:
        """Pictures behind one optimizer step: accumulated batches, those of all processes."""
        return batch * self.devices * int(self.typed.get("trainer.accumulate_grad_batches", 1))

    def steps(self, epochs: int, batch: int) -> int:
        """Optimizer steps of the run.

        Args:
            epochs: of the run, unless its steps were set by hand.
            batch: pictures in a batch.
        """
        trainer = {name: self.typed.get(f"trainer.{name}", value) for name, value in _TRAINER.items()}
        if trainer["max_steps"] > 0 and "trainer.max_epochs" not in self.typed:
            epochs = -1
        return max(1, planned_steps({**trainer, "max_epochs": epochs}, self.batches(batch))[1])

    def batches(self, batch: int) -> int:
        """Training batches of one process in a whole epoch."""
        drop_last = bool(self.typed.get("data.drop_last", True))
        return max(1, epoch_batches(self.pictures, batch, processes=self.devices, drop_last=drop_last))


def tokens_of(size: Any, patch: int) -> int:
    """Tokens of a picture with the class token.

    Args:
        size: side in pixels, or height and width.
        patch: side of a patch in pixels.
    """
    height, width = (size, size) if isinstance(size, int) else size
    return int(height // patch) * int(width // patch) + 1
