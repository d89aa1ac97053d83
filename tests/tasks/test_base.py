"""What every task does around its step: windows of accumulated batches, compiling, gradient checkpointing."""

import functools
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn import functional as F

from vit.data import Folder, ImageDataModule
from vit.tasks import MAE, Classifier, EncoderOptions, MaskedPatches, OptimConfig, ScheduleConfig

TINY = EncoderOptions(image_size=16, patch_size=8, width=16, depth=2, heads=2)


def model(encoder=TINY, **optim):
    return Classifier(
        classes=["blue", "green", "red"],
        encoder=encoder,
        optim=OptimConfig(**{"lr": 1e-3, **optim}),
        schedule=ScheduleConfig(warmup=0.0),
        seed=1,
    )


def fit(net, tmp_path, root, *, batch_size=6, drop_last=False, **options):
    common = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "default_root_dir": tmp_path,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
    }
    source = Folder(root=str(root), batch_size=batch_size, num_workers=0, seed=1, drop_last=drop_last)
    made = Trainer(**{**common, **options})
    made.fit(net, ImageDataModule(source))
    return made


class Windows(Classifier):
    """Keeps the pictures and the gradient of each accumulated window."""

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        self.pictures.append((batch.images.clone(), batch.labels.clone()))

    def on_before_optimizer_step(self, optimizer):
        images, labels = (torch.cat(part) for part in zip(*self.pictures, strict=True))
        want = torch.autograd.grad(F.cross_entropy(self(images), labels), self.model.head.weight)[0]
        self.windows.append((len(labels), self.model.head.weight.grad.clone(), want))
        self.pictures.clear()


def test_each_accumulated_gradient_is_the_mean_over_the_pictures_of_its_window(tmp_path, tiny_folder):  # C7
    torch.manual_seed(0)
    net = model(name="sgd", lr=1e-9, momentum=0.0)
    net.__class__ = Windows
    net.pictures, net.windows = [], []
    fit(net, tmp_path, tiny_folder, batch_size=5, accumulate_grad_batches=3, limit_val_batches=0)
    assert [size for size, *_ in net.windows] == [15, 15, 6]  # 36 pictures: the last window has batches of 5 and 1
    for _, got, want in net.windows:
        assert torch.allclose(got, want, atol=1e-6)


# As in vit.run.screen.
of_compiling = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@of_compiling
def test_compiling_changes_no_name_and_no_result(tmp_path, tiny_folder, monkeypatch, as_users_run):
    used = []

    def backend(graph, inputs):
        used.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    states = []
    for on in (False, True):
        torch.manual_seed(0)
        net = model(compile=on)
        made = fit(net, tmp_path, tiny_folder, max_steps=3)
        made.save_checkpoint(tmp_path / "x.ckpt")
        states.append(torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"])
        assert bool(used) == on
    plain, compiled = states
    assert list(plain) == list(compiled)
    assert all(torch.allclose(plain[name], compiled[name], atol=1e-5) for name in plain)


@of_compiling
@pytest.mark.parametrize("objective", [MaskedPatches, MAE])
def test_pretraining_goes_through_compiled_blocks(objective, tmp_path, tiny_folder, monkeypatch, as_users_run):
    used = []

    def backend(graph, inputs):
        used.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    encoder = EncoderOptions(image_size=16, patch_size=4, width=16, depth=2, heads=2)
    fit(objective(encoder=encoder, optim=OptimConfig(compile=True)), tmp_path, tiny_folder, max_steps=1)
    assert used


def test_gradient_checkpointing_computes_blocks_twice_and_learns_the_same(tmp_path, tiny_folder):
    encoder = EncoderOptions(image_size=16, patch_size=8, width=16, depth=2, heads=2, dropout=0.2, drop_path=0.2)
    states, counts = [], []
    for on in (False, True):
        torch.manual_seed(0)
        net = model(encoder, gradient_checkpointing=on)
        calls = []
        net.model.blocks[0].attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        fit(net, tmp_path, tiny_folder, max_steps=3, limit_val_batches=0)
        states.append(net.state_dict())
        counts.append(len(calls))
    assert counts[1] == 2 * counts[0] == 6
    assert all(torch.allclose(value, states[1][name], atol=1e-6) for name, value in states[0].items())


@pytest.mark.parametrize("name", ["lion", "lamb"])
def test_other_optimizers_train_and_resume(tmp_path, tiny_folder, name):
    net = model(name=name, lr=1e-3)
    made = fit(net, tmp_path, tiny_folder)
    made.save_checkpoint(tmp_path / "x.ckpt")
    again = model(name=name, lr=1e-3)
    fit_on = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=tmp_path,
    )
    source = Folder(root=str(tiny_folder), batch_size=6, num_workers=0, seed=1)
    fit_on.fit(again, ImageDataModule(source), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert fit_on.global_step == 12


class Scaler:
    """As much of a loss scaler as a task looks at."""

    def get_scale(self):
        return 4.0


@pytest.mark.parametrize("bad", [0, 1, None])
def test_no_batch_of_a_window_hides_a_loss_that_is_not_finite(monkeypatch, bad):  # C1
    net = model()
    bias = net.model.head.bias
    stub = SimpleNamespace(scaler=Scaler(), accumulate_grad_batches=2, global_step=3)
    monkeypatch.setattr(Classifier, "trainer", stub)
    monkeypatch.setattr(net, "clip_gradients", lambda *args: None)
    optimizer = torch.optim.SGD([bias], lr=0.1)
    for batch in range(2):
        net._opens_window = batch == 0
        loss = torch.tensor(float("nan") if batch == bad else 2.0)
        # As Lightning hands it over: divided by the window's length, multiplied by the scaler's factor.
        net.backward((bias.sum() * 0 + loss) / 2 * 4)
    bias.grad[0] = float("inf")  # the scaler skips these and tries a lower factor
    if bad is None:
        net.configure_gradient_clipping(optimizer)
        assert float(net._loss) == 2.0
        return
    with pytest.raises(ValueError, match="at step 3 the loss is nan, the gradient norm"):
        net.configure_gradient_clipping(optimizer)


def test_windows_open_with_their_first_batch(tmp_path, tiny_folder):  # C1
    seen = []

    class Seen(Classifier):
        def backward(self, loss, *args, **kwargs):
            seen.append(self._opens_window)
            super().backward(loss, *args, **kwargs)

    net = Seen(classes=["blue", "green", "red"], encoder=TINY, optim=OptimConfig(lr=1e-3), seed=1)
    fit(net, tmp_path, tiny_folder, batch_size=2, max_epochs=2, accumulate_grad_batches=2)
    half = len(seen) // 2
    assert seen[:half] == seen[half:] == [batch % 2 == 0 for batch in range(half)]
