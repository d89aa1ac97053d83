"""This toolkit as time_to_accuracy.py runs it; a file of its own, since the others need not wait for its imports."""

from pathlib import Path
from typing import Any

import torch
from contestants import Points, Predict
from lightning.pytorch import Callback, Trainer
from torch import nn

import vit as toolkit
from vit.data import Preprocessing, evaluation_transform
from vit.run import session


class Look(Callback):
    """Takes points of a fit of this toolkit: before the first step, in the middle of the first epoch, after each."""

    points: Points

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Test, and put the modules' modes back."""
        middle = int(trainer.num_training_batches) // 2 if trainer.current_epoch == 0 else 0
        if batch_idx in (0, middle):
            modes = [(part, part.training) for part in module.modules()]
            module.eval()
            if module.averaging is not None:  # test the weights that would be kept, as validation does
                module.averaging.on_validation_start(trainer, module)
            self.points(ours(module.net, module.preprocessing))
            if module.averaging is not None:
                module.averaging.on_validation_end(trainer, module)
            for part, training in modes:
                part.training = training


def ours(net: nn.Module, preprocessing: Preprocessing) -> Predict:
    """Logits of pictures as this toolkit shows them."""
    show = evaluation_transform(preprocessing)
    return lambda pictures: net(torch.stack([show(picture.convert("RGB")) for picture in pictures]))


def vit(folder: Path, weights: str, work: Path, points: Points) -> None:
    """`vit fit --recipe auto`, nothing else chosen but the folder and the weights."""
    Look.points = staticmethod(points)
    words = ["--recipe=auto", "--data=Folder", f"--data.root={folder}", f"--model.weights={weights}"]
    words += [
        "--trainer.accelerator=cpu",
        f"--trainer.default_root_dir={work}",
        "--trainer.callbacks=contestant_vit.Look",
    ]
    run = session.fit(words)
    assert run is not None
    best = toolkit.load(run)
    points(lambda pictures: best.logits(torch.stack([best.prepare(picture) for picture in pictures])), last=True)
