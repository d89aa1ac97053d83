"""A tiny folder of pictures and a tiny classifier."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Three classes that differ in colour; 12 train, 6 val and 6 test pictures of 8 x 8 pixels in each."""
    root = tmp_path_factory.mktemp("tiny")
    draw = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 6), ("test", 6)):
        for k, name in enumerate(("blue", "green", "red")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 90, (8, 8, 3), dtype=np.uint8)
                pixels[..., 2 - k] += 120
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root
