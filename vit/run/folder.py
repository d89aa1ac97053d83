"""A run folder: where one training run keeps everything, and how any path into it is understood.

    <default_root_dir>/<name>/<n>/
        config.yaml   typed.yaml   plan.txt   metrics.csv   run.json   split.parquet
        checkpoints/{best,last}.ckpt   predictions-{val,test}.parquet   model/   reconstructions/   tensorboard/

Standard library only, so that every other part can use it at no cost.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A training process started by a launcher must use the folder that the first one chose.
CHOSEN_FOLDER = "VIT_RUN_FOLDER"


@dataclass(frozen=True)
class RunFolder:
    """Names of the files of one run.

    Args:
        path: the folder itself.
    """

    path: Path

    @property
    def config(self) -> Path:
        """Every option as it was used, with absolute paths."""
        return self.path / "config.yaml"

    @property
    def typed(self) -> Path:
        """The options as they were given, before anything was filled in."""
        return self.path / "typed.yaml"

    @property
    def plan(self) -> Path:
        """What was printed before training."""
        return self.path / "plan.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of `best.ckpt` and `last.ckpt`."""
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        """The checkpoint with the best monitored value."""
        return self.checkpoints / "best.ckpt"

    @property
    def last(self) -> Path:
        """The newest checkpoint, from which a run goes on."""
        return self.checkpoints / "last.ckpt"

    @property
    def model(self) -> Path:
        """The model folder made from `best`, or from `last` where nothing chooses."""
        return self.path / "model"

    @property
    def split(self) -> Path:
        """Which picture went into which split."""
        return self.path / "split.parquet"

    def predictions(self, split: str) -> Path:
        """Logits for every picture of a split."""
        return self.path / f"predictions-{split}.parquet"

    @property
    def record(self) -> dict[str, Any]:
        """What `run.json` holds; empty before it is first written."""
        file = self.path / "run.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def update_record(self, values: Mapping[str, Any]) -> None:
        """Merge `values` into `run.json`, replacing the file in one step."""
        text = json.dumps({**self.record, **values}, indent=2, ensure_ascii=False)
        write_text(self.path / "run.json", text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all: beside its place first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def new_run_folder(root: str | os.PathLike[str], name: str) -> RunFolder:
    """Make the next free `<root>/<name>/<n>/`, n counting from 1.

    Two runs started at once get two folders, and the processes of one run share one.

    Args:
        root: parent of all runs.
        name: of the kind of run; letters, digits, `.`, `_` and `-`.

    Raises:
        ValueError: a name that does not fit into a path, or a root that cannot be written.
    """
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise ValueError(f"expected a run name of letters, digits, '.', '_' and '-', but got {name!r}.")
    if chosen := os.environ.get(CHOSEN_FOLDER):
        return RunFolder(Path(chosen))
    parent = Path(root).expanduser().absolute() / name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(p.name) for p in parent.iterdir() if p.name.isdecimal()), default=0)
        while True:
            try:
                (parent / str(number)).mkdir()
                return RunFolder(parent / str(number))
            except FileExistsError:
                number += 1
    except OSError as error:
        raise ValueError(
            f"expected a folder that can be written for the run, but {parent} cannot: {error.strerror}. "
            "Choose another with --trainer.default_root_dir."
        ) from error


def open_run_folder(path: str | os.PathLike[str]) -> RunFolder:
    """The run that `path` belongs to: the folder itself, its `model/`, or one of its checkpoints.

    Also `<root>/<name>`, the parent of numbered runs: its newest run.

    Raises:
        ValueError: there is no run at `path`.
    """
    given = Path(path).expanduser().absolute()
    for folder in (given, given.parent, given.parent.parent):
        if (folder / "config.yaml").is_file() and (folder / "run.json").is_file():
            return RunFolder(folder)
    if given.is_dir():
        numbered = sorted((p for p in given.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
        for folder in reversed(numbered):
            if (folder / "run.json").is_file():
                return RunFolder(folder)
    what = "a folder without config.yaml and run.json" if given.is_dir() else "nothing of that name"
    if given.is_file():
        what = "a file outside of a run folder"
    raise ValueError(
        f"expected a run folder (such as outputs/quickstart/1), its model/ or a checkpoint in it, "
        f"but {path} is {what}. `vit fit` prints the folder of each run."
    )
