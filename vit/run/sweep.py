"""`vit sweep`: a run for every combination of values, ranked by their val splits alone."""

import argparse
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from vit.data.module import ImageDataModule
from vit.run import session
from vit.run.folder import RunFolder, write_text
from vit.run.messages import is_bad_input
from vit.run.options import Options
from vit.run.screen import as_typed
from vit.tasks.finders import is_out_of_memory
from vit.tasks.paper import paper_rates


def sweep(
    args: Sequence[str],
    grid: Mapping[str, Sequence[Any]],
    *,
    trials: int | None = None,
) -> list[dict[str, Any]]:
    """Train a run for every combination of the grid; a sweep that was cut goes on where it stopped.

    Args:
        args: options of a fit, for all runs.
        grid: values by option. With `trials`, Optuna draws from them: two rising numbers are the ends of a range; of
            fractions it is searched on a logarithmic scale if the upper is at least 10 times the lower.
        trials: number of runs of a search by Optuna; None tries every combination.

    Returns:
        A row per run, the best first: the values, what `--monitor` names (default val_acc or val_map) of the checkpoint
        that the run kept, whatever its recipe let choose that, and the run. Also in `sweep.csv`.

    Raises:
        ValueError: an empty grid, a task other than classification, or bad options.
    """
    options = Options("fit", args)
    config, data = options.config, _comparable(options)
    typed = {option: value for option, value in options.by_hand().items() if option != "config"}
    if not grid and config.recipe == "paper" and isinstance(data, ImageDataModule):
        grid = _papers_grid(len(data.table.rows("train")), typed)
    if not grid:
        raise ValueError("expected --grid NAME=[VALUE,VALUE] with the values to try, but there is none.")
    for option, values in grid.items():
        for value in values:
            Options("fit", [*args, f"--{option}={value}"])  # a name or value that no run knows ends it here
    name = config.name or "sweep"
    folder = Path(config.trainer.default_root_dir).expanduser().absolute() / name
    several = isinstance(data, ImageDataModule) and data.table.several
    monitor = config.monitor or ("val_map" if several else "val_acc")
    higher = monitor != "val_loss"
    state = _State(folder / "sweep.json", args, {option: str(value) for option, value in typed.items()})

    def attempt(values: Mapping[str, Any]) -> dict[str, Any]:
        words = [f"--{option}={value}" for option, value in values.items()]
        row = state.find(values)
        if row is not None:
            return row
        shown = ", ".join(f"{option} {value}" for option, value in values.items())
        print(f"\n=== {shown}", flush=True)
        row = {**{k: str(v) for k, v in values.items()}, monitor: None, "run": None, "trouble": None}
        try:
            run = session.fit([*args, f"--name={name}", *words])
            assert run is not None
            row |= {monitor: _score(run, monitor), "run": run.path.name}
        except Exception as error:
            # One bad combination, such as a rate that is too high or a batch too large, does not end the others.
            if not (is_bad_input(error) or is_out_of_memory(error)):
                raise
            row["trouble"] = str(error)
        state.keep(row, values)
        return row

    if trials is None:
        rows = [attempt(dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]
    else:
        rows = _search(attempt, grid, trials, monitor, higher_is_better=higher)
    return _report(rows, monitor, folder, higher_is_better=higher)


def _comparable(options: Options) -> LightningDataModule:
    """The data of runs that their val splits can rank.

    Raises:
        ValueError: runs of another task, without val pictures, or of another kind.
    """
    config = options.config
    if options.pretraining or options.own_model:
        raise ValueError(
            "expected classification for vit sweep, since the accuracy on val pictures ranks its runs, but the model "
            f"is {config.model.class_path.rpartition('.')[2]}. Start its runs with vit fit and compare their records."
        )
    for asked, default in (("dry_run", False), ("seeds", 1), ("folds", None), ("resume", None)):
        if config[asked] != default:
            raise ValueError(f"expected no {asked} for vit sweep, which trains one run per combination: leave it out.")
    data = options.data()
    if isinstance(data, ImageDataModule) and not data.table.rows("val"):
        raise ValueError(
            "expected a val split, by which vit sweep ranks its runs, but there is none: give --data.val a share."
        )
    if 0 in (config.trainer.limit_val_batches, config.trainer.limit_train_batches) or config.trainer.fast_dev_run:
        raise ValueError(
            "expected runs that look at val pictures, by which vit sweep ranks them: leave out fast_dev_run, "
            "and limit_val_batches and limit_train_batches of 0."
        )
    return data


def _papers_grid(pictures: int, typed: Mapping[str, Any]) -> dict[str, list[float]]:
    if {"model.optim.lr", "model.optim.name"} & typed.keys():
        raise ValueError(
            "expected --grid NAME=[VALUE,VALUE]: the rates of the paper are not tried where optim.lr or optim.name "
            "is set by hand."
        )
    return {"model.optim.lr": list(paper_rates(pictures))}


class _State:
    """The rows that are done, on disk after each; what failed is tried again."""

    def __init__(self, file: Path, args: Sequence[str], typed: Mapping[str, str]) -> None:
        self.file, self.args, self.typed = file, list(args), dict(typed)
        self.rows: list[dict[str, Any]] = []
        self.now: list[dict[str, Any]] = []
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["args"] != self.args:
                raise ValueError(
                    f"expected the options of the sweep in {file.parent} ({' '.join(kept['args'])}), but got "
                    f"{' '.join(self.args)}. Choose another --name for another sweep."
                )
            was = kept.get("typed", self.typed)
            changed = sorted(name for name in was.keys() | self.typed if was.get(name) != self.typed.get(name))
            if changed:
                raise ValueError(
                    f"expected the configuration of the sweep in {file.parent}, but it has changed since in "
                    f"{', '.join(changed)}. Choose another --name for another sweep."
                )
            self.rows = kept["rows"]

    def find(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """The row of these values, if their run went well, or badly in this call."""
        done = [*(row for row in self.rows if row["trouble"] is None), *self.now]
        return next((row for row in done if _has(row, values)), None)

    def keep(self, row: dict[str, Any], values: Mapping[str, Any]) -> None:
        """Put a row in the place of the one of the same values, if any."""
        self.now.append(row)
        self.rows = [*(kept for kept in self.rows if not _has(kept, values)), row]
        told = {"args": self.args, "typed": self.typed, "rows": self.rows}
        write_text(self.file, json.dumps(told, indent=2) + "\n")


def _has(row: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(row.get(name) == str(value) for name, value in values.items())


def _score(run: RunFolder, monitor: str) -> float:
    """The value of the checkpoint that was kept, on the val split."""
    return float(run.record["val"][monitor.removeprefix("val_")])


def _search(
    attempt: Callable[[Mapping[str, Any]], dict[str, Any]],
    grid: Mapping[str, Sequence[Any]],
    trials: int,
    monitor: str,
    *,
    higher_is_better: bool,
) -> list[dict[str, Any]]:
    try:
        import optuna
    except ImportError as error:
        raise ValueError(
            "expected Optuna for --trials, but it is not installed: pip install 'vit-toolkit[hpo]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows = []

    def one(trial: Any) -> float:
        row = attempt({option: _draw(trial, option, values) for option, values in grid.items()})
        rows.append(row)
        if row[monitor] is None:
            raise optuna.TrialPruned
        return float(row[monitor])

    direction: Any = "maximize" if higher_is_better else "minimize"
    # With a fixed seed a search that goes on draws the same values again, and finds their runs done.
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(one, n_trials=trials)
    return rows


def _draw(trial: Any, option: str, values: Sequence[Any]) -> Any:
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    if len(numbers) == 2 and numbers[0] < numbers[1]:
        low, high = numbers
        if all(str(value).lstrip("-").isdecimal() for value in values):
            return trial.suggest_int(option, int(low), int(high))
        return trial.suggest_float(option, low, high, log=low > 0 and high >= 10 * low)
    return trial.suggest_categorical(option, [str(value) for value in values])


def _report(rows: list[dict[str, Any]], monitor: str, folder: Path, *, higher_is_better: bool) -> list[dict[str, Any]]:
    sign = -1 if higher_is_better else 1
    ranked = sorted(rows, key=lambda row: (row[monitor] is None, sign * (row[monitor] or 0.0)))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(ranked[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(ranked)
    write_text(folder / "sweep.csv", text.getvalue())
    columns = [name for name in ranked[0] if name != "trouble"]
    cells = [columns, *([_cell(row[name]) for name in columns] for row in ranked)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    print(f"\nsweep, ranked by {monitor}; test pictures were never looked at")
    for line in cells:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for row in ranked:
        if row["trouble"]:
            print(f"  failed: {row['trouble']}")
    print(f"table {as_typed(folder / 'sweep.csv')}", flush=True)
    return ranked


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def read_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """Options and their values from words such as `model.optim.lr=[1e-4,3e-4]`.

    Raises:
        ValueError: a word of another form, an option twice, or no values.
    """
    grid: dict[str, list[str]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        found = re.fullmatch(r"\[(.+)\]", text.strip())
        values = [] if found is None else _parts(found[1])
        if not equals or not values or name.lstrip("-") in grid:
            raise ValueError(
                f"expected each option once behind --grid, as NAME=[VALUE,VALUE], but got {word!r}; "
                "for example --grid model.optim.lr=[1e-4,3e-4] data.batch_size=[32,64]"
            )
        grid[name.lstrip("-")] = values
    return grid


def _parts(text: str) -> list[str]:
    """Values between commas that stand in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def command(words: Sequence[str]) -> int:
    """`vit sweep --config C --grid model.optim.lr=[1e-4,3e-4] ...`."""
    parser = argparse.ArgumentParser(
        prog="vit sweep",
        usage="vit sweep --config NAME|FILE --grid OPTION=[VALUE,VALUE] ... [--trials N] [--OPTION VALUE ...]",
        description="Train a run for every combination of values and rank them by their val splits. --trials N lets "
        "Optuna choose N of them. Other options are those of vit fit. Stopped? The same command goes on.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--grid", nargs="+", action="extend", default=[], metavar="OPTION=[VALUE,VALUE]")
    parser.add_argument("--trials", type=int)
    try:
        known, rest = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ValueError(f"expected vit sweep --config NAME --grid OPTION=[VALUE,VALUE], but {error}") from error
    rows = sweep(rest, read_grid(known.grid), trials=known.trials)
    return 0 if any(row["trouble"] is None for row in rows) else 1
