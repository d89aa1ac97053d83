"""Pictures of what a pre-training objective makes of a few val pictures, drawn while it learns."""

from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image
from torch import Tensor

from vit.data.batch import Pictures
from vit.tasks.pretrain import Pretraining, Shown

_SIDE, _GAP = 96, 4  # least side of a shown picture, and white between pictures, in pixels


class Reconstructions(Callback):
    """Draws `epoch-0010.png` and so on: true pictures above, what the encoder saw, and what was made of it below.

    The pictures are spread evenly over the val split, and the same things are hidden in them each time. Nothing
    that training draws is touched. Without a val split, or with a datamodule of another kind, nothing is drawn.

    Args:
        folder: where; made with the first picture.
        every: epochs between drawings.
        pictures: how many are shown.
    """

    def __init__(self, folder: Path, *, every: int, pictures: int = 8) -> None:
        self.folder, self.every, self.pictures = folder, every, pictures

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw after every so many epochs, and after the first."""
        epoch = trainer.current_epoch + 1
        due = self.every and (epoch % self.every == 0 or epoch == 1)
        if trainer.sanity_checking or not due or not isinstance(pl_module, Pretraining):
            return
        split = getattr(trainer.val_dataloaders, "dataset", None)
        if not isinstance(split, Pictures):
            return
        count = min(self.pictures, len(split))
        samples = [split[len(split) * i // count] for i in range(count)]
        shown = [sample.image for sample in samples if isinstance(sample.image, Tensor)]
        images = torch.stack(shown).to(pl_module.device)
        rows = torch.tensor([sample.row for sample in samples], device=pl_module.device)
        with trainer.precision_plugin.forward_context():
            drawn = pl_module.reconstruct(images, pl_module.fixed_draws(rows))
        if drawn is not None and trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True, parents=True)
            _save(contact_sheet(drawn), self.folder / f"epoch-{epoch:04d}.png")


def contact_sheet(drawn: Shown) -> UInt8[Tensor, "y x c"]:
    """Three rows of pictures on white, each picture enlarged to at least 96 pixels without smoothing."""
    rows = [_row(pictures) for pictures in drawn]
    between = torch.full((rows[0].shape[0], _GAP, rows[0].shape[2]), 255, dtype=torch.uint8)
    return torch.cat([rows[0], between, rows[1], between, rows[2]], dim=1).permute(1, 2, 0)


def _row(pictures: Float[Tensor, "b c h w"]) -> UInt8[Tensor, "c y x"]:
    times = max(1, -(-_SIDE // pictures.shape[-1]))
    shown = (pictures.float().cpu() * 255).round().to(torch.uint8)
    shown = shown.repeat_interleave(times, dim=2).repeat_interleave(times, dim=3)
    between = torch.full((*shown.shape[1:3], _GAP), 255, dtype=torch.uint8)
    parts = [part for picture in shown for part in (between, picture)]
    return torch.cat(parts[1:], dim=2)


def _save(sheet: UInt8[Tensor, "y x c"], file: Path) -> None:
    values = sheet.numpy()
    Image.fromarray(values[..., 0] if values.shape[2] == 1 else values).save(file)
