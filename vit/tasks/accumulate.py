"""Accumulated gradients that are the mean over all pictures of their window, whatever its length."""

import math


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
