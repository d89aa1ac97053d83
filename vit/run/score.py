"""`vit validate` and `vit test`: a checkpoint's values on a split, in the run's record."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything

from vit.data.module import ImageDataModule
from vit.data.source import Source
from vit.evaluate.metrics import summary
from vit.evaluate.multilabel import multilabel_summary
from vit.run.folder import RunFolder, open_run_folder
from vit.run.options import Options
from vit.run.record import now
from vit.run.screen import quiet_lightning, result_line
from vit.tasks.callbacks import Predictions
from vit.tasks.classify import Classifier
from vit.tasks.options import plain


def evaluate(verb: str, path: str, args: Sequence[str]) -> dict[str, Any]:
    """Score the best checkpoint of a run on its val or test split, and write the predictions.

    Args:
        verb: validate or test.
        path: the run, its model folder, or one of its checkpoints.
        args: options that change the run's own.

    Returns:
        The values, also found in the run's record.

    Raises:
        ValueError: no such run, or a split without pictures.
    """
    run = open_run_folder(path)
    checkpoint = Path(path) if Path(path).suffix == ".ckpt" else run.best if run.best.exists() else run.last
    options = Options(verb, ["--config", str(run.config), *args])
    config = options.config
    if options.pretraining and verb == "test":
        raise ValueError(
            f"expected a run that names pictures, but {run.path} was pre-trained without labels. Fine-tune it first: "
            f"vit fit --config finetune_folder --model.weights {run.path}"
        )
    split = {"validate": "val", "test": "test"}[verb]
    with quiet_lightning():
        seed_everything(config.seed, workers=True, verbose=False)
        if not options.own_model:
            options.of_model.weights = None
        keep_split(options, run)
        data, model = options.build()
        values = score_split(options, run, split, model, data, checkpoint)
    run.update_record({split: {**values, "checkpoint": checkpoint.name, "time": now()}})
    print(result_line(split, values))
    return values


# Of the options that all sources share, those that move pictures; of a source's own, all may.
_MOVES_PICTURES = {"split_seed", "val", "test", "folds", "fold", "group_pattern"}


def keep_split(options: Options, run: RunFolder) -> None:
    """Let pictures that have changed since a run be split as it split them: what it learned from is never scored.

    Args:
        options: of a verb about the run; where its data are asked for in another way by now, that counts, as does a
            split file.
        run: its `split.parquet` says what stood where.
    """
    data, told = options.data(), run.record.get("data", {}).get("table")
    if not isinstance(data, ImageDataModule) or told is None or data.table.file.stem == Path(told).stem:
        return
    was, now = run.record["config"]["data"], options.config.data.as_dict()
    before, after = was["init_args"], plain(now["init_args"])
    same = {f.name for f in fields(Source)} - _MOVES_PICTURES
    differ = [name for name in before.keys() & after.keys() - same if before[name] != after[name]]
    if was["class_path"] == now["class_path"] and not differ and not data.source.split_file and run.split.exists():
        options.split_as(run.split)


def score_split(
    options: Options, run: RunFolder, split: str, model: LightningModule, data: LightningDataModule, checkpoint: Path
) -> dict[str, Any]:
    """Score a checkpoint on a split: for our own task from the logits of each picture, else what the module logs.

    Args:
        options: of the verb.
        run: where the predictions of our own task are written.
        split: val or test.
        model: of the checkpoint's kind; it takes the checkpoint's weights.
        data: has that split.
        checkpoint: a file of the run.

    Returns:
        The values by name.

    Raises:
        ValueError: a split without pictures.
    """
    ours = isinstance(model, Classifier) and isinstance(data, ImageDataModule)
    predictions = Predictions()
    one: dict[str, Any] = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    limit = f"limit_{split}_batches"
    if options.config.trainer[limit] == 0:  # of the fit; who asks for a score wants one
        one[limit] = 1.0
    trainer = Trainer(**trainer_options(options, callbacks=[predictions] if ours else [], logger=False, **one))
    run_it = trainer.validate if split == "val" else trainer.test
    logged = run_it(model, datamodule=data, ckpt_path=str(checkpoint), verbose=False, weights_only=True)
    if not ours:
        return {name: value for part in logged for name, value in part.items()}
    assert isinstance(data, ImageDataModule)
    _, logits, labels = predictions.collected()
    predictions.write(run.predictions(split), data)
    return summary(logits, labels) if labels.ndim == 1 else multilabel_summary(logits, labels, data.classes)


def trainer_options(options: Options, **ours: Any) -> dict[str, Any]:
    """Arguments of a Trainer: the user's, then ours; callbacks of both.

    Args:
        options: of the verb.
        ours: what is not the user's to choose; `callbacks` is always among it.
    """
    made = dict(vars(options.made.trainer))
    callbacks = made.pop("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    return {**made, **ours, "callbacks": [*callbacks, *ours["callbacks"]]}
