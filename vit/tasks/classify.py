"""Image classification as a LightningModule: from scratch, or from weights with a new head."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vit.data.batch import Batch
from vit.data.mix import UNMIXED, Mixing, mixed
from vit.data.module import ImageDataModule
from vit.data.sampler import mix
from vit.evaluate.metrics import StageMetrics
from vit.evaluate.multilabel import MultiLabelMetrics
from vit.evaluate.probe import Features
from vit.models.heads import DistilledHead
from vit.models.normalise import Normalise
from vit.tasks.base import Task
from vit.tasks.distill import Teacher, distillation_loss, load_teacher
from vit.tasks.headstart import split_features, start_head, store_features
from vit.tasks.losses import Loss, LossConfig, make_loss, resolve_loss
from vit.tasks.methods import Method, TuningConfig, prepare, set_learning, set_modes, unfrozen
from vit.tasks.optim import OptimConfig, ScheduleConfig
from vit.tasks.options import EncoderOptions, PreprocessingOptions, given, plain, rebuilt
from vit.tasks.recipe import resolve
from vit.tasks.start import start_from


class Classifier(Task):
    """A Vision Transformer that learns to name pictures.

    The head is one zero-initialised layer D x K (ViT, section 3.2): at the start all logits are 0 and the loss is
    ln K. With `tuning.head_init` it starts from a ridge regression instead.

    Args:
        classes: class names in the order of their labels; the command line takes them from the data.
        encoder: the Vision Transformer; what is not set comes from its size, or from the weights.
        weights: a run, a model folder, a file of any known family, or the name of a timm model, see `vit weights`;
            None trains from scratch. The head is kept only if its classes are those of the data.
        method: what learns, see `vit.tasks.methods.prepare`: everything (`full`), the head alone (`head`), or the head
            and low-rank updates (`lora`), biases (`bitfit`), norms (`norms`), attention (`attention`), the last blocks
            (`last_n`). The rest stays as it is, in evaluation mode.
        tuning: options of the methods, gradual unfreezing, and how the head starts.
        optim: the optimizer.
        schedule: learning rate over the run.
        loss: what is minimised, and from which teacher the model learns too.
        mixing: mixup and CutMix of training batches.
        preprocessing: how pictures become tensors; what is not set comes from the weights.
        several: pictures have several labels, each a yes or no; the command line takes it from the data.
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
        method: Method = "full",
        tuning: TuningConfig = TuningConfig(),
        optim: OptimConfig = OptimConfig(),
        schedule: ScheduleConfig = ScheduleConfig(),
        loss: LossConfig = LossConfig(),
        mixing: Mixing = UNMIXED,
        preprocessing: PreprocessingOptions = PreprocessingOptions(),  # type: ignore[valid-type]
        several: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not classes or len(classes) < 2:
            raise ValueError(f"expected at least 2 classes, but got {list(classes or [])}.")
        self.mixing = rebuilt(Mixing, mixing)
        self.classes, self.several = tuple(classes), several
        if several and self.mixing != UNMIXED:
            raise ValueError("expected no mixing with several labels per picture: set model.mixing to 0.")
        self.method = method
        self.tuning = rebuilt(TuningConfig, tuning)
        self.weights = weights
        self.loss = resolve_loss(rebuilt(LossConfig, loss), multi_label=several)
        self.criterion: Loss | None = None if self.loss.needs_counts else self._make_loss(None)
        self._teacher: Teacher | None = None
        self.seed = seed
        start = start_from(given(encoder), weights, self.classes, given(preprocessing))
        self.weights_report = start.notes
        self.preprocessing = start.preprocessing
        self.resolved = resolve(
            rebuilt(OptimConfig, optim),
            rebuilt(ScheduleConfig, schedule),
            pretrained=weights is not None,
            method=method,
        )
        p = self.preprocessing
        self.net = Normalise(start.model, mean=p.mean, std=p.std)
        self.learning = prepare(self.model, method, self.tuning)
        self._opened: int | None = None
        self._head_started = False
        self._found: Features | None = None
        kind: type[StageMetrics | MultiLabelMetrics] = MultiLabelMetrics if several else StageMetrics
        self.train_metrics, self.val_metrics, self.test_metrics = (kind(len(self.classes)) for _ in range(3))
        self.train(True)
        self.keep_options(
            **self.shared_options,
            classes=list(self.classes),
            method=method,
            tuning=plain(asdict(self.tuning)),
            loss=plain(asdict(self.loss)),
            mixing=asdict(self.mixing),
            several=several,
            seed=seed,
        )

    @property
    def aim(self) -> str:
        """The method, for the plan."""
        return f"method {self.method}"

    @property
    def monitors(self) -> dict[str, str]:
        """The values that may choose the best checkpoint, with their direction; the first does where none is named."""
        if self.several:
            return {"val_map": "max", "val_f1": "max", "val_micro_f1": "max", "val_loss": "min"}
        values = {"val_acc": "max", "val_balanced_acc": "max", "val_loss": "min"}
        return values | ({"val_top5": "max"} if len(self.classes) > 5 else {})

    def _make_loss(self, counts: Sequence[int] | None, pictures: int | None = None) -> Loss:
        return make_loss(
            self.loss, counts=counts, num_classes=len(self.classes), multi_label=self.several, pictures=pictures
        )

    def setup(self, stage: str) -> None:
        """Give the datamodule the preprocessing of the weights, and compare the classes."""
        if stage == "fit":
            self._prepare_loss()
            if self.tuning.unfreeze_every is not None and self.trainer.world_size > 1:
                raise ValueError(
                    "expected one process for tuning.unfreeze_every, because others would wait for gradients of frozen "
                    f"blocks, but got {self.trainer.world_size}: leave it out, or set trainer.devices to 1."
                )
            set_learning(self.model, self.learning)
            self._opened = None
        data = getattr(self.trainer, "datamodule", None)
        if data is None or not hasattr(data, "classes"):
            return
        table = getattr(data, "table", None)
        if table is not None and table.several != self.several:
            kinds = {True: "several labels", False: "one label"}
            raise ValueError(
                f"expected data with {kinds[self.several]} per picture, as the model was made for, but it has "
                f"{kinds[table.several]}."
            )
        if tuple(data.classes) != self.classes:
            raise ValueError(
                f"expected data with the classes of the model ({', '.join(self.classes[:20])}), but it has "
                f"{', '.join(data.classes[:20])}."
            )
        super().setup(stage)

    def _prepare_loss(self) -> None:
        """Count the training pictures of each class, and load the teacher, where the loss wants them."""
        data = getattr(self.trainer, "datamodule", None)
        table = getattr(data, "table", None)
        if self.loss.needs_counts:
            if isinstance(data, ImageDataModule) and data.source.sampling == "balanced":
                raise ValueError(
                    "expected either data.sampling balanced or loss.class_weights and loss.logit_adjustment, but got "
                    "both: each makes up for classes of different size."
                )
            if table is None:
                raise ValueError(
                    "expected a datamodule with a data table, whose training pictures loss.class_weights and "
                    "loss.logit_adjustment count, but there is none."
                )
            self.criterion = self._make_loss(table.counts("train").tolist(), len(table.rows("train")))
        if self.loss.teacher is not None and self._teacher is None:
            self._teacher = load_teacher(self.loss.teacher, classes=self.classes, several=self.several)

    def train(self, mode: bool = True) -> "Classifier":
        """Switch to training; parts in which nothing learns stay in evaluation mode, see `set_modes`."""
        super().train(mode)
        set_modes(self.model, mode)
        return self

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer; before it, as it makes the loaders, features that stay the same take the pictures' place."""
        if self.method == "head":
            self._found = store_features(
                self.trainer, self.net, mixes=self.mixing != UNMIXED or self._teacher is not None
            )
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        """Start the head where it is asked for, once: not when a run goes on, and not after training."""
        found, self._found = self._found, None
        if self.tuning.head_init == "zero" or self._head_started:
            return
        self._head_started = True
        found = found or split_features(self.trainer, self.net, "train")
        head = self.model.head
        assert isinstance(head, nn.Linear)
        fitted, factor = start_head(head, found, binary=self.loss.name in ("bce", "asymmetric"))
        if self.trainer.is_global_zero:
            print(
                f"head: ridge regression on {len(found.x):,} pictures, {100 * fitted.loo_accuracy:.2f} % right when "
                f"left out (penalty {fitted.penalty:.3g}, logits times {factor:.3g})",
                flush=True,
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Unfreeze what learns in this epoch, and set the step's learning rates and seed."""
        epoch = self.trainer.current_epoch
        if self.tuning.unfreeze_every is not None and epoch != self._opened:
            self._opened = epoch
            set_learning(self.model, unfrozen(self.model, self.learning, self.tuning, epoch))
            self.train()
        super().on_train_batch_start(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what any reader needs to use the weights without this class, LoRA's factor included."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["vit_toolkit"]["several"] = self.several
        if self.method == "lora":
            checkpoint["vit_toolkit"]["lora_alpha"] = self.tuning.lora_alpha

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another architecture or method before any weight is touched.

        Raises:
            ValueError: names the options that differ.
        """
        super().on_load_checkpoint(checkpoint)
        self._head_started = True
        stored = checkpoint["hyper_parameters"]
        theirs = {"method": stored["method"], **{f"tuning.{k}": v for k, v in stored["tuning"].items()}}
        ours = {"method": self.method, **{f"tuning.{k}": v for k, v in plain(asdict(self.tuning)).items()}}
        changed = [name for name in theirs if ours[name] != theirs[name] and name not in _WITHOUT_PARAMETERS]
        if changed:
            shown = "; ".join(f"{name}: checkpoint {theirs[name]}, now {ours[name]}" for name in changed)
            raise ValueError(
                f"expected the method of the checkpoint, but it differs in {shown}. Leave these options out, or start "
                "a new run with model.weights."
            )

    def forward(self, images: UInt8[Tensor, "b c h w"] | Float[Tensor, "b ..."]) -> Float[Tensor, "b k"]:
        """Logits of pictures as the datamodule gives them, or of stored features in their place."""
        if images.ndim == 2:
            return self.model.head(images.to(next(self.model.head.parameters()).dtype))
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, ""]:
        """Loss of a batch, against shares of classes where pictures are mixed, and against the teacher's view of it."""
        labels: Tensor = batch.labels
        images, targets = batch.images, labels
        if self.mixing != UNMIXED:
            where = (self.seed, self.trainer.current_epoch, batch_idx, self.trainer.global_rank, _MIXING)
            images, targets = mixed(images, labels, classes=len(self.classes), seed=mix(*where), **asdict(self.mixing))
            labels = targets.argmax(1)
        if self.criterion is None:
            raise ValueError("expected training to begin in a Trainer, which counts the pictures of each class.")
        if self._teacher is None:
            logits = self(images).float()
            loss = self.criterion(logits, targets)
        else:
            of_labels, of_teacher = self._taught(images)
            logits = (of_labels + of_teacher) / 2
            share = self.loss.distillation_alpha
            loss = (1 - share) * self.criterion(of_labels, targets) + share * distillation_loss(
                self.loss, of_teacher, self._teacher(images), multi_label=self.several
            )
        self.train_metrics.update(loss, logits, labels)
        return loss

    def _taught(self, images: UInt8[Tensor, "b c h w"]) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
        """The logits that learn labels, and those that learn from the teacher: the same, but for two tokens' heads."""
        head = self.model.head
        if not isinstance(head, DistilledHead):
            logits = self(images).float()
            return logits, logits
        first, second = head.parts(self.model.pool(self.model.forward_features(self.net.normalise(images))))
        return first.float(), second.float()

    def validation_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, "b k"]:
        """Logits of a batch; the loss that is shown is plain (binary) cross-entropy, whatever is minimised."""
        return self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, "b k"]:
        """Logits of a batch."""
        return self._evaluate(batch, self.test_metrics)

    def predict_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, "b k"]:
        """Logits of a batch."""
        return self(batch.images).float()

    def _evaluate(self, batch: Batch, metrics: StageMetrics | MultiLabelMetrics) -> Float[Tensor, "b k"]:
        logits = self(batch.images).float()
        plain_loss = nn.functional.binary_cross_entropy_with_logits if self.several else nn.functional.cross_entropy
        metrics.update(plain_loss(logits, batch.labels), logits, batch.labels)
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

    def _log_epoch(self, stage: str, metrics: StageMetrics | MultiLabelMetrics) -> None:
        self.log_dict({f"{stage}_{name}": value for name, value in metrics.compute().items()})
        metrics.reset()


# Options of tuning that change no parameter and no parameter group.
_WITHOUT_PARAMETERS = ("tuning.unfreeze_every", "tuning.head_init")

# Keeps what mixing draws apart from dropout, whose seed is made of the same numbers.
_MIXING = 1
