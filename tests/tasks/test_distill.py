"""Distillation: losses by hand, teachers of every kind, and a student that learns what only the teacher knows."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from vit.models.artifact import save_model
from vit.models.config import ViTConfig
from vit.models.vit import VisionTransformer
from vit.tasks.distill import distillation_loss, load_teacher
from vit.tasks.losses import LossConfig

CLASSES = ("blue", "green", "red")
PREPARED = {
    "mean": (0.2, 0.3, 0.4),
    "std": (0.5, 0.6, 0.7),
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "crop_mode": "center",
}


def save_vit(folder, classes=CLASSES, size=16, channels=3):
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=size, patch_size=8, width=16, depth=1, heads=2, num_classes=len(classes), channels=channels
    )
    model = VisionTransformer(config).eval()
    torch.nn.init.normal_(model.head.weight)
    prepared = {**PREPARED, "mean": (0.5,), "std": (0.5,)} if channels == 1 else PREPARED
    save_model(folder, model, classes=classes, preprocessing={**prepared, "image_size": size})
    return model


def pictures(size=16, channels=3):
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (4, channels, size, size), dtype=torch.uint8, generator=draw)


class TestLoss:
    student = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]])
    teacher = torch.tensor([[2.0, 0.0, 1.0], [0.5, 0.5, 4.0]])

    def test_soft_is_the_divergence_at_temperature_times_its_square(self):
        got = distillation_loss(LossConfig(teacher="x", distillation_temperature=2.0), self.student, self.teacher)
        p, q = (self.teacher / 2).softmax(1), (self.student / 2).softmax(1)
        assert float(got) == pytest.approx(float(4 * (p * (p.log() - q.log())).sum(1).mean()), rel=1e-5)
        assert float(distillation_loss(LossConfig(), self.teacher, self.teacher)) == pytest.approx(0.0, abs=1e-6)

    def test_hard_is_cross_entropy_with_the_teachers_decision(self):
        got = distillation_loss(LossConfig(teacher="x", distillation="hard"), self.student, self.teacher)
        assert float(got) == pytest.approx(float(F.cross_entropy(self.student, torch.tensor([0, 2]))))

    def test_several_labels_are_as_many_questions(self):
        soft = distillation_loss(
            LossConfig(teacher="x", distillation_temperature=1.0), self.student, self.teacher, multi_label=True
        )
        p = self.teacher.sigmoid()
        want = -(p * F.logsigmoid(self.student) + (1 - p) * F.logsigmoid(-self.student)).mean()
        assert float(soft) == pytest.approx(float(want), rel=1e-5)
        hard = distillation_loss(
            LossConfig(teacher="x", distillation="hard"), self.student, self.teacher, multi_label=True
        )
        want = F.binary_cross_entropy_with_logits(self.student, torch.tensor([[1.0, 0, 1], [1, 1, 1]]))
        assert float(hard) == pytest.approx(float(want))


class TestTeacher:
    def test_a_model_folder_says_what_it_says_alone(self, tmp_path):
        model = save_vit(tmp_path / "model")
        teacher = load_teacher(str(tmp_path / "model"), classes=CLASSES)
        mean, std = (torch.tensor(PREPARED[name])[:, None, None] for name in ("mean", "std"))
        with torch.no_grad():
            want = model((pictures() / 255 - mean) / std)
        got = teacher(pictures())
        assert torch.allclose(got, want, atol=1e-5)
        assert not got.requires_grad

    def test_its_classes_are_put_in_the_students_order_by_name(self, tmp_path):
        save_vit(tmp_path / "model", classes=("red", "violet", "blue", "green"))
        logits = load_teacher(str(tmp_path / "model"), classes=("red", "violet", "blue", "green"))(pictures())
        got = load_teacher(str(tmp_path / "model"), classes=CLASSES)(pictures())
        assert torch.equal(got, logits[:, [2, 3, 0]])

    def test_it_sees_pictures_at_its_own_size_and_grey_ones_in_its_channels(self, tmp_path):
        save_vit(tmp_path / "model")
        teacher = load_teacher(str(tmp_path / "model"), classes=CLASSES)
        flat = torch.full((1, 3, 40, 24), 77, dtype=torch.uint8)
        assert torch.allclose(teacher(flat), teacher(flat[..., :16, :16]), atol=1e-4)
        assert torch.equal(teacher(flat[:, :1, :16, :16]), teacher(flat[..., :16, :16]))
        save_vit(tmp_path / "grey", channels=1)
        with pytest.raises(ValueError, match="wants 1"):
            load_teacher(str(tmp_path / "grey"), classes=CLASSES)(flat)

    def test_a_convolutional_network_of_timm_can_teach(self, tmp_path):
        torch.manual_seed(0)
        model = timm.create_model("resnet10t", num_classes=3).eval()
        config = {
            "architecture": "resnet10t",
            "num_classes": 3,
            "label_names": list(CLASSES),
            "pretrained_cfg": {**model.default_cfg, "num_classes": 3, "input_size": [3, 32, 32]},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        teacher = load_teacher(str(tmp_path), classes=CLASSES)
        mean, std = (torch.tensor(model.default_cfg[name])[:, None, None] for name in ("mean", "std"))
        with torch.no_grad():
            want = model((pictures(32) / 255 - mean) / std)
        assert torch.allclose(teacher(pictures(32)), want, atol=1e-4)

    def test_what_cannot_teach_is_refused(self, tmp_path):
        save_vit(tmp_path / "model")
        with pytest.raises(ValueError, match="does not know violet"):
            load_teacher(str(tmp_path / "model"), classes=("blue", "violet"))
        with pytest.raises(ValueError, match="a teacher that gives a picture several labels, .* gives one label"):
            load_teacher(str(tmp_path / "model"), classes=CLASSES, several=True)
        save_vit(tmp_path / "numbered", classes=("0", "1", "2"))
        with pytest.raises(ValueError, match="teacher of the 2 classes"):
            load_teacher(str(tmp_path / "numbered"), classes=("blue", "violet"))
        with pytest.raises(ValueError, match="found none at nowhere"):
            load_teacher("nowhere", classes=CLASSES)
