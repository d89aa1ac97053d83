"""Each objective learns from real digits: less error than the best constant answer; DINO without a collapse."""

import math

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn import functional as F

from vit.data import Digits, ImageDataModule
from vit.data.batch import Batch
from vit.data.multicrop import MultiCrop, Views
from vit.data.transforms import Preprocessing
from vit.tasks.autoregressive import Autoregressive
from vit.tasks.dino import DINO, HeadConfig
from vit.tasks.dino_teacher import TeacherConfig
from vit.tasks.mae import MAE, DecoderConfig
from vit.tasks.masked import MaskedPatches
from vit.tasks.optim import OptimConfig
from vit.tasks.options import EncoderOptions, PreprocessingOptions
from vit.tasks.targets import colour_classes, normalised, to_patches

COMMON = dict(
    encoder=EncoderOptions(image_size=16, patch_size=4, width=48, depth=2, heads=3, init_std=0.15),
    preprocessing=PreprocessingOptions(crop_pct=1.0),
    optim=OptimConfig(lr=3e-3),
)
OBJECTIVES = {
    "masked": lambda: MaskedPatches(**COMMON),
    "MAE": lambda: MAE(mask_ratio=0.5, decoder=DecoderConfig(width=32, depth=1, heads=2), **COMMON),
    "causal": lambda: Autoregressive(attention="causal", **COMMON),
    "prefix": lambda: Autoregressive(attention="prefix", **COMMON),
}


class InMemory:
    """Batches of pictures that were decoded once, in another order in every epoch."""

    def __init__(self, images, labels, size):
        self.images, self.labels, self.size, self.epoch = images, labels, size, 0

    def __len__(self):
        return len(self.images) // self.size

    def __iter__(self):
        self.epoch += 1
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.epoch))
        for rows in order[: len(self) * self.size].split(self.size):
            yield Batch(images=self.images[rows], labels=self.labels[rows], index=rows)


@pytest.fixture(scope="module")
def digits():
    """Pictures and labels of the train and val split."""
    data = ImageDataModule(Digits(eval_batch_size=256, num_workers=0))
    data.preprocessing = Preprocessing(image_size=16, crop_pct=1.0)

    def whole(split):
        batches = list(data.loader(split))
        return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])

    return {split: whole(split) for split in ("train", "val")}


def trainer(tmp_path, **options):
    common = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    common |= dict(enable_checkpointing=False, use_distributed_sampler=False, default_root_dir=tmp_path)
    return Trainer(**common, **options)


def constant_loss(name, images):
    """The loss of the best answer that does not look: class frequencies, or 0 for normalised values."""
    if name == "masked":
        shares = torch.bincount(colour_classes(images, 4).flatten(), minlength=512).double()
        return float(torch.special.entr(shares / shares.sum()).sum())
    return float(normalised(to_patches(images / 255 * 2 - 1, 4)).square().mean())


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_it_predicts_far_better_than_any_constant(name, tmp_path, digits):
    torch.manual_seed(0)
    model = OBJECTIVES[name]()
    fit = trainer(tmp_path, max_epochs=6)
    fit.fit(model, InMemory(*digits["train"], size=64), InMemory(*digits["val"], size=60))
    loss, constant = float(fit.callback_metrics["val_loss"]), constant_loss(name, digits["val"][0])
    print(f"\n{name}: val_loss {loss:.3f}, the best constant {constant:.3f}")
    assert loss < 0.85 * constant


class ViewsInMemory(InMemory):
    """Two large and two small crops of each picture, drawn without decoding it again."""

    def __iter__(self):
        for batch in super().__iter__():
            large, small = (self.crops(batch.images, *kind) for kind in (((0.5, 1.0), 16), ((0.2, 0.5), 8)))
            yield Views(images=large, local=small, labels=batch.labels, index=batch.index)

    def crops(self, images, scale, size):
        draw = torch.Generator().manual_seed(int(images.sum()) + size)

        def one():
            side = (scale[0] + (scale[1] - scale[0]) * torch.rand(len(images), generator=draw)).sqrt()
            where = torch.zeros(len(images), 2, 3)
            where[:, 0, 0] = where[:, 1, 1] = side
            where[:, :, 2] = (1 - side)[:, None] * (2 * torch.rand(len(images), 2, generator=draw) - 1)
            grid = F.affine_grid(where, [len(images), 3, size, size], align_corners=False)
            return F.grid_sample(images.float(), grid, align_corners=False).round().to(torch.uint8)

        return torch.stack([one(), one()])


@pytest.mark.slow
def test_dino_brings_student_and_teacher_together_without_a_collapse(tmp_path, digits):
    torch.manual_seed(0)
    model = DINO(
        projection=HeadConfig(hidden=64, bottleneck=32, outputs=128),
        views=MultiCrop(local_views=2, local_size=8),
        teacher=TeacherConfig(momentum=0.95, temperature=0.04),
        **COMMON,
    )
    model.setup = lambda stage: None  # the views are made here
    fit = trainer(tmp_path, max_epochs=14)
    fit.fit(model, ViewsInMemory(*digits["train"], size=64), InMemory(*digits["val"], size=60))
    values = {name: float(value) for name, value in fit.callback_metrics.items()}
    print(f"\nDINO: {values}, ln K {math.log(128):.3f}")
    assert values["train_loss"] < 0.9 * math.log(128)
    assert values["val_loss"] < 0.9 * math.log(128)
    assert values["val_spread"] > 0.7, "the answers to different pictures differ"
