"""Eight small folders of real pictures, as people have them, each with a large test set.

Made from the 10,000 pictures of clothing that the shipped weights have not seen, and from scikit-learn's digits and
photographs. What is drawn (which pictures are for training) comes from a seed; the test pictures are always the same.
"""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageFilter, ImageOps
from pretrained import NAMES
from pretrained import clothing as read_clothing
from sklearn.datasets import load_digits, load_sample_images

Draw = Iterator[tuple[Image.Image, str]]


class Pool(NamedTuple):
    """Pictures of one kind, in a fixed order, and their class names."""

    images: list[Image.Image]
    labels: list[str]

    def parts(self, train: dict[str, int], test: int, seed: int) -> tuple[list[int], list[int]]:
        """Rows to train on, drawn by class from a seed, and the first `test` of each class to test on."""
        random = np.random.default_rng(seed)
        chosen, tested = [], []
        for name, count in train.items():
            rows = [row for row, label in enumerate(self.labels) if label == name]
            tested += rows[:test]
            chosen += random.choice(rows[test:], count, replace=False).tolist()
        return chosen, tested


def clothing() -> Pool:
    """Fashion-MNIST's test pictures."""
    images, labels = read_clothing("t10k")
    return Pool([Image.fromarray(image) for image in images], [NAMES[label] for label in labels])


def digits() -> Pool:
    """scikit-learn's digits, 8 x 8 pixels."""
    found = load_digits()
    images = [Image.fromarray((image * 255 / 16).round().astype(np.uint8)) for image in found.images]
    return Pool(images, [str(label) for label in found.target])


def _save(folder: Path, split: str, row: int, name: str, picture: Image.Image) -> None:
    place = folder / split / name
    place.mkdir(parents=True, exist_ok=True)
    picture.save(place / f"{row:05d}.png")


def _plain(pool: Pool, train: dict[str, int], test: int) -> Callable[[Path, int], None]:
    def make(folder: Path, seed: int) -> None:
        for split, rows in zip(("train", "test"), pool.parts(train, test, seed), strict=True):
            for row in rows:
                _save(folder, split, row, pool.labels[row], pool.images[row])

    return make


LOOKS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "plain": lambda picture: picture,
    "negative": ImageOps.invert,
    "coarse": lambda picture: picture.resize((7, 7), Image.Resampling.BOX).resize((28, 28), Image.Resampling.NEAREST),
    "edges": lambda picture: picture.filter(ImageFilter.FIND_EDGES),
}


def _forty(folder: Path, seed: int) -> None:
    """Ten kinds of clothing, each in four looks."""
    pool = clothing()
    chosen, tested = pool.parts(dict.fromkeys(NAMES, 40), 200, seed)
    for split, rows in (("train", chosen), ("test", tested)):
        for number, row in enumerate(rows):
            look = list(LOOKS)[number % 4]
            _save(folder, split, row, f"{pool.labels[row]}-{look}", LOOKS[look](pool.images[row]))


def _colour(folder: Path, seed: int) -> None:
    """Clothing somewhere on a crop of a photograph, 64 x 64 pixels in colour."""
    pool, photographs = clothing(), [Image.fromarray(image) for image in load_sample_images().images]
    chosen, tested = pool.parts(dict.fromkeys(NAMES, 30), 150, seed)
    for split, rows in (("train", chosen), ("test", tested)):
        for row in rows:
            random = np.random.default_rng(row)
            photograph = photographs[int(random.integers(2))]
            left, top = (int(random.integers(side - 64)) for side in photograph.size)
            picture = photograph.crop((left, top, left + 64, top + 64))
            side = int(random.integers(40, 57))
            garment = pool.images[row].resize((side, side), Image.Resampling.BICUBIC)
            place = (int(random.integers(65 - side)), int(random.integers(65 - side)))
            picture.paste(garment.convert("RGB"), place, garment.point(lambda value: 255 if value > 24 else 0))
            _save(folder, split, row, pool.labels[row], picture)


def _several(folder: Path, seed: int) -> None:
    """Two garments side by side, 56 x 28 pixels, in a table with both labels."""
    pool = clothing()
    chosen, tested = pool.parts(dict.fromkeys(NAMES, 30), 150, seed)
    (folder / "pictures").mkdir(parents=True)
    with (folder / "table.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["path", "label", "split"])
        for split, rows, draws in (("train", chosen, seed), ("test", tested, 0)):
            order = np.random.default_rng(draws).permutation(rows).tolist()
            # The next picture of the order stands beside each; val is a part of train that is not trained on.
            for number, (row, other) in enumerate(zip(order, order[1:] + order[:1], strict=True)):
                picture = Image.new("L", (56, 28))
                picture.paste(pool.images[row], (0, 0))
                picture.paste(pool.images[other], (28, 0))
                path = f"pictures/{split}-{row:05d}.png"
                picture.save(folder / path)
                labels = ";".join(sorted({pool.labels[row], pool.labels[other]}))
                writer.writerow([path, labels, "val" if split == "train" and number % 6 == 0 else split])


def _falling(names: list[str]) -> dict[str, int]:
    """100 pictures of the first class, fewer of each next, 5 of the last."""
    return {name: round(100 * (5 / 100) ** (k / (len(names) - 1))) for k, name in enumerate(names)}


def folders() -> dict[str, Callable[[Path, int], None]]:
    """What makes each of the eight: called with a folder to fill and a seed."""
    garments, numbers = clothing(), digits()
    return {
        "balanced": _plain(garments, dict.fromkeys(NAMES, 30), 150),
        "imbalanced": _plain(garments, _falling(NAMES), 150),
        "two_classes": _plain(garments, {"t-shirt": 100, "shirt": 100}, 700),
        "forty_classes": _forty,
        "sixty_images": _plain(garments, {name: 10 for name in NAMES[:6]}, 300),
        "colour_64px": _colour,
        "grey_digits": _plain(numbers, {str(k): 30 for k in range(10)}, 130),
        "several_labels": _several,
    }


def options(name: str, folder: Path) -> list[str]:
    """How a fit is told of such a folder."""
    if name == "several_labels":
        return ["--data=Table", f"--data.file={folder / 'table.csv'}", "--data.separator=;"]
    return ["--data=Folder", f"--data.root={folder}", "--data.val=0.2"]


def metric(name: str) -> str:
    """What is compared: accuracy, for several labels the mean average precision."""
    return "map" if name == "several_labels" else "acc"


def check(values: dict[str, Any]) -> None:
    """The test set is as large as was promised."""
    if values["pictures"] < 1000:
        raise ValueError(f"expected at least 1,000 test pictures, but there are {values['pictures']}.")
