"""The verbs, for notebooks and for the command line: both take the same way."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vit.run.folder import RunFolder


def fit(
    config: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    dry_run: bool = False,
    **changes: Any,
) -> RunFolder | None:
    """Train as `vit fit` does.

    Args:
        config: name of a packaged configuration, such as "quickstart", or the path of a YAML file.
        resume: a run to go on with, in its own folder.
        dry_run: stop after the plan.
        changes: options over those of the file, nested as in YAML: `seed=1`, `trainer={"max_epochs": 3}`,
            `data="Folder"` or `data={"class_path": "Folder", "root": "photos"}`.

    Returns:
        The run: `run.path`, `run.record`; None after a dry run.

    Raises:
        ValueError: bad options or data.
    """
    from vit.run import session

    return session.fit(_given(config, changes), dry_run=dry_run, resume=None if resume is None else str(resume))


def fit_many(
    config: str | Path | None = None, *, seeds: int = 1, folds: int | None = None, **changes: Any
) -> list[RunFolder]:
    """Train a run for every seed and fold, and print mean and standard deviation of their val splits.

    Args:
        config: as in `fit`.
        seeds: runs per fold.
        folds: cross-validation; None leaves the split as it is.
        changes: as in `fit`.

    Raises:
        ValueError: bad options or data.
    """
    from vit.run import many

    return many.fit_many(_given(config, changes), seeds=seeds, folds=folds)


def sweep(
    config: str | Path | None = None, *, grid: dict[str, list[Any]], trials: int | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """Train a run for every combination of values; see `vit.run.sweep.sweep`.

    Args:
        config: as in `fit`.
        grid: values by dotted option, such as {"model.optim.lr": [1e-4, 3e-4]}.
        trials: number of runs that Optuna chooses; None tries every combination.
        changes: as in `fit`.

    Returns:
        A row per run, the best first.

    Raises:
        ValueError: bad options or data.
    """
    from vit.run import sweep as sweeps

    return sweeps.sweep(_given(config, changes), grid, trials=trials)


def validate(run: str | Path | RunFolder, **changes: Any) -> dict[str, Any]:
    """Score the best checkpoint of a run on its val split, see `test`."""
    from vit.run import score

    return score.evaluate("validate", _path(run), _words(changes))


def test(run: str | Path | RunFolder, **changes: Any) -> dict[str, Any]:
    """Score a run's best checkpoint on its test split; writes `predictions-test.parquet` and the record.

    Args:
        run: the run, its folder, its model folder or a checkpoint in it, which is then the one scored.
        changes: options that change the run's own, as in `fit`.

    Returns:
        loss, acc, balanced_acc, top5 where K > 5, the 95 % interval of acc, and the number of pictures; for several
        labels loss, map, f1, micro_f1, f1_per_class and the number of pictures.

    Raises:
        ValueError: no such run, or no test pictures.
    """
    from vit.run import score

    return score.evaluate("test", _path(run), _words(changes))


def load(run: str | Path | RunFolder) -> Any:
    """A predictor from a run, a model folder or a checkpoint: `vit.load(run).predict(["cat.jpg"])`."""
    from vit.deploy.predict import Predictor

    return Predictor.load(_path(run))


def _path(run: str | Path | RunFolder) -> str:
    return str(run.path if isinstance(run, RunFolder) else run)


def _given(config: str | Path | None, changes: dict[str, Any]) -> list[str]:
    """A configuration and changes to it as words of a command line."""
    return ([] if config is None else ["--config", str(config)]) + _words(changes)


def _words(changes: dict[str, Any], prefix: str = "") -> list[str]:
    """Nested options as words of a command line; what names a class comes before its arguments."""
    words: list[str] = []
    for key, value in sorted(changes.items(), key=lambda item: item[0] not in ("class_path", "config")):
        name = prefix if key in ("class_path", "init_args") and prefix else f"{prefix}{'.' if prefix else ''}{key}"
        if isinstance(value, dict):
            words += _words(value, name)
        else:
            text = value if isinstance(value, str) else str(value) if isinstance(value, Path) else json.dumps(value)
            words.append(f"--{name}={text}")
    return words


def fit_command(words: Sequence[str]) -> int:
    """`vit fit`."""
    from vit.run import session

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--resume")
    first.add_argument("--dry_run", action="store_true")
    first.add_argument("--seeds", type=int, default=1)
    first.add_argument("--folds", type=int)
    try:
        known, rest = first.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ValueError(
            f"expected a run's folder behind --resume, and whole numbers behind --seeds and --folds, but {error}"
        ) from error
    if known.seeds == 1 and known.folds is None:
        session.fit(rest, dry_run=known.dry_run, resume=known.resume)
    elif known.resume is not None:
        raise ValueError("expected one run behind --resume, but --seeds or --folds ask for several. Leave them out.")
    else:
        from vit.run.many import fit_many

        fit_many(rest, seeds=known.seeds, folds=known.folds, dry_run=known.dry_run)
    return 0


def sweep_command(words: Sequence[str]) -> int:
    """`vit sweep`."""
    from vit.run import sweep

    return sweep.command(words)


def validate_command(words: Sequence[str]) -> int:
    """`vit validate RUN`."""
    return _evaluate_command("validate", words)


def test_command(words: Sequence[str]) -> int:
    """`vit test RUN`."""
    return _evaluate_command("test", words)


def _evaluate_command(verb: str, words: Sequence[str]) -> int:
    from vit.run import score

    if any(word in ("-h", "--help") for word in words):
        from vit.run.options import Options

        Options(verb, ["--help"])
    if not words or words[0].startswith("-"):
        raise ValueError(f"expected a run first, such as: vit {verb} outputs/quickstart/1")
    score.evaluate(verb, words[0], words[1:])
    return 0


def predict_command(words: Sequence[str]) -> int:
    """`vit predict RUN PICTURE ...`."""
    from vit.deploy.predict import command

    return command(words)


def check_command(words: Sequence[str]) -> int:
    """`vit check ROOT`, or `vit check --data SOURCE --data.OPTION VALUE ...`."""
    from vit.data import Source
    from vit.data.audit_report import check
    from vit.run.options import PlainErrors

    rooted = bool(words) and not words[0].startswith("-")
    given = ["--data=Folder", f"--data.root={words[0]}", *words[1:]] if rooted else list(words)
    parser = PlainErrors(
        prog="vit check",
        usage="vit check ROOT [--out FOLDER] [--write_split FILE], or vit check --data SOURCE --data.OPTION VALUE ...",
        description="Decode every picture once and report what is wrong. Exit code 1 when there are errors.",
    )
    parser.add_argument("--out", type=str, default=".", help="Folder for check.csv and check.html.")
    parser.add_argument("--write_split", type=str | None, help="Write the splits without leaks to this file.")
    parser.add_subclass_arguments(Source, "data", required=True)
    options = parser.parse_args(given)
    source = parser.instantiate(options).data
    return 1 if check(source, out=options.out, write_manifest=options.write_split).errors else 0
