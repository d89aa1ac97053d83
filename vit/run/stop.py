"""Ctrl-C and SIGTERM: finish the step, write a checkpoint to go on from, and end."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from vit.run.folder import RunFolder
from vit.run.screen import as_typed
from vit.tasks.callbacks import may_save, save_whole
from vit.tasks.guards import NonFiniteError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A run that was asked to end.

    Args:
        number: of the signal; the exit code is 128 and this.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = int(number)


class StopAtStep(Checkpoint):
    """Once a signal came, save and end at the next optimizer step.

    A checkpoint between a step and its validation would lose that: inside an epoch one more step is taken, after its
    last step the run ends when the epoch is complete. A `Checkpoint` in name only: Lightning calls those last, when
    every other callback has seen the step, the average of the weights above all.

    Args:
        run: where `last.ckpt` is written.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.number: int | None = None

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """What the signals call. The second Ctrl-C ends at once."""
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        print(f"\n{name}: saving at the next step; Ctrl-C once more ends at once", flush=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over both signals; Lightning has set its own before, which would end in the middle of a window."""
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            for number in SIGNALS:
                signal.signal(number, self.ask)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Save between two optimizer steps, with the gradients of neither."""
        if may_save(trainer) and self._asked(trainer):
            save_whole(trainer, self.run.last)
            raise Stopped(self.number or signal.SIGTERM)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End between two epochs, whose checkpoint is written."""
        if self._asked(trainer):
            raise Stopped(self.number or signal.SIGTERM)

    def _asked(self, trainer: Trainer) -> bool:
        asked = self.number is not None
        # All processes must end at the same step, whichever got the signal.
        return trainer.strategy.reduce_boolean_decision(asked, all=False) if trainer.world_size > 1 else asked


@contextlib.contextmanager
def stoppable(trainer: Trainer, stop: StopAtStep) -> Iterator[None]:
    """After a stop say where the run can go on, and leave the signals as they were.

    Raises:
        Stopped: the run was asked to end; the exit code is then 130 after Ctrl-C and 143 after SIGTERM.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    except SystemExit:
        # So Lightning ends after any KeyboardInterrupt, a `Stopped` too.
        if not trainer.interrupted:
            raise
        print(f"\nstopped at step {trainer.global_step}; {_where(stop.run)}", flush=True)
        raise Stopped(stop.number or signal.SIGINT) from None
    except NonFiniteError as error:
        raise NonFiniteError(f"{error} The checkpoints hold the weights before it; {_where(stop.run)}") from None
    finally:
        with contextlib.suppress(ValueError):
            for number, handler in before.items():
                signal.signal(number, handler)


def _where(run: RunFolder) -> str:
    if run.last.exists():
        return f"go on with: vit fit --resume {as_typed(run.path)}"
    return "no checkpoint was written yet"
