"""ImageNet as ILSVRC lays it out, its subsets, and Tiny-ImageNet-200."""

import csv
import json
import logging
import os
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np

from vit.data.folder import Scan, class_pictures, entries_of, say
from vit.data.source import Source
from vit.data.stratify import TEST, TRAIN, VAL, hashed
from vit.data.table import Rows

log = logging.getLogger("vit.data")

_INNER = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")
_TRUTH = (
    "val_annotations.txt",
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "ILSVRC2012_validation_ground_truth.txt",
)
_EXPECTED = """expected
  ROOT/train/<synset, such as n01440764>/<picture>, and
  ROOT/val/<synset>/<picture>, or ROOT/val/<picture> with one of the files {truth} beside it"""


@dataclass(frozen=True, kw_only=True)
class ImageNet(Source):
    """ImageNet, a part of it, or Tiny-ImageNet-200, from folders named by synsets.

    Labels follow the sorted synsets, as in published weights. The official val pictures are val, or else test.

    Args:
        root: folder of train/ and val/ (or Kaggle's folder above ILSVRC/).
        subset: classes of a known subset.
        synsets: the classes, in the order of their labels.
        first: the first so many classes.
        fraction: share of each class's training pictures, at least one; a smaller one is part of a larger one.
            `split_seed` draws them.
        official: what the official val pictures are. With `test`, val is split off train.
        ground_truth: file that says the classes of a flat val folder; default found beside or above it.
        names: class names: `words` (tench) or `synsets` (n01440764).

    Source: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge" (2015).
    """

    root: str
    subset: Literal["imagenette", "imagewoof", "imagenet100"] | None = None
    synsets: tuple[str, ...] | None = None
    first: int | None = None
    fraction: float = 1.0
    official: Literal["val", "test"] = "val"
    ground_truth: str | None = None
    names: Literal["words", "synsets"] = "words"

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(value is not None for value in (self.subset, self.synsets, self.first)) > 1:
            raise ValueError("expected at most one of subset, synsets and first, but got more. Leave the others out.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"expected a fraction above 0 and at most 1, but got {self.fraction}.")
        if self.first is not None and self.first < 2:
            raise ValueError(f"expected the first 2 classes or more, but got first={self.first}.")

    def scan(self) -> Rows:
        """Find the pictures of the chosen classes.

        Raises:
            ValueError: a layout that is not ImageNet's, chosen classes that are not there, or a flat val folder
                whose ground truth is missing or does not fit.
        """
        given = Path(os.path.abspath(Path(self.root).expanduser()))
        root = next((given / inner for inner in _INNER if (given / inner / "train").is_dir()), None)
        if root is None:
            raise ValueError(f"{_EXPECTED.format(truth=', '.join(_TRUTH))}\nbut {given} holds no train folder.")
        scan = Scan(root=root)
        folders, _ = entries_of(scan, str(root / "train"))
        synsets = self._chosen(folders, root)
        train = class_pictures(scan, "train", list(synsets))
        empty = [synset for synset in synsets if not train[synset]]
        if empty:
            raise ValueError(
                f"expected pictures of every class below {root / 'train'}, but there are none in {empty[0]}."
            )
        found = {TRAIN: {synset: self._part(pictures) for synset, pictures in train.items()}}
        if (root / "val").is_dir():
            official = _val_folders(scan, synsets) or self._flat_val(scan, synsets, given)
            found[{"val": VAL, "test": TEST}[self.official]] = official
        say(scan)
        parts = [(code, k, split.get(name, [])) for code, split in found.items() for k, name in enumerate(synsets)]
        counts = [len(pictures) for _, _, pictures in parts]
        return Rows(
            classes=class_names(synsets, root) if self.names == "words" else synsets,
            root=root,
            paths=[path for _, _, pictures in parts for path in pictures],
            labels=np.repeat(np.array([k for _, k, _ in parts], dtype=np.int32), counts),
            splits=np.repeat(np.array([code for code, _, _ in parts], dtype=np.int8), counts),
            info={**scan.info(), "synsets": list(synsets), "official": self.official},
        )

    def _chosen(self, folders: list[str], root: Path) -> tuple[str, ...]:
        """Synsets in the order of their labels."""
        if self.first is not None and self.first > len(folders):
            raise ValueError(f"expected {self.first} classes in {root / 'train'}, but there are {len(folders)}.")
        wanted = self.synsets or tuple(folders[: self.first])
        if self.subset is not None:
            wanted = tuple(sorted(subset_synsets()[self.subset]))
        missing = sorted(set(wanted) - set(folders))
        if missing:
            raise ValueError(
                f"expected a folder for each of {len(wanted)} classes in {root / 'train'}, but {len(missing)} are not "
                f"there: {', '.join(missing[:10])}."
            )
        twice = [synset for synset, count in Counter(wanted).items() if count > 1]
        if twice or len(wanted) < 2:
            raise ValueError(f"expected two classes or more, each once, but got {', '.join(twice or wanted)}.")
        return wanted

    def _part(self, pictures: list[bytes]) -> list[bytes]:
        if self.fraction == 1:
            return pictures
        count = max(1, round(self.fraction * len(pictures)))
        return [pictures[i] for i in np.sort(np.argsort(hashed(pictures, self.split_seed))[:count])]

    def _flat_val(self, scan: Scan, synsets: tuple[str, ...], given: Path) -> dict[str, list[bytes]]:
        """Pictures by class of a val folder without class folders."""
        folder = "val/images" if (scan.root / "val" / "images").is_dir() else "val"
        _, pictures = entries_of(scan, str(scan.root / folder))
        truth = _ground_truth(self.ground_truth, (scan.root / "val", scan.root, given, given.parent))
        if truth is None:
            raise ValueError(
                f"{_EXPECTED.format(truth=', '.join(_TRUTH))}\nbut there is no such file for the {len(pictures):,} "
                f"pictures in {scan.root / folder}. Put it there or name it with data.ground_truth."
            )
        classes = _read_truth(truth, pictures)
        unnamed = [name for name in pictures if name not in classes]
        if unnamed or len(classes) != len(pictures):
            raise ValueError(
                f"expected a class in {truth} for each of {len(pictures):,} pictures in {scan.root / folder}, but it "
                f"has {len(classes):,}"
                + (f", and none for {unnamed[0]}." if unnamed else ". Some pictures are missing.")
            )
        found: dict[str, list[bytes]] = {synset: [] for synset in synsets}
        for name in pictures:
            if classes[name] in found:
                found[classes[name]].append(os.fsencode(f"{folder}/{name}"))
        return found


def _val_folders(scan: Scan, synsets: tuple[str, ...]) -> dict[str, list[bytes]]:
    """Pictures by class of a val folder of class folders; empty where there are none."""
    folders, _ = entries_of(Scan(root=scan.root), str(scan.root / "val"))
    present = [synset for synset in synsets if synset in folders]
    return class_pictures(scan, "val", present) if present else {}


def _ground_truth(given: str | None, folders: tuple[Path, ...]) -> Path | None:
    if given is not None:
        file = Path(given).expanduser().absolute()
        if not file.is_file():
            raise ValueError(f"expected a ground truth file at {file}, but there is none.")
        return file
    inner = ("", "ILSVRC2012_devkit_t12/data", "devkit/data")
    places = [folder / part / name for folder in folders for part in inner for name in _TRUTH]
    return next((place for place in places if place.is_file()), None)


def _read_truth(file: Path, pictures: list[str]) -> dict[str, str]:
    """Synset of each picture.

    Raises:
        ValueError: another form, or as many lines as no val folder has pictures.
    """
    lines = file.read_text(encoding="utf-8").split("\n")
    lines = [line.rstrip("\r") for line in lines if line.strip()]
    try:
        if file.suffix == ".csv":
            suffix = os.path.splitext(pictures[0])[1] if pictures else ""
            return {row["ImageId"] + suffix: row["PredictionString"].split()[0] for row in csv.DictReader(lines)}
        if "\t" in lines[0]:
            return {name: synset for name, synset, *_ in (line.split("\t") for line in lines)}
        if len(lines) != len(pictures):
            raise ValueError(f"it has {len(lines):,} lines for {len(pictures):,} pictures")
        if not lines[0].strip().isdigit():
            return dict(zip(pictures, (line.strip() for line in lines), strict=True))
        numbers = _devkit_synsets(file.parent / "meta.mat")
        return {name: numbers[int(line)] for name, line in zip(pictures, lines, strict=True)}
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"expected the classes of the val pictures in {file}, in its official form, but it cannot be read: {error}."
        ) from error


def _devkit_synsets(meta: Path) -> dict[int, str]:
    """Synset by ILSVRC's own number, from the development kit."""
    if not meta.is_file():
        raise ValueError(f"the numbers in it are explained by {meta.name}, which is not beside it")
    from scipy.io import loadmat

    entries = loadmat(meta, squeeze_me=True)["synsets"]
    return {int(entry["ILSVRC2012_ID"]): str(entry["WNID"]) for entry in np.atleast_1d(entries)}


def subset_synsets() -> dict[str, list[str]]:
    """Synsets of the known subsets, by the subset's name."""
    text = resources.files("vit.data").joinpath("imagenet_subsets.json").read_text(encoding="utf-8")
    return json.loads(text)


def class_names(synsets: tuple[str, ...], root: Path) -> tuple[str, ...]:
    """A short, unique name per synset: its first word, and the synset where two share a word.

    Args:
        synsets: such as n01440764.
        root: its words.txt (Tiny-ImageNet's) is used where timm knows no name.
    """
    from timm.data import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    words = {synset: info.label_name_to_description(synset) for synset in info.label_names()}
    if set(synsets) - set(words) and (root / "words.txt").is_file():
        lines = (root / "words.txt").read_text(encoding="utf-8").splitlines()
        words = dict(line.split("\t", 1) for line in lines if "\t" in line) | words
    long = [words.get(synset, synset) for synset in synsets]
    short = [name.split(",")[0].strip() for name in long]
    counts = Counter(short)
    return tuple(n if counts[n] == 1 else f"{n} ({s})" for n, s in zip(short, synsets, strict=True))
