"""The command: what it prints, what it refuses and how, and that nothing is left behind by a bad start."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import vit
from vit import cli
from vit.run.configs import config_folder, config_names
from vit.run.options import Options


@pytest.fixture
def photos(tmp_path):
    """A flat folder with three classes, one of them numeric, of eight pictures each."""
    root = tmp_path / "photos"
    for k, name in enumerate(("cat", "dog", "10")):
        (root / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (20, 16), (80 * k, 10 * i, 90)).save(root / name / f"{i}.png")
    return root


def run(capsys, *words):
    """Exit code, standard output and standard error of `vit WORDS`."""
    code = cli.main(list(map(str, words)))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("code", ["import vit", "import vit.cli; vit.cli.main(['--help'])"])
def test_help_and_import_load_nothing_that_takes_time(code):  # seconds stand in docs/records/startup.json
    def loaded(code):
        code += "; import sys; print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        return set(out.splitlines()[-1].split())

    assert loaded(code) - loaded("pass") == {"vit"}


def test_no_verb_gives_short_help_with_an_example_and_exit_code_2(capsys):  # D12
    code, _, err = run(capsys)
    assert code == 2
    assert "vit fit --config quickstart" in err
    assert run(capsys, "fti")[0] == 2
    assert "Did you mean fit?" in run(capsys, "fti")[2]


def test_a_configuration_before_the_verb_is_taken(capsys):  # D11
    assert run(capsys, "--config", "quickstart", "fit", "--dry_run")[0] == 0
    assert run(capsys, "fit", "--dry_run", "--config", "quickstart")[0] == 0


BAD = {
    "a missing folder": (["--data", "Folder", "--data.root", "nowhere"], "nowhere"),
    "a size the patch does not divide": (["-c", "digits_scratch", "--model.encoder.image_size", "18"], "16 or 20"),
    "weights that are not there": (["-c", "quickstart", "--model.weights", "nothing-here"], "nothing-here"),
    "a wrong option": (["-c", "quickstart", "--model.optim.lerning_rate", "1"], "no option --model.optim.lerning_rate"),
    "a wrong option of the data": (["-c", "quickstart", "--data.batchsize", "8"], "Did you mean data.batch_size"),
    "an abbreviation": (["-c", "quickstart", "--trainer.max_epoch", "3"], "Did you mean --trainer.max_epochs"),  # D13
    "a data source left out": (["--data.root", "photos"], "expected --data beside --data.root, an option of Folder"),
    "a wrong source": (["--data", "Foldr"], "Did you mean Folder"),
    "no data": ([], "expected data"),
    "a folder source without its root": (["--data", "Folder"], "--data.root"),
    "text for a number": (["-c", "quickstart", "--model.optim.lr", "fast"], "to be a number, but got 'fast'"),
    "text for a number of the data": (["-c", "quickstart", "--data.batch_size", "x"], "a whole number, but got 'x'"),
    "a wrong choice": (["-c", "quickstart", "--model.method", "hed"], "one of full, head, lora"),
    "a negative rate": (["-c", "quickstart", "--model.optim.lr", "-1"], "above 0"),
    "a wrong configuration": (["-c", "quickstat"], "Did you mean quickstart"),
    "a wrong monitor": (["-c", "quickstart", "--monitor", "val_acuracy"], "val_acc"),  # C24
    "a run that is none": (["--resume", "nowhere"], "nowhere"),
    "a warm-up longer than the run": (["-c", "quickstart", "--model.schedule.warmup", "9999"], "at most the"),
    "a wrong name": (["-c", "quickstart", "--name", "a/b"], "a/b"),
    "a wrong precision": (["-c", "quickstart", "--trainer.precision", "17"], "one of"),
    "options of the Trainer that do not go together": (
        ["-c", "quickstart", "--trainer.accelerator=cpu", "--trainer.enable_checkpointing=false"],
        "enable_checkpointing",
    ),
    "no epochs": (["-c", "quickstart", "--trainer.max_epochs", "0"], "at least 1 optimizer step"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_message_and_exit_code_2_and_writes_nothing(
    case, capsys, tmp_path, monkeypatch, as_users_run
):
    monkeypatch.chdir(tmp_path)
    words, message = BAD[case]
    code, _, err = run(capsys, "fit", *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 12
    assert list(tmp_path.iterdir()) == []


def test_bad_folders_get_one_message_and_exit_code_2(capsys, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit = ["fit", "--data", "Folder", "--data.root", photos, "--model.encoder.size", "Ti/8", "--trainer.max_epochs=1"]
    fit += ["--model.encoder.image_size=16", "--model.encoder.depth=1", "--trainer.accelerator=cpu"]
    (photos / "empty").mkdir()
    code, _, err = run(capsys, *fit)
    assert code == 2
    assert "empty" in err
    (photos / "empty").rmdir()
    (photos / "cat" / "0.png").write_bytes(b"this is no picture")
    code, _, err = run(capsys, *fit, "--data.val=0", "--data.test=0")
    assert code == 2
    assert "0.png" in err
    assert "Traceback" not in err
    assert not (tmp_path / "outputs" / "folder" / "1").exists()


def test_a_class_in_val_that_train_lacks_is_named(capsys, tmp_path, monkeypatch):  # A6
    monkeypatch.chdir(tmp_path)
    for place in ("train/a", "train/b", "val/a", "val/zebra"):
        folder = tmp_path / "data" / place
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "x.png")
    code, _, err = run(capsys, "fit", "--data", "Folder", "--data.root", "data")
    assert code == 2
    assert "zebra" in err
    assert not (tmp_path / "outputs").exists()


def test_typed_values_win_over_files_in_any_order_and_files_over_the_environment(tmp_path, monkeypatch):  # D14, D17
    file = tmp_path / "c.yaml"
    file.write_text("model: {optim: {lr: 0.5}}\ndata: {class_path: Digits}\n")
    for words in (["--model.optim.lr=1", "-c", str(file)], ["-c", str(file), "--model.optim.lr=1"]):
        assert Options("fit", words).config.model.optim.lr == 1
    monkeypatch.setenv("VIT_FIT__MODEL__OPTIM__LR", "7")
    assert Options("fit", ["--data", "Digits"]).config.model.optim.lr == 7
    assert Options("fit", ["-c", str(file)]).config.model.optim.lr == 0.5


@pytest.mark.parametrize("text", ["1e-4", "1E-4", ".0001", '"1e-4"'])
def test_numbers_are_numbers_however_they_are_written(tmp_path, text):  # D15
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {{optim: {{lr: {text}}}}}\ndata: {{class_path: Digits}}\n")
    assert Options("fit", ["-c", str(file)]).config.model.optim.lr == 1e-4
    assert Options("fit", ["--data=Digits", f"--model.optim.lr={text.strip(chr(34))}"]).config.model.optim.lr == 1e-4


def test_a_dry_run_prints_the_plan_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "fit", "--config", "quickstart", "--dry_run")
    assert code == 0
    for part in ("K = 10", "train 1,241, val 179, test 377", "optimizer steps", "warm-up", "lr at", "are frozen"):
        assert part in out
    assert "precision" in out
    assert list(tmp_path.iterdir()) == []


def test_a_trial_run_of_lightnings_ends_well_and_leaves_nothing(capsys, tiny, tmp_path):
    code, out, _ = run(capsys, "fit", *tiny, "--trainer.fast_dev_run=true")
    assert code == 0
    assert "no checkpoint was written" in out


def test_two_runs_in_a_row_keep_both(capsys, tiny):  # D1
    for _ in range(2):
        assert run(capsys, "fit", *tiny, "--trainer.max_epochs=1")[0] == 0
    root = Path(tiny[-1].partition("=")[2]) / "quickstart"
    assert sorted(p.name for p in root.iterdir()) == ["1", "2"]
    assert (root / "1" / "config.yaml").exists()


def test_a_callback_of_the_users_own_keeps_ours(capsys, tiny):  # D9
    code, _, err = run(capsys, "fit", *tiny, "--trainer.callbacks=Timer", "--trainer.max_epochs=1")
    assert code == 0, err
    folder = Path(tiny[-1].partition("=")[2]) / "quickstart" / "1"
    assert (folder / "checkpoints" / "best.ckpt").exists()


def test_the_folder_of_a_run_holds_what_is_promised_and_every_verb_needs_nothing_else(
    capsys, photos, tmp_path, monkeypatch
):  # D3, D5, D18, A7, F7
    monkeypatch.chdir(tmp_path)
    words = ["fit", "--data", "Folder", "--data.root", "photos", "--data.val=0.25", "--data.test=0.25"]
    words += ["--model.encoder.size=Ti/8", "--model.encoder.image_size=16", "--model.encoder.depth=1"]
    assert run(capsys, *words, "--trainer.max_epochs=2", "--trainer.accelerator=cpu")[0] == 0
    folder = tmp_path / "outputs" / "folder" / "1"
    names = {"config.yaml", "typed.yaml", "plan.txt", "metrics.csv", "run.json", "split.parquet", "model"}
    assert names | {"checkpoints", "predictions-val.parquet"} <= {p.name for p in folder.iterdir()}
    record = json.loads((folder / "run.json").read_text())
    assert record["checkpoint"] == {"file": "best.ckpt", "chosen_by": "val_acc", "split": "val"}
    assert record["seeds"] == {"run": 0, "split": 0}
    assert record["val"]["pictures"] == 6
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert Path(config["data"]["init_args"]["root"]).is_absolute()
    classes = json.loads((folder / "model" / "config.json").read_text())["label_names"]
    assert sorted(classes) == ["10", "cat", "dog"]

    monkeypatch.chdir("/")
    code, out, _ = run(capsys, "test", folder)
    assert code == 0
    assert "on 6 pictures" in out
    assert json.loads((folder / "run.json").read_text())["test"]["pictures"] == 6
    assert (folder / "predictions-test.parquet").exists()
    for place in (folder, folder / "model", folder / "checkpoints" / "best.ckpt", folder.parent):
        assert run(capsys, "validate", place)[0] == 0

    # The names come from the model, whatever became of the folders.
    (photos / "cat").rename(photos / "zzz")
    out_file = tmp_path / "labels.csv"
    pictures = sorted((photos / "zzz").glob("*.png"))[:5]
    code, _, _ = run(capsys, "predict", folder, *reversed(pictures), "--out", out_file, "--top_k", "3")
    assert code == 0
    rows = list(csv.DictReader(out_file.read_text(encoding="utf-8").splitlines()))
    assert [row["path"] for row in rows] == [str(p) for p in reversed(pictures)]
    for row in rows:
        total = sum(float(row[name]) for name in ("probability", "probability_2", "probability_3"))
        assert total == pytest.approx(1, abs=1e-5)
        assert {row["class"], row["class_2"], row["class_3"]} == {"10", "cat", "dog"}


def test_fit_never_opens_a_test_picture(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split, count in (("train", 8), ("val", 4), ("test", 4)):
        for name in ("a", "b"):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"{i}.png")
                if split == "test":
                    (folder / f"{i}.png").write_bytes(b"a bomb")
    opened = []
    real = open

    def watched(file, *args, **kwargs):
        opened.append(str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", watched)
    words = ["--data", "Folder", "--data.root", "data", "--data.num_workers=0", "--trainer.accelerator=cpu"]
    words += ["--model.encoder.size=Ti/8", "--model.encoder.image_size=16", "--model.encoder.depth=1"]
    assert run(capsys, "fit", *words, "--trainer.max_epochs=1")[0] == 0
    assert not [name for name in opened if f"{os.sep}test{os.sep}" in name]
    code, _, err = run(capsys, "test", "outputs/folder/1")
    assert code == 2
    assert "0.png" in err


def test_a_module_of_the_users_own_gets_the_number_of_classes(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from lightning.pytorch import LightningModule\n"
        "class Linear(LightningModule):\n"
        "    def __init__(self, rate: float = 0.1, num_classes: int = 2):\n"
        "        super().__init__()\n"
        "        self.rate = rate\n"
        "        self.layer = torch.nn.Linear(3, num_classes)\n"
        "    def validation_step(self, batch, batch_idx):\n"
        "        self.log('val_loss', self.training_step(batch, batch_idx))\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        logits = self.layer(batch.images.float().mean((2, 3)) / 255)\n"
        "        return torch.nn.functional.cross_entropy(logits, batch.labels)\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), self.rate)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--data", "Digits", "--model", "mine.Linear", "--model.rate", "0.2", "--trainer.max_steps=2"]
    words += ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", f"--trainer.default_root_dir={tmp_path / 'o'}"]
    words += ["--trainer.limit_val_batches=0", "--trainer.logger=false"]
    assert run(capsys, "fit", *words)[0] == 0
    state = torch.load(tmp_path / "o" / "digits" / "1" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["state_dict"]["layer.weight"].shape == (10, 3)


def test_two_spawned_workers_train_from_the_command_line(tiny):
    words = [*tiny, "--data.num_workers=2", "--data.multiprocessing_context=spawn", "--trainer.max_epochs=1"]
    done = subprocess.run([sys.executable, "-m", "vit.cli", "fit", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 workers" in done.stdout


@pytest.mark.slow
def test_two_processes_share_one_run_folder_and_score_each_picture_once(tiny):  # D2, E9
    words = [*tiny, "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=2"]
    done = subprocess.run([sys.executable, "-m", "vit.cli", "fit", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("K = 10") == 1
    assert "2 epochs, 12 optimizer steps" in done.stdout
    root = Path(tiny[-1].partition("=")[2]) / "quickstart"
    assert [p.name for p in root.iterdir()] == ["1"]
    record = json.loads((root / "1" / "run.json").read_text())
    assert record["steps"] == 12
    assert record["val"]["pictures"] == 179


def test_the_same_from_a_notebook(tmp_path, tiny):
    changes = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "limit_train_batches": 4}
    run = vit.fit(
        "digits_scratch",
        seed=3,
        trainer={**changes, "default_root_dir": str(tmp_path / "o")},
        model={"encoder": {"width": 16, "depth": 1, "heads": 2}},
        data={"class_path": "Digits", "batch_size": 8},
    )
    assert run.record["seeds"]["run"] == 3
    assert run.record["config"]["data"]["init_args"]["batch_size"] == 8
    assert vit.test(run)["pictures"] == 377
    digit = next((Path(run.record["data"]["root"]) / "7").glob("*.png"))
    prediction = vit.load(run).predict(digit)[0]
    assert prediction.label in [str(k) for k in range(10)]
    assert vit.fit("quickstart", dry_run=True) is None


def test_fit_help_shows_every_trainer_option(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--trainer.max_epochs", "--trainer.strategy", "--model.encoder.width", "--data", "--resume"):
        assert option in text


@pytest.mark.parametrize("name", config_names())
def test_a_packaged_configuration_is_complete_short_and_says_its_purpose(name):
    text = (config_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    assert text.startswith("# ")
    assert "# Command: vit fit --config" in text
    assert "# Measured:" in text
    values = yaml.safe_load(text)
    # A recipe chooses what is left out; without one a file is complete.
    assert set(values) - {"recipe"} == {"model", "data"} | ({"trainer"} if values.get("recipe") != "auto" else set())
