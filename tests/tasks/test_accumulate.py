"""Accumulated gradients in windows of every length."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from vit.tasks.accumulate import window_factor


class Slope(LightningModule):
    """Its loss is the mean of weight times input, so that its gradient is the mean input."""

    def __init__(self, corrected, batch_size, pictures):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.corrected, self.batch_size, self.pictures = corrected, batch_size, pictures
        self.gradients = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = (self.weight * x).mean()
        if not self.corrected:
            return loss
        return loss * window_factor(
            batch_idx,
            len(x),
            accumulate=self.trainer.accumulate_grad_batches,
            batches=self.trainer.num_training_batches,
            batch_size=self.batch_size,
            pictures=self.pictures,
        )

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(float(self.weight.grad))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def gradients(tmp_path, values, *, batch_size, accumulate, corrected=True, known=True):
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    sizes = (batch_size, len(values)) if known else (None, None)
    model = Slope(corrected, *sizes)
    trainer.fit(model, DataLoader(TensorDataset(torch.tensor(values)), batch_size=batch_size))
    return model.gradients


def test_gradients_of_a_last_partial_window_are_whole(tmp_path):  # C7
    ones = [1.0] * 10
    assert gradients(tmp_path, ones, batch_size=2, accumulate=4, corrected=False) == [1.0, 0.25]
    for known in (True, False):
        assert gradients(tmp_path, ones, batch_size=2, accumulate=4, known=known) == [1.0, 1.0]


def test_a_window_of_unequal_batches_is_the_mean_over_its_pictures(tmp_path):  # C7
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 10.0]  # batches of 2; the last has 1
    got = gradients(tmp_path, values, batch_size=2, accumulate=2)
    assert got == pytest.approx([2.5, (5.0 + 6.0 + 10.0) / 3])
    assert gradients(tmp_path, values, batch_size=2, accumulate=3) == pytest.approx([3.5, 10.0])
    assert gradients(tmp_path, values, batch_size=2, accumulate=9) == pytest.approx([sum(values) / 7])


def test_without_accumulation_and_without_a_known_end_nothing_changes():
    common = {"batch_size": 4, "pictures": 9}
    assert window_factor(2, 1, accumulate=1, batches=3, **common) == 1.0
    assert window_factor(2, 1, accumulate=2, batches=float("inf"), **common) == 1.0
