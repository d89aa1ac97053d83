"""torchvision, OpenCLIP, Google's .npz and the papers' own .pth files under our names."""

import argparse
import json

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from vit.models import VisionTransformer, ViTConfig
from vit.models.weights import load_weights

TINY = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "heads": 1, "num_classes": 5}


def build(randomise, **options):
    return randomise(VisionTransformer(ViTConfig(**{**TINY, **options})))


def pixels(*size):
    return torch.randn(2, 3, *(size or (32, 32)), generator=torch.Generator().manual_seed(1))


def equal(ours, theirs, error_of):
    with torch.no_grad():
        return error_of(ours(pixels()), theirs(pixels())) < 1e-5


@pytest.mark.parametrize(
    "build_theirs",
    [
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 128, 96, num_classes=5),
        pytest.param(lambda: torchvision.models.vit_b_32(num_classes=5), marks=pytest.mark.slow),
    ],
)
def test_torchvisions_logits_are_ours(build_theirs, tmp_path, randomise, error_of):
    theirs = randomise(build_theirs())
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    loaded = load_weights(str(tmp_path / "weights.pth"))
    x = torch.randn(2, 3, theirs.image_size, theirs.image_size)
    with torch.no_grad():
        assert error_of(loaded.model(x), theirs(x)) < 1e-5
    assert loaded.model.config.norm_eps == 1e-6  # case B18
    assert loaded.preprocessing["std"] == (0.229, 0.224, 0.225)


class OpenClipTower(nn.Module):
    """OpenCLIP's image tower as its paper draws it, under its names."""

    def __init__(self, width=64, depth=2, heads=1, act=nn.GELU):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 8, 8, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(17, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList(self.block(width, heads, act) for _ in range(depth))
        self.proj = nn.Parameter(torch.zeros(width, 16))

    def block(self, width, heads, act):
        made = nn.Module()
        made.ln_1, made.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        made.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        made.mlp = nn.Sequential()
        made.mlp.add_module("c_fc", nn.Linear(width, 4 * width))
        made.mlp.add_module("gelu", act())
        made.mlp.add_module("c_proj", nn.Linear(4 * width, width))
        return made

    def forward(self, x):
        x = self.conv1(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.positional_embedding
        x = self.ln_pre(x)
        for block in self.transformer.resblocks:
            normed = block.ln_1(x)
            x = x + block.attn(normed, normed, normed, need_weights=False)[0]
            x = x + block.mlp(block.ln_2(x))
        return self.ln_post(x[:, 0])


class Quick(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


# Case B20.
@pytest.mark.parametrize(("quick", "name"), [(True, "quick_gelu"), (False, "gelu")])
def test_open_clips_features_are_ours_once_the_activation_is_known(quick, name, tmp_path, randomise, error_of):
    tower = randomise(OpenClipTower(act=Quick if quick else nn.GELU))
    state = {f"visual.{n}": t for n, t in tower.state_dict().items()}
    state |= {"positional_embedding": torch.zeros(7, 3), "token_embedding.weight": torch.zeros(9, 3)}
    save_file(state, tmp_path / "open_clip_model.safetensors")
    with pytest.raises(ValueError, match="option activation"):
        load_weights(str(tmp_path))
    assert equal(load_weights(str(tmp_path), activation=name).model, tower, error_of)
    vision = {"width": 64, "head_width": 64, "image_size": 32}
    config = {"model_cfg": {"quick_gelu": quick, "vision_cfg": vision}, "preprocess_cfg": {"mean": [0.1, 0.2, 0.3]}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    loaded = load_weights(str(tmp_path))
    assert loaded.model.config.activation == name
    assert loaded.preprocessing["mean"] == (0.1, 0.2, 0.3)
    assert equal(loaded.model, tower, error_of)
    assert set(loaded.report.dropped) == {"proj", "positional_embedding", "token_embedding.weight"}


def jax_tree(model, naming, scanned=False):
    """The weights of a model of ours as flax stores them."""
    s = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    c = model.config
    paper = naming == "vision_transformer"
    h, e = c.heads, c.width // c.heads
    tree = {
        "embedding/kernel": s["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": s["patch_embed.proj.bias"],
    }
    tree |= {"head/kernel": s["head.weight"].T, "head/bias": s["head.bias"]}
    tree["Transformer/posembed_input/pos_embedding" if paper else "pos_embedding"] = s["pos_embed"]
    if c.class_token:
        tree["cls"] = s["cls_token"]
    tree |= {"Transformer/encoder_norm/scale": s["norm.weight"], "Transformer/encoder_norm/bias": s["norm.bias"]}

    def attention(to, q, k, v, proj):
        for part, (weight, bias) in {"query": q, "key": k, "value": v}.items():
            tree[f"{to}/{part}/kernel"] = weight.T.reshape(c.width, h, e)
            tree[f"{to}/{part}/bias"] = bias.reshape(h, e)
        tree[f"{to}/out/kernel"], tree[f"{to}/out/bias"] = proj[0].T.reshape(h, e, c.width), proj[1]

    def dense(to, name):
        tree[f"{to}/kernel"], tree[f"{to}/bias"] = s[f"{name}.weight"].T, s[f"{name}.bias"]

    def norm(to, name):
        tree[f"{to}/scale"], tree[f"{to}/bias"] = s[f"{name}.weight"], s[f"{name}.bias"]

    names = ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
    names = names if paper else ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
    for i in range(c.depth):
        b, to = f"blocks.{i}.", f"Transformer/encoderblock_{i}/"
        weights, biases = np.split(s[f"{b}attn.qkv.weight"], 3), np.split(s[f"{b}attn.qkv.bias"], 3)
        proj = (s[f"{b}attn.proj.weight"], s[f"{b}attn.proj.bias"])
        norm(to + names[0], f"{b}norm1")
        attention(to + names[1], *zip(weights, biases, strict=True), proj)
        norm(to + names[2], f"{b}norm2")
        dense(f"{to}{names[3]}/Dense_0", f"{b}mlp.fc1")
        dense(f"{to}{names[3]}/Dense_1", f"{b}mlp.fc2")
    if c.pool == "attention":
        to = "MAPHead_0/"
        tree[f"{to}probe"] = s["attn_pool.latent"]
        kv, kv_bias = np.split(s["attn_pool.kv.weight"], 2), np.split(s["attn_pool.kv.bias"], 2)
        q, proj = ((s[f"attn_pool.{n}.weight"], s[f"attn_pool.{n}.bias"]) for n in ("q", "proj"))
        attention(f"{to}MultiHeadDotProductAttention_0", q, (kv[0], kv_bias[0]), (kv[1], kv_bias[1]), proj)
        norm(f"{to}LayerNorm_0", "attn_pool.norm")
        dense(f"{to}MlpBlock_0/Dense_0", "attn_pool.mlp.fc1")
        dense(f"{to}MlpBlock_0/Dense_1", "attn_pool.mlp.fc2")
    if scanned:
        ends = {name.partition("encoderblock_0/")[2] for name in tree if "encoderblock_0/" in name}
        for end in ends:
            layers = [tree.pop(f"Transformer/encoderblock_{i}/{end}") for i in range(c.depth)]
            tree[f"Transformer/encoderblock/{end}"] = np.stack(layers)
    return tree


JAX = {
    "vision_transformer": ("vision_transformer", {}, "", False),
    "vision_transformer, in optimizer state": ("vision_transformer", {}, "opt/target/", False),
    "big_vision, attention pooling": ("big_vision", {"pool": "attention", "class_token": False}, "params/", False),
    "big_vision, scanned, mean": (
        "big_vision",
        {"pool": "mean", "class_token": False, "final_norm": "before_pool"},
        "params/img/",
        True,
    ),
    "big_vision, class token without position": ("big_vision", {"prefix_position": False}, "params/", False),
}


@pytest.mark.parametrize("kind", JAX)
def test_googles_arrays_give_the_same_logits(kind, tmp_path, randomise, error_of):
    naming, options, prefix, scanned = JAX[kind]
    model = build(randomise, heads=4, activation="gelu_tanh", **options)
    tree = {prefix + name: value for name, value in jax_tree(model, naming, scanned).items()}
    if "img" in prefix:
        tree["params/txt/Embed_0/embedding"] = np.zeros((3, 4), np.float32)
    np.savez(tmp_path / "weights.npz", **tree)
    loaded = load_weights(str(tmp_path / "weights.npz"))
    assert equal(loaded.model, model, error_of)
    assert loaded.model.config.heads == 4
    assert loaded.preprocessing["mean"] == (0.5, 0.5, 0.5)


def test_timm_reads_the_same_from_googles_arrays(tmp_path, randomise, error_of):
    """timm's own reader is the reference for the layout of the arrays."""
    model = build(randomise, heads=4)
    np.savez(tmp_path / "weights.npz", **jax_tree(model, "vision_transformer"))
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 5}
    theirs = timm.create_model("vit_tiny_patch16_224", **small).eval()
    theirs.load_pretrained(str(tmp_path / "weights.npz"))
    loaded = load_weights(str(tmp_path / "weights.npz"), activation="gelu")
    assert equal(loaded.model, theirs, error_of)


def test_arrays_of_a_pre_training_head_lose_the_head_and_say_so(tmp_path, randomise):
    tree = jax_tree(build(randomise), "vision_transformer")
    tree |= {"pre_logits/kernel": np.zeros((64, 64), np.float32), "pre_logits/bias": np.zeros(64, np.float32)}
    np.savez(tmp_path / "weights.npz", **tree)
    loaded = load_weights(str(tmp_path / "weights.npz"))
    assert loaded.model.config.num_classes == 0
    assert {"head.weight", "pre_logits/kernel"} <= set(loaded.report.dropped)


def test_brain_floats_in_arrays_are_read(tmp_path, randomise, error_of):
    model = build(randomise, heads=4, activation="gelu_tanh").bfloat16().float()
    tree = {
        n: (np.ascontiguousarray(v).view(np.uint32) >> 16).astype(np.uint16).view("V2")
        for n, v in jax_tree(model, "big_vision").items()
    }
    np.savez(tmp_path / "weights.npz", **tree)
    assert equal(load_weights(str(tmp_path / "weights.npz")).model, model, error_of)


ORIGINALS = {
    "DINO": (
        {},
        lambda s: {
            "student": {},
            "teacher": {f"backbone.{n}": t for n, t in s.items() if "head" not in n}
            | {"head.mlp.0.weight": torch.zeros(3, 3), "head.last_layer.weight_g": torch.zeros(3, 1)},
            "args": argparse.Namespace(arch="vit_small"),
        },
    ),
    "MAE": (
        {},
        lambda s: {
            "model": {n: t for n, t in s.items() if "head" not in n}
            | {"mask_token": torch.zeros(1, 1, 8), "decoder_blocks.0.norm1.weight": torch.zeros(8)}
        },
    ),
    "DeiT": ({"num_classes": 5}, lambda s: {"model": s, "epoch": 3, "args": argparse.Namespace()}),
    "DeiT distilled": (
        {"num_classes": 5, "registers": 1, "head": "distilled"},
        lambda s: {
            "model": {
                n.replace("reg_token", "dist_token")
                .replace("head.labels", "head")
                .replace("head.teacher", "head_dist"): t
                for n, t in s.items()
            }
        },
    ),
    "DINOv2": (
        {"layer_scale": 1e-5, "mlp": "swiglu_packed", "mlp_dim": 96},
        lambda s: (
            {n.replace("fc1", "w12").replace("fc2", "w3"): t for n, t in s.items()} | {"mask_token": torch.zeros(1, 64)}
        ),
    ),
    "DINOv2 in chunks": (
        {"layer_scale": 1e-5},
        lambda s: {n.replace("blocks.0", "blocks.0.0").replace("blocks.1", "blocks.1.1"): t for n, t in s.items()},
    ),
    "data parallel": ({}, lambda s: {"state_dict": {f"module.backbone.{n}": t for n, t in s.items()}}),
}


@pytest.mark.parametrize("kind", ORIGINALS)
def test_the_papers_own_files_are_read(kind, tmp_path, randomise, error_of):
    options, wrap = ORIGINALS[kind]
    model = build(randomise, **{"num_classes": 0, **options})
    torch.save(wrap(model.state_dict()), tmp_path / "checkpoint")
    loaded = load_weights(str(tmp_path / "checkpoint"))
    assert equal(loaded.model, model, error_of)
    assert loaded.model.config.position_antialias == (kind != "DINOv2")


def test_dinov2_with_registers_has_positions_for_the_class_token_only(tmp_path, randomise, error_of):
    model = build(randomise, num_classes=0, registers=4, prefix_position=False)
    row = torch.randn(1, 1, 64)
    state = model.state_dict()
    state["pos_embed"] = torch.cat([row, state["pos_embed"]], dim=1)
    state["cls_token"] = state["cls_token"] - row
    state["register_tokens"] = state.pop("reg_token")
    torch.save(state, tmp_path / "w.pth")
    assert equal(load_weights(str(tmp_path / "w.pth")).model, model, error_of)


@pytest.mark.parametrize("gated", [False, True])
def test_dinov3s_own_file_is_read_with_its_masked_biases(gated, tmp_path, randomise, error_of):
    options = {"position": "none", "relative_position": "rotary", "registers": 4, "layer_scale": 1e-5, "norm_eps": 1e-5}
    model = build(randomise, num_classes=0, key_bias=False, mlp="swiglu" if gated else "dense", **options)
    state = {n.replace("reg_token", "storage_tokens"): t for n, t in model.state_dict().items()}
    for i in range(2):
        q, v = (state.pop(f"blocks.{i}.attn.{p}_bias") for p in "qv")
        state[f"blocks.{i}.attn.qkv.bias"] = torch.cat([q, torch.full((64,), torch.nan), v])
        state[f"blocks.{i}.attn.qkv.bias_mask"] = torch.cat([torch.ones(64), torch.zeros(64), torch.ones(64)])
    names = (("fc1_g", "w1"), ("fc1_x", "w2"), ("mlp.fc2", "mlp.w3")) if gated else ()
    for ours, theirs in names:
        state = {n.replace(ours, theirs): t for n, t in state.items()}
    state["rope_embed.periods"] = 100.0 ** (torch.arange(16) / 16)
    torch.save({"teacher": {f"backbone.{n}": t for n, t in state.items()}}, tmp_path / "w.pth")
    loaded = load_weights(str(tmp_path / "w.pth"), image_size=32)
    assert loaded.model.config.rotary_base == 100
    assert equal(loaded.model, model, error_of)


def test_an_eva_file_says_that_its_rotation_is_unknown(tmp_path, randomise):
    torch.save(build(randomise, key_bias=False).state_dict(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match="relative_position"):
        load_weights(str(tmp_path / "w.pth"))
    assert load_weights(str(tmp_path / "w.pth"), relative_position="none").model.config.key_bias is False
