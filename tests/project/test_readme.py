"""README's commands, and those of the page on training, are run as they stand, with fewer epochs."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from vit import cli
from vit.data import Preprocessing
from vit.models import VisionTransformer, save_model, vit_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FASTER = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.accelerator=cpu"]


def vit_commands(text: str = README) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if words and words[0].rpartition("/")[2] == "vit"]


def test_every_command_of_the_readme_runs_in_its_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(("cat", "dog")):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for i in range(20):
            Image.new("RGB", (32, 24), (90 * k, 5 * i, 40)).save(folder / f"{i}.png")
    prepared = {**Preprocessing(image_size=32).to_dict()}
    model = VisionTransformer(vit_config("Ti/16", image_size=32, num_classes=2, depth=1))
    weights = save_model(tmp_path / "weights", model, classes=["x", "y"], preprocessing=prepared)
    commands = vit_commands()
    assert len(commands) >= 8
    for words in commands:
        verb, rest = words[1], words[2:]
        if verb == "fit" and "--help" in rest:
            with pytest.raises(SystemExit):
                cli.main(words[1:])
            continue
        if verb in ("fit", "sweep"):
            rest = [*rest, *FASTER]
            if "finetune_folder" in rest:
                # A test has no network for the weights that the configuration names.
                rest += [f"--model.weights={weights}", "--model.encoder.image_size=32"]
            if "--resume" in rest:
                rest = [*rest, "--trainer.max_epochs=2"]
        code = cli.main([verb, *rest])
        assert code == 0, f"{shlex.join(words)}: {capsys.readouterr().err}"
    assert (tmp_path / "labels.csv").exists()


TRAINING = vit_commands((ROOT / "docs" / "training.md").read_text(encoding="utf-8"))
PLANNED = [words for words in TRAINING if not any(word.startswith("--find") for word in words)]  # a search trains
CASES = [pytest.param(words, False, id=f"plan of {' '.join(words)}") for words in PLANNED]
CASES += [pytest.param(words, True, id=" ".join(words), marks=pytest.mark.slow) for words in TRAINING]


@pytest.mark.parametrize(("words", "trains"), CASES)
def test_every_command_of_the_page_on_training_runs(tmp_path, monkeypatch, capsys, words, trains):
    monkeypatch.chdir(tmp_path)
    if any("outputs/quickstart/1" in word for word in words):
        assert cli.main(["fit", "--config=quickstart", *FASTER]) == 0
    # A length in steps stays as it stands.
    faster = FASTER[1:] if "--trainer.max_steps" in words else FASTER
    code = cli.main([*words[1:], *faster, *([] if trains else ["--dry_run"])])
    assert code == 0, f"{shlex.join(words)}: {capsys.readouterr().err}"


def test_the_notebook_lines_of_the_readme_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block
    Image.new("L", (8, 8), 200).save(tmp_path / "digit.png")
    exec(compile(block.group(1), "README.md", "exec"), {})
    assert "acc_95" in capsys.readouterr().out
    assert sys.modules["vit"]
