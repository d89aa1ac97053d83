"""What frozen features are worth: the features of a split, and a linear classifier from them in closed form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vit.data.batch import Batch
from vit.models.normalise import Normalise
from vit.models.vit import VisionTransformer

_CHUNK = 8192
_SCORED = 20_000


class Features(NamedTuple):
    """Pooled features of pictures, on the CPU, in the order in which they came.

    Args:
        x: what a head takes, float32.
        y: labels as in `Batch`.
        index: rows of the data table.
    """

    x: Float[Tensor, "n d"]
    y: Tensor
    index: Int64[Tensor, " n"]  # type: ignore[assignment]  # hides tuple.index, which nobody needs


@torch.no_grad()
def features(net: Normalise, loader: Iterable[Batch]) -> Features:
    """Pooled features of all pictures of a loader, in evaluation mode; the modules' modes are put back.

    Args:
        net: a `VisionTransformer` that takes pixels; its device is used.
        loader: gives the pictures.

    Raises:
        ValueError: the loader is empty.
    """
    model = net.model
    assert isinstance(model, VisionTransformer)
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    parts = []
    try:
        for batch in loader:
            images = batch.images.to(device, non_blocking=True)
            pooled = model.pool(model.forward_features(net.normalise(images)))
            parts.append((pooled.float().cpu(), batch.labels.cpu(), batch.index.cpu()))
    finally:
        for module, mode in modes:
            module.training = mode
    if not parts:
        raise ValueError("expected pictures to take features of, but the loader is empty.")
    x, y, index = (torch.cat(part) for part in zip(*parts, strict=True))
    return Features(x, y, index)


@dataclass(frozen=True, kw_only=True)
class Ridge:
    """A linear classifier by regularised least squares, and how it does on rows that it has not seen.

    Args:
        weight: of each class.
        bias: of each class.
        penalty: the λ that was chosen.
        loo_accuracy: share of rows that are right when each is left out; for several labels, the share of decisions.
        loo_scores: of the scored rows, each left out; about 1 for the class, -1 for others.
        scored: which rows these are.
    """

    weight: Float[Tensor, "k d"]
    bias: Float[Tensor, " k"]
    penalty: float
    loo_accuracy: float
    loo_scores: Float[Tensor, "m k"]
    scored: Int64[Tensor, " m"]


def ridge(x: Float[Tensor, "n d"], y: Tensor, num_classes: int, *, penalties: Sequence[float] | None = None) -> Ridge:
    """Regularised least squares from features to targets {-1, 1}^K (ViT, section 4.1, few-shot), in closed form.

    The bias is not penalised. λ is the one with the least squared error when each row is left out, which needs no
    refits: the residual of a left-out row is its residual divided by 1 - h, h being its leverage (Golub, Heath and
    Wahba, 1979; with the bias h is 1/n larger). Beyond 20,000 rows that error is a mean over as many, evenly spaced.

    Args:
        x: features.
        y: class numbers, or the share (0 or 1) of each class, (n, k).
        num_classes: K.
        penalties: the λ to choose from; None: half decades from 1e-6 to 1e3 times the features' mean eigenvalue,
            so that the choice does not depend on their scale.

    Raises:
        ValueError: fewer than 2 rows, features that are not finite, or a λ that is not above 0.
    """
    n = len(x)
    if n < 2:
        raise ValueError(f"expected at least 2 pictures for a ridge regression, but got {n}.")
    if not torch.isfinite(x).all():
        raise ValueError("expected finite features for a ridge regression, but got NaN or infinity.")
    targets = _targets(y, num_classes)
    centre, level = x.mean(0, dtype=torch.float64), targets.mean(0, dtype=torch.float64)
    gram = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    cross = x.new_zeros(x.shape[1], num_classes, dtype=torch.float64)
    for rows in torch.arange(n, device=x.device).split(_CHUNK):
        centred = x[rows].double() - centre
        gram += centred.T @ centred
        cross += centred.T @ (targets[rows] - level)
    values, basis = torch.linalg.eigh(gram)
    values, cross = values.clamp(min=0.0), basis.T @ cross
    chosen = _penalties(float(values.mean()), penalties)
    scored = torch.arange(0, n, -(-n // _SCORED), device=x.device)
    turned, wanted = (x[scored].double() - centre) @ basis, targets[scored].double()
    best: tuple[float, float, Tensor] | None = None
    for penalty in chosen:
        shrunk = 1 / (values + penalty)
        leverage = 1 / n + turned.square() @ shrunk
        residuals = (wanted - level - turned @ (shrunk[:, None] * cross)) / (1 - leverage)[:, None]
        error = float(residuals.square().mean())
        if best is None or error < best[0]:
            best = error, penalty, wanted - residuals
    assert best is not None
    _, penalty, scores = best
    weight = (basis @ (cross / (values + penalty)[:, None])).T
    right = scores.argmax(1) == y[scored] if y.ndim == 1 else (scores > 0) == (wanted > 0)
    return Ridge(
        weight=weight.float(),
        bias=(level - weight @ centre).float(),
        penalty=penalty,
        loo_accuracy=float(right.double().mean()),
        loo_scores=scores.float(),
        scored=scored,
    )


def _targets(y: Tensor, num_classes: int) -> Float[Tensor, "n k"]:
    shares = torch.nn.functional.one_hot(y, num_classes) if y.ndim == 1 else y
    return 2 * shares.float() - 1


def _penalties(mean: float, given: Sequence[float] | None) -> list[float]:
    if given is None:
        return [(mean or 1.0) * 10 ** (step / 2) for step in range(-12, 7)]
    if not given or min(given) <= 0:
        raise ValueError(f"expected penalties above 0, but got {list(given)}.")
    return list(given)


def sharpness(scores: Float[Tensor, "n k"], y: Tensor) -> float:
    """The factor on scores of unseen rows under which they have the least cross-entropy.

    Regression scores lie near ±1, whatever K; their softmax would be nearly uniform. The factor is found where the
    derivative, which rises with the factor, is zero. Targets are smoothed by one row in n + 2 (as in Platt, 1999), so
    that it stays finite where every row is right.

    Args:
        scores: of left-out rows, as in `Ridge`.
        y: class numbers; or the share of each class, (n, k), for which the cross-entropy is the binary one.
    """
    s, k = scores.double(), scores.shape[1]
    shares = torch.nn.functional.one_hot(y, k).double() if y.ndim == 1 else y.double()
    smooth = 1 / (len(y) + 2)
    targets = (1 - smooth) * shares + smooth * (1 / k if y.ndim == 1 else 0.5)
    low, high = -7.0, 7.0
    for _ in range(50):
        middle = (low + high) / 2
        logits = s * 10**middle
        p = logits.softmax(1) if y.ndim == 1 else logits.sigmoid()
        if float(((p - targets) * s).sum()) < 0:
            low = middle
        else:
            high = middle
    return float(10 ** ((low + high) / 2))
