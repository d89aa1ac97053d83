"""Images -> tokens -> logits, and the model folder on disk. Knows no data set and no Lightning."""

from vit.models.config import ViTConfig
from vit.models.heads import swap_head
from vit.models.normalise import Normalise
from vit.models.sizes import vit_config
from vit.models.vit import VisionTransformer

__all__ = ["Normalise", "ViTConfig", "VisionTransformer", "swap_head", "vit_config"]
