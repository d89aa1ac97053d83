"""Image classification as a LightningModule: from scratch, or from weights with a new head."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, UInt8
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from vit.data.batch import Batch
from vit.data.mix import UNMIXED, Mixing, mixed
from vit.data.sampler import mix
from vit.data.transforms import Preprocessing
from vit.evaluate.metrics import StageMetrics
from vit.models.config import ViTConfig
from vit.models.normalise import Normalise
from vit.models.sizes import vit_config
from vit.models.vit import VisionTransformer
from vit.models.weights import load_weights
from vit.tasks.optim import (
    OptimConfig,
    Schedule,
    ScheduleConfig,
    apply_to_optimizer,
    make_optimizer,
    make_schedule,
    parameter_groups,
)
from vit.tasks.options import EncoderOptions, PreprocessingOptions, given, plain, rebuilt
from vit.tasks.recipe import resolve


@dataclass(frozen=True)
class Start:
    """Where a classifier starts from: the model, how pictures are prepared for it, what became of the weights."""

    model: VisionTransformer
    preprocessing: Preprocessing
    notes: tuple[str, ...]


class Classifier(LightningModule):
    """A Vision Transformer that learns to name pictures.

    The head is one zero-initialised layer D x K (ViT, section 3.2): at the start all logits are 0 and the loss is
    ln K. Learning rates are a pure function of the optimizer step. What is random in a step (dropout, stochastic
    depth) comes from (seed, epoch, batch, process), so that a run which goes on equals one that was never cut.

    Args:
        classes: class names in the order of their labels; the command line takes them from the data.
        encoder: the Vision Transformer; what is not set comes from its size, or from the weights.
        weights: a run, a model folder, a file of any known family, or the name of a timm model, see `vit weights`;
            None trains from scratch. The head is kept only if its classes are those of the data.
        method: `full` trains everything; `head` trains the head and leaves the rest as it is, in evaluation mode.
        optim: the optimizer.
        schedule: learning rate over the run.
        label_smoothing: share of the target spread over all classes, in [0, 1).
        mixing: mixup and CutMix of training batches.
        preprocessing: how pictures become tensors; what is not set comes from the weights.
        seed: of what is random in a step; the command line takes it from `--seed`.

    Raises:
        ValueError: options that do not go together, or weights that do not fit.
    """

    def __init__(
        self,
        *,
        classes: Sequence[str] | None = None,
        encoder: EncoderOptions = EncoderOptions(),  # type: ignore[valid-type]
        weights: str | None = None,
        method: Literal["full", "head"] = "full",
        optim: OptimConfig = OptimConfig(),
        schedule: ScheduleConfig = ScheduleConfig(),
        label_smoothing: float = 0.0,
        mixing: Mixing = UNMIXED,
        preprocessing: PreprocessingOptions = PreprocessingOptions(),  # type: ignore[valid-type]
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not classes or len(classes) < 2:
            raise ValueError(f"expected at least 2 classes, but got {list(classes or [])}.")
        if method not in ("full", "head"):
            raise ValueError(f"expected method full or head, but got {method!r}.")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"expected label_smoothing in [0, 1), but got {label_smoothing}.")
        self.mixing = rebuilt(Mixing, mixing)
        self.classes = tuple(classes)
        self.method = method
        self.weights = weights
        self.label_smoothing = label_smoothing
        self.seed = seed
        start = _start(given(encoder), weights, self.classes, given(preprocessing))
        self.weights_report = start.notes
        self.preprocessing = start.preprocessing
        self.resolved = resolve(
            rebuilt(OptimConfig, optim),
            rebuilt(ScheduleConfig, schedule),
            pretrained=weights is not None,
            head_only=method == "head",
        )
        p = self.preprocessing
        self.net = Normalise(start.model, mean=p.mean, std=p.std)
        if method == "head":
            self.model.requires_grad_(False)
            self.model.head.requires_grad_(True)
        self.train_metrics, self.val_metrics, self.test_metrics = (StageMetrics(len(self.classes)) for _ in range(3))
        self.train(True)
        self._save_plain_hyperparameters()

    @property
    def model(self) -> VisionTransformer:
        """The bare model, on normalised floats."""
        model = self.net.model
        assert isinstance(model, VisionTransformer)
        return model

    @property
    def monitors(self) -> dict[str, str]:
        """The values that may choose the best checkpoint, with their direction."""
        values = {"val_loss": "min", "val_acc": "max", "val_balanced_acc": "max"}
        return values | ({"val_top5": "max"} if len(self.classes) > 5 else {})

    def _save_plain_hyperparameters(self) -> None:
        # Plain values only, and all that is needed to rebuild: a checkpoint neither runs code nor misses its weights.
        prepared = self.preprocessing.to_dict()
        del prepared["image_size"]
        values = {
            "classes": list(self.classes),
            "encoder": {k: v for k, v in self.model.config.to_dict().items() if k != "num_classes"},
            "method": self.method,
            "optim": plain(asdict(self.resolved.optim)),
            "schedule": plain(asdict(self.resolved.schedule)),
            "label_smoothing": self.label_smoothing,
            "mixing": asdict(self.mixing),
            "preprocessing": prepared,
            "seed": self.seed,
        }
        self.save_hyperparameters(values, logger=False)

    def setup(self, stage: str) -> None:
        """Give the datamodule the preprocessing of the weights, and compare the classes."""
        data = getattr(self.trainer, "datamodule", None)
        if data is None or not hasattr(data, "classes"):
            return
        if tuple(data.classes) != self.classes:
            raise ValueError(
                f"expected data with the classes of the model ({', '.join(self.classes[:20])}), but it has "
                f"{', '.join(data.classes[:20])}."
            )
        if hasattr(data, "preprocessing"):
            data.preprocessing = self.preprocessing

    def train(self, mode: bool = True) -> "Classifier":
        """Switch to training; frozen parts stay in evaluation mode."""
        super().train(mode)
        if self.method == "head":
            self.model.eval()
            self.model.head.train(mode)
        return self

    def forward(self, images: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        """Logits of pictures as the datamodule gives them."""
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, ""]:
        """Cross-entropy of a batch, against shares of classes where pictures are mixed."""
        labels: Tensor = batch.labels
        images, targets = batch.images, labels
        if self.mixing != UNMIXED:
            where = (self.seed, self.trainer.current_epoch, batch_idx, self.trainer.global_rank, _MIXING)
            images, targets = mixed(images, labels, classes=len(self.classes), seed=mix(*where), **asdict(self.mixing))
            labels = targets.argmax(1)
        logits = self(images).float()
        loss = nn.functional.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        self.train_metrics.update(loss, logits, labels)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, "b k"]:
        """Logits of a batch; the loss is counted without smoothing."""
        return self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, "b k"]:
        """Logits of a batch."""
        return self._evaluate(batch, self.test_metrics)

    def predict_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, "b k"]:
        """Logits of a batch."""
        return self(batch.images).float()

    def _evaluate(self, batch: Batch, metrics: StageMetrics) -> Float[Tensor, "b k"]:
        logits = self(batch.images).float()
        metrics.update(nn.functional.cross_entropy(logits, batch.labels), logits, batch.labels)
        return logits

    def on_train_epoch_end(self) -> None:
        """Log the epoch's training values, as they were while the weights moved."""
        self._log_epoch("train", self.train_metrics)

    def on_validation_epoch_end(self) -> None:
        """Log validation values."""
        self._log_epoch("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:
        """Log test values."""
        self._log_epoch("test", self.test_metrics)

    def _log_epoch(self, stage: str, metrics: StageMetrics) -> None:
        self.log_dict({f"{stage}_{name}": value for name, value in metrics.compute().items()})
        metrics.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer; its learning rates are set before each step by `on_train_batch_start`."""
        self.lr_factor: Schedule = make_schedule(self.resolved.schedule, self._run_steps())
        return make_optimizer(self.resolved.optim, self.parameter_groups())

    def _run_steps(self) -> int:
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf") and self.resolved.schedule.steps is None:
            raise ValueError(
                "expected a run that ends, but it has neither trainer.max_epochs nor trainer.max_steps; "
                "set one, or model.schedule.steps."
            )
        return self.resolved.schedule.steps or int(steps)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer gets: see `vit.tasks.optim.parameter_groups`."""
        o = self.resolved.optim
        assert o.lr is not None
        assert o.weight_decay is not None
        assert o.layer_decay is not None
        return parameter_groups(self.model, lr=o.lr, weight_decay=o.weight_decay, layer_decay=o.layer_decay)

    def on_train_start(self) -> None:
        """After a checkpoint was read: what is configured now wins over what the optimizer remembers."""
        groups = self.parameter_groups()
        apply_to_optimizer(self.trainer.optimizers[0], self.resolved.optim, groups)
        self.highest_lrs = [group["lr"] for group in groups]

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Set the step's learning rates and seed, both functions of where in the run this is."""
        factor = self.lr_factor(self.trainer.global_step)
        for group, highest in zip(self.trainer.optimizers[0].param_groups, self.highest_lrs, strict=True):
            group["lr"] = highest * factor
        torch.manual_seed(mix(self.seed, self.trainer.current_epoch, batch_idx, self.trainer.global_rank))

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global norm at `optim.clip`; the Trainer's own setting goes first."""
        if gradient_clip_val is None:
            gradient_clip_val, gradient_clip_algorithm = self.resolved.optim.clip or None, "norm"
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what any reader needs to use the weights without this class."""
        checkpoint["vit_toolkit"] = {
            "config": self.model.config.to_dict(),
            "classes": list(self.classes),
            "preprocessing": self.preprocessing.to_dict(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another architecture before any weight is touched.

        Raises:
            ValueError: names the options that differ.
        """
        stored = checkpoint.get("vit_toolkit", {}).get("config")
        if stored is None:
            raise ValueError(
                "expected a checkpoint written by this toolkit, but it has no model description; "
                "to start from its weights, give it as model.weights."
            )
        ours = self.model.config.to_dict()
        changed = [k for k in ours if ours[k] != stored.get(k) and k not in _WITHOUT_WEIGHTS]
        if changed:
            shown = "; ".join(f"{k}: checkpoint {stored.get(k)}, now {ours[k]}" for k in changed)
            raise ValueError(
                f"expected the architecture of the checkpoint, but it differs in {shown}. Leave these options "
                "out, or start a new run with model.weights."
            )


# Keeps what mixing draws apart from dropout, whose seed is made of the same numbers.
_MIXING = 1

_WITHOUT_WEIGHTS = (
    "init_std",
    "position_antialias",
    "dropout",
    "position_dropout",
    "attention_dropout",
    "drop_path",
    "fused",
    "dynamic_size",
)


def _start(encoder: dict[str, Any], weights: str | None, classes: Sequence[str], preparing: dict[str, Any]) -> Start:
    """Build the model, from weights or not; its head is new unless the weights have the same classes."""
    size = encoder.pop("size", None)
    base: dict[str, Any] = {}
    notes: list[str] = []
    if weights is not None:
        if size is not None:
            raise ValueError(
                f"expected either weights or a size, but got weights {weights} and encoder.size {size}; "
                "the size comes with the weights."
            )
        loaded = load_weights(weights, classes=classes, **encoder)
        model, base = loaded.model, loaded.preprocessing
        notes = loaded.report.table().splitlines()
        changed = [k for k in ("mean", "std") if k in preparing and tuple(preparing[k]) != tuple(base[k])]
        notes += [f"note: {k} {preparing[k]} is set by hand, the weights were trained with {base[k]}" for k in changed]
    else:
        config = {**encoder, "num_classes": len(classes)}
        model = VisionTransformer(vit_config(size, **config) if size else ViTConfig.from_dict(config))
    channels = {"mean": (0.5,) * model.config.channels, "std": (0.5,) * model.config.channels}
    values = {**channels, **base, **preparing, "image_size": model.config.image_size}
    return Start(model, Preprocessing.from_dict(values), tuple(notes))
