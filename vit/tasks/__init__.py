"""What is optimised, and how: the LightningModules."""

from vit.tasks.classify import Classifier
from vit.tasks.optim import OptimConfig, ScheduleConfig
from vit.tasks.options import EncoderOptions, PreprocessingOptions

__all__ = ["Classifier", "EncoderOptions", "OptimConfig", "PreprocessingOptions", "ScheduleConfig"]
