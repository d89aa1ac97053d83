"""Numbers about a model whose pictures have several labels, or none, over a whole pass."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelStatScores


class MultiLabelMetrics(nn.Module):
    """Loss, mean average precision and F1 of one stage.

    `map` is the mean over the classes that occur of the area under precision over recall (macro, scikit-learn's
    `average_precision_score`); it needs no threshold. `f1` is the mean of each class's F1 at probability 0.5, over
    the classes that occur; `micro_f1` counts all decisions together. Scores of a whole pass are kept for `map`.

    Args:
        num_classes: K.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.loss = SumMetric(nan_strategy="disable")
        common: dict[str, Any] = {"num_labels": num_classes, "average": None, "validate_args": False}
        # At 0.5 of the probability; logits are scores too, but torchmetrics would take those within [0, 1] as they are.
        kept = {"counts": MultilabelStatScores(**common), "precision": MultilabelAveragePrecision(**common)}
        self.metrics = MetricCollection(kept, compute_groups=False)  # type: ignore[arg-type]

    def update(self, loss: Float[Tensor, ""], logits: Float[Tensor, "b k"], labels: Float[Tensor, "b k"]) -> None:
        """Add a batch.

        Args:
            loss: mean loss of the batch.
            logits: scores.
            labels: 0 and 1 per class.
        """
        self.loss.update(loss.detach().float() * len(labels))
        self.metrics.update(logits.detach().float().sigmoid(), labels.long())

    def compute(self) -> dict[str, Tensor]:
        """All values over what came since the last `reset`, over all processes; empty without pictures."""
        if not self.metrics["counts"].update_called:
            return {}
        with warnings.catch_warnings():
            # Classes that do not occur have no precision, and are left out below.
            warnings.filterwarnings("ignore", "No positive samples found")
            warnings.filterwarnings("ignore", "Average precision score for one or more classes was `nan`")
            values = self.metrics.compute()
        true_positive, false_positive, _, false_negative, support = values["counts"].unbind(-1)
        pictures = values["counts"][0, :4].sum()
        present = support > 0
        f1 = 2 * true_positive / (2 * true_positive + false_positive + false_negative)
        all_right, all_wrong = true_positive.sum(), (false_positive + false_negative).sum()
        return {
            "loss": self.loss.compute() / pictures,
            "map": values["precision"][present].mean(),
            "f1": f1[present].mean(),
            "micro_f1": 2 * all_right / (2 * all_right + all_wrong),
        }

    def reset(self) -> None:
        """Forget all batches."""
        # See `StageMetrics.reset`.
        with torch.inference_mode(False):
            self.loss.reset()
            self.metrics.reset()


def multilabel_summary(
    logits: Float[Tensor, "n k"], labels: Float[Tensor, "n k"], classes: Sequence[str]
) -> dict[str, object]:
    """The numbers of one finished pass for a run's record, with F1 of each class that occurs.

    Args:
        logits: scores of every picture, once each.
        labels: 0 and 1 per class.
        classes: their names.
    """
    metrics = MultiLabelMetrics(logits.shape[1])
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
    metrics.update(loss, logits, labels)
    values = {name: float(value) for name, value in metrics.compute().items()}
    said, there = (logits > 0), (labels > 0.5)
    right, either = (said & there).sum(0), said.sum(0) + there.sum(0)
    per_class = {
        name: float(2 * right[k] / either[k]) for k, name in enumerate(classes) if there[:, k].any() and either[k]
    }
    return {**values, "f1_per_class": per_class, "pictures": len(labels)}
