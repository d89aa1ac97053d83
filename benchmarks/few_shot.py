"""Few digits per class: fine-tuning weights that were pre-trained on clothing, against training from scratch.

Every run takes the same number of steps of the same size with the same options; nothing is chosen on the test
pictures, which are all digits that the run itself does not train on. A run that is done is not repeated.

Run: python benchmarks/few_shot.py [NAME=RUN ...]        Writes docs/records/few_shot.json.
NAME=RUN adds other weights, such as mae=outputs/fashion_mnist_mae/1.
"""

import csv
import random
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from records import keep, read

from vit.data import Digits
from vit.run import score, session

STEPS, SEEDS, SIZES = 200, (0, 1, 2), (10, 30, 100)
ENCODER = {"image_size": 28, "patch_size": 7, "width": 96, "depth": 6, "heads": 3, "init_std": 0.1}
OPTIONS = [
    "--recipe=none",
    "--data=Digits",
    "--data.batch_size=32",
    "--data.eval_batch_size=512",
    "--data.num_workers=0",
    "--model.optim.lr=1e-3",
    "--model.optim.layer_decay=1.0",
    "--model.loss.label_smoothing=0.1",
    "--model.preprocessing.crop_pct=1.0",
    f"--trainer.max_steps={STEPS}",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
]


def split(per_class: int, seed: int, folder: Path) -> Path:
    """A split file with so many training digits per class; all others are the test."""
    table = Digits().table()
    by_class: dict[int, list[str]] = {}
    for row in table.rows():
        by_class.setdefault(table.label(row), []).append(table.name(row))
    file = folder / f"split-{per_class}-{seed}.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["path", "split"])
        for label, paths in sorted(by_class.items()):
            chosen = set(random.Random(f"{seed}-{label}").sample(paths, per_class))
            writer.writerows([path, "train" if path in chosen else "test"] for path in paths)
    return file


def one(start: str, weights: str | None, per_class: int, seed: int, folder: Path) -> dict[str, Any]:
    """Train and test once."""
    words = [*OPTIONS, f"--data.split_file={split(per_class, seed, folder)}", f"--seed={seed}"]
    words += [f"--name={start}-{per_class}-{seed}", f"--trainer.default_root_dir={folder}"]
    words += [f"--model.weights={weights}"] if weights else [f"--model.encoder.{k}={v}" for k, v in ENCODER.items()]
    run = session.fit(words)
    assert run is not None
    values = score.evaluate("test", str(run.path), [])
    told = {"start": start, "per_class": per_class, "seed": seed, "acc": values["acc"], "pictures": values["pictures"]}
    return told | {"fit_seconds": run.record["fit_seconds"]}


def main(more: list[str]) -> None:
    """Print the table and keep the record."""
    starts: dict[str, str | None] = {"scratch": None, "supervised": "fashion_mnist_28"}
    starts |= dict(word.split("=", 1) for word in more)
    rows = (read("few_shot") or {"rows": []})["rows"]
    done = {(row["start"], row["per_class"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as name:
        for per_class in SIZES:
            for start, weights in starts.items():
                for seed in SEEDS:
                    if (start, per_class, seed) in done:
                        continue
                    rows.append(one(start, weights, per_class, seed, Path(name)))
                    keep("few_shot", {"steps": STEPS, "rows": rows})
    for per_class in SIZES:
        for start in dict.fromkeys(row["start"] for row in rows):
            found = [row["acc"] for row in rows if (row["start"], row["per_class"]) == (start, per_class)]
            print(f"{per_class:>4} a class, {start:<12} {100 * mean(found):6.2f} ± {100 * stdev(found):.2f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
