"""Numbers about a classifier, from counts that are kept over a whole pass: no average of batch averages."""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassStatScores


class StageMetrics(nn.Module):
    """Loss, top-1, top-5 and balanced accuracy of one stage; each stage has its own.

    `acc` is the share of pictures that are right (micro); `balanced_acc` is the mean over the classes that occur of
    the share that is right in each (macro recall, as scikit-learn's `balanced_accuracy_score`). `top5` exists only
    with more than 5 classes.

    Args:
        num_classes: K.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        # A weighted MeanMetric ignores its weights unless it looks for NaN, which waits for the device.
        self.loss = SumMetric(nan_strategy="disable")
        counts: dict[str, MulticlassStatScores] = {
            "counts": MulticlassStatScores(num_classes, average=None, validate_args=False)
        }
        if num_classes > 5:
            counts["top5"] = MulticlassAccuracy(num_classes, top_k=5, average="micro", validate_args=False)
        # Two metrics over the same input would otherwise be tried for shared state, which needs a batch first.
        self.metrics = MetricCollection(counts, compute_groups=False)  # type: ignore[arg-type]

    def update(self, loss: Float[Tensor, ""], logits: Float[Tensor, "b k"], labels: Int64[Tensor, " b"]) -> None:
        """Add a batch; nothing is read back from the device.

        Args:
            loss: mean loss of the batch.
            logits: scores.
            labels: class numbers.
        """
        self.loss.update(loss.detach().float() * len(labels))
        self.metrics.update(logits.detach().float(), labels)

    def compute(self) -> dict[str, Tensor]:
        """All values over what came since the last `reset`, over all processes; empty without pictures."""
        if not self.metrics["counts"].update_called:
            return {}
        values = self.metrics.compute()
        true_positive, *_, support = values["counts"].unbind(-1)
        present = support > 0
        named = {
            "loss": self.loss.compute() / support.sum(),
            "acc": true_positive.sum() / support.sum(),
            "balanced_acc": (true_positive[present] / support[present]).mean(),
        }
        return named | ({"top5": values["top5"]} if "top5" in values else {})

    def reset(self) -> None:
        """Forget all batches."""
        # Counters made in inference mode, as at the end of `trainer.validate`, could not be counted up in training.
        with torch.inference_mode(False):
            self.loss.reset()
            self.metrics.reset()


def accuracy_interval(right: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of an accuracy (Wilson, 1927), which holds for few pictures and near 0 and 1 too.

    Args:
        right: pictures that are right.
        total: pictures, at least 1.
        confidence: probability that the interval contains the true accuracy.

    Returns:
        Lower and upper end.
    """
    from scipy.stats import binomtest

    interval = binomtest(right, total).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def summary(logits: Float[Tensor, "n k"], labels: Int64[Tensor, " n"]) -> dict[str, object]:
    """The numbers of one finished pass for a run's record: values, picture count, the interval of the accuracy.

    Args:
        logits: scores of every picture, once each.
        labels: class numbers.
    """
    metrics = StageMetrics(logits.shape[1])
    metrics.update(torch.nn.functional.cross_entropy(logits.float(), labels), logits, labels)
    values = {name: float(value) for name, value in metrics.compute().items()}
    right = int((logits.argmax(1) == labels).sum())
    low, high = accuracy_interval(right, len(labels))
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return {**finite, "acc_95": [low, high], "pictures": len(labels)}
