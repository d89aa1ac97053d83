"""Write docs/results.md from docs/records: no number in it is typed by hand.

Run: python benchmarks/results.py
"""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "records"


def quickstart() -> list[str]:
    """The quickstart's accuracy over seeds."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("quickstart-*.json"))]
    if not records:
        return ["Not measured."]
    lines = [
        "| seed | test accuracy | 95 % interval | digits | fit | fit and test, whole commands |",
        "|---|---|---|---|---|---|",
    ]
    for r in records:
        t = r["test"]
        interval = f"{100 * t['acc_95'][0]:.1f} to {100 * t['acc_95'][1]:.1f} %"
        times = f"{r['fit_seconds']:.0f} s | {r['wall_seconds_fit_and_test']:.0f} s"
        lines.append(f"| {r['seeds']['run']} | {100 * t['acc']:.2f} % | {interval} | {t['pictures']} | {times} |")
    accuracies = [100 * r["test"]["acc"] for r in records]
    return [*lines, "", f"Mean {mean(accuracies):.2f} %, sd {stdev(accuracies):.2f}. {machine(records[0])}"]


def pretrained() -> list[str]:
    """What pre-trained weights are worth."""
    path = RECORDS / "pretrained.json"
    if not path.exists():
        return ["Not measured."]
    record = json.loads(path.read_text(encoding="utf-8"))
    lines = ["| start | test accuracy | 95 % interval | pictures |", "|---|---|---|---|"]
    for name, r in record["results"].items():
        interval = f"{100 * r['acc_95'][0]:.1f} to {100 * r['acc_95'][1]:.1f} %"
        lines.append(f"| {name} | {100 * r['acc']:.2f} % | {interval} | {r['pictures']} |")
    what = (
        f"Fashion-MNIST, {record['pictures_per_class']['train']} training pictures a class, "
        f"{record['epochs']} epochs at {record['image_size']} pixels, weights {record['weights']}, "
        f"seed {record['seed']}."
    )
    return [what, "", *lines, "", machine(record)]


def startup() -> list[str]:
    """What one waits for."""
    path = RECORDS / "startup.json"
    if not path.exists():
        return ["Not measured."]
    record = json.loads(path.read_text(encoding="utf-8"))
    lines = ["| command | median of 5 |", "|---|---|"]
    lines += [f"| `{name}` | {value:.2f} s |" for name, value in record["seconds"].items()]
    ratio = f"`vit fit --help` takes {record['help_over_import']:.2f} times `import lightning.pytorch.cli`."
    return [*lines, "", f"{ratio} {machine(record)}"]


def machine(record: dict[str, Any]) -> str:
    """Where a record was measured."""
    where = record["environment"]
    hardware, libraries = where["hardware"], where["libraries"]
    return f"Measured on {hardware['processor']}, {hardware['cores']} cores, torch {libraries['torch']}."


def page() -> str:
    """The whole page."""
    parts = [
        "# Results",
        "",
        "Made by `benchmarks/results.py` from the run records in `docs/records/`.",
        "",
        "## Quickstart: handwritten digits from scratch",
        "",
        *quickstart(),
        "",
        "## Pre-trained weights against the same run from scratch",
        "",
        *pretrained(),
        "",
        "## Waiting for the command line",
        "",
        *startup(),
        "",
        "## Not measured yet",
        "",
        "The configurations for CIFAR and ImageNet need a GPU; nobody has run them to their end.",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(page(), encoding="utf-8")
