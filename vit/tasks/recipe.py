"""What is chosen where the user chose nothing, each value with its reason."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from vit.tasks.methods import FEW, Method
from vit.tasks.optim import OptimConfig, ScheduleConfig


class Resolved(NamedTuple):
    """Configurations without open values, and why each open value became what it is."""

    optim: OptimConfig
    schedule: ScheduleConfig
    reasons: dict[str, str]


def resolve(optim: OptimConfig, schedule: ScheduleConfig, *, pretrained: bool, method: Method) -> Resolved:
    """Fill in what is `None`.

    From scratch: AdamW at 1e-3 with decay 0.05 (the order of DeiT's table 9 at batch 1024, for small batches).
    Fine-tuning: AdamW at 3e-4 with layer decay 0.75 (the order of MAE's table 9); SGD at 0.01 without decay as in
    the ViT paper's table 4. A linear head alone bears ten times the rate and no decay, and so do the few of
    LoRA, biases and norms, which must move further, in all layers alike.

    Args:
        optim: as typed.
        schedule: as typed.
        pretrained: whether the backbone starts from weights.
        method: what learns.
    """
    if optim.name == "sgd":
        lr, decay, layers, why = 0.01, 0.0, 1.0, "SGD as in the ViT paper, table 4"
    elif method == "head":
        lr, decay, layers, why = 3e-3, 0.0, 1.0, "a linear head alone"
    elif method in FEW:
        lr, decay, layers, why = 3e-3, 0.0, 1.0, f"the few parameters of {method}"
    elif pretrained:
        lr, decay, layers, why = 3e-4, 0.05, 0.75, "fine-tuning pre-trained weights"
    else:
        lr, decay, layers, why = 1e-3, 0.05, 1.0, "training from scratch"
    values = {"lr": lr, "weight_decay": decay, "layer_decay": layers, "clip": 1.0}
    return fill(optim, schedule, values, {**dict.fromkeys(values, why), "clip": "as in the ViT paper, section 4.1"})


def fill(optim: OptimConfig, schedule: ScheduleConfig, values: Mapping[str, float], why: Mapping[str, str]) -> Resolved:
    """Put values in the place of what is `None`.

    Args:
        optim: as typed.
        schedule: as typed; its warm-up becomes a tenth of all steps.
        values: of the optimizer.
        why: the reason for each of them.
    """
    open_values: dict[str, Any] = {name: value for name, value in values.items() if getattr(optim, name) is None}
    reasons = {f"optim.{name}": why[name] for name in open_values}
    if schedule.warmup is None:
        schedule = replace(schedule, warmup=0.1)
        reasons["schedule.warmup"] = "a tenth of all steps"
    return Resolved(replace(optim, **open_values), schedule, reasons)
