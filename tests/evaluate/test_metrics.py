"""Metrics against scikit-learn and hand computations."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss, top_k_accuracy_score

from vit.evaluate.metrics import StageMetrics, accuracy_interval, summary


def filled(logits: torch.Tensor, labels: torch.Tensor, batch: int) -> dict[str, float]:
    metrics = StageMetrics(logits.shape[1])
    for x, y in zip(logits.split(batch), labels.split(batch), strict=True):
        metrics.update(torch.nn.functional.cross_entropy(x, y), x, y)
    return {name: float(value) for name, value in metrics.compute().items()}


@pytest.mark.parametrize("k", [2, 3, 7])
@pytest.mark.parametrize("batch", [1, 3, 7, 64])
def test_values_equal_scikit_learn_for_any_batch_size(k, batch):  # E1, E7
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(50, k, generator=generator)
    labels = (torch.rand(50, generator=generator) ** 2 * k).long()
    got = filled(logits, labels, batch)
    probabilities = logits.softmax(1).numpy()
    assert got["acc"] == pytest.approx(accuracy_score(labels, logits.argmax(1)))
    assert got["balanced_acc"] == pytest.approx(balanced_accuracy_score(labels, logits.argmax(1)))
    assert got["loss"] == pytest.approx(log_loss(labels, probabilities, labels=range(k)), rel=1e-5)
    if k > 5:
        assert got["top5"] == pytest.approx(top_k_accuracy_score(labels, probabilities, k=5, labels=range(k)))


def test_micro_and_macro_accuracy_are_told_apart_on_an_imbalanced_toy():  # E1
    labels = torch.tensor([0, 0, 0, 0, 1])
    logits = torch.nn.functional.one_hot(torch.zeros(5, dtype=torch.long), 2).float()
    got = filled(logits, labels, 5)
    assert got["acc"] == pytest.approx(0.8)
    assert got["balanced_acc"] == pytest.approx(0.5)


@pytest.mark.parametrize(("k", "there"), [(2, False), (3, False), (5, False), (6, True)])
def test_top5_exists_only_with_more_than_five_classes(k, there):  # E3
    got = filled(torch.randn(4, k), torch.zeros(4, dtype=torch.long), 2)
    assert ("top5" in got) is there


def test_a_class_that_is_absent_is_left_out_of_the_balanced_accuracy():  # A5
    labels = torch.tensor([0, 0, 2])
    logits = torch.eye(3)[torch.tensor([0, 1, 2])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns of the absent class
        want = balanced_accuracy_score(labels, logits.argmax(1))
    assert filled(logits, labels, 3)["balanced_acc"] == pytest.approx(want) == pytest.approx(0.75)


def test_stages_do_not_mix():  # E6
    train, val = StageMetrics(2), StageMetrics(2)
    right, wrong = torch.eye(2), torch.eye(2).flip(0)
    labels = torch.tensor([0, 1])
    train.update(torch.tensor(0.0), right, labels)
    val.update(torch.tensor(9.0), wrong, labels)
    assert float(train.compute()["acc"]) == 1.0
    assert float(val.compute()["acc"]) == 0.0


def test_nothing_is_reported_before_the_first_picture():
    assert StageMetrics(3).compute() == {}


def test_the_interval_equals_wilsons_formula():
    n, k, z = 360, 350, 1.959963984540054
    p = k / n
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert accuracy_interval(k, n) == pytest.approx((centre - half, centre + half))
    assert accuracy_interval(5, 5)[1] == pytest.approx(1.0)


def test_the_summary_counts_each_picture_and_holds_plain_values():
    labels = torch.tensor([0, 1, 1])
    got = summary(torch.eye(2)[labels] * 5, labels)
    assert got["acc"] == 1.0
    assert got["pictures"] == 3
    assert got["acc_95"][0] < 1.0
