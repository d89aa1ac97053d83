"""DINO: the loss and the schedules by hand, and who moves when."""

import math

import pytest
import torch
from test_pretrain import TINY, fit, make

from vit.data.multicrop import MultiCrop
from vit.tasks.dino import DINO, DINOHead, HeadConfig
from vit.tasks.dino_teacher import Spread, TeacherConfig, cosine, cross_entropies
from vit.tasks.optim import OptimConfig, ScheduleConfig
from vit.tasks.options import EncoderOptions

HEAD = HeadConfig(hidden=32, bottleneck=16, outputs=64)
VIEWS = MultiCrop(local_views=2, local_size=8)


def tiny(**options):
    return DINO(**{"encoder": EncoderOptions(**TINY), "projection": HEAD, "views": VIEWS, "seed": 3, **options})


def test_the_loss_is_equation_2_pair_by_pair():
    student, teacher, centre = torch.randn(3, 5, 7), torch.randn(2, 5, 7), torch.randn(7)
    pairs = cross_entropies(student, teacher, centre, (0.1, 0.05))
    for g in range(2):
        for v in range(3):
            p = torch.softmax((teacher[g] - centre) / 0.05, -1)
            want = -(p * torch.log_softmax(student[v] / 0.1, -1)).sum(-1).mean()
            assert torch.allclose(pairs[g, v], want, rtol=1e-5)


def test_schedules_by_hand():
    teacher = TeacherConfig(momentum=0.9, temperature=0.07, first_temperature=0.04, warmup=0.3)
    assert teacher.momentum_at(0, 101) == pytest.approx(0.9)
    assert teacher.momentum_at(50, 101) == pytest.approx(0.95)
    assert teacher.momentum_at(100, 101) == pytest.approx(1.0)
    assert teacher.momentum_at(500, 101) == pytest.approx(1.0)
    assert teacher.temperature_at(0, 100) == pytest.approx(0.04)
    assert teacher.temperature_at(15, 100) == pytest.approx(0.055)
    assert [teacher.temperature_at(step, 100) for step in (30, 99)] == pytest.approx([0.07] * 2)
    assert TeacherConfig(warmup=0.0).temperature_at(0, 100) == 0.07
    assert cosine(0.04, 0.4, 0, 11) == pytest.approx(0.04)
    assert cosine(0.04, 0.4, 10, 11) == pytest.approx(0.4)


def test_prototypes_and_what_they_are_compared_with_have_length_1():
    head = DINOHead(32, HEAD)
    out = head(torch.randn(4, 32))
    head.last.weight.data *= 7
    assert out.shape == (4, 64)
    assert out.abs().max() <= 1
    features = torch.randn(4, 32)
    before = head(features)
    head.last.weight.data *= 3
    assert torch.allclose(head(features), before, atol=1e-6)


def test_the_teacher_is_the_average_of_the_student_and_never_learns_by_gradient(tmp_path, tiny_folder):
    model = tiny(teacher=TeacherConfig(momentum=0.8), optim=OptimConfig(lr=1e-3), freeze_last=0)
    want = {n: p.detach().clone() for n, p in model.model.named_parameters()}
    step = model.follow

    def follow(momentum):
        for name, p in model.student.named_parameters():
            want[name] = momentum * want[name] + (1 - momentum) * p.detach()
        step(momentum)
        momenta.append(momentum)

    momenta = []
    model.follow = follow
    fit(model, tiny_folder, tmp_path, max_epochs=-1, max_steps=4, limit_val_batches=0)
    assert momenta == pytest.approx([TeacherConfig(momentum=0.8).momentum_at(i, 4) for i in range(4)])
    for name, p in model.model.named_parameters():
        assert torch.allclose(p, want[name], atol=1e-6), name
        assert p.grad is None
    assert not any(p.requires_grad for p in model.model.parameters())


def test_accumulated_batches_are_one_step_of_the_teacher(tmp_path, tiny_folder):
    model, momenta = tiny(), []
    step = model.follow
    model.follow = lambda momentum: (momenta.append(momentum), step(momentum))
    fit(model, tiny_folder, tmp_path, accumulate_grad_batches=3, limit_val_batches=0)
    assert len(momenta) == 2, "6 batches of 6 pictures, 3 to a step"


def test_every_student_parameter_learns_and_is_in_one_group(tmp_path, tiny_folder):  # C18, C9
    model = tiny(freeze_last=0)
    grads = {}
    clip = model.configure_gradient_clipping
    model.configure_gradient_clipping = lambda *a, **k: (
        grads.update({n: p.grad is not None for n, p in model.named_parameters() if p.requires_grad}),
        clip(*a, **k),
    )
    fit(model, tiny_folder, tmp_path, max_epochs=-1, max_steps=1, limit_val_batches=0)
    assert [n for n, there in grads.items() if not there] == []
    grouped = sorted(id(p) for group in model.parameter_groups() for p in group["params"])
    assert grouped == sorted(id(p) for n, p in model.named_parameters() if n.startswith("student"))


def test_prototypes_stay_in_the_first_epochs_and_decay_rises_on_a_cosine(tmp_path, tiny_folder):
    optim, schedule = OptimConfig(lr=1e-3, weight_decay=0.04), ScheduleConfig(warmup=0)
    model = tiny(freeze_last=1, final_weight_decay=0.4, optim=optim, schedule=schedule)
    first, after, decays = model.student_head.last.weight.detach().clone(), [], []
    model.on_before_optimizer_step = lambda o: decays.append({g["name"]: g["weight_decay"] for g in o.param_groups})
    end = model.on_train_epoch_end
    model.on_train_epoch_end = lambda: (after.append(model.student_head.last.weight.detach().clone()), end())
    fit(model, tiny_folder, tmp_path, max_epochs=2, limit_val_batches=0)
    assert torch.equal(after[0], first)
    assert not torch.equal(after[1], first)
    assert [d["DINO"] for d in decays] == pytest.approx([cosine(0.04, 0.4, i, 12) for i in range(12)])
    assert all(d["blocks.0 (no decay)"] == 0 for d in decays)


def test_the_centre_is_the_running_mean_of_the_teachers_outputs(tmp_path, tiny_folder):
    model, means = tiny(teacher=TeacherConfig(centre_momentum=0.7)), []
    move = model._move_centre
    model._move_centre = lambda teacher: (means.append(teacher.mean((0, 1))), move(teacher))
    fit(model, tiny_folder, tmp_path, max_epochs=-1, max_steps=3, limit_val_batches=0)
    want = torch.zeros(64)
    for mean in means:
        want = 0.7 * want + 0.3 * mean
    assert torch.allclose(model.centre, want, atol=1e-6)


def test_local_views_are_about_three_sevenths_and_fit_the_patches(as_users_run):
    sizes = {(28, 4): 12, (32, 4): 12, (224, 16): 96, (16, 8): 8}
    for (side, patch), want in sizes.items():
        encoder = EncoderOptions(**{**TINY, "image_size": side, "patch_size": patch})
        assert tiny(encoder=encoder, views=MultiCrop()).views.local_size == want
    with pytest.raises(ValueError, match="that the patch size 4 divides"):
        tiny(views=MultiCrop(local_size=10))
    with pytest.raises(ValueError, match="no optim.ema with DINO"):
        tiny(optim=OptimConfig(ema=0.99))


def test_spread_tells_the_two_kinds_of_collapse_by_hand():
    def values(answers):
        spread = Spread(4)
        for part in answers.split(3):
            spread.update(part)
        return {name: float(v) for name, v in spread.compute().items()}

    assert values(torch.full((8, 4), 0.25)) == pytest.approx({"entropy": 1.0, "spread": 1.0})
    assert values(torch.eye(4)[[1] * 8]) == pytest.approx({"entropy": 0.0, "spread": 0.0})
    assert values(torch.eye(4)[[0, 1, 2, 3] * 2]) == pytest.approx({"entropy": 0.0, "spread": 1.0})
    assert values(torch.eye(4)[[0, 1] * 4])["spread"] == pytest.approx(math.log(2) / math.log(4))


def test_the_saved_encoder_is_the_teacher_with_the_configuration_that_was_asked_for():
    model = make("DINO")
    checkpoint = {}
    model.on_save_checkpoint(checkpoint)
    assert checkpoint["vit_toolkit"]["config"]["dynamic_size"] is False
    assert checkpoint["vit_toolkit"]["config"]["num_classes"] == 0
    assert model.student.config.dynamic_size
    assert model.monitors == {}
