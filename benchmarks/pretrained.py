"""What pre-trained weights are worth: the same fit on 2,000 Fashion-MNIST pictures with them and from scratch.

Run: python benchmarks/pretrained.py WEIGHTS [FASHION_MNIST_FOLDER]        Writes docs/records/pretrained.json.
WEIGHTS is anything that model.weights takes; the record in docs/ was made with DINOv2-S/14.
The folder holds the four IDX files, as Debian's package dataset-fashion-mnist installs them.
"""

import gzip
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from records import keep

import vit
from vit.models.weights import load_weights

DEBIAN = "/usr/share/datasets/fashion-mnist"
NAMES = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]
PER_CLASS = {"train": 200, "val": 50, "test": 200}
SIZE, EPOCHS, SEED = 56, 2, 0
AUGMENT = {"crop_scale": [0.6, 1.0], "flip": 0.5}


def read_idx(file: Path) -> np.ndarray:
    """An IDX file: magic number, sizes, bytes."""
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def clothing(prefix: str, source: Path = Path(DEBIAN)) -> tuple[np.ndarray, np.ndarray]:
    """Pictures and labels of Fashion-MNIST's `train` or `t10k` set."""
    images, labels = (read_idx(next(source.glob(f"{prefix}-{part}*"))) for part in ("images", "labels"))
    return images, labels


def make_folder(source: Path, target: Path) -> None:
    """The first pictures of each class as class folders: train and val from one set, test from the other."""
    for prefix, splits in (("train", ("train", "val")), ("t10k", ("test",))):
        images, labels = clothing(prefix, source)
        for k, name in enumerate(NAMES):
            chosen = iter(np.flatnonzero(labels == k))
            for split in splits:
                folder = target / split / name
                folder.mkdir(parents=True)
                for _ in range(PER_CLASS[split]):
                    index = next(chosen)
                    Image.fromarray(images[index]).save(folder / f"{index:05d}.png")


def main(weights: str, source: str = DEBIAN) -> None:
    """Fit twice with the same options, test, print both."""
    place = Path(tempfile.mkdtemp())
    make_folder(Path(source), place / "fashion")
    loaded = load_weights(weights)
    config = loaded.model.config.to_dict()
    scratch = {
        k: v for k, v in config.items() if k not in ("num_classes", "image_size", "position_grid") and v is not None
    }
    results = {}
    for name, model in (("pretrained", {"weights": weights}), ("scratch", {"encoder": scratch})):
        model = {**model, "encoder": {**model.get("encoder", {}), "image_size": SIZE}}
        run = vit.fit(
            name=name,
            seed=SEED,
            recipe="none",  # auto would choose other rates for each of the two
            data={
                "class_path": "Folder",
                "root": str(place / "fashion"),
                "batch_size": 32,
                "num_workers": 0,
                "augment": AUGMENT,
            },
            model={**model, "preprocessing": {"crop_pct": 1.0}},
            trainer={"max_epochs": EPOCHS, "default_root_dir": str(place), "logger": False},
        )
        results[name] = vit.test(run)
        print(f"{name}: test accuracy {results[name]['acc']:.4f} on {results[name]['pictures']} pictures", flush=True)
    record = {
        "results": results,
        "weights": Path(weights).name,
        "image_size": SIZE,
        "epochs": EPOCHS,
        "seed": SEED,
        "pictures_per_class": PER_CLASS,
        "environment": run.record["environment"],
    }
    keep("pretrained", record)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("expected WEIGHTS: python benchmarks/pretrained.py WEIGHTS [FASHION_MNIST_FOLDER]")
    main(*sys.argv[1:])
