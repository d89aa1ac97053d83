"""Numbers for several labels against scikit-learn's."""

import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score

from vit.evaluate.multilabel import MultiLabelMetrics, multilabel_summary

DRAW = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.randn(50, 4, generator=DRAW)
LABELS = (torch.rand(50, 4, generator=DRAW) < torch.tensor([0.5, 0.2, 0.1, 0.0])).float()


def test_values_over_batches_equal_scikit_learns_and_absent_classes_do_not_count():  # A5
    metrics = MultiLabelMetrics(4)
    assert metrics.compute() == {}
    for part in (slice(0, 32), slice(32, 50)):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(LOGITS[part], LABELS[part])
        metrics.update(loss, LOGITS[part], LABELS[part])
    got = {name: float(value) for name, value in metrics.compute().items()}
    said = (LOGITS > 0).int()
    want = {
        "loss": float(torch.nn.functional.binary_cross_entropy_with_logits(LOGITS, LABELS)),
        "map": average_precision_score(LABELS[:, :3], LOGITS[:, :3], average="macro"),
        "f1": f1_score(LABELS[:, :3], said[:, :3], average="macro"),
        "micro_f1": f1_score(LABELS, said, average="micro"),
    }
    assert got == pytest.approx(want, rel=1e-5)
    summary = multilabel_summary(LOGITS, LABELS, ["a", "b", "c", "d"])
    assert summary["map"] == pytest.approx(want["map"])
    each = f1_score(LABELS[:, :3], said[:, :3], average=None)
    assert summary["f1_per_class"] == pytest.approx(dict(zip("abc", each, strict=True)))
    metrics.reset()
    assert metrics.compute() == {}


def test_logits_between_0_and_1_are_not_taken_for_probabilities():
    metrics = MultiLabelMetrics(2)
    logits = torch.tensor([[0.2, 0.3], [-0.2, -0.1]])
    metrics.update(torch.tensor(0.0), logits, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert float(metrics.compute()["f1"]) == 1.0
