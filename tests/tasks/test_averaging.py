"""The moving average of weights and the greedy soup: by hand, while training goes on, and after a resume."""

import copy

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from vit.data import Folder, ImageDataModule
from vit.models.weights import read_checkpoint
from vit.tasks import Classifier, EncoderOptions, OptimConfig, ScheduleConfig
from vit.tasks.averaging import greedy_soup, save_soup
from vit.tasks.callbacks import checkpoint_callbacks

TINY = EncoderOptions(image_size=16, patch_size=8, width=16, depth=1, heads=2, dropout=0.1)
STEPS = 24


def model(**optim):
    values = {"lr": 5e-3, **optim}
    return Classifier(
        classes=["blue", "green", "red"],
        encoder=TINY,
        optim=OptimConfig(**values),
        schedule=ScheduleConfig(steps=STEPS),
        seed=1,
    )


def data(root):
    return ImageDataModule(Folder(root=str(root), batch_size=6, num_workers=0, seed=1))


def trainer(tmp_path, **options):
    common = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "default_root_dir": tmp_path,
    }
    return Trainer(**{**common, **options})


def weights(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Watch(Callback):
    """The weights after each optimizer step, those that each validation sees, and what it measures."""

    def __init__(self):
        self.starts, self.steps, self.seen, self.losses = [], [], [], []

    def on_train_start(self, trainer, net):
        self.starts.append(weights(net))

    def on_train_batch_end(self, trainer, net, *args):
        self.steps.append(weights(net))

    def on_validation_batch_start(self, trainer, net, *args):
        self.seen.append(weights(net))

    def on_validation_end(self, trainer, net):
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def fit(tmp_path, root, *, epochs, ckpt=None, watch=None, **optim):
    torch.manual_seed(0)
    net = model(**optim)
    made = trainer(tmp_path, max_epochs=epochs, num_sanity_val_steps=0, callbacks=[watch] if watch else [])
    made.fit(net, data(root), ckpt_path=ckpt, weights_only=True if ckpt else None)
    return net, made


@pytest.mark.parametrize("warmup", [True, False], ids=["with a warm-up", "without"])
def test_the_average_equals_the_hand_computation_and_is_what_stays(tmp_path, tiny_folder, warmup):  # C13
    watch = Watch()
    net, made = fit(tmp_path, tiny_folder, epochs=2, watch=watch, ema=0.4, ema_start=2, ema_warmup=warmup)
    average = watch.steps[2]
    for n, new in enumerate(watch.steps[3:], start=1):
        decay = min(0.4, (1 + n) / (10 + n)) if warmup else 0.4
        average = {name: decay * value + (1 - decay) * new[name] for name, value in average.items()}
    final = weights(net)
    assert all(torch.allclose(final[name], average[name], atol=1e-6) for name in final)
    assert not equal(final, watch.steps[-1])
    made.save_checkpoint(tmp_path / "x.ckpt")
    held = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert held["averaging"]["state_dict"] == "average"
    assert held["averaging"]["updates"] == 10
    assert equal(held["averaging"]["live"], watch.steps[-1])
    kept, _, _ = read_checkpoint(tmp_path / "x.ckpt")
    assert equal(weights(kept), {name.removeprefix("net.model."): value for name, value in final.items()})


def test_before_it_has_started_the_live_weights_are_scored_and_then_the_average(tmp_path, tiny_folder):  # C13
    plain, averaged, late = Watch(), Watch(), Watch()
    fit(tmp_path, tiny_folder, epochs=2, watch=plain)
    _, made = fit(tmp_path, tiny_folder, epochs=2, watch=averaged, ema=0.999, ema_start=6)
    fit(tmp_path, tiny_folder, epochs=2, watch=late, ema=0.999, ema_start=0.9)
    assert all(equal(a, b) for a, b in zip(plain.steps, averaged.steps, strict=True)), "training never sees the average"
    assert averaged.losses[0] == plain.losses[0]
    assert averaged.losses[1] != plain.losses[1]
    assert late.losses == plain.losses, "0.9 of 24 steps are not reached"
    assert equal(averaged.seen[-1], weights(made.lightning_module))


def test_an_average_that_has_begun_goes_on_where_a_longer_run_would_begin_it_later(tmp_path, tiny_folder):  # C13
    _, first = fit(tmp_path, tiny_folder, epochs=1, ema=0.9, ema_start=4)
    first.save_checkpoint(tmp_path / "first.ckpt")
    longer, _ = fit(tmp_path, tiny_folder, epochs=3, ckpt=tmp_path / "first.ckpt", ema=0.9, ema_start=12)
    assert longer.averaging.updates == 18 - 4, "one for each step behind the fourth"


@pytest.mark.parametrize("start", [2, 8], ids=["after it has started", "before it has started"])
def test_a_resumed_average_equals_that_of_an_unbroken_run_bit_for_bit(tmp_path, tiny_folder, start):  # C13, C14
    optim = {"ema": 0.9, "ema_start": start}
    whole, unbroken = fit(tmp_path, tiny_folder, epochs=3, **optim)
    _, first = fit(tmp_path, tiny_folder, epochs=1, **optim)
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed, second = fit(tmp_path, tiny_folder, epochs=3, ckpt=tmp_path / "first.ckpt", **optim)
    assert equal(weights(resumed), weights(whole))
    files = [tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt"]
    for made, file in zip((unbroken, second), files, strict=True):
        made.save_checkpoint(file)
    a, b = (torch.load(file, weights_only=True)["averaging"] for file in files)
    assert equal(a.pop("live"), b.pop("live"))
    assert a == b


def test_without_the_average_a_run_goes_on_with_the_live_weights(tmp_path, tiny_folder):
    whole, _ = fit(tmp_path, tiny_folder, epochs=2)
    _, first = fit(tmp_path, tiny_folder, epochs=1, ema=0.9)
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed, _ = fit(tmp_path, tiny_folder, epochs=2, ckpt=tmp_path / "first.ckpt")
    assert equal(weights(resumed), weights(whole))


def test_one_trainer_that_is_told_to_go_on_does_so_with_the_live_weights(tmp_path, tiny_folder):
    watch = Watch()
    net, made = fit(tmp_path, tiny_folder, epochs=1, ema=0.9, watch=watch)
    average = weights(net)
    made.validate(net, data(tiny_folder), verbose=False)
    assert equal(weights(net), average), "what was trained is what is scored"
    made.fit_loop.max_epochs = 2
    made.fit(net, data(tiny_folder))
    assert equal(watch.starts[1], watch.steps[5])
    assert net.averaging.updates == 12


def test_an_error_in_validation_leaves_the_live_weights(tmp_path, tiny_folder):
    class Break(Watch):
        def on_validation_batch_start(self, *args):
            raise RuntimeError("broken")

    watch = Break()
    net = model(ema=0.9)
    with pytest.raises(RuntimeError, match="broken"):
        trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0, callbacks=[watch]).fit(net, data(tiny_folder))
    assert equal(weights(net), watch.steps[-1])


def test_frozen_weights_are_not_copied(tmp_path, tiny_folder):
    torch.manual_seed(0)
    net = Classifier(
        classes=["blue", "green", "red"], encoder=TINY, method="head", optim=OptimConfig(lr=0.1, ema=0.9), seed=1
    )
    made = trainer(tmp_path, max_epochs=1)
    made.fit(net, data(tiny_folder))
    made.save_checkpoint(tmp_path / "x.ckpt")
    held = torch.load(tmp_path / "x.ckpt", weights_only=True)["averaging"]
    assert sorted(held["live"]) == ["net.model.head.bias", "net.model.head.weight"]


@pytest.fixture
def files(tmp_path):
    made = {}
    for name, value in (("a", 1.5), ("b", 0.8), ("c", 9.0), ("d", 0.1)):
        made[name] = tmp_path / f"{name}.ckpt"
        torch.save({"state_dict": {"w": torch.tensor([value]), "n": torch.tensor(3)}}, made[name])
    return made


def test_a_greedy_soup_takes_in_only_what_helps(files):
    target = 1.0
    asked = []

    def score(state):
        asked.append(copy.deepcopy(state))
        return -abs(float(state["w"]) - target)

    soup = greedy_soup(list(files.values()), score)
    # 0.8 alone misses by 0.2; with 1.5 by 0.15; then 0.1 makes 0.8, and 9.0 is far off.
    assert soup.used == ("b.ckpt", "a.ckpt")
    assert float(soup.state_dict["w"]) == pytest.approx(1.15)
    assert soup.state_dict["n"].dtype == torch.int64
    assert int(soup.state_dict["n"]) == 3
    assert soup.score == pytest.approx(-0.15)
    assert [stays for *_, stays in soup.tried] == [True, True, False, False]
    assert len(asked) == 4 + 3
    errors = greedy_soup(list(files.values()), lambda state: -score(state), higher_is_better=False)
    assert errors.used == soup.used
    assert errors.score == pytest.approx(0.15)


def test_a_soup_of_different_models_is_refused(files, tmp_path):
    torch.save({"state_dict": {"w": torch.zeros(2), "n": torch.tensor(3)}}, tmp_path / "e.ckpt")
    with pytest.raises(ValueError, match="checkpoints of one model"):
        greedy_soup([files["a"], tmp_path / "e.ckpt"], lambda state: float(state["w"].sum()))
    with pytest.raises(ValueError, match="at least one checkpoint"):
        greedy_soup([], lambda state: 0.0)


def test_the_best_checkpoints_of_a_run_become_a_soup_that_is_read_like_any_checkpoint(tmp_path, tiny_folder):
    folder = tmp_path / "checkpoints"
    kept = checkpoint_callbacks(folder, monitor="val_loss", mode="min", every_n_steps=None, keep=2)
    torch.manual_seed(0)
    net = model()
    made = trainer(tmp_path, max_epochs=4, callbacks=kept, enable_checkpointing=True)
    made.fit(net, data(tiny_folder))
    files = sorted(folder.glob("soup-*.ckpt"))
    assert [file.name for file in files] == ["soup-epoch=2-step=18.ckpt", "soup-epoch=3-step=24.ckpt"]

    def score(state):
        net.load_state_dict(state)
        return made.validate(net, data(tiny_folder), verbose=False)[0]["val_loss"]

    soup = greedy_soup(files, score, higher_is_better=False)
    assert soup.score <= min(own for _, own, _, _ in soup.tried)
    save_soup(soup, folder / "soup.ckpt", like=folder / "best.ckpt")
    read, _, classes = read_checkpoint(folder / "soup.ckpt")
    assert classes == ["blue", "green", "red"]
    want = {name.removeprefix("net.model."): value for name, value in soup.state_dict.items()}
    assert equal(dict(read.state_dict()), want)
    held = torch.load(folder / "soup.ckpt", weights_only=True)
    assert held["averaging"] == {"state_dict": "soup", "used": list(soup.used)}
    assert "optimizer_states" not in held
    result = made.validate(net, data(tiny_folder), ckpt_path=folder / "soup.ckpt", verbose=False, weights_only=True)
    assert result[0]["val_loss"] == pytest.approx(soup.score)
