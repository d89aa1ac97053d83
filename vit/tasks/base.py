"""What every task shares: how its weights move, what is random in a step, what its checkpoints hold."""

from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from vit.data.batch import Batch
from vit.data.module import ImageDataModule
from vit.data.multicrop import MultiCrop, Views
from vit.data.sampler import mix
from vit.data.transforms import Preprocessing
from vit.models.normalise import Normalise
from vit.models.vit import VisionTransformer
from vit.tasks.accumulate import window_factor
from vit.tasks.averaging import Averaging, live_weights_first
from vit.tasks.guards import check_finite
from vit.tasks.optim import Schedule, apply_to_optimizer, make_optimizer, make_schedule, parameter_groups, steps_of
from vit.tasks.options import plain
from vit.tasks.recipe import Resolved


class Task(LightningModule):
    """A Vision Transformer and an aim.

    Learning rates are a pure function of the optimizer step. What is random in a step (dropout, stochastic depth,
    masks) comes from (seed, epoch, batch, process), so that a run which goes on equals one that was never cut.

    A task sets `net`, `seed`, `resolved` and `preprocessing`.

    Attributes:
        net: the model behind its normalisation.
        seed: of what is random in a step.
        resolved: optimizer and schedule without open values.
        preprocessing: how pictures become tensors.
        weights: what the model started from, as it was named; None from scratch.
        weights_report: lines for the plan on what became of those weights.
        classes: class names in the order of their labels; empty where a task has none.
        views: views of each training picture; None for one.
    """

    net: Normalise
    seed: int
    resolved: Resolved
    preprocessing: Preprocessing
    weights: str | None = None
    weights_report: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    views: MultiCrop | None = None
    averaging: Averaging | None = None
    _window, _opens_window = 1.0, True
    _loss: Tensor

    @property
    def model(self) -> VisionTransformer:
        """The bare model, on normalised floats."""
        model = self.net.model
        assert isinstance(model, VisionTransformer)
        return model

    @property
    def trained(self) -> VisionTransformer:
        """The model that the optimizer moves; another than `model` where that is an average of it."""
        return self.model

    @property
    def aim(self) -> str:
        """What is trained, in a few words for the plan."""
        return type(self).__name__

    @property
    def monitors(self) -> dict[str, str]:
        """The values that may choose the best checkpoint, with their direction; the first does where none is named."""
        return {"val_loss": "min"}

    @property
    def logged(self) -> dict[str, str]:
        """All values that callbacks of one's own may watch, with their direction."""
        training = {name.replace("val_", "train_", 1): way for name, way in self.monitors.items()}
        return {"train_loss": "min", **training, **self.monitors}

    @property
    def shared_options(self) -> dict[str, Any]:
        """The options that all tasks have but the seed, as they came out: plain values, from which they are rebuilt."""
        return {
            "encoder": {k: v for k, v in self.model.config.to_dict().items() if k != "num_classes"},
            "optim": plain(asdict(self.resolved.optim)),
            "schedule": plain(asdict(self.resolved.schedule)),
            "preprocessing": {k: v for k, v in self.preprocessing.to_dict().items() if k != "image_size"},
        }

    def keep_options(self, **values: Any) -> None:
        """Add plain values to the hyper-parameters: a checkpoint neither runs code nor misses what it was made of."""
        self.save_hyperparameters(values, logger=False)

    def setup(self, stage: str) -> None:
        """Give the datamodule the preprocessing of the model, and the views that it learns from.

        What a fit's data declare about their pictures becomes the model's: predictions prepare pictures alike.
        """
        data = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "preprocessing"):
            data.preprocessing = self.preprocessing  # type: ignore[union-attr]
        if stage == "fit" and isinstance(data, ImageDataModule):
            self.preprocessing = data.preprocessing
            self.keep_options(preprocessing=self.shared_options["preprocessing"])
        if self.views is not None and not hasattr(data, "views"):
            raise ValueError(
                f"expected an ImageDataModule, which makes several views of a picture, but got {type(data).__name__}."
            )
        if hasattr(data, "views"):
            data.views = self.views  # type: ignore[union-attr]

    def configure_callbacks(self) -> list[Callback]:
        """The average of the weights, where it is asked for."""
        o = self.resolved.optim
        if o.ema is not None and self.averaging is None:
            self.averaging = Averaging(o.ema, warmup=o.ema_warmup)
        return [] if self.averaging is None else [self.averaging]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer; its learning rates are set before each step by `on_train_batch_start`."""
        o = self.resolved.optim
        self.lr_factor: Schedule = make_schedule(self.resolved.schedule, self._run_steps())
        if self.averaging is not None:
            self.averaging.start = steps_of(o.ema_start, self.lr_factor.total)
        self.trained.gradient_checkpointing = o.gradient_checkpointing
        if o.compile:
            # In place: a wrapper would put its own name before those of the weights. Block by block: pre-training goes
            # through the encoder's parts, and one block's code serves all.
            for block in self.trained.blocks:
                block.compile()
        return make_optimizer(o, self.parameter_groups())

    def _run_steps(self) -> int:
        steps = self.trainer.estimated_stepping_batches
        # Of data without a length Lightning knows max_steps alone, where -1 stands for none.
        if (steps == float("inf") or steps < 0) and self.resolved.schedule.steps is None:
            raise ValueError(
                "expected a run whose length is known, for its learning rates, but it has neither trainer.max_steps "
                "nor trainer.max_epochs with data of known length; set one, or model.schedule.steps."
            )
        return self.resolved.schedule.steps or int(steps)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer gets: see `vit.tasks.optim.parameter_groups`."""
        o = self.resolved.optim
        assert o.lr is not None
        assert o.weight_decay is not None
        assert o.layer_decay is not None
        return parameter_groups(self.trained, lr=o.lr, weight_decay=o.weight_decay, layer_decay=o.layer_decay)

    def on_train_start(self) -> None:
        """After a checkpoint was read: what is configured now wins over what the optimizer remembers."""
        groups = self.parameter_groups()
        apply_to_optimizer(self.trainer.optimizers[0], groups)
        self.highest_lrs = [group["lr"] for group in groups]
        self._loss = torch.zeros((), device=self.device)  # a run that goes on may begin inside a window

    def on_train_batch_start(self, batch: Batch | Views, batch_idx: int) -> None:
        """Set the step's learning rates and seed, both functions of where in the run this is."""
        factor = self.lr_factor(self.trainer.global_step)
        for group, highest in zip(self.trainer.optimizers[0].param_groups, self.highest_lrs, strict=True):
            group["lr"] = highest * factor
        torch.manual_seed(mix(self.seed, self.trainer.current_epoch, batch_idx, self.trainer.global_rank))
        self._opens_window = batch_idx % self.trainer.accumulate_grad_batches == 0
        loader: Any = self.trainer.train_dataloader
        known = isinstance(loader, DataLoader) and loader.batch_size is not None
        known = known and not isinstance(loader.dataset, IterableDataset)
        self._window = window_factor(
            batch_idx,
            len(batch.labels),
            accumulate=self.trainer.accumulate_grad_batches,
            batches=self.trainer.num_training_batches,
            batch_size=loader.batch_size if known else None,
            pictures=len(loader.sampler) if known else None,
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Gradients of the batch's loss, by its share in the window of accumulated batches."""
        # Lightning has divided it by the window's length, and multiplied it for half precision.
        scale = 1.0 if self.trainer.scaler is None else self.trainer.scaler.get_scale()
        now = loss.detach() * (self.trainer.accumulate_grad_batches / scale)
        # One that is not finite stays in view to the window's end: a loss scaler would skip its step without a word.
        self._loss = now if self._opens_window else torch.where(self._loss.isfinite(), now, self._loss)
        super().backward(loss if self._window == 1 else loss * self._window, *args, **kwargs)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global norm at `optim.clip`; the Trainer's own setting goes first.

        Raises:
            NonFiniteError: the loss or the norm is not finite.
        """
        if gradient_clip_val is None:
            gradient_clip_val, gradient_clip_algorithm = self.resolved.optim.clip or None, "norm"
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        rate, skips = optimizer.param_groups[-1]["lr"], self.trainer.scaler is not None
        check_finite(self._loss, norm, step=self.trainer.global_step, lr=rate, skips=skips)
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

        Training goes on with the live weights, everything else gets what was scored.

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
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            name = checkpoint["hyper_parameters"]["optim"]["name"]
            if name != self.resolved.optim.name:
                raise ValueError(
                    f"expected the optimizer of the checkpoint, {name}, but got {self.resolved.optim.name}: each keeps "
                    "a state of its own. Leave model.optim.name out, or start a new run with model.weights."
                )
            live_weights_first(checkpoint)


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
