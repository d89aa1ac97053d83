"""Features equal a plain pass; ridge regression and its leave-one-out equal scikit-learn's and plain refits."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifierCV, RidgeCV

from vit.data.batch import Batch
from vit.evaluate.probe import features, ridge, sharpness
from vit.models.config import ViTConfig
from vit.models.normalise import Normalise
from vit.models.vit import VisionTransformer

GRID = [1e-3, 1e-1, 1.0, 10.0, 100.0, 1e4]


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x).float(), torch.from_numpy(y)


@pytest.mark.parametrize("rows", [1797, 300, 40], ids=["n > d", "n > d, less", "n < d"])
def test_coefficients_and_the_chosen_penalty_equal_scikit_learns(digits, rows):
    x, y = digits[0][:rows], digits[1][:rows]
    ours = ridge(x, y, 10, penalties=GRID)
    theirs = RidgeClassifierCV(alphas=GRID).fit(x.double().numpy(), y.numpy())
    assert ours.penalty == theirs.alpha_
    np.testing.assert_allclose(ours.weight.numpy(), theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(ours.bias.numpy(), theirs.intercept_, atol=1e-4)
    scores = x @ ours.weight.T + ours.bias
    assert (scores.argmax(1).numpy() == theirs.predict(x.double().numpy())).all()


def test_left_out_scores_equal_those_of_refits(digits):
    x, y = digits[0][:40], digits[1][:40]
    ours = ridge(x, y, 10, penalties=[50.0])
    x64, targets = x.double().numpy(), np.where(y.numpy()[:, None] == np.arange(10), 1.0, -1.0)
    refits = []
    for i in range(40):
        kept = np.arange(40) != i
        refits.append(Ridge(alpha=50.0).fit(x64[kept], targets[kept]).predict(x64[i : i + 1])[0])
    np.testing.assert_allclose(ours.loo_scores.numpy(), np.stack(refits), atol=1e-4)
    assert ours.loo_accuracy == pytest.approx((np.stack(refits).argmax(1) == y.numpy()).mean())
    theirs = RidgeCV(alphas=[50.0], store_cv_results=True).fit(x64, targets)
    error = np.mean((ours.loo_scores.double().numpy() - targets) ** 2)
    assert error == pytest.approx(theirs.cv_results_.mean(), rel=1e-5)


def test_the_choice_does_not_depend_on_the_scale_of_the_features_and_a_class_may_be_absent(digits):
    x, y = digits[0][:200], digits[1][:200]
    plain, scaled = ridge(x, y, 12), ridge(1000 * x, y, 12)
    assert scaled.penalty == pytest.approx(1e6 * plain.penalty)
    torch.testing.assert_close(scaled.weight * 1000, plain.weight, atol=1e-6, rtol=1e-4)
    assert plain.weight[11].abs().max() < 1e-6
    assert float(plain.bias[11]) == pytest.approx(-1.0)


def test_beyond_the_limit_the_error_is_a_mean_over_evenly_spaced_rows(digits, monkeypatch):
    x, y = digits
    every = ridge(x, y, 10)
    monkeypatch.setattr("vit.evaluate.probe._SCORED", 600)
    some = ridge(x, y, 10)
    assert len(some.scored) == 599
    assert some.penalty == every.penalty
    assert torch.equal(some.weight, every.weight)
    torch.testing.assert_close(some.loo_scores, every.loo_scores[::3])


def test_several_labels_per_picture_are_targets_too(digits):
    x, y = digits[0][:300], digits[1][:300]
    shares = torch.stack([y < 5, y % 2 == 0], dim=1).float()
    ours = ridge(x, shares, 2, penalties=GRID)
    theirs = RidgeCV(alphas=GRID).fit(x.double().numpy(), 2 * shares.numpy() - 1)
    assert ours.penalty == theirs.alpha_
    np.testing.assert_allclose(ours.weight.numpy(), theirs.coef_, atol=1e-4)
    assert 0.8 < ours.loo_accuracy < 1
    assert sharpness(ours.loo_scores, shares) > 1


def test_the_sharpness_is_where_cross_entropy_is_least(digits):
    x, y = digits
    ours = ridge(x, y, 10)
    scores, labels = ours.loo_scores.double(), y[ours.scored]

    def loss(factor):
        smooth = 1 / (len(labels) + 2)
        return float(torch.nn.functional.cross_entropy(factor * scores, labels, label_smoothing=smooth))

    best = sharpness(ours.loo_scores, labels)
    assert 2 < best < 20
    assert loss(best) < min(loss(0.98 * best), loss(1.02 * best))
    assert loss(best) < 0.5 * loss(1.0)
    # The same factor as a logistic regression on one feature, without a penalty.
    signed = ridge(x[y < 2], y[y < 2], 2)
    one = (signed.loo_scores[:, 1] - signed.loo_scores[:, 0]).numpy()[:, None]
    noisy = y[y < 2].numpy().copy()
    noisy[::7] = 1 - noisy[::7]
    theirs = LogisticRegression(C=1e9, fit_intercept=False).fit(one, noisy)
    assert sharpness(signed.loo_scores, torch.from_numpy(noisy)) == pytest.approx(theirs.coef_[0, 0], rel=0.02)


def test_the_sharpness_is_finite_where_every_row_is_right():
    scores = torch.eye(4).repeat(5, 1) * 2 - 1
    assert 1 < sharpness(scores, torch.arange(4).repeat(5)) < 10


def test_features_are_what_the_head_takes_and_modes_are_put_back():
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=8, width=32, depth=2, heads=2, num_classes=3, dropout=0.5)
    net = Normalise(VisionTransformer(config), mean=(0.5,) * 3, std=(0.5,) * 3)
    torch.nn.init.normal_(net.model.head.weight)
    net.train()
    net.model.blocks[0].eval()
    images = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
    loader = [Batch(images[s], torch.arange(7)[s] % 3, torch.arange(100, 107)[s]) for s in (slice(0, 4), slice(4, 7))]
    before = torch.get_rng_state()
    x, y, index = features(net, loader)
    assert torch.equal(before, torch.get_rng_state())
    assert net.training
    assert not net.model.blocks[0].training
    assert net.model.blocks[1].mlp.drop1.training
    assert index.tolist() == list(range(100, 107))
    assert y.tolist() == [0, 1, 2, 0, 1, 2, 0]
    torch.testing.assert_close(net.model.head(x), net.eval()(images))


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(1, 3), {}, "at least 2 pictures"),
        (torch.full((4, 3), torch.nan), {}, "finite"),
        (torch.zeros(4, 3), {"penalties": [0.0]}, "above 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(x, options, message):
    with pytest.raises(ValueError, match=message):
        ridge(x, torch.zeros(len(x), dtype=torch.int64), 2, **options)
    with pytest.raises(ValueError, match="empty"):
        features(Normalise(VisionTransformer(ViTConfig(image_size=16, width=32, heads=2)), mean=(0,), std=(1,)), [])


def test_features_without_any_difference_give_the_classes_shares():
    fitted = ridge(torch.ones(4, 3), torch.tensor([0, 0, 0, 1]), 2)
    assert torch.equal(fitted.weight, torch.zeros(2, 3))
    assert fitted.bias.tolist() == pytest.approx([0.5, -0.5])
