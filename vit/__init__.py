"""A Vision Transformer toolkit for image classification.

In a notebook: `run = vit.fit("quickstart")`, `vit.test(run)`, `vit.load(run).predict(["digit.png"])`.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Loaded on first use, so that `import vit` and `vit --help` cost milliseconds.
_HOME = {
    "fit": "vit.api",
    "fit_many": "vit.api",
    "load": "vit.api",
    "sweep": "vit.api",
    "test": "vit.api",
    "validate": "vit.api",
    "Classifier": "vit.tasks.classify",
    "ImageDataModule": "vit.data.module",
    "ViTConfig": "vit.models.config",
    "VisionTransformer": "vit.models.vit",
    "vit_config": "vit.models.sizes",
}

__all__ = [
    "Classifier",
    "ImageDataModule",
    "ViTConfig",
    "VisionTransformer",
    "fit",
    "fit_many",
    "load",
    "sweep",
    "test",
    "validate",
    "vit_config",
]

if TYPE_CHECKING:
    from vit.api import fit, fit_many, load, sweep, test, validate
    from vit.data.module import ImageDataModule
    from vit.models.config import ViTConfig
    from vit.models.sizes import vit_config
    from vit.models.vit import VisionTransformer
    from vit.tasks.classify import Classifier


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'vit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
