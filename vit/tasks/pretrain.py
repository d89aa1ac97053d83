"""What all pre-training objectives share: an encoder without a head, a loss of pictures alone, fixed draws."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64, Num
from torch import Tensor, nn
from torchmetrics import SumMetric

from vit.data.batch import Batch
from vit.data.sampler import mix
from vit.models.config import ViTConfig
from vit.models.normalise import Normalise
from vit.models.vit import EMBEDDINGS, VisionTransformer, trunc_normal
from vit.tasks.base import Task
from vit.tasks.optim import OptimConfig, ScheduleConfig
from vit.tasks.options import EncoderOptions, PreprocessingOptions, given, rebuilt
from vit.tasks.recipe import fill
from vit.tasks.start import start_from
from vit.tasks.targets import statistics, to_images, to_patches

_DRAWS = 2  # keeps what an objective draws apart from dropout, whose seed is made of the same numbers


class Shown(NamedTuple):
    """Pictures in [0, 1] that show what an objective does: as they are, what the encoder saw, what was made of it."""

    pictures: Float[Tensor, "b c h w"]
    seen: Float[Tensor, "b c h w"]
    made: Float[Tensor, "b c h w"]


class Pretraining(Task):
    """A Vision Transformer without a head that learns from pictures alone; labels are not looked at.

    Its checkpoints and model folder hold the encoder under timm's names, for `weights` of another run. What is random
    in a training step comes from (seed, epoch, batch, process); in validation from (seed, row of the picture), so
    that the same is asked of a picture in every epoch, whatever the batch size.

    Args:
        encoder: the Vision Transformer; what is not set comes from its size, or from the weights.
        weights: encoder to go on from, as in `Classifier`; None starts from scratch.
        optim: the optimizer.
        schedule: learning rate over the run.
        preprocessing: how pictures become tensors; what is not set comes from the weights.
        pictures_every: epochs between drawings of what the objective makes of 8 val pictures; 0 draws none. None is
            10, or 0 for an objective that makes no pictures.
        seed: of what is random; the command line takes it from `--seed`.

    Raises:
        ValueError: options that do not go together, or weights that do not fit.
    """

    makes_pictures = True

    def __init__(
        self,
        *,
        encoder: EncoderOptions = EncoderOptions(),  # type: ignore[valid-type]
        weights: str | None = None,
        optim: OptimConfig = OptimConfig(),
        schedule: ScheduleConfig = ScheduleConfig(),
        preprocessing: PreprocessingOptions = PreprocessingOptions(),  # type: ignore[valid-type]
        pictures_every: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if pictures_every is None:
            pictures_every = 10 if self.makes_pictures else 0
        if pictures_every < 0 or (pictures_every and not self.makes_pictures):
            wanted = "of at least 0" if self.makes_pictures else "0, as this objective makes no pictures"
            raise ValueError(f"expected pictures_every {wanted}, but got {pictures_every}.")
        self.pictures_every, self.seed, self.weights = pictures_every, seed, weights
        start = start_from(given(encoder), weights, (), given(preprocessing))
        self.weights_report, self.preprocessing = start.notes, start.preprocessing
        # AdamW's rates of pre-training for small batches, every layer at one rate.
        values = {"lr": 1e-3, "weight_decay": 0.05, "layer_decay": 1.0, "clip": 1.0}
        self.resolved = fill(
            rebuilt(OptimConfig, optim),
            rebuilt(ScheduleConfig, schedule),
            values,
            dict.fromkeys(values, "pre-training"),
        )
        self.net = Normalise(start.model, mean=self.preprocessing.mean, std=self.preprocessing.std)
        self._train_loss, self._val_loss = MeanLoss(), MeanLoss()
        self.train(True)
        self.keep_options(**self.shared_options, pictures_every=pictures_every, seed=seed)

    @property
    def aim(self) -> str:
        """The objective, for the plan."""
        return f"pre-training {type(self).__name__}"

    @property
    def config(self) -> ViTConfig:
        """Of the encoder."""
        return self.model.config

    @property
    def draws_per_patch(self) -> int:
        """Uniform numbers that the objective needs for each patch of a picture."""
        return 1

    def loss(self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n r"]) -> Float[Tensor, ""]:
        """The mean loss of pictures.

        Args:
            images: as the datamodule gives them.
            draws: uniform numbers in [0, 1), all that the objective may draw.
        """
        raise NotImplementedError

    def reconstruct(self, images: Num[Tensor, "b c h w"], draws: Float[Tensor, "b n r"]) -> Shown | None:
        """What the objective makes of pictures; None for one that draws nothing. Arguments as in `loss`."""
        return None

    def forward(self, images: Num[Tensor, "b c h w"]) -> Float[Tensor, "b d"]:
        """Pooled features of pictures as the datamodule gives them."""
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, ""]:
        """The loss of a batch."""
        seed = mix(self.seed, self.trainer.current_epoch, batch_idx, self.trainer.global_rank, _DRAWS)
        # On the CPU, so that every device draws alike.
        draws = torch.rand(self._shape(len(batch.index)), generator=torch.Generator().manual_seed(seed))
        loss = self.loss(batch.images, draws.to(batch.index.device))
        self._train_loss.add(loss, len(batch.index))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count the loss of a batch."""
        self._val_loss.add(self.loss(batch.images, self.fixed_draws(batch.index)), len(batch.index))

    def fixed_draws(self, rows: Int64[Tensor, " b"]) -> Float[Tensor, "b n r"]:
        """The draws of pictures by their rows in the data table, the same whenever they are asked for."""
        generator, shape = torch.Generator(), self._shape(1)
        made = [
            torch.rand(shape, generator=generator.manual_seed(mix(self.seed, row, _DRAWS))) for row in rows.tolist()
        ]
        return torch.cat(made).to(rows.device)

    def _shape(self, pictures: int) -> tuple[int, int, int]:
        return pictures, self.config.grid[0] * self.config.grid[1], self.draws_per_patch

    def on_train_epoch_end(self) -> None:
        """Log the epoch's mean loss, as it was while the weights moved."""
        self._log_loss("train_loss", self._train_loss)

    def on_validation_epoch_end(self) -> None:
        """Log the mean loss of the val pictures."""
        self._log_loss("val_loss", self._val_loss)

    def _log_loss(self, name: str, losses: "MeanLoss") -> None:
        if (value := losses.mean()) is not None:
            self.log(name, value)
        losses.reset()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The encoder's groups, then all other trainable parameters, which learn at the rate of the last layer."""
        o = self.resolved.optim
        groups = super().parameter_groups()
        inside = {id(p) for p in self.trained.parameters()}
        others = [(n, p) for n, p in self.named_parameters() if p.requires_grad and id(p) not in inside]
        exempt = [p for n, p in others if VisionTransformer.no_weight_decay(n, p)]
        decayed = [p for n, p in others if not VisionTransformer.no_weight_decay(n, p)]
        for suffix, params, decay in (("", decayed, o.weight_decay), (" (no decay)", exempt, 0.0)):
            if params:
                group = {"params": params, "lr": o.lr, "lr_scale": 1.0, "weight_decay": decay}
                groups.append({**group, "name": type(self).__name__ + suffix})
        return groups

    def last_norm(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Tokens after the model's last norm, also where it stands behind the pooling."""
        return self.trained.fc_norm(tokens)

    def pixels(self, patches: Float[Tensor, "b n p"]) -> Float[Tensor, "b c h w"]:
        """Patches of normalised images as pictures in [0, 1]."""
        images = to_images(patches.float(), self.config.grid, self.config.patch_size)
        return (images * self.net.std + self.net.mean).clamp(0, 1)

    def draw(
        self,
        images: Num[Tensor, "b c h w"],
        predicted: Float[Tensor, "b n p"],
        hidden: Bool[Tensor, "b n"],
        *,
        normalised: bool,
    ) -> Shown:
        """Pictures with their hidden patches grey, and with the predicted ones in their place.

        Args:
            images: as the datamodule gives them.
            predicted: values of normalised images; where patches are normalised too, they are shown with the mean
                and deviation of the true patch, which the model does not know.
            hidden: which patches are predicted.
            normalised: whether the predicted patches are.
        """
        flat = to_patches(self.net.normalise(images).float(), self.config.patch_size)
        if normalised:
            mean, std = statistics(flat)
            predicted = predicted * std + mean
        made = self.pixels(torch.where(hidden[..., None], predicted, flat))
        shown = to_patches(self.pixels(flat), self.config.patch_size)
        seen = torch.where(hidden[..., None], 0.5, shown)
        return Shown(self.pixels(flat), to_images(seen, self.config.grid, self.config.patch_size), made)


class MeanLoss(nn.Module):
    """The mean loss over pictures, over all batches and processes."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = SumMetric(nan_strategy="disable"), SumMetric(nan_strategy="disable")

    def add(self, loss: Float[Tensor, ""], pictures: int) -> None:
        """Count the mean loss of a batch; nothing is read back from the device."""
        self.total.update(loss.detach().float() * pictures)
        self.count.update(pictures)

    def mean(self) -> Tensor | None:
        """Over what came since the last `reset`; None without pictures."""
        return self.total.compute() / self.count.compute() if self.count.update_called else None

    def reset(self) -> None:
        """Begin anew."""
        self.total.reset()
        self.count.reset()


def init_parts(part: nn.Module, std: float) -> None:
    """Start the parts beside the encoder as it starts: dense weights and tokens truncated normal, biases 0.

    Args:
        part: changed in place.
        std: `init_std` of the encoder.
    """
    for module in part.modules():
        if isinstance(module, nn.Linear):
            trunc_normal(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in module.named_parameters(recurse=False):
            if name in EMBEDDINGS:
                trunc_normal(parameter, std=std)


def freeze_pooling(model: VisionTransformer) -> None:
    """Leave attention pooling as it is, in an objective of single patches that does not use it."""
    if model.attn_pool is not None:
        model.attn_pool.requires_grad_(False)
