"""`vit validate` and `vit test`: a checkpoint's values on a split, in the run's record."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything

from vit.data.module import ImageDataModule
from vit.evaluate.metrics import summary
from vit.evaluate.multilabel import multilabel_summary
from vit.run.folder import RunFolder, open_run_folder
from vit.run.options import Options
from vit.run.record import now
from vit.run.screen import quiet_lightning, result_line
from vit.tasks.callbacks import Predictions
from vit.tasks.classify import Classifier


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
        data, model = options.build()
        values = score_split(options, run, split, model, data, checkpoint)
    run.update_record({split: {**values, "checkpoint": checkpoint.name, "time": now()}})
    print(result_line(split, values))
    return values


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
