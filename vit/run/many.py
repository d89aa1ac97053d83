"""Several runs as one: other seeds, cross-validation folds, and what they say together."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from vit.run import session
from vit.run.folder import RunFolder, write_text
from vit.run.options import Options
from vit.run.record import now
from vit.run.screen import as_typed

_VALUES = ("acc", "balanced_acc", "loss", "map", "f1", "micro_f1", "top5")


def fit_many(
    args: Sequence[str], *, seeds: int = 1, folds: int | None = None, dry_run: bool = False
) -> list[RunFolder]:
    """Train a run for every seed and fold, and write what their val splits say together.

    Args:
        args: options of a fit, without `--seeds` and `--folds`.
        seeds: runs per fold; the first has the seed that the options name.
        folds: parts of the data that is not test, each of which validates once; None leaves the split as it is.
        dry_run: stop after the first plan.

    Returns:
        The runs; the summary lies beside them as `several-<first>-<last>.json`.

    Raises:
        ValueError: fewer than 1 seed or 2 folds, or bad options.
    """
    if seeds < 1 or (folds is not None and folds < 2):
        raise ValueError(f"expected at least 1 for --seeds and at least 2 for --folds, but got {seeds} and {folds}.")

    def split_of(fold: int) -> list[str]:
        return [] if folds is None else [f"--data.folds={folds}", f"--data.fold={fold}"]

    if dry_run:
        session.fit([*args, *split_of(0)], dry_run=True)
        return []
    first = Options("fit", args).config.seed
    runs = []
    for fold in range(folds or 1):
        for seed in range(first, first + seeds):
            run = session.fit([*args, *split_of(fold), f"--seed={seed}"])
            assert run is not None
            runs.append(run)
    summary = summarise(runs)
    file = runs[0].path.parent / f"several-{runs[0].path.name}-{runs[-1].path.name}.json"
    write_text(file, json.dumps(summary, indent=2) + "\n")
    print("\n" + "\n".join(lines_of(summary)) + f"\nsummary {as_typed(file)}", flush=True)
    return runs


def summarise(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Mean and sample standard deviation over runs of every number of their val splits."""
    records = [run.record for run in runs]
    rows = [
        {"run": run.path.name, "seed": record["seeds"]["run"], **_numbers(record)}
        for run, record in zip(runs, records, strict=True)
    ]
    values = {}
    for name in _VALUES:
        found = [row[name] for row in rows if row.get(name) is not None]
        if len(found) == len(rows):
            sd = statistics.stdev(found) if len(found) > 1 else None
            values[name] = {"mean": statistics.fmean(found), "sd": sd}
    return {"time": now(), "split": "val", "runs": rows, "values": values}


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    # Tasks without classes keep the names that Lightning logged.
    told = {name.removeprefix("val_"): value for name, value in (record.get("val") or {}).items()}
    fold = record["data"].get("fold") if "data" in record else None
    return ({} if fold is None else {"fold": fold}) | {name: told[name] for name in _VALUES if name in told}


def lines_of(summary: dict[str, Any]) -> list[str]:
    """The summary as text: a line per run, then mean and standard deviation."""
    names = list(summary["values"])
    lines = [f"{len(summary['runs'])} runs, val split"]
    for row in summary["runs"]:
        where = f"run {row['run']}, seed {row['seed']}" + (f", fold {row['fold']}" if "fold" in row else "")
        lines.append(f"  {where:<26}" + "  ".join(f"{name} {row[name]:.4f}" for name in names))
    for name, value in summary["values"].items():
        sd = "" if value["sd"] is None else f" ± {value['sd']:.4f} (sd over runs)"
        lines.append(f"  {name} {value['mean']:.4f}{sd}")
    return lines
