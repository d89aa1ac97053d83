"""Accuracy over time from Enter: the same pre-trained weights and pictures, fine-tuned in five ways.

2,000 Fashion-MNIST pictures to train on, 10,000 to test. Each way runs in a process of its own on one thread; its
clock starts before that process does and stands still while it is tested. On the way 1,000 of the test pictures tell
the accuracy, at the end all 10,000. A way whose record is there is not run again, so that the script, which takes
hours, goes on where it stopped. Seconds of the processor are kept too: on a busy machine they compare better.

Run: python benchmarks/time_to_accuracy.py WEIGHTS [WAY ...]        Writes docs/records/time_to_accuracy.json.
Needs: pip install accelerate transformers, and Debian's package dataset-fashion-mnist.
WEIGHTS is a folder of DINOv2-S in transformers' layout. A WAY is one of vit, trainer_224, trainer_112, timm_112,
probe_112; default all of them.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pretrained import NAMES, clothing
from records import keep, read

SIZE, DOCUMENTED = 112, 224  # pixels: what recipe auto chooses here, and what transformers' guide takes
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("contestant_vit", "vit", {}),
    f"trainer_{SIZE}": ("contestants", "trainer", {"size": SIZE}),
    f"probe_{SIZE}": ("contestants", "probe", {"size": SIZE}),
    f"trainer_{DOCUMENTED}": ("contestants", "trainer", {"size": DOCUMENTED}),
    f"timm_{SIZE}": ("contestants", "timm", {"size": SIZE}),
}
TARGETS = ((f"trainer_{DOCUMENTED}", 20), (f"trainer_{SIZE}", 8))
PER_CLASS, ON_THE_WAY = 200, 1000
STARTED = "TIME_TO_ACCURACY_STARTED"


def make_folder(target: Path) -> None:
    """The first pictures of each class of Fashion-MNIST to train on, and all that are there to test."""
    for prefix, split, count in (("train", "train", PER_CLASS), ("t10k", "test", None)):
        images, labels = clothing(prefix)
        for k, name in enumerate(f"{k}-{name}" for k, name in enumerate(NAMES)):  # folders in the order of the labels
            (target / split / name).mkdir(parents=True)
            for index in np.flatnonzero(labels == k)[:count]:
                Image.fromarray(images[index]).save(target / split / name / f"{index:05d}.png")


class Clock:
    """Takes points of a curve; implements `contestants.Points`."""

    def __init__(self, started: float) -> None:
        self.started, self.stopped, self.stopped_cpu = started, 0.0, 0.0
        self.points: list[dict[str, Any]] = []
        images, labels = clothing("t10k")
        self.images, self.labels = [Image.fromarray(image) for image in images], torch.tensor(labels.astype(np.int64))

    @torch.no_grad()
    def __call__(self, predict: Any, *, last: bool = False) -> None:
        """Test, and keep the time until now."""
        now, cpu = time.time(), time.process_time()
        seconds, busy = now - self.started - self.stopped, cpu - self.stopped_cpu
        count = len(self.images) if last else ON_THE_WAY
        state = torch.random.get_rng_state()
        right = 0
        for first in range(0, count, 100):
            rows = slice(first, min(first + 100, count))
            right += int((predict(self.images[rows]).argmax(1) == self.labels[rows]).sum())
        torch.random.set_rng_state(state)
        point = {"seconds": round(seconds, 1), "cpu_seconds": round(busy, 1), "acc": right / count, "pictures": count}
        self.points.append(point)
        print(point, flush=True)
        self.stopped += time.time() - now
        self.stopped_cpu += time.process_time() - cpu


def one(way: str, weights: str, folder: str, result: str) -> None:
    """Run one way in this process."""
    torch.set_num_threads(1)
    clock = Clock(float(os.environ[STARTED]))
    module, name, options = WAYS[way]
    with tempfile.TemporaryDirectory() as work:
        run = getattr(importlib.import_module(module), name)
        run(Path(folder), weights, Path(work), clock, **options)
    Path(result).write_text(json.dumps(clock.points), encoding="utf-8")


def ratio_to_end(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], unit: str = "seconds") -> float | None:
    """How many times sooner our curve reaches the accuracy in which theirs ends; None if it never does."""
    end = theirs[-1]
    reached = next((point[unit] for point in ours if point["acc"] >= end["acc"]), None)
    return None if reached is None else end[unit] / reached


def show(ways: dict[str, list[dict[str, Any]]]) -> None:
    """Print the curves, and how much sooner ours reaches the others' ends."""
    for way, points in ways.items():
        print(f"{way}: " + ", ".join(f"{100 * p['acc']:.1f} % after {p['seconds']:.0f} s" for p in points))
    for way, target in TARGETS:
        if way in ways and "vit" in ways:
            units = ("seconds", "cpu_seconds")
            seconds, cpu = (ratio_to_end(ways["vit"], ways[way], unit) for unit in units)
            told = f"{seconds:.1f} times sooner ({cpu:.1f} in processor time)" if seconds and cpu else "never"
            print(f"vit reaches the end of {way} {told}; wanted {target}")


def main(weights: str, asked: list[str]) -> None:
    """Run what is missing, print all, and keep the record after each way."""
    ways = (read("time_to_accuracy") or {"ways": {}})["ways"]
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name))
        for way in asked or WAYS:
            if way in ways:
                continue
            result = Path(name) / "result.json"
            environment = {
                **os.environ,
                STARTED: str(time.time()),
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
            words = [sys.executable, __file__, "--one", way, weights, name, str(result)]
            subprocess.run(words, check=True, env=environment)
            ways = (read("time_to_accuracy") or {"ways": {}})["ways"]  # another process may have added one
            ways[way] = json.loads(result.read_text(encoding="utf-8"))
            keep("time_to_accuracy", {"train": 10 * PER_CLASS, "on_the_way": ON_THE_WAY, "ways": ways})
    show(ways)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("expected WEIGHTS: python benchmarks/time_to_accuracy.py WEIGHTS [WAY ...]")
    if sys.argv[1] == "--one":
        one(*sys.argv[2:])
    else:
        main(sys.argv[1], sys.argv[2:])
