"""README's quickstart over 3 seeds: test accuracy on held-out digits, and the wall time of its two commands.

Run: python benchmarks/quickstart.py [CONFIG]        Writes docs/records/<CONFIG>-<seed>.json.
CONFIG is quickstart, or digits_scratch for the same digits without weights.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

from records import keep, published

VIT = [sys.executable, "-m", "vit.cli"]


def run(config: str, seed: int, outputs: Path) -> tuple[Path, float]:
    """Fit and test with a seed; the run's folder and the seconds of both commands."""
    started = time.monotonic()
    fit = [*VIT, "fit", "--config", config, "--seed", str(seed), "--name", f"seed{seed}"]
    subprocess.run([*fit, f"--trainer.default_root_dir={outputs}"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*VIT, "test", str(outputs / f"seed{seed}")], check=True, stdout=subprocess.DEVNULL)
    return outputs / f"seed{seed}" / "1", time.monotonic() - started


def main(config: str = "quickstart") -> None:
    """Print all three accuracies and keep their records."""
    outputs = Path(tempfile.mkdtemp())
    accuracies = []
    for seed in (0, 1, 2):
        folder, seconds = run(config, seed, outputs)
        record = published(json.loads((folder / "run.json").read_text(encoding="utf-8")))
        keep(f"{config}-{seed}", {**record, "wall_seconds_fit_and_test": round(seconds, 1)})
        accuracies.append(record["test"]["acc"])
        pictures = record["test"]["pictures"]
        print(f"seed {seed}: test accuracy {accuracies[-1]:.4f} on {pictures} digits, {seconds:.0f} s", flush=True)
    print(f"mean {mean(accuracies):.4f}, sd {stdev(accuracies):.4f}")
    shutil.rmtree(outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
