"""Pictures per second of one worker process: our training input against timm's and torchvision's.

All read the same JPEG files, decode, take a random resized crop to 224 (bicubic), flip and batch as uint8. Nothing is
cached between the pipelines but the files themselves, in the system's page cache. "vit, disk cache" reads back, from
the second epoch on, the pictures that the first one decoded and shrunk.

Run: python benchmarks/input_pipeline.py        Writes docs/records/input_pipeline.json.
"""

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from PIL import Image
from records import keep
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader

from vit.data import Folder, ImageDataModule, Preprocessing

SIZES = {(500, 375): (256, 1.6), (1600, 1200): (64, 2.0), (4000, 3000): (16, 4.5)}
CACHED = "vit, disk cache"
CACHE_TARGETS = {(4000, 3000): 20.0}
BATCH = 16
NOISE = 4.0


def make_files(root: Path, width: int, height: int, count: int) -> float:
    """Crops of scikit-learn's two photographs at a size, with a camera's noise; their mean size in kB."""
    photographs = [Image.fromarray(picture) for picture in load_sample_images().images]
    random = np.random.default_rng(0)
    for number in range(count):
        photograph = photographs[number % 2]
        part = int(random.integers(400, 560))
        left, top = random.integers(0, photograph.width - part), random.integers(0, photograph.height - part * 3 // 4)
        box = (int(left), int(top), int(left) + part, int(top) + part * 3 // 4)
        pixels = np.asarray(photograph.resize((width, height), Image.Resampling.LANCZOS, box=box), np.float32)
        pixels = pixels + random.normal(0, NOISE, pixels.shape).astype(np.float32)
        folder = root / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{number:04d}.jpg"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, quality=90)
    return mean(file.stat().st_size for file in root.rglob("*.jpg")) / 1000


def ours(root: Path, **options: Any) -> DataLoader:
    """This toolkit's training loader."""
    data = ImageDataModule(Folder(root=str(root), batch_size=BATCH, num_workers=1, val=0.0, test=0.0, **options))
    data.preprocessing = Preprocessing(image_size=224)
    return data.train_dataloader()


def cached(root: Path) -> DataLoader:
    """The same with the disk cache."""
    return ours(root, cache="disk")


def timms(root: Path) -> DataLoader:
    """timm's dataset, transform and collation, without its normalisation."""
    from timm.data import ImageDataset, create_transform
    from timm.data.loader import fast_collate

    transform = create_transform(
        224, is_training=True, use_prefetcher=True, interpolation="bicubic", color_jitter=None, hflip=0.5
    )
    return _loader(ImageDataset(str(root / "train"), transform=transform), collate_fn=fast_collate)


def torchvisions(root: Path) -> DataLoader:
    """torchvision's image folder and v2 transforms on PIL pictures."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(224, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])
    return _loader(ImageFolder(str(root / "train"), transform))


def _loader(dataset: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=1, drop_last=True, persistent_workers=True, **options)


def seconds(loader: DataLoader) -> float:
    """Seconds of one epoch."""
    started = time.perf_counter()
    for batch in loader:
        images = batch[0]
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (3, 224, 224)
    return time.perf_counter() - started


def compare(root: Path, count: int, rounds: int, makers: dict[str, Callable[[Path], DataLoader]]) -> dict[str, Any]:
    """Epochs of all pipelines in turn; pictures per second, and the median ratio of neighbouring epochs."""
    loaders = {name: make(root) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(rounds + 1):
        for name, loader in loaders.items():
            spent = seconds(loader)
            if number:  # the first epoch starts the worker and fills the cache
                times[name].append(spent)
    result: dict[str, Any] = {"per_second": {name: round(count / median(t), 1) for name, t in times.items()}}
    for name in loaders:
        if name != "timm":
            ratios = (theirs / spent for theirs, spent in zip(times["timm"], times[name], strict=True))
            result.setdefault("over_timm", {})[name] = round(median(ratios), 2)
    return result


def main() -> None:
    """Print the ratios and keep them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dry_run", action="store_true", help="measure and print, but keep no record")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {"batch_size": BATCH, "rounds": rounds, "noise": NOISE, "sizes": {}}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VIT_CACHE"] = f"{folder}/cache"
        for (width, height), (count, target) in SIZES.items():
            root = Path(folder) / f"{width}x{height}"
            kilobytes = make_files(root, width, height, count)
            makers = {"timm": timms, "torchvision": torchvisions, "vit": ours, CACHED: cached}
            result = compare(root, count, rounds, makers)
            targets = {"vit": target}
            if (width, height) in CACHE_TARGETS:
                targets[CACHED] = CACHE_TARGETS[width, height]
            record["sizes"][f"{width}x{height}"] = {
                "files": count,
                "kB": round(kilobytes),
                "targets_over_timm": targets,
                **result,
            }
            print(f"{width} x {height}, {kilobytes:.0f} kB: {result['per_second']} pictures per second")
            print(f"    over timm: {result['over_timm']}, targets {targets}", flush=True)
    if not arguments.dry_run:
        keep("input_pipeline", record)


if __name__ == "__main__":
    main()
