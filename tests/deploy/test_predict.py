"""Predictions: the pixels of validation, the names of training, the order of the input."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from vit.data import Folder, ImageDataModule, Preprocessing
from vit.deploy.predict import Predictor, command, find_pictures
from vit.models import VisionTransformer, ViTConfig, save_model


@pytest.fixture
def pictures(tmp_path):
    """Pictures of several modes and sizes in two class folders."""
    draw = np.random.default_rng(0)
    for k, name in enumerate(("a", "b")):
        folder = tmp_path / "val" / name
        folder.mkdir(parents=True)
        (tmp_path / "train" / name).mkdir(parents=True)
        for i, mode in enumerate(("RGB", "L", "RGBA", "P")):
            noise = draw.integers(0, 256, (30 + 7 * i, 41 + k, 4), dtype=np.uint8)
            image = Image.fromarray(noise, "RGBA").convert(mode)
            image.save(folder / f"{i}.png")
            image.save(tmp_path / "train" / name / f"{i}.png")
    return tmp_path


@pytest.fixture
def predictor():
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=2, num_classes=3)
    model = VisionTransformer(config)
    torch.nn.init.normal_(model.head.weight)
    return Predictor(model.eval(), classes=["x", "ü", "3"], preprocessing=Preprocessing(image_size=16, crop_pct=0.8))


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
def test_the_tensor_of_a_prediction_equals_the_one_validation_feeds(pictures, predictor):  # F9
    data = ImageDataModule(Folder(root=str(pictures), num_workers=0, eval_batch_size=3))
    data.preprocessing = predictor.preprocessing
    seen = 0
    for batch in data.loader("val"):
        for image, index in zip(batch.images, batch.index.tolist(), strict=True):
            path = data.table.path(index)
            assert torch.equal(predictor.prepare(path), image)
            with open(path, "rb") as file:
                assert torch.equal(predictor.prepare(file.read()), image)
            with Image.open(path) as opened:
                assert torch.equal(predictor.prepare(opened), image)
            seen += 1
    assert seen == 8


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
def test_predictions_keep_the_order_for_any_batch_size_and_say_what_cannot_be_read(pictures, predictor):
    paths = sorted(map(str, (pictures / "val").rglob("*.png")))
    bad = pictures / "bad.png"
    bad.write_bytes(b"no picture")
    paths.insert(2, str(bad))
    one = predictor.predict(paths, top_k=3, batch_size=1)
    many = predictor.predict(paths, top_k=3, batch_size=4)
    assert [p.path for p in one] == [p.path for p in many] == paths
    for a, b in zip(one, many, strict=True):
        assert a.label == b.label
        assert sum(p for _, p in a.top) == pytest.approx(1 if a.error is None else 0, abs=1e-6)
        assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-6)
    assert one[2].label is None
    assert "bad.png" in one[2].error
    with torch.inference_mode():
        scores = predictor.logits(predictor.prepare(paths[0])[None])
    assert one[0].label == predictor.classes[int(scores.argmax())]


def test_the_command_prints_csv_and_its_exit_code_says_if_a_picture_failed(tmp_path, predictor, capsys, as_users_run):
    folder = tmp_path / "model"
    save_model(
        folder,
        predictor._net.model,
        classes=predictor.classes,
        preprocessing=predictor.preprocessing.to_dict(),
    )
    buffer = io.BytesIO()
    Image.new("RGB", (20, 20), (200, 10, 10)).save(buffer, "JPEG")
    for name in ("b, c.JPG", "a.png", ".hidden.jpg"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(buffer.getvalue())
    assert command([str(folder), str(tmp_path / "in"), "--top_k", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "path,class,probability,class_2,probability_2,error"
    assert [line.split("/in/")[1].partition(".")[0] for line in lines[1:]] == ["a", "b, c"]
    (tmp_path / "in" / "a.png").write_bytes(b"")
    assert command([str(folder), str(tmp_path / "in"), "--out", str(tmp_path / "o.csv")]) == 1
    out = capsys.readouterr()
    assert "1 pictures could not be read" in out.err
    assert "a.png" in (tmp_path / "o.csv").read_text().splitlines()[1]
    with pytest.raises(ValueError, match="nothing at"):
        find_pictures([str(tmp_path / "none")])
    with pytest.raises(ValueError, match="cannot be written"):
        command([str(folder), str(tmp_path / "in"), "--out", str(tmp_path / "no" / "o.csv")])
    with pytest.raises(ValueError, match="at least 1"):
        command([str(folder), str(tmp_path / "in"), "--top_k", "0"])


# A13
def test_limits_and_endings_are_options_of_predictions_too(tmp_path, predictor, capsys, as_users_run):
    save_model(
        tmp_path / "model",
        predictor._net.model,
        classes=predictor.classes,
        preprocessing=predictor.preprocessing.to_dict(),
    )
    (tmp_path / "in").mkdir()
    Image.new("L", (20, 20)).save(tmp_path / "in" / "a.png")
    np.save(tmp_path / "in" / "b.npy", np.zeros((3, 9, 8), np.uint8))
    words = [str(tmp_path / "model"), str(tmp_path / "in")]
    assert command([*words, "--max_pixels=399"]) == 1
    assert "of vit predict --max_pixels" in capsys.readouterr().out
    assert command([*words, "--max_pixels=400", "--suffixes", ".npy", ".png"]) == 0
    assert [line.split("/in/")[1][:5] for line in capsys.readouterr().out.splitlines()[1:]] == ["a.png", "b.npy"]
    (tmp_path / "in" / "a.png").unlink()
    with pytest.raises(ValueError, match=r"\.npy, are given with --suffixes"):
        command(words)
    for bad in ("npy", ".NPY"):
        with pytest.raises(ValueError, match=rf"suffixes such as \.npy, in lower case, but got {bad}"):
            command([*words, "--suffixes", bad])
