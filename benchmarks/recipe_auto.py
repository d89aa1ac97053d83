"""Is `recipe: auto` as good as a search? On eight small folders, against the best of four learning rates.

The sweep trains four runs with the toolkit's defaults, at auto's image size and as long, and takes the one that is
best on the val pictures; auto trains one run. Both are then scored on the same test pictures. Each seed draws other
training pictures. What is done is kept, run by run, so that the script goes on where it stopped (unfinished rows wait
in the folder for temporary files). Rows of a recipe that was changed because of them move to `earlier`, with what was
changed: they are published too.

Run: python benchmarks/recipe_auto.py [WEIGHTS FOLDER ...]        Writes docs/records/recipe_auto.json.
Default: the weights that ship, all eight folders (benchmarks/small_folders.py).
"""

import math
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from records import keep, read

RATES = ["1e-4", "3e-4", "1e-3", "3e-3"]
SEEDS = (0, 1, 2)
T = 4.303  # Student's t, 97.5 %, 2 degrees of freedom: three seeds
CLAIM = 2.0
COMMON = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]


def one(name: str, weights: str, seed: int, place: Path) -> dict[str, Any]:
    """Auto and the sweep on one folder, drawn and trained with one seed."""
    # Here, since results.py reads this file for its intervals.
    from small_folders import check, folders, metric, options

    import vit
    from vit.run import session, sweep
    from vit.run.folder import RunFolder

    folder = place / "pictures"
    if not folder.exists():
        folders()[name](place / "draft", seed)
        (place / "draft").rename(folder)
    words = [*options(name, folder), f"--model.weights={weights}", f"--seed={seed}", *COMMON]
    words.append(f"--trainer.default_root_dir={place / 'runs'}")
    done = place / "auto.txt"
    if not done.exists():
        fitted = session.fit([*words, "--recipe=auto", "--name=auto"])
        assert fitted is not None
        done.write_text(str(fitted.path))
    run = RunFolder(Path(done.read_text()))
    told = vit.test(run)
    check(told)
    config = run.record["config"]
    epochs, size = config["trainer"]["max_epochs"], config["model"]["encoder"]["image_size"]
    plain = [*words, "--recipe=none", "--name=sweep", f"--trainer.max_epochs={epochs}"]
    plain.append(f"--model.encoder.image_size={size}")
    rows = sweep.sweep(plain, {"model.optim.lr": RATES})
    best = vit.test(place / "runs" / "sweep" / str(rows[0]["run"]))
    return {
        "folder": name,
        "weights": Path(weights).name,
        "seed": seed,
        "metric": metric(name),
        "pictures": told["pictures"],
        "epochs": epochs,
        "auto": told[metric(name)],
        "sweep": best[metric(name)],
        "lr": rows[0]["model.optim.lr"],
        "seconds": run.record["fit_seconds"],
    }


def interval(differences: list[float]) -> tuple[float, float]:
    """95 % interval of a mean over seeds, by Student's t."""
    half = T * stdev(differences) / math.sqrt(len(differences))
    return mean(differences) - half, mean(differences) + half


def complete(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Rows by weights and folder, where all seeds are done."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["weights"], row["folder"]), []).append(row)
    return {name: found for name, found in groups.items() if len(found) == len(SEEDS)}


def show(rows: list[dict[str, Any]]) -> None:
    """Print a line per folder."""
    for (weights, name), found in complete(rows).items():
        differences = [100 * (row["auto"] - row["sweep"]) for row in found]
        low, high = interval(differences)
        verdict = f"significantly worse by more than {CLAIM:g} points" if high < -CLAIM else "ok"
        scores = " ".join(f"{side} {100 * mean(row[side] for row in found):.2f}" for side in ("auto", "sweep"))
        print(f"{name:<15} {weights}: {scores}, {mean(differences):+.2f} ({low:+.2f} to {high:+.2f}) points: {verdict}")


def kept() -> dict[str, Any]:
    """What is done; another process may have added some."""
    return read("recipe_auto") or {"rows": [], "earlier": []}


def main(weights: str, names: list[str]) -> None:
    """Run what is missing; print all."""
    from small_folders import folders

    for name in names or list(folders()):
        for seed in SEEDS:
            if any((r["weights"], r["folder"], r["seed"]) == (Path(weights).name, name, seed) for r in kept()["rows"]):
                continue
            place = Path(tempfile.gettempdir()) / f"vit-{Path(__file__).stem}-{Path(weights).name}-{name}-{seed}"
            shutil.rmtree(place / "draft", ignore_errors=True)
            row = one(name, weights, seed, place)
            done = kept()
            keep("recipe_auto", {"rates": RATES, "rows": [*done["rows"], row], "earlier": done["earlier"]})
            shutil.rmtree(place)
            print(row, flush=True)
    show(kept()["rows"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fashion_mnist_28", sys.argv[2:])
