"""The README of a model folder: what the model is, what it wants, how to open it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vit.models.config import ViTConfig

_CARD = """\
---
library_name: {library}
pipeline_tag: image-classification
tags: [vision-transformer, vit-toolkit]
---
# Vision Transformer, {count} classes

Patch size {patch}, {size} pixels, width {width}, {depth} blocks, {heads} heads. Trained with vit-toolkit; its
configuration and where it comes from stand in `config.json` under `vit_toolkit`.

## Open it

```python
from vit.models import load_model

model, info = load_model("FOLDER")
```

{elsewhere}
## Pictures

{pictures}

Models work on normalised pictures: values in [0, 1], minus `mean`, divided by `std`.

## Classes

{classes}
"""

_TIMM = """\
The same weights open in timm and in transformers:

```python
model = timm.create_model("local-dir:FOLDER", pretrained=True)
classify = transformers.pipeline("image-classification", model="FOLDER")
```
"""

_ONLY_HERE = """\
timm and transformers cannot open this model, because timm has no {gaps}.
"""


def model_card(config: ViTConfig, classes: Sequence[str], preprocessing: Mapping[str, Any], gaps: Sequence[str]) -> str:
    """Markdown for `README.md`.

    Args:
        config: of the model.
        classes: names in the order of the logits.
        preprocessing: plain values.
        gaps: what timm cannot express; empty where it opens the model.
    """
    return _CARD.format(
        library="vit-toolkit" if gaps else "timm",
        count=len(classes),
        patch=config.patch_size,
        size=f"{config.size[0]}x{config.size[1]}",
        width=config.width,
        depth=config.depth,
        heads=config.heads,
        elsewhere=_ONLY_HERE.format(gaps="; no ".join(gaps)) if gaps else _TIMM,
        pictures="\n".join(f"- {name}: `{json.dumps(value)}`" for name, value in preprocessing.items()),
        classes=_class_list(classes),
    )


def _class_list(classes: Sequence[str], shown: int = 100) -> str:
    lines = [f"{i}. `{name}`" for i, name in enumerate(classes[:shown])]
    if len(classes) > shown:
        lines.append(f"\nand {len(classes) - shown} more, in `config.json`.")
    return "\n".join(lines) or "None: it gives features."
