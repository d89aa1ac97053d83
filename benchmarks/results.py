"""Write docs/results.md from docs/records: no number in it is typed by hand.

Run: python benchmarks/results.py
"""

import json
from statistics import mean, stdev
from typing import Any

from recipe_auto import complete, interval
from records import RECORDS, ROOT, read
from time_to_accuracy import TARGETS, WAYS, ratio_to_end


def digits(config: str) -> list[str]:
    """Accuracy of a configuration of digits over seeds."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob(f"{config}-*.json"))]
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


def shipped() -> list[str]:
    """The weights inside the package."""
    record = read("shipped")
    if record is None:
        return ["Not measured."]
    t, v = record["test"], record["val"]
    low, high = (100 * value for value in t["acc_95"])
    return [
        f"`fashion_mnist_28`, {record['epochs']} epochs of `fashion_mnist_pretrain`: {100 * t['acc']:.2f} % of "
        f"{t['pictures']:,} test pictures of clothing (95 % interval {low:.2f} to {high:.2f}), "
        f"{100 * v['acc']:.2f} % of the {v['pictures']:,} that chose the checkpoint. {machine(record)}"
    ]


def few_shot() -> list[str]:
    """Few digits a class."""
    record = read("few_shot")
    if record is None:
        return ["Not measured."]
    rows = record["rows"]
    starts = list(dict.fromkeys(row["start"] for row in rows))
    sizes = sorted({row["per_class"] for row in rows})
    lines = ["| digits a class | " + " | ".join(starts) + " |", "|---|" + "---|" * len(starts)]
    for size in sizes:
        cells = []
        for start in starts:
            found = [100 * row["acc"] for row in rows if (row["start"], row["per_class"]) == (start, size)]
            cells.append(f"{mean(found):.2f} ± {stdev(found):.2f} %" if len(found) > 1 else "-")
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    told = (
        f"Test accuracy on all other digits, mean ± sd over {len({row['seed'] for row in rows})} seeds, "
        f"{record['steps']} steps of 32 for every run, the same options for all. `supervised` are the weights that "
        "ship."
    )
    if others := [start for start in starts if start not in ("scratch", "supervised")]:
        told += f" Without labels, on the same pictures of clothing: {', '.join(others)}."
    return [told, "", *lines, "", machine(record)]


def input_pipeline() -> list[str]:
    """Pictures per second of the training pipeline."""
    record = read("input_pipeline")
    if record is None:
        return ["Not measured."]
    names = list(next(iter(record["sizes"].values()))["per_second"])
    lines = [
        "| JPEGs | " + " | ".join(names) + " | vit / timm | disk cache / timm |",
        "|---|" + "---|" * (len(names) + 2),
    ]
    for size, told in record["sizes"].items():
        cached = next(name for name in names if name not in ("timm", "torchvision", "vit"))
        rates = " | ".join(f"{told['per_second'][name]:.0f}" for name in names)
        over = told["over_timm"]
        lines.append(f"| {size} | {rates} | {over['vit']:.2f} | {over[cached]:.1f} |")
    return ["Training pictures per second, one worker process, batches of 224 pixels.", "", *lines, "", machine(record)]


def index() -> list[str]:
    """Cost of many rows."""
    record = read("index")
    if record is None:
        return ["Not measured."]
    scan = record["scanning"]
    lines = [
        f"Scanning {scan['files']:,} files takes {scan['vit_over_torchvision']:.2f} times torchvision's `ImageFolder` "
        f"({scan['seconds']['vit']:.2f} s).",
        "",
        "| rows of a table | built in | bytes a row beyond its path | while it is built | file |",
        "|---|---|---|---|---|",
    ]
    for name in ("table", "large_table"):
        t = record[name]
        then, peak = t["then_bytes_per_row_beyond_path"], t["peak_bytes_per_row_beyond_path"]
        lines.append(f"| {t['rows']:,} | {t['seconds']:.0f} s | {then:.0f} | {peak:.0f} | {t['file_mb']:,.0f} MB |")
    more = ", ".join(f"{abs(t['more_than_for_10_rows_mb']):.1f} MB ({c})" for c, t in record["workers"].items())
    return [*lines, "", f"A worker with 1.3 million rows differs from one with 10 rows by {more}. {machine(record)}"]


def checking() -> list[str]:
    """Speed of `vit check`."""
    record = read("check")
    if record is None:
        return ["Not measured."]
    names = list(next(iter(record["sizes"].values()))["per_second"])
    lines = ["| JPEGs | files | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for size, told in record["sizes"].items():
        rates = " | ".join(f"{told['per_second'][name]:,.0f}" for name in names)
        lines.append(f"| {size} | {told['files']:,} | {rates} |")
    what = "Pictures per second, from the folder to the written page, beside bare loops that open and decode."
    return [what, "", *lines, "", machine(record)]


def pretrained() -> list[str]:
    """What pre-trained weights are worth."""
    record = read("pretrained")
    if record is None:
        return ["Not measured."]
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
    record = read("startup")
    if record is None:
        return ["Not measured."]
    lines = ["| command | median of 5 |", "|---|---|"]
    lines += [f"| `{name}` | {value:.2f} s |" for name, value in record["seconds"].items()]
    ratio = f"`vit fit --help` takes {record['help_over_import']:.2f} times `import lightning.pytorch.cli`."
    return [*lines, "", f"{ratio} {machine(record)}"]


def time_to_accuracy() -> list[str]:
    """Curves of accuracy over time."""
    record = read("time_to_accuracy")
    if record is None:
        return ["Not measured."]
    ways = record["ways"]
    lines = [
        "| way | accuracy on the way, after seconds | at the end | seconds | of the processor |",
        "|---|---|---|---|---|",
    ]
    for way, points in ways.items():
        *before, end = points
        curve = ", ".join(f"{100 * p['acc']:.1f} % {p['seconds']:.0f}" for p in before) or "-"
        final = f"{100 * end['acc']:.2f} % | {end['seconds']:.0f} | {end['cpu_seconds']:.0f}"
        lines.append(f"| {way} | {curve} | {final} |")
    told = [f"Not run yet: {', '.join(missing)}."] if (missing := [way for way in WAYS if way not in ways]) else []
    if "vit" in ways:
        told.append(
            "What `vit` does after its first point (the average of the weights, val_loss as the monitor) was chosen "
            "with curves on these test pictures in view, so that its end is not free of selection; its first point is."
        )
    for way, _ in TARGETS:
        if way in ways and "vit" in ways:
            ratio = ratio_to_end(ways["vit"], ways[way])
            told.append(f"`vit` reaches the end of `{way}` {f'{ratio:.1f} times sooner' if ratio else 'never'}.")
    what = (
        f"The same DINOv2-S weights fine-tuned on {record['train']:,} Fashion-MNIST pictures, one thread, from Enter; "
        f"on the way {record['on_the_way']:,} of the 10,000 test pictures, at the end all. The number in a name is "
        "the size in pixels."
    )
    return [what, "", *lines, "", *told, "", machine(record)]


def recipe_auto() -> list[str]:
    """`recipe: auto` against sweeps."""
    record = read("recipe_auto")
    if record is None:
        return ["Not measured."]
    rows_by_name = complete(record["rows"])
    if not rows_by_name:
        return ["Not measured on all seeds yet."]
    lines = [
        "| folder | weights | test pictures | auto | best of 4 | difference, 95 % interval |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in rows_by_name.items():
        differences = [100 * (row["auto"] - row["sweep"]) for row in rows]
        low, high = interval(differences)
        scores = [f"{100 * mean(row[side] for row in rows):.2f} %" for side in ("auto", "sweep")]
        measured = f" ({rows[0]['metric']})" if rows[0]["metric"] != "acc" else ""
        lines.append(
            f"| {name[1]}{measured} | {name[0]} | {rows[0]['pictures']:,} | {' | '.join(scores)} | "
            f"{mean(differences):+.2f} ({low:+.2f} to {high:+.2f}) |"
        )
    what = (
        "One run of `recipe: auto` against the best on val of four learning rates with the plain defaults, as many "
        "epochs and the same image size; mean of 3 seeds, each with other training pictures, the interval by "
        "Student's t."
    )
    told = []
    for change in record["earlier"]:
        auto, sweep = (100 * mean(row[side] for row in change["rows"]) for side in ("auto", "sweep"))
        told += ["", f"{change['rows'][0]['folder']} was {auto:.2f} against {sweep:.2f} % before: {change['changed']}"]
    return [what, "", *lines, *told, "", machine(record)]


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
        "## Quickstart: handwritten digits from weights that ship",
        "",
        *digits("quickstart"),
        "",
        "## The same digits from scratch (`digits_scratch`)",
        "",
        *digits("digits_scratch"),
        "",
        "## The weights that ship",
        "",
        *shipped(),
        "",
        "## Few digits: pre-trained on clothing, or from scratch",
        "",
        *few_shot(),
        "",
        "## Pre-trained weights against the same run from scratch",
        "",
        *pretrained(),
        "",
        "## Accuracy over time",
        "",
        *time_to_accuracy(),
        "",
        "## `recipe: auto` against a search",
        "",
        *recipe_auto(),
        "",
        "## Reading pictures",
        "",
        *input_pipeline(),
        "",
        "## Many pictures",
        "",
        *index(),
        "",
        "## `vit check`",
        "",
        *checking(),
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
