"""Images -> tokens -> logits, and the model folder on disk. Knows no data set and no Lightning."""

from vit.models.artifact import ModelInfo, load_model, save_model
from vit.models.config import ViTConfig
from vit.models.heads import swap_head
from vit.models.normalise import Normalise
from vit.models.sizes import vit_config
from vit.models.vit import VisionTransformer

__all__ = [
    "ModelInfo",
    "Normalise",
    "ViTConfig",
    "VisionTransformer",
    "load_model",
    "save_model",
    "swap_head",
    "vit_config",
]
