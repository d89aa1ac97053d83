"""Every packaged configuration starts: two steps on data of the right shape, offline."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from vit.data.imagenet import subset_synsets
from vit.models.artifact import load_model, save_model
from vit.models.sizes import vit_config
from vit.models.vit import VisionTransformer
from vit.run import score, session
from vit.run.configs import config_names
from vit.tasks.accumulate import planned_steps

STEPS = [
    "--trainer.max_steps=2",
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.limit_val_batches=1",
]


@pytest.fixture
def pretrained(tmp_path):
    """A model folder with weights to start from, 32 pixels, patch 8."""
    config = vit_config("Ti/8", image_size=32, num_classes=2, depth=2)
    prepared = {"image_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9}
    prepared |= {"crop_mode": "center"}
    return save_model(tmp_path / "weights", VisionTransformer(config), classes=["x", "y"], preprocessing=prepared)


def batches(count, key, seed):
    data = np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)
    return {b"data": data, key: [i % 10 for i in range(count)], b"filenames": [b"x.png"] * count}


@pytest.fixture
def cifar(tmp_path):
    """Both CIFAR archives, unpacked, with few pictures."""
    ten, hundred = tmp_path / "cifar-10-batches-py", tmp_path / "cifar-100-python"
    files = {ten / f"data_batch_{i}": batches(40, b"labels", i) for i in range(1, 6)}
    files[ten / "test_batch"] = batches(20, b"labels", 6)
    files[ten / "batches.meta"] = {b"label_names": [f"class{i}".encode() for i in range(10)]}
    for name, count in (("train", 200), ("test", 20)):
        fine = batches(count, b"fine_labels", count)
        files[hundred / name] = {**fine, b"coarse_labels": [i % 5 for i in range(count)]}
    names = {b"fine_label_names": [f"class{i}".encode() for i in range(10)]}
    files[hundred / "meta"] = {**names, b"coarse_label_names": [f"group{i}".encode() for i in range(5)]}
    for path, values in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(values, protocol=2))
    return tmp_path


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    for k, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for i in range(30):
            Image.new("RGB", (50, 40), (80 * k, 5 * i, 90)).save(root / name / f"{i}.jpg")
    return root


@pytest.fixture
def imagenet(tmp_path):
    """ImageNet's folders, for the classes of the small subsets."""
    subsets = subset_synsets()
    for k, synset in enumerate(sorted({*subsets["imagenette"], *subsets["imagenet100"]})):
        for folder, count in (("train", 2), ("val", 1)):
            (tmp_path / "imagenet" / folder / synset).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40, 32), (2 * k, 90 * i, 0)).save(
                    tmp_path / "imagenet" / folder / synset / f"{i}.JPEG"
                )
    return tmp_path / "imagenet"


@pytest.fixture
def clothes(tmp_path):
    """Fashion-MNIST's four IDX files, with few pictures."""
    folder = tmp_path / "clothes"
    folder.mkdir()
    for kind, count in (("train", 160), ("t10k", 20)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        head = b"".join(side.to_bytes(4, "big") for side in pixels.shape)
        (folder / f"{kind}-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3]) + head + pixels.tobytes())
        labels = bytes(i % 10 for i in range(count))
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1]) + head[:4] + labels)
    return folder


CLOTHES = [f"fashion_mnist_{name}" for name in ("mae", "masked", "autoregressive", "dino")]


def words_for(name, pretrained, cifar, photos, imagenet, clothes):
    from_archive = [f"--data.root={cifar}", "--data.checksum=false", "--data.download=false"]
    from_folders = [f"--data.root={imagenet}"]
    smaller, few = ["--model.encoder.image_size=32", "--model.encoder.depth=1"], ["--data.first=4", "--data.fraction=1"]
    tiny_dino = ["--model.projection.hidden=16", "--model.projection.outputs=32"]
    return {
        "quickstart": [],
        "digits_scratch": [],
        **{name: [f"--data.root={clothes}", "--data.batch_size=8"] for name in CLOTHES},
        "cifar10_mae": [*from_archive, "--model.encoder.depth=1", "--data.batch_size=8"],
        "imagenet100_mae": [*from_folders, *smaller, "--model.decoder.depth=1", "--data.batch_size=8"],
        "imagenet100_masked": [*from_folders, *smaller, "--data.batch_size=8", "--model.schedule.warmup=1"],
        "imagenet100_autoregressive": [*from_folders, *smaller, "--model.head_depth=1", "--data.batch_size=8"],
        "imagenet100_dino": [*from_folders, *smaller, *tiny_dino, "--data.batch_size=4"],
        "fashion_mnist_pretrain": [f"--data.root={clothes}", "--data.batch_size=32"],
        "finetune_folder": [f"--data.root={photos}", f"--model.weights={pretrained}", "--model.encoder.image_size=32"],
        "cifar10_scratch": [*from_archive, "--model.encoder.depth=2"],
        "imagenette_finetune": [*from_folders, f"--model.weights={pretrained}", "--data.batch_size=5"],
        "imagenet100_pretrain": [*from_folders, *smaller, "--data.batch_size=8"],
        "imagenet_subset_finetune": [*from_folders, f"--model.weights={pretrained}", *few, "--data.batch_size=2"],
        "cifar100_finetune": [*from_archive, f"--model.weights={pretrained}"],
        # 384 pixels with the paper's batch of 512 would take minutes here.
        "paper_finetune": [
            *from_archive,
            f"--model.weights={pretrained}",
            "--data.batch_size=2",
            "--data.val=0.1",
            "--model.schedule.warmup=1",
            "--data.eval_batch_size=2",
        ],
    }[name]


# Those of full size take longest, and differ from the others in numbers alone.
LONG = ("imagenet100_", "cifar10_mae", "fashion_mnist_dino")
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n.startswith(LONG) else n for n in config_names()]


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_takes_two_steps_and_leaves_a_whole_run(
    name, tmp_path, pretrained, cifar, photos, imagenet, clothes
):
    words = ["--config", name, *STEPS, *words_for(name, pretrained, cifar, photos, imagenet, clothes)]
    run = session.fit([*words, f"--trainer.default_root_dir={tmp_path / 'outputs'}"])
    assert run.record["steps"] == 2
    assert run.record["name"] == name
    assert run.model.is_dir()
    assert run.best.exists() or run.last.exists()
    model = run.record["config"]["model"]
    size = model.get("init_args", model)["encoder"]["image_size"]
    clothing = dict.fromkeys(("fashion_mnist_pretrain", *CLOTHES), 28)
    assert size == {"quickstart": 28, "digits_scratch": 16, "paper_finetune": 384, **clothing}.get(name, 32)


def test_planned_steps_are_the_steps_that_are_taken(tmp_path, tiny, capsys):  # C6
    run = session.fit([*tiny, "--trainer.accumulate_grad_batches=4", "--trainer.max_epochs=3"])
    out = capsys.readouterr().out
    assert "3 epochs, 6 optimizer steps, 2 per epoch" in out, out[out.find("  steps") :][:200]
    assert run.record["steps"] == 6


@pytest.mark.parametrize(("limit", "steps"), [(6, 2), (6.0, 2), (1, 1), (1.0, 39), (0.5, 20), (None, 39)])
def test_a_limit_counts_batches_or_is_a_share_as_lightning_reads_it(limit, steps):
    trainer = {"limit_train_batches": limit, "fast_dev_run": False, "overfit_batches": 0.0}
    trainer |= {"accumulate_grad_batches": 4, "max_epochs": 3, "max_steps": -1}
    assert planned_steps(trainer, 155) == (steps, 3 * steps)


def test_fewer_pictures_than_a_batch_still_train(tmp_path):  # A26
    for name in ("a", "b"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (8, 8), (i, 90, 0)).save(tmp_path / "data" / "train" / name / f"{i}.png")
    words = ["--data=Folder", f"--data.root={tmp_path / 'data'}", "--data.batch_size=64", "--data.val=0"]
    words += ["--model.encoder.size=Ti/8", "--model.encoder.image_size=16", "--model.encoder.depth=1"]
    words += ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    run = session.fit([*words, f"--trainer.default_root_dir={tmp_path / 'outputs'}"])
    assert run.record["steps"] == 1
    assert run.record["checkpoint"] == {"file": "last.ckpt", "chosen_by": None, "split": None}
    assert run.model.is_dir()


def test_weights_of_a_run_start_another_with_a_new_head(tmp_path, tiny, photos):  # B12
    first = session.fit([*tiny, "--trainer.max_epochs=1"])
    words = ["--data=Folder", f"--data.root={photos}", f"--model.weights={first.path}", "--trainer.max_epochs=1"]
    words += ["--trainer.accelerator=cpu", "--trainer.logger=false", "--model.encoder.image_size=32"]
    second = session.fit([*words, f"--trainer.default_root_dir={tmp_path / 'outputs'}"])
    encoder = second.record["config"]["model"]["encoder"]
    assert (encoder["width"], encoder["image_size"]) == (16, 32)
    assert second.record["data"]["classes"] == ["cat", "dog"]
    assert "head re-initialised for 2 classes" in (second.path / "plan.txt").read_text()
    assert score.evaluate("validate", str(second.path), [])["pictures"] > 0


def test_the_head_of_weights_with_the_same_classes_is_kept(tmp_path, tiny):  # B12, B13
    first = session.fit([*tiny, "--trainer.max_epochs=1"])
    before = load_model(first.model)[0].head.weight
    # One step at a rate of nearly nothing leaves the head where it was.
    words = [f"--model.weights={first.path}", "--model.method=head", "--model.optim.lr=1e-12", "--trainer.max_epochs=1"]
    dropped = ("width", "depth", "heads", "limit_train", "max_epochs")
    kept = [word for word in tiny if not any(name in word for name in dropped)]
    second = session.fit(["--data=Digits", "--recipe=none", *kept[1:], *words, "--model.encoder.image_size=16"])
    after = load_model(second.model)[0].head.weight
    assert torch.allclose(before, after, atol=1e-6)
    assert before.abs().max() > 1e-4
    assert tmp_path in second.path.parents
