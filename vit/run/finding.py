"""What is searched before a run starts, or chosen after it: batch size, learning rate, and a soup of checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from torch import Tensor

from vit.data.module import ImageDataModule
from vit.run.folder import RunFolder
from vit.run.options import Options
from vit.run.recipes import apply_recipe
from vit.tasks.averaging import Soup, greedy_soup, read_soup, save_soup
from vit.tasks.base import Task
from vit.tasks.finders import find_batch_size, find_lr


def find(options: Options, recipe: Sequence[str] = ()) -> list[str]:
    """Search what `--find_batch_size` and `--find_lr` ask for, and set it in the options, in place.

    The batch size comes first, because the right rate depends on it; the recipe chooses again for the one that was
    found. Model and data are as before. What is random comes from the run's seed, so that the same run finds the same.

    Args:
        options: of a fit, after its recipe.
        recipe: what that chose, a line each.

    Returns:
        The same lines as they are now, and one for each value that was found.

    Raises:
        ValueError: a task or data of one's own.
    """
    config, lines = options.config, list(recipe)
    for wanted in ("find_batch_size", "find_lr"):
        if not config[wanted]:
            continue
        seed_everything(config.seed, workers=True, verbose=False)
        data, task = _built(options, as_it_starts=wanted == "find_lr")
        if not isinstance(task, Task) or not isinstance(data, ImageDataModule):
            raise ValueError(f"expected a task and a data source of this toolkit for --{wanted}; leave it out.")
        data.preprocessing = task.preprocessing
        trainer = config.trainer.as_dict()
        if wanted == "find_batch_size":
            size = find_batch_size(task, data, trainer)
            config.data.init_args.batch_size = size.batch_size
            lines = apply_recipe(options, {"data.batch_size": size.batch_size})
            lines.append(f"data.batch_size {size.batch_size} ({size.largest} is the largest that fitted)")
        else:
            rate = find_lr(task, data, trainer)
            options.of_model["optim.lr"] = rate.lr
            lines.append(
                f"model.optim.lr {rate.lr:.3g} (a tenth of where the loss was lowest, {len(rate.rates)} steps)"
            )
        # It is found: the configuration that is saved, and a run that goes on, search no more.
        config[wanted] = False
    return lines


def _built(options: Options, *, as_it_starts: bool) -> tuple[LightningDataModule, LightningModule]:
    """Data and model; how much fits into memory does not want a head that starts from a pass over all pictures."""
    tuning = options.of_model.get("tuning")
    if as_it_starts or tuning is None or tuning.head_init == "zero":
        return options.build()
    chosen, tuning.head_init = tuning.head_init, "zero"
    try:
        return options.build()
    finally:
        tuning.head_init = chosen


def make_soup(
    run: RunFolder, score: Callable[[Path], Mapping[str, Any]], monitor: str, *, higher_is_better: bool
) -> dict[str, Any] | None:
    """Put the greedy soup of the kept checkpoints in the place of `best.ckpt`, if several belong to it.

    It is kept as `soup.ckpt` too: training that goes on may put a single checkpoint in the place of `best.ckpt`.

    Args:
        run: its checkpoints `soup-*.ckpt`.
        score: values of a checkpoint on the val split.
        monitor: the value that counts.
        higher_is_better: its direction.

    Returns:
        What was tried and used, for the record; None without checkpoints.
    """
    files = sorted(run.checkpoints.glob("soup-*.ckpt"))
    if not files:
        return None
    draft, kept = run.checkpoints / "draft.ckpt", run.checkpoints / "soup.ckpt"

    def value(file: Path) -> float:
        return float(score(file)[monitor.removeprefix("val_")])

    def value_of(state: Mapping[str, Tensor]) -> float:
        save_soup(Soup(dict(state), 0.0, (), ()), draft, like=run.best)
        return value(draft)

    try:
        soup = greedy_soup(files, value_of, higher_is_better=higher_is_better)
    finally:
        draft.unlink(missing_ok=True)

    def worse(score: float, than: float) -> bool:
        return score < than if higher_is_better else score > than

    # Of a run that went on, the soup before it may hold checkpoints that are gone, and still be the best; so may a
    # single checkpoint from a time when none were kept for a soup.
    before, single = value(kept) if kept.exists() else None, value(run.best)
    if before is not None and worse(soup.score, before):
        soup = read_soup(kept)._replace(score=before, tried=soup.tried)
    if worse(soup.score, single):
        soup = soup._replace(score=single, used=(run.best.name,))
    elif len(soup.used) > 1 or before is not None:
        for file in (kept, run.best):
            save_soup(soup, file, like=run.best)
    print(f"\nsoup of {len(soup.used)} of {len(files)} checkpoints: {monitor} {soup.score:.4f}", flush=True)
    told = {name: value for name, value in soup._asdict().items() if name != "state_dict"}
    return {**told, "used": list(soup.used), "tried": [list(row) for row in soup.tried]}
