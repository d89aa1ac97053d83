"""One Lightning datamodule around any source: splits, loaders, and the position for resuming."""

import logging
import os
from functools import cached_property
from typing import Any

import torch
import torch.distributed
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vit.data.augment import PRESETS
from vit.data.batch import Pictures, collate
from vit.data.cache import PictureCache, RamFolder, disk_room
from vit.data.multicrop import MultiCrop, ViewsTransform, collate_views
from vit.data.sampler import EvalSampler, Key, TrainSampler
from vit.data.source import Source, choose_workers, scarce_memory
from vit.data.table import SPLITS, DataTable
from vit.data.transforms import Preprocessing, Still, Training, Transform, training_transform
from vit.data.vectors import Vectors

log = logging.getLogger("vit.data")

DEFAULT_BATCH_SIZE = 32


class Loader(DataLoader):
    """A loader that Lightning takes for resumable: its position is part of the datamodule's state."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing of its own; see `ImageDataModule.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing of its own."""


class ImageDataModule(LightningDataModule):
    """Batches of a source's pictures.

    The source is scanned when its table, classes or sizes are first asked for. Set `preprocessing` before the
    loaders are made; it follows the model's weights. With `views` set, training batches hold several views of each
    picture.

    Args:
        source: where the pictures come from and how they are loaded.

    Attributes:
        features: stored vectors by split, in its order, and the rows that they were made of, which a fit gets in place
            of the split's pictures; empty when a fit begins.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source
        self.views: MultiCrop | None = None
        self._preprocessing: Preprocessing | None = None
        self.features: dict[str, tuple[Tensor, Tensor]] = {}
        self._sampler: TrainSampler | None = None
        self._position: tuple[int, int] | None = None
        self._lowered = self._said_scarce = False
        self._ram: RamFolder | None = None

    @cached_property
    def table(self) -> DataTable:
        """The data table; made on first use.

        Raises:
            ValueError: the pictures are not there or not laid out as expected.
        """
        return self.source.table()

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of their labels."""
        return self.table.classes

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.classes)

    @property
    def preprocessing(self) -> Preprocessing:
        """How pictures become tensors; what the source declares about its pictures goes first."""
        return self.source.declared(self._preprocessing)

    @preprocessing.setter
    def preprocessing(self, value: Preprocessing | None) -> None:
        self._preprocessing = value

    @cached_property
    def seed(self) -> int:
        """Of order and augmentation: the source's, else that of `seed_everything`, else 0."""
        if self.source.seed is not None:
            return self.source.seed
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @property
    def batch_size(self) -> int:
        """Training pictures per step and process: as asked for, but no more than there are."""
        wanted = self.source.batch_size or DEFAULT_BATCH_SIZE
        return max(1, min(wanted, len(self.table.rows("train")) // self._world()))

    @property
    def eval_batch_size(self) -> int:
        """Pictures per evaluation step and process."""
        return self.source.eval_batch_size or self.source.batch_size or DEFAULT_BATCH_SIZE

    def setup(self, stage: str) -> None:
        """Start at the beginning, until a state is loaded; turn validation off where there is no val split."""
        self._position = None
        self.features = {}
        if stage == "fit" and self.trainer is not None and not self.table.rows("val"):
            log.warning("there is no val split, so training runs without validation")
            self.trainer.limit_val_batches = 0

    def teardown(self, stage: str) -> None:
        """Give back the memory of the cache."""
        if self._ram is not None:
            self._ram.close()
            self._ram = None

    def train_dataloader(self) -> Loader:
        """Random crops and flips of the train split, in a seeded order.

        Raises:
            ValueError: there are no training pictures, or fewer than processes.
        """
        self._need("train")
        wanted = self.source.batch_size or DEFAULT_BATCH_SIZE
        if self.batch_size < wanted and not self._lowered:
            self._lowered = True
            log.warning("batch_size lowered from %d to %d: train has no more pictures", wanted, self.batch_size)
        pictures = self._training_pictures()
        sampler = self.source.sampler(self.table, seed=self.seed, rank=self._rank(), world=self._world())
        epoch = 0 if self.trainer is None else self.trainer.current_epoch
        if self._position is not None:
            sampler.resume_at(*self._position)
            epoch = max(epoch, self._position[0])
        sampler.set_epoch(epoch)
        self._sampler = sampler
        if "train" in self.features:
            return self._vectors("train", sampler, batch_size=self.batch_size, drop_last=self.source.drop_last)
        return self._loader(pictures, sampler, batch_size=self.batch_size, drop_last=self.source.drop_last, keep=True)

    def _training_pictures(self) -> Pictures:
        if self.views is not None:
            if self.source.cache != "none":
                raise ValueError(f"expected data.cache none with several views, but got {self.source.cache}.")
            several = ViewsTransform(self.preprocessing, self.source.augment, self.views)
            return self._pictures("train", several, seed=self.seed)
        transform = training_transform(self.preprocessing, self.source.augment)
        return self._pictures("train", transform, seed=self.seed, cache=self._cache(transform))

    @property
    def trains_as_evaluated(self) -> bool:
        """Whether training sees each picture as evaluation does, every time the same."""
        return self.views is None and self.source.augment.resolve() == PRESETS["none"]

    def val_dataloader(self) -> Loader:
        """The val split."""
        return self.loader("val")

    def test_dataloader(self) -> Loader:
        """The test split; nothing else opens its files."""
        return self.loader("test")

    def predict_dataloader(self) -> Loader:
        """All pictures, in the order of the table."""
        return self.loader(None)

    def loader(self, split: str | None) -> Loader:
        """Pictures of a split (None: of all) as they are evaluated, in the order of the table.

        Raises:
            ValueError: the split is empty.
        """
        self._need(split)
        pictures = self._pictures(split, None)
        sampler = EvalSampler(len(pictures), rank=self._rank(), world=self._world())
        if split in self.features and self._fn() == TrainerFn.FITTING:
            return self._vectors(split, sampler, batch_size=self.eval_batch_size, drop_last=False)
        # Kept workers hold memory through all of training; a val loader is used in every epoch, others once.
        keep = split == "val" and self._fn() == TrainerFn.FITTING
        return self._loader(pictures, sampler, batch_size=self.eval_batch_size, drop_last=False, keep=keep)

    def state_dict(self) -> dict[str, Any]:
        """Position in the epoch, in pictures of all processes, and what it is a position in."""
        if self.trainer is None or self._sampler is None:
            return {}
        epoch = self._sampler.started_epoch
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        batches = progress.processed
        if batches >= self.trainer.num_training_batches:
            epoch, batches = epoch + 1, 0
        return {
            "epoch": epoch,
            "pictures": batches * self.batch_size * self._world(),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "table": self.table.file.stem,
            "classes": list(self.classes),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: the classes are others than the model was trained on.
        """
        if list(self.classes) != state_dict["classes"]:
            raise ValueError(
                f"expected the classes of the checkpoint ({', '.join(state_dict['classes'][:20])}), but the "
                f"data has {', '.join(self.classes[:20])}. Use the same data, or start a new run."
            )
        ours = {"seed": self.seed, "table": self.table.file.stem}
        if state_dict["pictures"]:
            ours["batch_size"] = self.batch_size
        changed = [name for name, value in ours.items() if state_dict[name] != value]
        if changed and self._fn() == TrainerFn.FITTING:
            log.warning("not what the checkpoint was trained with, so the run goes on differently: %s", changed)
        self._position = (state_dict["epoch"], state_dict["pictures"])

    def describe(self) -> dict[str, Any]:
        """Plain values for the plan: root, sizes, what was left out, batch size and workers with reasons."""
        workers, reason = self._workers()
        counts = {split: self.table.counts(split).tolist() for split in SPLITS}
        return {
            "source": type(self.source).__name__,
            "root": str(self.table.root),
            "table": str(self.table.file),
            "classes": list(self.classes),
            "several_labels": self.table.several,
            "pictures": {split: len(self.table.rows(split)) for split in SPLITS},
            "pictures_per_class": {
                name: {split: counts[split][i] for split in SPLITS} for i, name in enumerate(self.classes)
            },
            **self.table.info,
            "seed": self.seed,
            "split_seed": self.source.split_seed,
            "batch_size": self.batch_size,
            "batch_size_reason": self._batch_size_reason(),
            "eval_batch_size": self.eval_batch_size,
            "num_workers": workers,
            "num_workers_reason": reason,
            "augment": self.source.augment.describe(),
            "cache": self.source.cache,
            "preprocessing": self.preprocessing.to_dict(),
        }

    def _batch_size_reason(self) -> str:
        if self.batch_size < (self.source.batch_size or DEFAULT_BATCH_SIZE):
            return "train has no more pictures"
        return "as asked for" if self.source.batch_size else "default"

    def _need(self, split: str | None) -> None:
        if not self.table.rows(split):
            sizes = ", ".join(f"{name} {len(self.table.rows(name))}" for name in SPLITS)
            raise ValueError(
                f"expected pictures in the {split} split of {self.table.root}, but the splits have: {sizes}. "
                f"Add a {split} folder, or leave the split to the shares val and test."
            )

    def _pictures(
        self,
        split: str | None,
        transform: Transform | ViewsTransform | None,
        seed: int | None = None,
        cache: PictureCache | None = None,
    ) -> Pictures:
        return Pictures(
            self.table,
            split,
            transform,
            preprocessing=self.preprocessing,
            max_pixels=self.source.max_pixels,
            seed=seed,
            max_errors=self.source.max_errors if split == "train" and self.source.on_error == "skip" else None,
            cache=cache,
        )

    def _cache(self, transform: Training | Still) -> PictureCache | None:
        if self.source.cache == "none":
            return None
        size, processes = self.source.cache_size, self._processes()
        if self.source.cache == "ram":
            self._ram = self._ram or RamFolder(size, processes)
            folder, room = self._ram.path, self._ram.room
        else:
            folder, room = disk_room(self.source.cache_dir, size, processes)
        return PictureCache(
            folder,
            room=room,
            writers=max(1, self._workers()[0]),
            preprocessing=self.preprocessing,
            transform=transform,
            max_pixels=self.source.max_pixels,
        )

    def _loader(
        self, pictures: Pictures, sampler: Sampler[Key], *, batch_size: int, drop_last: bool, keep: bool
    ) -> Loader:
        workers, _ = self._workers()
        self._check_shared_memory(workers, batch_size, pictures.transform)
        pin = self._on_gpu() if self.source.pin_memory is None else self.source.pin_memory
        return Loader(
            pictures,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=workers,
            collate_fn=collate_views if isinstance(pictures.transform, ViewsTransform) else collate,
            pin_memory=pin,
            multiprocessing_context=self.source.multiprocessing_context if workers else None,
            # Without its own, every iterator would draw from training's generator.
            generator=torch.Generator(),
            persistent_workers=keep and self.source.persistent_workers and workers > 0,
        )

    def _check_shared_memory(self, workers: int, batch_size: int, transform: object) -> None:
        p = self.preprocessing
        pixels = p.size[0] * p.size[1]
        if isinstance(transform, ViewsTransform):
            pixels = transform.views.pixels(pixels)
        line = scarce_memory(workers, batch_size * p.channels * pixels, processes=self._processes())
        if line is not None and not self._said_scarce:
            self._said_scarce = True
            log.warning(line)

    def _workers(self) -> tuple[int, str]:
        if self.source.num_workers is not None:
            return self.source.num_workers, "as asked for"
        return choose_workers(self.table, on_gpu=self._on_gpu(), processes=self._processes())

    def _processes(self) -> int:
        """Training processes on this machine."""
        return self.trainer.num_devices if self.trainer is not None else 1

    def _vectors(self, split: str, sampler: Sampler[Key], *, batch_size: int, drop_last: bool) -> Loader:
        stored: Dataset[Any] = Vectors(self.table, split, *self.features[split])
        return Loader(
            stored,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate,
            generator=torch.Generator(),
        )

    def _on_gpu(self) -> bool:
        if self.trainer is None:
            return torch.cuda.is_available()
        return self.trainer.strategy.root_device.type == "cuda"

    def _fn(self) -> TrainerFn | None:
        return None if self.trainer is None else self.trainer.state.fn

    def _world(self) -> int:
        if self.trainer is not None:
            return self.trainer.world_size
        return torch.distributed.get_world_size() if _distributed() else 1

    def _rank(self) -> int:
        if self.trainer is not None:
            return self.trainer.global_rank
        return torch.distributed.get_rank() if _distributed() else 0


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
