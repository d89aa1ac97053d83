"""What is optimised, and how: the LightningModules."""

from vit.tasks.autoregressive import Autoregressive
from vit.tasks.classify import Classifier
from vit.tasks.dino import DINO
from vit.tasks.losses import LossConfig
from vit.tasks.mae import MAE
from vit.tasks.masked import MaskedPatches
from vit.tasks.optim import OptimConfig, ScheduleConfig
from vit.tasks.options import EncoderOptions, PreprocessingOptions

__all__ = [
    "DINO",
    "MAE",
    "Autoregressive",
    "Classifier",
    "EncoderOptions",
    "LossConfig",
    "MaskedPatches",
    "OptimConfig",
    "PreprocessingOptions",
    "ScheduleConfig",
]
