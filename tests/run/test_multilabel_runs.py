"""Pictures with several labels, from a table to named pictures."""

import csv

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image
from sklearn.metrics import average_precision_score

from vit.cli import main
from vit.deploy.predict import Predictor
from vit.models.artifact import load_model
from vit.run import score, session

NAMES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Pictures whose labels are the channels that are bright: one, two or all three."""
    root = tmp_path_factory.mktemp("several")
    draw = np.random.default_rng(0)
    rows = ["path,label,split"]
    kinds = [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)]
    for split, times in (("train", 8), ("val", 4), ("test", 3)):
        for i in range(times * len(kinds)):
            kind = kinds[i % len(kinds)]
            pixels = draw.integers(0, 80, (8, 8, 3), dtype=np.uint8)
            pixels[..., list(kind)] += 150
            name = f"{split}-{i}.png"
            Image.fromarray(pixels).save(root / name)
            rows.append(f"{name},{'|'.join(NAMES[k] for k in kind)},{split}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    return root / "labels.csv"


def words(table, tmp_path, *more):
    return [
        "--data=Table",
        f"--data.file={table}",
        "--data.separator=|",
        "--data.batch_size=8",
        "--data.num_workers=0",
        "--model.encoder.image_size=16",
        "--model.encoder.patch_size=8",
        "--model.encoder.width=16",
        "--model.encoder.depth=1",
        "--model.encoder.heads=2",
        "--model.optim.lr=5e-3",
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        "--trainer.max_epochs=12",
        f"--trainer.default_root_dir={tmp_path}",
        *more,
    ]


def test_several_labels_are_learned_scored_and_predicted(table, tmp_path):
    run = session.fit(words(table, tmp_path))
    record = run.record
    assert record["val"]["map"] > 0.9
    assert set(record["val"]["f1_per_class"]) == set(NAMES)
    assert record["checkpoint"]["chosen_by"] == "val_map"
    assert yaml.safe_load(run.config.read_text())["model"]["loss"]["name"] in (None, "bce")
    held = pq.read_table(run.predictions("val"))
    logits, labels = (np.array(held[name].to_pylist()) for name in ("logits", "label"))
    want = average_precision_score(labels[:, [0, 1, 2]], logits, average="macro")
    assert record["val"]["map"] == pytest.approx(want, rel=1e-5)
    values = score.evaluate("test", str(run.path), [])
    assert values["pictures"] == 18
    assert load_model(run.model)[1].several
    pictures = sorted(table.parent.glob("test-*.png"))
    for source in (run.path, run.model, run.best):
        predictor = Predictor.load(source)
        assert predictor.several
        answers = predictor.predict(pictures)
    sums = [sum(value for _, value in answer.top) for answer in answers]
    assert max(sums) > 1.2, "probabilities are independent"
    with table.open() as file:
        truth = {row["path"]: set(row["label"].split("|")) for row in csv.DictReader(file)}
    right = [set(a.labels) == truth[a.path.rsplit("/", 1)[-1]] for a in answers]
    assert np.mean(right) > 0.6
    assert main(["predict", str(run.path), str(pictures[0]), f"--out={tmp_path / 'answers.csv'}"]) == 0
    header, first = (tmp_path / "answers.csv").read_text().strip().splitlines()
    assert header.split(",")[-2:] == ["labels", "error"]
    assert set(first.split(",")[-2].split("|")) == set(answers[0].labels)


@pytest.mark.parametrize(
    "more",
    [
        ["--model.loss.name=asymmetric"],
        ["--model.loss.class_weights=balanced", "--model.method=head", "--model.tuning.head_init=ridge"],
    ],
)
def test_every_option_of_several_labels_trains(table, tmp_path, more):
    run = session.fit(words(table, tmp_path, "--trainer.max_epochs=2", *more))
    assert run.record["val"]["map"] > 0.3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.loss.name=cross_entropy"], "one answer per picture"),
        (["--model.mixing.mixup=0.8"], "no mixing with several labels"),
        (["--data.sampling=balanced"], "no data.sampling balanced with several labels"),
        (["--monitor=val_acc"], "val_map"),
    ],
)
def test_what_needs_one_label_is_refused(table, tmp_path, more, message, as_users_run):
    with pytest.raises(ValueError, match=message):
        session.fit(words(table, tmp_path, *more))
