"""vit/models/weights.py: nothing is lost in silence, nothing in a file runs, and every size is a starting point."""

import pickle
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from vit.models import VisionTransformer, ViTConfig, save_model
from vit.models.adapt import adapt_channels, resize_patches
from vit.models.weights import load_weights, read_checkpoint

TINY = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "heads": 1, "num_classes": 3}
NAMES = ("cat", "dog", "owl")
PREPROCESSING = {
    "image_size": 32,
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
    "interpolation": "bilinear",
    "crop_pct": 0.8,
    "crop_mode": "squash",
}


def build(randomise, **options):
    return randomise(VisionTransformer(ViTConfig(**{**TINY, **options})))


def folder_of(model, tmp_path, classes=NAMES):
    prepared = {**PREPROCESSING, "image_size": model.config.image_size}
    return str(save_model(tmp_path / "model", model, classes=classes, preprocessing=prepared))


def file_of(state, tmp_path, name="weights.safetensors"):
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / name)
    return str(tmp_path / name)


def pixels(*size, channels=3):
    return torch.randn(2, channels, *(size or (32, 32)), generator=torch.Generator().manual_seed(1))


# Case B1.
@pytest.mark.parametrize("size", [16, 48, 64, (32, 64)])
def test_any_image_size_loads_and_the_report_names_both_grids(size, tmp_path, randomise):
    model = build(randomise)
    for source in (folder_of(model, tmp_path), file_of(model.state_dict(), tmp_path)):
        loaded = load_weights(source, image_size=size)
        height, width = (size, size) if isinstance(size, int) else size
        assert loaded.model(pixels(height, width)).shape == (2, 3)
        assert loaded.report.resized == {"pos_embed": f"grid 4x4 -> {height // 8}x{width // 8}"}
        assert loaded.preprocessing["image_size"] == size
        assert "4x4" in loaded.report.table()


# Cases B1 and B13.
@pytest.mark.parametrize("source", ["folder", "run", "file", "checkpoint"])
def test_at_the_same_size_logits_are_bit_equal(source, tmp_path, randomise):
    model = build(randomise)
    path = {"file": lambda: file_of(model.state_dict(), tmp_path), "checkpoint": lambda: checkpoint(model, tmp_path)}
    loaded = load_weights(path[source]() if source in path else folder_of(model, tmp_path))
    if source == "run":
        loaded = load_weights(str(tmp_path))
    assert torch.equal(loaded.model(pixels()), model(pixels()))
    assert not loaded.report.new
    assert loaded.classes == (("0", "1", "2") if source == "file" else NAMES)
    if source != "file":
        assert {**loaded.preprocessing, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]} == PREPROCESSING  # case B14


def checkpoint(model, tmp_path):
    state = {f"net.model.{n}": t for n, t in model.state_dict().items()}
    info = {"config": model.config.to_dict(), "classes": list(NAMES), "preprocessing": PREPROCESSING}
    torch.save({"state_dict": state, "vit_toolkit": info}, tmp_path / "last.ckpt")
    return str(tmp_path / "last.ckpt")


def test_a_training_checkpoint_is_known_by_what_is_in_it(tmp_path, randomise):
    model = build(randomise)
    path = checkpoint(model, tmp_path)
    (tmp_path / "last.ckpt").rename(tmp_path / "anything")
    assert load_weights(str(tmp_path / "anything")).classes == NAMES
    again, preprocessing, names = read_checkpoint(tmp_path / "anything")
    assert torch.equal(again(pixels()), model(pixels()))
    assert (preprocessing, tuple(names)) == (PREPROCESSING, NAMES)
    with pytest.raises(ValueError, match="expected weights from"):
        load_weights(path)


# Case B2.
@pytest.mark.parametrize("size", [32, 48])
@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("prefix_position", [True, False])
def test_prefix_rows_never_take_part_in_resizing(class_token, registers, prefix_position, size, tmp_path, randomise):
    options = {"class_token": class_token, "registers": registers, "prefix_position": prefix_position, "pool": "mean"}
    model = build(randomise, **options)
    loaded = load_weights(folder_of(model, tmp_path), image_size=size)
    prefix = model.config.prefix_tokens if prefix_position else 0
    assert torch.equal(loaded.model.pos_embed[:, :prefix], model.pos_embed[:, :prefix])
    assert loaded.model.pos_embed.shape[1] == prefix + (size // 8) ** 2
    timms = timm.create_model(
        "vit_tiny_patch16_224",
        **{"img_size": size, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 1, "num_classes": 3},
        **{"class_token": class_token, "reg_tokens": registers, "no_embed_class": not prefix_position},
        global_pool="avg",
    )
    timms.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(model.state_dict(), timms))
    with torch.no_grad():
        x = pixels(size, size)
        torch.testing.assert_close(loaded.model(x), timms.eval()(x), atol=1e-5, rtol=1e-5)


# Case B2.
@pytest.mark.parametrize(
    "options",
    [{"prefix_position": False}, {"registers": 4}, {"registers": 4, "prefix_position": False}, {"class_token": False}],
)
def test_prefix_rows_are_added_dropped_or_joined_to_their_tokens(options, tmp_path, randomise):
    model = build(randomise, pool="mean", registers=0)
    loaded = load_weights(folder_of(model, tmp_path), **options)
    x = pixels()
    tokens, theirs = loaded.model.embed(x), model.embed(x)
    assert torch.allclose(tokens[:, -16:], theirs[:, -16:], atol=1e-6)
    if "class_token" not in options:
        assert torch.allclose(tokens[:, 0], theirs[:, 0], atol=1e-6)
    assert ("reg_token" in loaded.report.new) == ("registers" in options)


# Case B6.
@pytest.mark.parametrize("patch_size", [4, 16])
def test_another_patch_size_keeps_the_response_to_a_constant_image(patch_size, tmp_path, randomise):
    model = build(randomise)
    loaded = load_weights(folder_of(model, tmp_path), patch_size=patch_size)
    assert loaded.model.patch_embed.proj.weight.shape == (64, 3, patch_size, patch_size)
    x = torch.ones(1, 3, 32, 32)
    ours, theirs = loaded.model.patch_embed(x)[0, 0], model.patch_embed(x)[0, 0]
    assert (ours - theirs).abs().max() / theirs.abs().max() < 1e-3
    assert set(loaded.report.resized) == {"patch_embed.proj.weight", "pos_embed"}


def test_patches_resize_as_timms_flexible_ones_up_to_a_constant_in_smaller_ones():
    kernel = torch.randn(5, 3, 16, 16)
    for side in (24, 8):
        ours, theirs = resize_patches(kernel, side), timm.layers.resample_patch_embed(kernel, [side, side])
        shift = (ours - theirs).flatten(2)
        torch.testing.assert_close(shift, shift[..., :1].expand_as(shift), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.sum((2, 3)), kernel.sum((2, 3)), atol=1e-4, rtol=1e-4)
        assert shift.abs().max() < (1e-4 if side > 16 else 0.2)


def test_channels_are_summed_or_repeated(tmp_path, randomise):
    model = build(randomise)
    grey = load_weights(folder_of(model, tmp_path), channels=1)
    x = pixels(channels=1)
    torch.testing.assert_close(grey.model(x), model(x.expand(-1, 3, -1, -1)), atol=1e-5, rtol=1e-5)
    assert grey.preprocessing["mean"] == pytest.approx((0.2,))
    six = load_weights(folder_of(model, tmp_path), channels=6)
    torch.testing.assert_close(six.model(x.expand(-1, 6, -1, -1)), model(x.expand(-1, 3, -1, -1)), atol=1e-5, rtol=1e-5)
    assert len(six.preprocessing["std"]) == 6
    assert adapt_channels(k := torch.randn(2, 3, 4, 4), 3) is k


# Case B8.
def test_a_model_for_any_size_loads_with_one_switch(tmp_path, randomise):
    folder = folder_of(build(randomise), tmp_path)
    with pytest.raises(ValueError, match="dynamic_size"):
        load_weights(folder).model(pixels(40, 40))
    assert load_weights(folder, dynamic_size=True).model(pixels(40, 40)).shape == (2, 3)


# Case B10.
def test_a_prefix_that_no_wrapper_uses_is_an_error(tmp_path, randomise):
    state = build(randomise).state_dict()
    with pytest.raises(ValueError, match=r"but got foo\.: rename"):
        load_weights(file_of({f"foo.{n}": t for n, t in state.items()}, tmp_path))
    wrapped = load_weights(file_of({f"module.backbone.{n}": t for n, t in state.items()}, tmp_path))
    assert len(wrapped.report.matched) == len(state)


# Case B10.
def test_a_missing_or_extra_backbone_tensor_is_an_error_that_names_it(tmp_path, randomise):
    state = build(randomise, depth=3).state_dict()
    without = {n: t for n, t in state.items() if not n.startswith("blocks.1.")}
    with pytest.raises(ValueError, match=r"12 are missing: blocks\.1\.norm1\.weight"):
        load_weights(file_of(without, tmp_path))
    with pytest.raises(ValueError, match=r"have no place in the model: blocks\.0\.odd\.weight"):
        load_weights(file_of({**state, "blocks.0.odd.weight": torch.zeros(2)}, tmp_path))
    with pytest.raises(ValueError, match="patch embedding"):
        load_weights(file_of({"fc.weight": torch.zeros(2, 2)}, tmp_path))
    headless = {n: t for n, t in state.items() if not n.startswith("head.")}
    assert load_weights(file_of(headless, tmp_path)).model.config.num_classes == 0


# Cases B12 and B13.
def test_a_head_stays_only_for_the_same_names_in_the_same_order(tmp_path, randomise):
    model = build(randomise)
    folder = folder_of(model, tmp_path)
    kept = load_weights(folder, classes=NAMES)
    assert torch.equal(kept.model(pixels()), model(pixels()))
    for classes in (("dog", "cat", "owl"), ("a", "b"), ("a", "b", "c", "d")):
        loaded = load_weights(folder, classes=classes)
        assert loaded.classes == classes
        assert loaded.model.head.weight.shape == (len(classes), 64)
        assert loaded.model.head.weight.abs().max() == 0
        assert f"head re-initialised for {len(classes)} classes" in loaded.report.table()
        same = {n: t for n, t in loaded.model.state_dict().items() if not n.startswith("head.")}
        assert all(torch.equal(t, model.state_dict()[n]) for n, t in same.items())
    numbered = load_weights(file_of(model.state_dict(), tmp_path), classes=("0", "1", "2"))
    assert numbered.model.head.weight.abs().max() == 0


MOVED = {
    "bias table": {"position": "none", "relative_position": "bias"},
    "two axes": {"position": "learned_2d"},
    "every layer": {"position_at": "every_layer"},
    "two axes at every layer": {"position": "learned_2d", "position_at": "every_layer"},
    "sine": {"position": "sine_2d"},
    "sine in one row": {"position": "sine"},
    "quadratic": {"position": "none", "relative_position": "quadratic"},
    "rotary": {"position": "none", "relative_position": "rotary"},
    "rotary by index": {"relative_position": "rotary_index"},
    "mixed": {"relative_position": "rotary_mixed"},
}


@pytest.mark.parametrize("kind", MOVED)
def test_every_kind_of_position_moves_to_another_grid_as_it_does_at_run_time(kind, tmp_path, randomise):
    model = build(randomise, **MOVED[kind])
    folder = folder_of(model, tmp_path)
    assert torch.equal(load_weights(folder).model(pixels()), model(pixels()))
    x = pixels(64, 40)
    moved = load_weights(folder, image_size=(64, 40))
    dynamic = load_weights(folder, dynamic_size=True)
    assert dynamic.model.config == replace(
        model.config, dynamic_size=True, position_grid=dynamic.model.config.position_grid
    )
    torch.testing.assert_close(moved.model(x), dynamic.model(x), atol=1e-5, rtol=1e-5)


def test_options_that_change_shapes_are_refused(tmp_path, randomise):
    with pytest.raises(ValueError, match=r"tensors differ: .*file \(64"):
        load_weights(folder_of(build(randomise), tmp_path), width=128, heads=2)


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


# Cases H1 and H2.
@pytest.mark.parametrize("kind", ["pickle", "torch", "npz", "folder"])
def test_a_planted_program_never_runs(kind, tmp_path):
    marker, path = tmp_path / "ran", tmp_path / "weights"
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"model": Payload(marker)}))
    elif kind == "torch":
        torch.save({"model": Payload(marker)}, path)
    elif kind == "npz":
        np.savez(path, embedding=np.array([Payload(marker)], dtype=object))
        path = path.with_suffix(".npz")
    else:
        path.mkdir()
        torch.save({"patch_embed.proj.weight": torch.zeros(2, 2), "x": Payload(marker)}, path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="would run code"):
        load_weights(str(path))
    assert not marker.exists()


def test_files_that_are_no_weights_get_a_clear_error(tmp_path, randomise):
    cases = {
        "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
        "page": (b"<!doctype html><title>404</title>", "but it begins with"),
        "cut": (b"PK\x03\x04 and no more", "cut or damaged"),
        "halved": ((1000).to_bytes(8, "little") + b'{"a": 1', "whole safetensors"),
        "broken": (b"\x80\x02garbage", "damaged"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_weights(str(tmp_path / name))
    with zipfile.ZipFile(tmp_path / "script", "w") as archive:
        archive.writestr("model/constants.pkl", b"")
    with pytest.raises(ValueError, match="TorchScript"):
        load_weights(str(tmp_path / "script"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="found none"):
        load_weights(str(tmp_path / "empty"))
    torch.save([1, 2], tmp_path / "list")
    with pytest.raises(ValueError, match="named tensors"):
        load_weights(str(tmp_path / "list"))


@pytest.mark.filterwarnings("ignore")
def test_a_name_without_a_network_says_what_to_download_and_which_option_to_set():
    with pytest.raises(
        ValueError, match=r"vit_small_patch14_reg4_dinov2.*config\.json and model\.safetensors.*model\.weights"
    ):
        load_weights("vit_small_patch14_reg4_dinov2.lvd142m")
    with pytest.raises(ValueError, match="found none at no/such/place"):
        load_weights("no/such/place")


def test_a_timm_model_that_is_no_plain_vit_is_refused(tmp_path):
    from vit.models.timm_family import timm_options

    with pytest.raises(ValueError, match="its Beit"):
        timm_options(timm.create_model("beit_base_patch16_224", depth=1))
