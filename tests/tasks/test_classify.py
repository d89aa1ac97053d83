"""The classifier: its head, what is frozen, what it logs, and that its checkpoints need nothing else."""

import json
import math

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from vit.data import Folder, ImageDataModule
from vit.data.batch import collate
from vit.tasks import Classifier, EncoderOptions, LossConfig, OptimConfig, PreprocessingOptions, ScheduleConfig

TINY = EncoderOptions(image_size=32, patch_size=8, width=32, depth=2, heads=2, dropout=0.1, drop_path=0.1)
CLASSES = ["blue", "green", "red"]


def trainer(tmp_path, **options):
    common = dict(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        default_root_dir=tmp_path,
        max_epochs=2,
    )
    return Trainer(**{**common, **options})


def tiny(**options):
    values = {"classes": CLASSES, "encoder": TINY, "optim": OptimConfig(lr=2e-3), "seed": 1}
    return Classifier(**{**values, **options})


def tiny_data(root, **options):
    return ImageDataModule(Folder(root=str(root), batch_size=6, num_workers=0, seed=1, **options))


class TestFit:
    def test_head_only_leaves_every_other_parameter_and_buffer_bit_equal(self, tmp_path, tiny_folder):  # C11
        model = tiny(method="head")
        before = {k: v.clone() for k, v in model.state_dict().items()}
        images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
        model.train()
        features = [model.model.forward_features(model.net.normalise(images)) for _ in range(2)]
        assert torch.equal(*features), "dropout and stochastic depth are off in frozen parts"
        trainer(tmp_path).fit(model, tiny_data(tiny_folder))
        changed = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
        assert sorted(changed) == ["net.model.head.bias", "net.model.head.weight"]
        model.train()
        assert not model.model.blocks[0].training
        assert model.model.head.training

    def test_full_fine_tuning_moves_every_parameter(self, tmp_path, tiny_folder):  # C18
        model = tiny()
        before = {k: v.clone() for k, v in model.named_parameters()}
        trainer(tmp_path).fit(model, tiny_data(tiny_folder))
        assert [k for k, v in model.named_parameters() if torch.equal(v, before[k])] == []

    def test_it_learns_colours(self, tmp_path, tiny_folder):
        model = tiny(optim=OptimConfig(lr=3e-3))
        fit = trainer(tmp_path, max_epochs=12)
        fit.fit(model, tiny_data(tiny_folder))
        assert float(fit.callback_metrics["val_acc"]) > 0.9

    def test_the_logged_names_and_top5_follow_k(self, tmp_path, tiny_folder):  # E3
        fit = trainer(tmp_path, max_epochs=1)
        fit.fit(tiny(), tiny_data(tiny_folder))
        stages = {f"{s}_{m}" for s in ("train", "val") for m in ("loss", "acc", "balanced_acc")}
        assert set(fit.callback_metrics) == stages

    def test_planned_rates_are_the_rates_in_use_and_end_at_the_final_value(self, tmp_path, tiny_folder):  # C5
        model = tiny(schedule=ScheduleConfig(warmup=2, final=0.1), optim=OptimConfig(lr=1e-3, layer_decay=0.5))
        rates = []
        model.on_before_optimizer_step = lambda o: rates.append([g["lr"] for g in o.param_groups])
        trainer(tmp_path, max_epochs=2).fit(model, tiny_data(tiny_folder))
        assert len(rates) == 12
        assert rates[0][-1] == pytest.approx(0.5e-3)
        assert rates[1][-1] == pytest.approx(1e-3)
        assert rates[-1][-1] == pytest.approx(1e-4)
        assert rates[1][0] == pytest.approx(1e-3 * 0.5**3)

    def test_gradients_are_clipped_at_the_configured_norm(self, tmp_path, tiny_folder):
        norms = []
        for clip in (1e-3, 0.0):
            # Plain SGD at rate 1 moves the weights by just what clipping leaves of the gradient.
            optim = OptimConfig(name="sgd", lr=1.0, momentum=0.0, layer_decay=1.0, clip=clip)
            model = tiny(optim=optim, schedule=ScheduleConfig(warmup=0.0, final=1.0))
            before = [p.detach().clone() for p in model.parameters()]
            fit = trainer(tmp_path, max_steps=1, max_epochs=-1, limit_val_batches=0)
            fit.fit(model, tiny_data(tiny_folder))
            moved = [a.detach() - b for a, b in zip(model.parameters(), before, strict=True)]
            norms.append(float(torch.nn.utils.get_total_norm(moved)))
        assert norms[0] == pytest.approx(1e-3, rel=1e-3)
        assert norms[1] > 1e-2

    def test_a_checkpoint_is_plain_and_rebuilds_the_model_alone(
        self, tmp_path, tiny_folder, as_users_run
    ):  # C21, D4, H1, B13
        model = tiny(preprocessing=PreprocessingOptions(mean=(0.1, 0.2, 0.3)))
        fit = trainer(tmp_path, max_epochs=1)
        fit.fit(model, tiny_data(tiny_folder))
        path = tmp_path / "x.ckpt"
        fit.save_checkpoint(path)
        raw = torch.load(path, weights_only=True)
        json.dumps(raw["hyper_parameters"])
        again = Classifier.load_from_checkpoint(path, weights_only=True).eval()
        images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
        assert torch.equal(again(images), model.eval()(images))
        assert again.classes == ("blue", "green", "red")
        assert again.preprocessing == model.preprocessing

    def test_data_with_other_classes_are_refused(self, tmp_path, tiny_folder):
        model = tiny(classes=["a", "b"])
        with pytest.raises(ValueError, match="expected data with the classes of the model"):
            trainer(tmp_path).fit(model, tiny_data(tiny_folder))


@torch.no_grad()
def test_the_first_loss_is_ln_k():
    model = tiny().eval()
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    logits = model(images)
    assert torch.equal(logits, torch.zeros(5, 3))
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0, 1]))
    assert loss.item() == pytest.approx(math.log(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ["one"]}, "at least 2 classes"),
        ({"method": "hed"}, "expected method full, head, lora"),
        ({"loss": {"label_smoothing": 1.0}}, "label_smoothing"),
        ({"encoder": EncoderOptions(image_size=36, patch_size=8)}, "32 or 40"),  # B7
        ({"encoder": EncoderOptions(size="B/61")}, "did you mean"),
        ({"weights": "nowhere"}, "nowhere"),
        ({"weights": "x", "encoder": EncoderOptions(size="B/16")}, "either weights or a size"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(options, message, as_users_run):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


@torch.no_grad()
def test_label_smoothing_changes_the_training_loss_only():
    from vit.data.batch import Batch

    batch = Batch(
        images=torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8),
        labels=torch.tensor([0, 1, 2, 0, 1, 2]),
        index=torch.arange(6),
    )
    plain, smooth = tiny(), tiny(loss=LossConfig(label_smoothing=0.3))
    torch.nn.init.normal_(plain.model.head.weight)
    smooth.load_state_dict(plain.state_dict())
    plain.eval(), smooth.eval()
    want = torch.nn.functional.cross_entropy(smooth(batch.images), batch.labels, label_smoothing=0.3)
    assert float(smooth.training_step(batch, 0)) == pytest.approx(float(want))
    assert float(plain.training_step(batch, 0)) != pytest.approx(float(want))
    for model in (plain, smooth):
        model.validation_step(batch, 0)
    assert float(plain.val_metrics.compute()["loss"]) == float(smooth.val_metrics.compute()["loss"])


def test_the_distillation_token_learns_from_the_teacher_and_the_class_token_from_labels(
    tmp_path, tiny_folder, as_users_run
):
    teacher = tiny()
    torch.nn.init.normal_(teacher.model.head.weight)
    fit = trainer(tmp_path, max_steps=1, max_epochs=-1)
    fit.fit(teacher, tiny_data(tiny_folder))
    fit.save_checkpoint(tmp_path / "teacher.ckpt")
    encoder = EncoderOptions(image_size=32, patch_size=8, width=32, depth=2, heads=2, registers=1, head="distilled")
    for share, still in ((1.0, "labels"), (0.5, None)):
        loss = LossConfig(teacher=str(tmp_path / "teacher.ckpt"), distillation="hard", distillation_alpha=share)
        student = tiny(encoder=encoder, loss=loss)
        learn = trainer(tmp_path, max_epochs=8, limit_val_batches=0)
        learn.fit(student, tiny_data(tiny_folder))
        at_zero = {name for name, p in student.model.head.named_parameters() if not p.any()}
        assert at_zero == ({f"{still}.weight", f"{still}.bias"} if still else set())
    data = tiny_data(tiny_folder)
    data.preprocessing = student.preprocessing
    batches = list(data.val_dataloader())
    images, labels = torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])
    with torch.no_grad():
        net = student.eval().net
        of_labels, of_teacher = student.model.head.parts(
            student.model.pool(student.model.forward_features(net.normalise(images)))
        )
        theirs = teacher.eval()(images).argmax(1)
    assert (of_labels.argmax(1) == labels).float().mean() > 0.8
    assert (of_teacher.argmax(1) == theirs).float().mean() > 0.8
    assert (theirs == labels).float().mean() < 0.7, "the two had different things to learn"
    learn.save_checkpoint(tmp_path / "student.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "student.ckpt", weights_only=True)
    assert again.eval()(images).equal(student(images))


class Stream(IterableDataset):
    """Pictures without a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_a_stream_without_a_length_trains_by_steps_alone(tmp_path, tiny_folder):
    data, model = tiny_data(tiny_folder), tiny()
    data.preprocessing = model.preprocessing
    pictures = data.loader("train").dataset
    loader = DataLoader(Stream([pictures[i] for i in range(36)]), batch_size=6, collate_fn=collate)
    by_steps = trainer(tmp_path, max_steps=4, max_epochs=-1, limit_val_batches=0)
    by_steps.fit(model, loader)
    assert by_steps.global_step == 4
    with pytest.raises(ValueError, match="a run whose length is known.*trainer.max_steps"):
        trainer(tmp_path, max_epochs=2, limit_val_batches=0).fit(tiny(), loader)


@pytest.mark.parametrize("loss", [{"logit_adjustment": 1.0}, {"class_weights": "balanced"}])
def test_classes_of_unlike_size_are_made_up_for_once(tmp_path, tiny_folder, loss):
    with pytest.raises(ValueError, match="either data.sampling balanced or"):
        trainer(tmp_path).fit(tiny(loss=LossConfig(**loss)), tiny_data(tiny_folder, sampling="balanced"))


def test_the_teacher_and_the_counts_enter_the_training_loss(tmp_path, tiny_folder, as_users_run):
    teacher = tiny()
    torch.nn.init.normal_(teacher.model.head.weight)
    fit = trainer(tmp_path, max_steps=1, max_epochs=-1)
    fit.fit(teacher, tiny_data(tiny_folder))
    fit.save_checkpoint(tmp_path / "teacher.ckpt")
    loss = LossConfig(teacher=str(tmp_path / "teacher.ckpt"), distillation_alpha=1.0, class_weights="balanced")
    student = tiny(loss=loss, optim=OptimConfig(lr=3e-3))
    learn = trainer(tmp_path, max_epochs=15, limit_val_batches=0)
    learn.fit(student, tiny_data(tiny_folder))
    assert [n for n, _ in student.named_parameters()] == [n for n, _ in teacher.named_parameters()]
    data = tiny_data(tiny_folder)
    data.preprocessing = student.preprocessing
    images = torch.cat([batch.images for batch in data.val_dataloader()])
    with torch.no_grad():
        theirs, ours = teacher.eval()(images).argmax(1), student.eval()(images).argmax(1)
    assert (theirs == ours).float().mean() > 0.7, "labels play no part, so only the teacher can have taught this"
    learn.save_checkpoint(tmp_path / "student.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "student.ckpt", weights_only=True)
    assert again.loss == student.loss
    assert again.eval()(images).equal(student(images))
    with pytest.raises(ValueError, match="in a Trainer"):
        again.training_step(next(iter(data.train_dataloader())), 0)
