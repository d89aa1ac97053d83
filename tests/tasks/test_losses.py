"""Losses against torch's, timm's, torchvision's and scikit-learn's, and against numbers worked out by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from timm.loss import AsymmetricLossMultiLabel, BinaryCrossEntropy, SoftTargetCrossEntropy
from torch.nn import functional as F
from torchvision.ops import sigmoid_focal_loss

from vit.data.mix import mixed
from vit.tasks.losses import LossConfig, make_loss, resolve_loss

K = 5
DRAW = torch.Generator().manual_seed(0)
LOGITS = 3 * torch.randn(7, K, generator=DRAW)
LABELS = torch.randint(0, K, (7,), generator=DRAW)
SOFT = torch.rand(7, K, generator=DRAW).softmax(1)
SEVERAL = torch.randint(0, 2, (7, K), generator=DRAW).float()
COUNTS = [40, 10, 20, 5, 25]
NAMES = ("cross_entropy", "bce", "focal", "asymmetric")


def loss(logits, targets, *, counts=None, multi_label=False, pictures=None, **options):
    made = make_loss(
        LossConfig(**options), counts=counts, num_classes=logits.shape[1], multi_label=multi_label, pictures=pictures
    )
    return float(made(logits, targets))


def same(value):
    return pytest.approx(float(value), rel=1e-5)


class TestOneLabel:
    @pytest.mark.parametrize("smoothing", [0.0, 0.2])
    def test_cross_entropy_equals_torchs_for_class_numbers_and_shares(self, smoothing):
        for targets in (LABELS, SOFT):
            want = F.cross_entropy(LOGITS, targets, label_smoothing=smoothing)
            assert loss(LOGITS, targets, label_smoothing=smoothing) == same(want)
        assert loss(LOGITS, SOFT) == same(SoftTargetCrossEntropy()(LOGITS, SOFT))

    def test_balanced_weights_are_scikit_learns_and_every_picture_counts_once(self):
        every = np.repeat(np.arange(K), COUNTS)
        weights = torch.tensor(compute_class_weight("balanced", classes=np.arange(K), y=every)).float()
        one_by_one = weights[LABELS] * F.cross_entropy(LOGITS, LABELS, reduction="none")
        assert loss(LOGITS, LABELS, counts=COUNTS, class_weights="balanced") == same(one_by_one.mean())
        hot = F.one_hot(LABELS, K).float()
        assert loss(LOGITS, hot, counts=COUNTS, class_weights="balanced") == same(one_by_one.mean())
        # Over the whole training set the weights change the loss of no uniform guess.
        flat = torch.zeros(sum(COUNTS), K)
        got = loss(flat, torch.from_numpy(every), counts=COUNTS, class_weights="balanced")
        assert got == same(math.log(K))

    def test_weights_multiply_each_pictures_binary_loss(self):
        weights = torch.tensor([100 / (K * n) for n in COUNTS])
        each = F.binary_cross_entropy_with_logits(LOGITS, F.one_hot(LABELS, K).float(), reduction="none").mean(1)
        got = loss(LOGITS, LABELS, counts=COUNTS, class_weights="balanced", name="bce")
        assert got == same((weights[LABELS] * each).mean())

    def test_logit_adjustment_adds_log_frequencies_in_training(self):
        prior = torch.tensor(COUNTS) / 100
        for targets in (LABELS, SOFT):
            want = F.cross_entropy(LOGITS + 1.5 * prior.log(), targets)
            assert loss(LOGITS, targets, counts=COUNTS, logit_adjustment=1.5) == same(want)

    def test_logits_that_know_nothing_but_the_frequencies_are_adjusted_to_equal(self):
        # The best constant logits under the adjusted loss are those of balanced classes: all equal.
        targets = torch.tensor(COUNTS)[None] / 100
        made = make_loss(LossConfig(logit_adjustment=1.0), counts=COUNTS, num_classes=K, multi_label=False)
        logits = torch.zeros(1, K, requires_grad=True)
        made(logits, targets).backward()
        assert logits.grad.abs().max() < 1e-6

    @pytest.mark.parametrize("smoothing", [0.0, 0.2])
    def test_bce_equals_timms(self, smoothing):
        want = BinaryCrossEntropy(smoothing=smoothing)(LOGITS, LABELS)
        assert loss(LOGITS, LABELS, name="bce", label_smoothing=smoothing) == same(want)
        assert loss(LOGITS, SOFT, name="bce") == same(F.binary_cross_entropy_with_logits(LOGITS, SOFT))

    @pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
    def test_focal_of_two_classes_is_torchvisions_of_their_difference(self, gamma):
        two, labels = LOGITS[:, :2], LABELS % 2
        difference = two[:, 1] - two[:, 0]
        want = sigmoid_focal_loss(difference, labels.float(), alpha=-1, gamma=gamma, reduction="mean")
        assert loss(two, labels, name="focal", focal_gamma=gamma) == same(want)

    def test_focal_without_gamma_is_cross_entropy_and_by_hand_otherwise(self):
        assert loss(LOGITS, SOFT, name="focal", focal_gamma=0.0) == same(F.cross_entropy(LOGITS, SOFT))
        logits = torch.tensor([[math.log(3.0), 0.0, 0.0]])  # probabilities 0.6, 0.2, 0.2
        want = 0.5 * 0.4**2 * -math.log(0.6) + 0.5 * 0.8**2 * -math.log(0.2)
        assert loss(logits, torch.tensor([[0.5, 0.5, 0.0]]), name="focal") == same(want)

    @pytest.mark.parametrize("name", NAMES)
    def test_mixed_targets_of_one_picture_equal_its_class_number(self, name):  # C17
        images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
        _, targets = mixed(images, LABELS[:1], classes=K, seed=0, mixup=0.8)
        assert loss(LOGITS[:1], targets, name=name) == same(loss(LOGITS[:1], LABELS[:1], name=name))

    @pytest.mark.parametrize("name", ["cross_entropy", "bce", "focal"])
    def test_mixed_targets_lie_between_those_of_their_classes(self, name):  # C16, C17
        images = torch.zeros(7, 3, 8, 8, dtype=torch.uint8)
        _, targets = mixed(images, LABELS, classes=K, seed=3, mixup=0.8)
        got = loss(LOGITS, targets, name=name)
        ends = loss(LOGITS, LABELS, name=name), loss(LOGITS, LABELS.roll(1), name=name)
        assert min(ends) <= got <= max(ends) or name == "focal"
        if name == "cross_entropy":
            share = targets[torch.arange(7), LABELS].median()
            assert got == same(share * ends[0] + (1 - share) * ends[1])


class TestSeveralLabels:
    def test_the_name_follows_the_labels(self):
        assert resolve_loss(LossConfig(), multi_label=True).name == "bce"
        assert resolve_loss(LossConfig(), multi_label=False).name == "cross_entropy"

    @pytest.mark.parametrize("smoothing", [0.0, 0.2])
    def test_bce_equals_timms(self, smoothing):
        want = BinaryCrossEntropy(smoothing=smoothing, smooth_dense=True)(LOGITS, SEVERAL)
        assert loss(LOGITS, SEVERAL, multi_label=True, label_smoothing=smoothing) == same(want)

    def test_balanced_weighs_yes_by_the_odds_of_no(self):
        want = F.binary_cross_entropy_with_logits(
            LOGITS, SEVERAL, pos_weight=torch.tensor([(60 - n) / n for n in COUNTS])
        )
        got = loss(LOGITS, SEVERAL, multi_label=True, counts=COUNTS, pictures=60, class_weights="balanced")
        assert got == same(want)

    @pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
    def test_focal_equals_torchvisions(self, gamma):
        for targets in (SEVERAL, SOFT):
            want = sigmoid_focal_loss(LOGITS, targets, alpha=-1, gamma=gamma, reduction="mean")
            assert loss(LOGITS, targets, multi_label=True, name="focal", focal_gamma=gamma) == same(want)

    @pytest.mark.parametrize(("gammas", "margin"), [((0.0, 4.0), 0.05), ((1.0, 4.0), 0.05), ((1.0, 2.0), 0.0)])
    def test_asymmetric_equals_timms(self, gammas, margin):
        reference = AsymmetricLossMultiLabel(
            gamma_pos=gammas[0], gamma_neg=gammas[1], clip=margin, reduction="mean", eps=1e-30
        )
        options = {"name": "asymmetric", "asymmetric_gammas": gammas, "asymmetric_margin": margin}
        assert loss(LOGITS, SEVERAL, multi_label=True, **options) == same(reference(LOGITS, SEVERAL))

    def test_asymmetric_ignores_easy_absent_classes(self):
        logits = torch.full((1, K), -6.0, requires_grad=True)  # probability 0.0025, below the margin
        made = make_loss(LossConfig(name="asymmetric"), counts=None, num_classes=K, multi_label=True)
        made(logits, torch.zeros(1, K)).backward()
        assert torch.count_nonzero(logits.grad) == 0


@pytest.mark.parametrize(
    ("name", "multi_label"), [p for p in itertools.product(NAMES, (False, True)) if p != ("cross_entropy", True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
def test_extreme_logits_have_finite_losses_and_gradients(name, multi_label, dtype, exponent):  # C1
    values = torch.tensor([[0.0, 1e4, -1e4, 88.0, -104.0], [3e38, -3e38, 0.0, 17.0, -17.0]])
    for targets in (torch.eye(K)[:2], torch.ones(2, K) / K, torch.ones(2, K), torch.zeros(2, K)):
        logits = values.clamp(-1e6, 1e6).to(dtype).requires_grad_()
        for margin in (0.0, 0.05):
            options = {
                "focal": {"focal_gamma": exponent},
                "asymmetric": {"asymmetric_gammas": (exponent, exponent), "asymmetric_margin": margin},
            }
            config = LossConfig(name=name, **options.get(name, {}))
            got = make_loss(config, counts=None, num_classes=K, multi_label=multi_label)(logits, targets)
            got.backward()
            assert got.dtype == torch.float32
            assert got.isfinite()
            assert logits.grad.isfinite().all(), (name, margin)


def test_a_loss_adds_nothing_to_a_state_dict():
    made = make_loss(LossConfig(class_weights="balanced"), counts=COUNTS, num_classes=K, multi_label=False)
    assert made.state_dict() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "hinge"}, "one of None, cross_entropy"),
        ({"focal_gamma": 1.0}, "expected loss.focal_gamma with loss.name focal"),
        ({"name": "focal", "asymmetric_margin": 0.1}, "expected loss.asymmetric_margin with loss.name asymmetric"),
        ({"distillation": "hard"}, "expected loss.distillation with loss.teacher"),
        ({"distillation_alpha": 0.9}, "expected loss.distillation_alpha with loss.teacher"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"focal_gamma": -1.0}, "focal_gamma"),
        ({"asymmetric_gammas": (1.0, -1.0)}, "two loss.asymmetric_gammas"),
        ({"asymmetric_margin": 1.0}, "asymmetric_margin"),
        ({"class_weights": "effective"}, "none, balanced"),
        ({"logit_adjustment": -1.0}, "logit_adjustment"),
        ({"distillation": "warm"}, "soft, hard"),
        ({"distillation_alpha": 0.0}, "distillation_alpha"),
        ({"distillation_temperature": 0.0}, "distillation_temperature"),
    ],
)
def test_values_out_of_range_are_refused(options, message, as_users_run):
    with pytest.raises(ValueError, match=message):
        LossConfig(**options)


@pytest.mark.parametrize(
    ("options", "made", "message"),
    [
        ({"name": "cross_entropy"}, {"multi_label": True}, "one answer per picture"),
        ({"logit_adjustment": 1.0}, {"multi_label": True, "counts": COUNTS}, "with several labels"),
        ({"logit_adjustment": 1.0, "name": "bce"}, {"counts": COUNTS}, "cross_entropy or focal"),
        ({"logit_adjustment": 1.0, "class_weights": "balanced"}, {"counts": COUNTS}, "but got both"),
        ({"class_weights": "balanced"}, {}, "at least one training picture of each"),
        ({"class_weights": "balanced"}, {"counts": [1, 2, 0, 3, 4]}, "at least one training picture of each"),
        ({"class_weights": "balanced"}, {"counts": [9] * K, "multi_label": True, "pictures": 9}, "without each class"),
    ],
)
def test_what_does_not_go_together_is_refused(options, made, message):
    values = {"counts": None, "num_classes": K, "multi_label": False, **made}
    with pytest.raises(ValueError, match=message):
        make_loss(LossConfig(**options), **values)


def test_targets_of_another_shape_are_refused(as_users_run):
    made = make_loss(LossConfig(), counts=None, num_classes=K, multi_label=False)
    for targets in (LABELS[:3], SOFT[:, :3], SOFT[:, 0]):
        with pytest.raises(ValueError, match="of class numbers or"):
            made(LOGITS, targets)
    several = make_loss(LossConfig(), counts=None, num_classes=K, multi_label=True)
    with pytest.raises(ValueError, match="0 and 1 per class"):
        several(LOGITS, LABELS)
