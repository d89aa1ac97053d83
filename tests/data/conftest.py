"""Pictures and folders that the data tests are made of."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def draw() -> Callable[..., Image.Image]:
    """A picture of random colours, the same for the same seed."""

    def make(width: int = 8, height: int = 8, seed: int = 0, mode: str = "RGB") -> Image.Image:
        values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(values).convert(mode)

    return make


@pytest.fixture
def plant(tmp_path: Path, draw) -> Callable[[Mapping[str, int]], Path]:
    """Make class folders with so many PNG files each, every one different."""

    def make(counts: Mapping[str, int], root: Path | None = None) -> Path:
        root = root or tmp_path / "pictures"
        seed = 0
        for folder, count in counts.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                seed += 1
                draw(seed=seed).save(root / folder / f"{number:03d}.png")
        return root

    return make


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Class folders of 24 training JPEGs, 8 in the rarer class: smooth colours, several sizes, every orientation."""
    random = np.random.default_rng(0)
    sizes = [(150, 100), (64, 96), (240, 180), (33, 47)]
    for number in range(26):
        coarse = Image.fromarray(random.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        picture = coarse.resize(sizes[number % 4], Image.Resampling.BICUBIC)
        exif = Image.Exif()
        exif[0x0112] = number % 8 + 1
        split = "val" if number >= 24 else "train"
        folder = tmp_path / "photos" / split / ("rare" if number % 3 == 0 else "usual")
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{number:02d}.jpg", quality=90, exif=exif)
    return tmp_path / "photos"
