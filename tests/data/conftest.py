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
