"""What all pre-training objectives share: targets by hand, groups, plain checkpoints, fixed draws, what changes."""

import json

import pytest
import torch
from lightning.pytorch import Trainer

from vit.data import Folder, ImageDataModule
from vit.models.layers import PatchEmbed
from vit.tasks.autoregressive import Autoregressive
from vit.tasks.dino import DINO, HeadConfig
from vit.tasks.mae import MAE, DecoderConfig
from vit.tasks.masked import MaskedPatches
from vit.tasks.optim import OptimConfig
from vit.tasks.options import EncoderOptions
from vit.tasks.targets import colour_classes, colour_patches, normalised, to_images, to_patches

TINY = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 2}
OBJECTIVES = {
    "masked": lambda **o: MaskedPatches(**o),
    "masked 4x4": lambda **o: MaskedPatches(target="colours_4x4", **o),
    "masked pixels": lambda **o: MaskedPatches(target="pixels", **o),
    "MAE": lambda **o: MAE(decoder=DecoderConfig(width=16, depth=1, heads=2), **o),
    "causal": lambda **o: Autoregressive(attention="causal", **o),
    "prefix": lambda **o: Autoregressive(**o),
    "DINO": lambda **o: DINO(projection=HeadConfig(hidden=32, bottleneck=16, outputs=64), freeze_last=0, **o),
}
SINGLE = [name for name in OBJECTIVES if name != "DINO"]


def make(name, *, encoder=None, **options):
    return OBJECTIVES[name](encoder=EncoderOptions(**{**TINY, **(encoder or {})}), seed=3, **options)


def fit(model, root, tmp_path, *, batch_size=6, eval_batch_size=6, **options):
    common = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    common |= dict(enable_checkpointing=False, use_distributed_sampler=False, default_root_dir=tmp_path, max_epochs=1)
    data = Folder(root=str(root), batch_size=batch_size, eval_batch_size=eval_batch_size, num_workers=0, seed=1)
    trainer = Trainer(**{**common, **options})
    trainer.fit(model, ImageDataModule(data))
    return trainer


class TestTargets:
    def test_patches_are_flattened_as_the_embedding_multiplies_them(self):
        embed = PatchEmbed(4, 3, 7)
        images = torch.randn(2, 3, 8, 12)
        patches = to_patches(images, 4)
        want = patches @ embed.proj.weight.flatten(1).T + embed.proj.bias
        assert torch.allclose(embed(images), want, atol=1e-5)
        assert torch.equal(to_images(patches, (2, 3), 4), images)

    def test_mean_colours_have_three_bits_a_channel_by_hand(self):
        image = torch.zeros(1, 3, 2, 8, dtype=torch.uint8)
        image[..., 2:4] = 255
        image[0, 0, :, 4:6] = torch.tensor([[30, 34], [32, 32]])  # mean 32: the first of the second step of red
        image[0, 1, :, 6:8] = torch.tensor([[95, 95], [95, 96]])  # mean 95.25: still the third step of green
        assert colour_classes(image, 2).tolist() == [[[0], [511], [64], [16]]]
        assert torch.equal(colour_classes(image.float() / 255, 2), colour_classes(image, 2))
        assert colour_classes(image[:, :1], 2).tolist() == [[[0], [7], [1], [0]]]

    def test_grey_pictures_in_three_channels_use_the_eight_grey_classes(self):
        grey = torch.randint(0, 256, (50, 1, 4, 4), dtype=torch.uint8)
        three = colour_classes(grey.expand(-1, 3, -1, -1), 2)
        assert torch.equal(three, colour_classes(grey, 2) * 73)

    def test_a_4x4_version_has_the_mean_of_each_cell(self):
        image = torch.randint(0, 256, (1, 1, 8, 16), dtype=torch.uint8)
        cells = colour_classes(image, 8, side=4)
        assert cells.shape == (1, 2, 16)
        right_below = image[0, 0, 6:8, 14:16].float().mean()
        assert cells[0, 1, 15] == int(right_below // 32)

    @pytest.mark.parametrize("side", [1, 4])
    def test_the_way_back_gives_the_middle_of_each_class(self, side):
        classes = torch.randint(0, 512, (2, 4, side**2))
        patches = colour_patches(classes, 3, 8, side)
        pixels = to_images((patches * 255).round(), (2, 2), 8)
        assert torch.equal(colour_classes(pixels.to(torch.uint8), 8, side), classes)
        assert colour_patches(torch.tensor([[[64]]]), 3, 2)[0, 0].tolist() == [1.5 / 8] * 4 + [0.5 / 8] * 8

    def test_normalised_patches_have_mean_0_and_deviation_1_and_flat_ones_are_0(self):
        patches = torch.randn(2, 3, 48) * 5 + 2
        patches[0, 0] = 0.7
        out = normalised(patches)
        assert torch.allclose(out.mean(-1), torch.zeros(2, 3), atol=1e-3)
        assert torch.allclose(out.std(-1)[1], torch.ones(3), atol=1e-4)
        assert out[0, 0].abs().max() < 1e-3


VARIANTS = [
    {},
    {"pool": "mean", "class_token": False},
    {"pool": "attention", "registers": 2},
    {"relative_position": "rotary_mixed", "position": "none"},
    {"position_at": "every_layer", "relative_position": "bias", "channels": 1},
]


@pytest.mark.parametrize("encoder", VARIANTS, ids=str)
@pytest.mark.parametrize("name", SINGLE)
def test_every_trainable_parameter_learns_and_is_in_one_group(name, encoder):  # C18, C9
    model = make(name, encoder=encoder)
    images = torch.randint(0, 256, (4, model.config.channels, 16, 16), dtype=torch.uint8)
    model.loss(images, model.fixed_draws(torch.arange(4))).backward()
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert [n for n, p in trainable.items() if p.grad is None] == []
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert all(n.startswith("net.model.attn_pool.") for n in frozen)
    groups = model.parameter_groups()
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in trainable.values())
    names = {id(p): n for n, p in trainable.items()}
    for group in groups:
        for p in group["params"]:
            token = any(part in names[id(p)] for part in ("token", "pos_embed", "rel_pos", "rope"))
            assert (group["weight_decay"] == 0) == (p.ndim < 2 or token), names[id(p)]
        assert group["lr"] == 1e-3


@pytest.mark.parametrize("name", SINGLE)
def test_one_step_moves_all_that_learns_and_labels_do_not_matter(name, tmp_path, tiny_folder):
    def weights(shift):
        torch.manual_seed(0)
        model = make(name, optim=OptimConfig(lr=1e-3))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        step = model.training_step

        def relabelled(batch, batch_idx):
            return step(batch._replace(labels=(batch.labels + shift) % 3), batch_idx)

        model.training_step = relabelled
        fit(model, tiny_folder, tmp_path, max_epochs=-1, max_steps=3, limit_val_batches=0)
        return before, model.state_dict()

    before, after = weights(0)
    assert [n for n, v in after.items() if torch.equal(v, before[n])] == []
    _, other = weights(1)
    assert all(torch.equal(after[n], other[n]) for n in after)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_a_checkpoint_is_plain_and_rebuilds_the_objective_alone(name, tmp_path, tiny_folder, as_users_run):  # C21, H1
    model = make(name)
    trainer = fit(model, tiny_folder, tmp_path, limit_train_batches=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    raw = torch.load(tmp_path / "x.ckpt", weights_only=True)
    json.dumps(raw["hyper_parameters"])
    assert raw["vit_toolkit"]["classes"] == []
    again = type(model).load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert all(torch.equal(v, again.state_dict()[n]) for n, v in model.state_dict().items())
    assert dict(again.hparams) == dict(model.hparams)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_the_val_loss_asks_the_same_of_a_picture_whatever_the_batch(name, tmp_path, tiny_folder):  # E7
    values = []
    for size in (18, 5, 1):
        torch.manual_seed(0)
        model = make(name, optim=OptimConfig(lr=1e-12))
        trainer = fit(model, tiny_folder, tmp_path, eval_batch_size=size, limit_train_batches=1)
        values.append(float(trainer.callback_metrics["val_loss"]))
    assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-4)


def test_what_is_drawn_depends_on_the_step_in_training_and_on_the_picture_in_validation():
    model = make("MAE")
    rows = torch.tensor([5, 9, 5])
    draws = model.fixed_draws(rows)
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws, model.fixed_draws(rows))
    assert not torch.equal(draws, MAE(encoder=EncoderOptions(**TINY), seed=4).fixed_draws(rows))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("masked", {"pictures_every": -1}, "pictures_every"),
        ("masked", {"corrupted": 0.0}, "corrupted"),
        ("masked", {"target": "edges"}, "mean_colour, colours_4x4, pixels"),
        ("masked", {"encoder": {"image_size": 4}}, "at least 2 patches"),
        ("masked 4x4", {"encoder": {"patch_size": 2}}, "at least 4 pixels"),
        ("MAE", {"mask_ratio": 1.0}, "mask_ratio"),
        ("causal", {"encoder": {"image_size": 4}}, "at least 2 patches"),
        ("prefix", {"head_depth": -1}, "head_depth"),
        ("DINO", {"student_temperature": 0.0}, "student_temperature"),
        ("DINO", {"pictures_every": 5}, "makes no pictures"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(name, options, message, as_users_run):
    with pytest.raises(ValueError, match=message):
        make(name, **options)
