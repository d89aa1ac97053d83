"""Pre-training from the command line: runs, resuming, pictures, and what a fine-tuning run makes of the result."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from test_resume import Cut, equal, fit_with

from vit.deploy.predict import Predictor
from vit.models.artifact import load_model
from vit.models.weights import load_weights
from vit.run import score, session

ENCODER = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "dropout": 0.1, "drop_path": 0.1}
WORDS = [
    "--data=Digits",
    "--data.batch_size=8",
    "--data.num_workers=0",
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=3",
    "--trainer.logger=false",
    "--trainer.limit_train_batches=6",
    "--trainer.limit_val_batches=2",
]
OBJECTIVES = {
    "MaskedPatches": ["--model.target=colours_4x4"],
    "MAE": ["--model.decoder.width=16", "--model.decoder.depth=1", "--model.decoder.heads=2"],
    "Autoregressive": ["--model.head_depth=1"],
    "DINO": [
        "--model.projection.hidden=16",
        "--model.projection.bottleneck=8",
        "--model.projection.outputs=32",
        "--model.views.local_views=2",
        "--model.final_weight_decay=0.2",
    ],
}


@pytest.fixture
def words(tmp_path):
    """Words of a tiny run of an objective into a folder of the test's own."""

    def of(name):
        encoder = [f"--model.encoder.{key}={value}" for key, value in ENCODER.items()]
        return [
            f"--model={name}",
            *encoder,
            *OBJECTIVES[name],
            *WORDS,
            f"--trainer.default_root_dir={tmp_path / 'out'}",
        ]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_a_cut_run_goes_on_bit_for_bit(tmp_path, words, name, watched):  # C14
    args = [*words(name), "--save_every_n_steps=1", "--seed=5"]
    unbroken = session.fit([*args, "--name=unbroken"])
    fit_with(Cut(9), [*args, "--name=cut"], Cut.Now, watched)
    broken = tmp_path / "out" / "cut" / "1"
    assert not equal(broken / "checkpoints" / "last.ckpt", unbroken.last)
    resumed = session.fit([], resume=str(broken))
    assert equal(resumed.last, unbroken.last)
    assert "seed 5" in unbroken.plan.read_text()
    assert torch.load(unbroken.last, weights_only=True)["hyper_parameters"]["seed"] == 5


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_fine_tuning_takes_every_tensor_of_the_encoder_and_a_new_head(words, name):
    run = session.fit([*words(name), "--trainer.max_epochs=1"])
    best = run.best if name != "DINO" else run.last
    state = torch.load(best, weights_only=True)["state_dict"]
    encoder = {k.removeprefix("net.model."): v for k, v in state.items() if k.startswith("net.model.")}
    loaded = load_weights(str(run.path), classes=["x", "y", "z"])
    assert sorted(loaded.report.matched) == sorted(encoder)
    assert sorted(loaded.report.new) == ["head.bias", "head.weight"]
    assert not loaded.report.dropped
    for key, value in encoder.items():
        assert torch.equal(loaded.model.state_dict()[key], value), key
    assert loaded.model.head.weight.shape == (3, 16)
    model, info = load_model(run.model)
    assert info.classes == ()
    images = torch.randn(2, 3, 16, 16)
    theirs = timm.create_model(f"local-dir:{run.model}", pretrained=True, num_classes=0).eval()
    with torch.no_grad():
        assert torch.allclose(model(images), theirs(images), atol=1e-5)
    with pytest.raises(ValueError, match="pre-trained without labels and has no classes"):
        Predictor.load(run.path)
    tuned = session.fit(["--data=Digits", *WORDS[1:], f"--model.weights={run.path}", *words(name)[-1:], "--name=tuned"])
    assert "head re-initialised for 10 classes" in tuned.plan.read_text()
    assert tuned.record["val"]["pictures"] > 0
    again = [f"--model={name}", f"--model.weights={tuned.path}", *OBJECTIVES[name]]
    more = session.fit([*again, *WORDS, words(name)[-1]])
    assert "head left out" in more.plan.read_text()


def test_the_run_says_what_was_done(words, capsys):
    run = session.fit([*words("MAE"), "--trainer.max_epochs=1"])
    out = capsys.readouterr().out
    assert "pre-training MAE" in out
    assert "--model.weights" in out
    assert "vit predict" not in out
    assert run.record["checkpoint"]["chosen_by"] == "val_loss"
    assert run.record["val"]["val_loss"] > 0
    assert run.record["config"]["model"]["class_path"].endswith("MAE")
    assert "val_loss" in score.evaluate("validate", str(run.path), [])
    with pytest.raises(ValueError, match="pre-trained without labels"):
        score.evaluate("test", str(run.path), [])


def test_dino_keeps_its_last_checkpoint_and_says_so(words):
    run = session.fit([*words("DINO"), "--trainer.max_epochs=1"])
    assert run.record["checkpoint"] == {"file": "last.ckpt", "chosen_by": None, "split": None}
    assert set(run.record["val"]) == {"val_loss", "val_entropy", "val_spread", "checkpoint"}
    with pytest.raises(ValueError, match="DINO keeps its last checkpoint"):
        session.fit([*words("DINO"), "--monitor=val_loss"])


def test_pictures_are_drawn_as_often_as_asked_and_change_nothing(words):  # C22
    drawn = session.fit([*words("MAE"), "--model.pictures_every=2", "--name=drawn"])
    plain = session.fit([*words("MAE"), "--model.pictures_every=0", "--name=plain"])
    assert equal(drawn.last, plain.last)
    files = sorted((drawn.path / "reconstructions").iterdir())
    assert [file.name for file in files] == ["epoch-0001.png", "epoch-0002.png"]
    assert not (plain.path / "reconstructions").exists()
    first, second = (np.asarray(Image.open(file)) for file in files)
    assert first.shape == (3 * 96 + 2 * 4, 8 * 96 + 7 * 4, 3)
    assert (first[:196] == second[:196]).all(), "the same pictures, with the same patches hidden"
    assert (first[200:] != second[200:]).any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--model.mask_ratio=1.5"], "mask_ratio"),
        (["--model.mask_ratoi=0.5"], "there is no option model.mask_ratoi. .*--model.help"),
        (["--model.decoder.width=17"], "width=17"),
        (["--monitor=val_acc"], "val_loss"),
        (["--soup=2"], "expected classification with a val split for --soup 2"),
    ],
)
def test_wrong_options_are_refused_in_words(words, changed, message, as_users_run):
    with pytest.raises(ValueError, match=message):
        session.fit([*words("MAE"), *changed])
