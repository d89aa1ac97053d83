"""Windows of accumulated batches: gradients that are the mean over their pictures, and how many steps they make."""

import math
from collections.abc import Mapping
from typing import Any


def window_factor(
    batch_idx: int, size: int, *, accumulate: int, batches: float, batch_size: int | None, pictures: int | None
) -> float:
    """What a batch's mean loss is multiplied by so that an accumulated gradient is the mean over its pictures.

    Lightning divides every batch's loss by `accumulate`, also in a last window of fewer batches, and whatever the
    sizes of the batches. The right weight of a batch is its pictures over those of its window.

    Args:
        batch_idx: position of the batch in the epoch.
        size: pictures in the batch.
        accumulate: batches per optimizer step.
        batches: of the epoch.
        batch_size: of all batches but the last; None where it is not known: then batches count equally.
        pictures: of the epoch.
    """
    if accumulate == 1 or batches == math.inf:
        return 1.0
    start = batch_idx - batch_idx % accumulate
    end = min(start + accumulate, int(batches))
    if batch_size is None or pictures is None:
        return accumulate / (end - start)
    return accumulate * size / (min(end * batch_size, pictures) - start * batch_size)


def epoch_batches(pictures: int, batch: int, *, processes: int = 1, drop_last: bool = True) -> int:
    """Training batches of one process in a whole epoch.

    Args:
        pictures: to train on, in all processes.
        batch: pictures in a batch of one process.
        processes: that share the pictures.
        drop_last: leave out a last batch that is smaller.
    """
    own = pictures // processes
    return own // batch if drop_last else math.ceil(own / batch)


def planned_steps(trainer: Mapping[str, Any], batches: int) -> tuple[int, int]:
    """Optimizer steps per epoch and in all, as Lightning will take them.

    Args:
        trainer: options of the Trainer.
        batches: training batches in a whole epoch.
    """
    limit = trainer["limit_train_batches"]
    if trainer["fast_dev_run"]:
        fast = 1 if trainer["fast_dev_run"] is True else int(trainer["fast_dev_run"])
        return min(fast, batches), min(fast, batches)
    if trainer["overfit_batches"]:
        limit = trainer["overfit_batches"]
    if limit is not None:
        # As Lightning: whole numbers count batches, also those that a parser has read as 6.0; others are shares.
        counts = isinstance(limit, int) or limit > 1
        batches = min(batches, int(limit)) if counts else int(batches * limit)
    per_epoch = math.ceil(batches / (trainer["accumulate_grad_batches"] or 1))
    epochs, steps = trainer["max_epochs"], trainer["max_steps"]
    total = math.inf if epochs in (-1, None) else per_epoch * epochs
    total = min(total, steps) if steps not in (-1, None) else total
    return per_epoch, -1 if total == math.inf else int(total)
