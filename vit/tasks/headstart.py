"""Features of a frozen backbone in a fit: stored in the place of pictures, and a head in closed form from them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from lightning.pytorch import Trainer
from torch import Tensor, nn

from vit.data.module import ImageDataModule
from vit.data.source import available_memory
from vit.evaluate.probe import Features, Ridge, features, ridge, sharpness
from vit.models.normalise import Normalise
from vit.models.vit import VisionTransformer


def split_features(trainer: Trainer, net: Normalise, split: str) -> Features:
    """Features of a split's pictures as they are evaluated, in the order of the data table, in every process.

    Args:
        trainer: its datamodule gives the pictures, its precision is used.
        net: a `VisionTransformer` that takes pixels.
        split: train, val or test.

    Raises:
        ValueError: the datamodule cannot give a split as it is evaluated.
    """
    data: Any = getattr(trainer, "datamodule", None)
    if not hasattr(data, "loader"):
        raise ValueError(
            f"expected a datamodule of this toolkit, for features of its {split} split, but got {type(data).__name__}: "
            "set model.tuning.head_init to zero."
        )
    with trainer.precision_plugin.forward_context():
        mine = features(net, data.loader(split))
    if trainer.world_size == 1:
        return mine
    # Process r of w has every w-th picture from the r-th on, see `EvalSampler`.
    shares: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(shares, tuple(mine))
    count = sum(len(share[0]) for share in shares)
    merged = []
    for pieces in zip(*shares, strict=True):
        whole = pieces[0].new_empty(count, *pieces[0].shape[1:])
        for rank, piece in enumerate(pieces):
            whole[rank :: trainer.world_size] = piece
        merged.append(whole)
    return Features(*merged)


def store_features(trainer: Trainer, net: Normalise, *, mixes: bool) -> Features | None:
    """Give the datamodule features in place of pictures, where all epochs would compute the same ones.

    Those of the val split always; those of the train split where augmentation is `none` and nothing is mixed. A run
    that is cut short on purpose (`limit_train_batches`, `fast_dev_run`) goes on to look at few pictures.

    Args:
        trainer: its datamodule gives the pictures.
        net: with a backbone in which nothing learns.
        mixes: whether training pictures are mixed.

    Returns:
        The train split's, if they are stored.
    """
    data: Any = getattr(trainer, "datamodule", None)
    # fast_dev_run and overfit_batches are limits too; whole numbers count batches.
    limit = trainer.limit_train_batches
    if not isinstance(data, ImageDataModule) or isinstance(limit, int) or limit != 1.0:
        return None
    kept = {
        "val": bool(data.table.rows("val")) and trainer.limit_val_batches == 1.0,
        "train": data.trains_as_evaluated and not mixes,
    }
    splits = [split for split, stored in kept.items() if stored]
    if (needed := _bytes(data, net, splits)) > (free := available_memory() // 2):
        if trainer.is_global_zero:
            print(
                f"head: features would take {needed / 1e9:.1f} GB, more than half of the free memory "
                f"({2 * free / 1e9:.1f} GB), so that each epoch computes them again",
                flush=True,
            )
        return None
    found = {split: split_features(trainer, net, split) for split in splits}
    data.features = {split: (part.x, part.index) for split, part in found.items()}
    if trainer.is_global_zero and found:
        counts = " and ".join(f"{len(part.x):,} {split}" for split, part in found.items())
        print(f"head: features of {counts} pictures are computed once", flush=True)
    return found.get("train")


def _bytes(data: ImageDataModule, net: Normalise, splits: Sequence[str]) -> int:
    """Of the stored features of splits: float32 numbers."""
    assert isinstance(net.model, VisionTransformer)
    return 4 * net.model.config.width * sum(len(data.table.rows(split)) for split in splits)


@torch.no_grad()
def start_head(head: nn.Linear, found: Features, *, binary: bool = False) -> tuple[Ridge, float]:
    """Set a head to the ridge solution on features, its logits as sharp as left-out pictures want them.

    The factor leaves the order of classes, hence the accuracy, as it is. It makes the head a good start for
    cross-entropy, which the regression's targets of ±1 are not: see `sharpness`.

    Args:
        head: changed in place.
        found: features and labels of the training pictures.
        binary: the loss is a binary cross-entropy per class, also where a picture has one class.

    Returns:
        The solution and the factor.
    """
    fitted = ridge(found.x, found.y, head.out_features)
    labels: Tensor = found.y[fitted.scored]
    if binary and labels.ndim == 1:
        labels = nn.functional.one_hot(labels, head.out_features)
    factor = sharpness(fitted.loo_scores, labels)
    head.weight.copy_(factor * fitted.weight)
    head.bias.copy_(factor * fitted.bias)
    return fitted, factor
