"""vit/models/timm_family.py: timm's models give the same logits here, from folders and from bare files."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

from vit.models.weights import load_weights

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5}
REGISTERS = {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5}
MODELS = {
    "class token": ("vit_tiny_patch16_224", {}),
    "no class token, mean": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
    "registers, LayerScale": ("vit_small_patch14_reg4_dinov2", {}),
    "LayerScale, class token without position": ("deit3_small_patch16_224", {}),
    "class and distillation token": ("deit_tiny_distilled_patch16_224", {}),
    "attention pooling, tanh": ("vit_base_patch16_siglip_224", {"act_layer": "gelu_tanh"}),
    "query and key norm": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "packed SwiGLU": ("vit_giant_patch14_dinov2", {"mlp_ratio": 3.0}),
    "CLIP": ("vit_base_patch16_clip_quickgelu_224", {}),
    "rotary, SwiGLU with norms (EVA-02 large)": ("eva02_large_patch14_clip_224", {}),
    "rotary, fused (EVA-02 tiny)": ("eva02_tiny_patch14_224", {"global_pool": "avg"}),
    "no rotation (EVA giant)": ("eva_giant_patch14_224", {}),
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "DINOv3 with biases": ("vit_small_patch16_dinov3_qkvb", {}),
    "DINOv3, SwiGLU": ("vit_huge_plus_patch16_dinov3", {}),
    "axial RoPE-ViT": ("vit_small_patch16_rope_224", {}),
    "mixed RoPE-ViT": ("vit_small_patch16_rope_mixed_ape_224", {}),
    "rotary, registers, mean": ("vit_base_patch16_rope_reg1_gap_256", {}),
}


def folder_of(model, name, arguments, folder):
    """What timm's own export writes."""
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    cfg = {**model.pretrained_cfg, "num_classes": 5}
    values = {"architecture": name, "num_classes": 5, "model_args": arguments, "pretrained_cfg": cfg}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def make(kind, randomise):
    name, changes = MODELS[kind]
    arguments = {**SMALL, **changes}
    model = timm.create_model(name, **arguments)
    randomise(model)
    return model, name, {k: v for k, v in arguments.items() if k != "num_classes"}


@pytest.mark.parametrize("kind", MODELS)
def test_a_timm_folder_gives_timms_logits(kind, tmp_path, randomise, error_of):
    model, name, arguments = make(kind, randomise)
    loaded = load_weights(f"local-dir:{folder_of(model, name, arguments, tmp_path / 'timm')}")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs, ours = model(x), loaded.model(x)
    assert theirs.std() > 0.1
    assert error_of(ours, theirs) < 1e-5
    assert loaded.preprocessing["mean"] == tuple(model.pretrained_cfg["mean"])  # case B14
    assert loaded.preprocessing["image_size"] == 32
    assert loaded.classes == ("0", "1", "2", "3", "4")
