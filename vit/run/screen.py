"""What a run says on the screen, and what Lightning need not say."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vit.run.folder import RunFolder


def say_next(
    run: RunFolder,
    values: dict[str, Any] | None,
    seconds: float,
    *,
    chosen_by: str | None,
    has_test: bool,
    has_classes: bool,
    by_steps: bool,
) -> None:
    """Print the result of a fit, where it lies, and what to try next.

    Args:
        run: its folder.
        values: numbers of the val split; None where there is none.
        seconds: time of training.
        chosen_by: the val value that chose the checkpoint; None where it is the last one.
        has_test: whether there are test pictures.
        has_classes: whether the model names pictures; one that was pre-trained without labels does not.
        by_steps: whether a number of steps ended it, not of epochs.
    """
    shown = as_typed(run.path)
    print(f"\ntrained in {seconds:.1f} s")
    if values is not None:
        print(result_line("val", values) + (f"; {chosen_by} chose the checkpoint" if chosen_by else ""))
    print(f"run     {shown}")
    if run.model.is_dir():
        print(f"model   {shown}/model")
    print("next")
    if has_test:
        print(f"  vit test {shown}                  score it on pictures that were never looked at")
    if run.model.is_dir() and not has_classes:
        print(f"  vit fit --config finetune_folder --model.weights {shown} --data.root PHOTOS   give it classes")
    elif run.model.is_dir():
        print(f"  vit predict {shown} PICTURE ...   name other pictures")
    length, end = ("max_steps", "step") if by_steps else ("max_epochs", "epoch")
    print(f"  vit fit --resume {shown} --trainer.{length} N   go on to {end} N")


def result_line(split: str, values: dict[str, Any]) -> str:
    """One line with the numbers of a split and the interval of the accuracy; for others' modules what they log."""
    if "acc_95" not in values:
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        return f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    low, high = (100 * value for value in values["acc_95"])
    return (
        f"{split} accuracy {100 * values['acc']:.2f} % (95 % interval {low:.2f} to {high:.2f}) "
        f"on {values['pictures']:,} pictures, balanced {100 * values['balanced_acc']:.2f} %, "
        + ("loss not finite" if values["loss"] is None else f"loss {values['loss']:.4f}")
    )


def as_typed(path: Path) -> str:
    """A path as one would type it from here."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's notices of what the plan says better; its warnings about real trouble stay."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _NOT_NEWS:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        logger.setLevel(before)


_NOT_NEWS = (
    # Lightning 2.6 with torch 2.14: about Lightning's own use of torch.
    r".*LeafSpec.*is deprecated",
    # Workers are chosen by amount of data and cores; the plan gives the reason.
    r"The '.*_dataloader' does not have many workers",
    # Frozen parts are in evaluation mode on purpose.
    r"Found \d+ module\(s\) in eval mode at the start of training",
    # Small data sets have fewer batches than the logging interval.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    # Evaluation needs none of the callbacks of training.
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    # The values are of all processes already.
    r"It is recommended to use `self.log\(.*sync_dist=True",
    # torch.compile looks at the inputs of a block, which are no leaves.
    r"The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # A run that goes on writes into its own folder.
    r"Checkpoint directory .* exists and is not empty",
)
