"""Real pictures without a network: scikit-learn's 1,797 handwritten digits, as class folders of PNG files."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vit.data.augment import Augmentation
from vit.data.folder import scan_folder
from vit.data.source import Source
from vit.data.table import Rows, make_cache_folder

COUNT = 1797

_AUGMENT = Augmentation(preset="light", flip=0.0)


@dataclass(frozen=True, kw_only=True)
class Digits(Source):
    """Handwritten digits, 8x8 pixels, 10 classes; written once into the cache, then read like any folder.

    377 are held out for the test, 179 for validation. Nothing is flipped: a mirrored digit is another sign.

    Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (1998), shipped by scikit-learn.
    """

    test: float = 0.21
    augment: Augmentation = _AUGMENT

    def scan(self) -> Rows:
        """Write the digits if need be, and find them.

        Raises:
            ValueError: the cache folder cannot be written, or someone changed the digits in it.
        """
        folder = write_digits()
        rows = scan_folder(folder)
        if len(rows.paths) != COUNT:
            raise ValueError(
                f"expected {COUNT} digits in {folder}, but found {len(rows.paths)}. "
                "Delete the folder; it is made again."
            )
        return rows


def write_digits() -> Path:
    """Folder of the digits in the cache, made if it is missing.

    It is filled beside its place and renamed: a kill leaves no half folder, and of two processes one wins.

    Raises:
        ValueError: the cache folder cannot be written.
    """
    cache = make_cache_folder()
    target = cache / "digits"
    if target.is_dir():
        return target
    from sklearn.datasets import load_digits

    digits = load_digits()
    draft = Path(tempfile.mkdtemp(dir=cache, prefix="digits-"))
    try:
        for number, (values, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            folder = draft / str(label)
            folder.mkdir(exist_ok=True)
            grey = np.rint(values * (255 / 16)).astype(np.uint8)
            Image.fromarray(grey).save(folder / f"{number:04d}.png")
        draft.chmod(0o755)
        os.rename(draft, target)
    except OSError as error:
        if not target.is_dir():
            raise ValueError(
                f"expected room for the digits in {cache}, but writing failed ({error}). "
                "Free space there or set the environment variable VIT_CACHE."
            ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
