"""Put a finished pre-training run into the package, as float16, with its record and a card.

Run: python benchmarks/ship.py outputs/fashion_mnist_pretrain/1        Writes vit/pretrained/fashion_mnist_28/.
The run must have been tested: vit test outputs/fashion_mnist_pretrain/1
"""

import sys

from records import ROOT, keep, published

from vit.models.artifact import CARD, WEIGHTS, load_model, save_model
from vit.run.folder import open_run_folder

TARGET = ROOT / "vit" / "pretrained" / "fashion_mnist_28"

CARD_TEXT = """# fashion_mnist_28

A Vision Transformer of {parameters:,} parameters ({size:.1f} MB as float16): {image_size} x {image_size} pixels,
patches of {patch_size}, width {width}, {depth} blocks. It was pre-trained with labels and the MLP head of the ViT paper
(section 3.1) on the 60,000 training pictures of Fashion-MNIST, less {val:,} that chose the checkpoint.
The record of the run is `run.json`; `vit fit --config fashion_mnist_pretrain` makes it again.

Test accuracy on the 10,000 test pictures: {acc:.2f} % (95 % interval {low:.2f} to {high:.2f}).

Good for: a first try without a network; small, simple, mostly grey pictures such as digits, signs and icons, where few
are at hand; teaching. docs/results.md compares it with training from scratch on 10, 30 and 100 pictures a class.

Not good for: photographs, colour, anything larger than about 64 pixels. `vit weights` lists weights for those.

Data: Xiao, Rasul, Vollgraf, "Fashion-MNIST" (2017), MIT licence. Weights: Apache-2.0.
"""


def main(path: str) -> None:
    """Write the folder."""
    run = open_run_folder(path)
    record = published(run.record)
    model, info = load_model(run.model)
    provenance = {"config": "fashion_mnist_pretrain", "test_acc": record["test"]["acc"]}
    save_model(TARGET, model.half(), classes=info.classes, preprocessing=info.preprocessing, provenance=provenance)
    (TARGET / "run.json").write_text(keep("shipped", record), encoding="utf-8")
    c, (low, high) = model.config, (100 * v for v in record["test"]["acc_95"])
    card = CARD_TEXT.format(
        parameters=sum(p.numel() for p in model.parameters()),
        size=(TARGET / WEIGHTS).stat().st_size / 1e6,
        image_size=c.size[0],
        patch_size=c.patch_size,
        width=c.width,
        depth=c.depth,
        val=record["data"]["pictures"]["val"],
        acc=100 * record["test"]["acc"],
        low=low,
        high=high,
    )
    (TARGET / CARD).write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main(sys.argv[1])
