"""The masked autoencoder: what the encoder sees, where the decoder puts it, and the loss of the reference."""

from types import SimpleNamespace

import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from vit.tasks.mae import MAE, DecoderConfig
from vit.tasks.options import EncoderOptions
from vit.tasks.targets import to_patches

TINY = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 2}


def tiny(normalise_targets=True, **encoder):
    decoder = DecoderConfig(width=16, depth=1, heads=2)
    return MAE(encoder=EncoderOptions(**{**TINY, **encoder}), decoder=decoder, normalise_targets=normalise_targets)


class Fixed(torch.nn.Module):
    """Gives the same output whatever comes."""

    def __init__(self, **values):
        super().__init__()
        self.output = SimpleNamespace(hidden_states=None, attentions=None, **values)

    def forward(self, *args, **kwargs):
        return self.output


def hidden_pixels(kept):
    hidden = torch.ones(len(kept), 16).scatter(1, kept, 0.0).view(-1, 1, 4, 4)
    return torch.nn.functional.interpolate(hidden, scale_factor=4) > 0


@torch.no_grad()
def test_visible_tokens_and_predictions_do_not_depend_on_hidden_pixels():
    model = tiny().eval()
    images, draws = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8), torch.rand(3, 16, 1)
    tokens, kept = model.encode_visible(images, draws)
    assert tokens.shape == (3, 1 + 4, 32), "the class token and a quarter of 16 patches"
    other = torch.where(hidden_pixels(kept), 255 - images, images)
    assert torch.equal(model.encode_visible(other, draws)[0], tokens)
    assert torch.equal(model.predict(other, draws)[0], model.predict(images, draws)[0])
    seen = torch.where(hidden_pixels(kept), images, 255 - images)
    assert not torch.allclose(model.predict(seen, draws)[0], model.predict(images, draws)[0])
    assert float(model.loss(other, draws)) != float(model.loss(images, draws)), "the targets are the hidden pixels"


@torch.no_grad()
def test_an_encoder_that_sees_all_gives_the_plain_models_tokens():
    for encoder in ({}, {"relative_position": "rotary_index", "position": "none"}, {"relative_position": "bias"}):
        model = tiny(**encoder).eval()
        model.visible = 16
        images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
        tokens, kept = model.encode_visible(images, torch.rand(2, 16, 1))
        plain = model.model.forward_features(model.net.normalise(images))
        places = torch.cat([torch.zeros(2, 1, dtype=torch.int64), kept + 1], 1)
        assert torch.allclose(tokens, plain.gather(1, places[..., None].expand_as(tokens)), atol=1e-5)


@torch.no_grad()
def test_the_decoder_puts_each_token_in_its_place():
    model = tiny().eval()
    decoder = model.decoder
    decoder.blocks = torch.nn.ModuleList()
    decoder.norm = decoder.out = torch.nn.Identity()
    tokens, kept = torch.randn(1, 1 + 2, 32), torch.tensor([[7, 2]])
    out = decoder(tokens, kept) - decoder.positions
    embedded = decoder.embed(tokens)
    assert torch.allclose(out[0, 7], embedded[0, 1], atol=1e-5)
    assert torch.allclose(out[0, 2], embedded[0, 2], atol=1e-5)
    others = [i for i in range(16) if i not in (2, 7)]
    assert torch.allclose(out[0, others], decoder.mask_token[0].expand(14, -1), atol=1e-5)


@torch.no_grad()
def test_the_loss_is_the_references():
    images, draws = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8), torch.rand(3, 16, 1)
    for norm in (True, False):
        model = tiny(normalise_targets=norm).eval()
        predicted, hidden = model.predict(images, draws)
        # transformers flattens a patch by row, column, channel.
        theirs = predicted.unflatten(2, (3, 16)).transpose(2, 3).flatten(2)
        sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        sizes |= {f"decoder_{name}": value for name, value in sizes.items()}
        reference = ViTMAEForPreTraining(ViTMAEConfig(image_size=16, patch_size=4, norm_pix_loss=norm, **sizes))
        reference.vit = Fixed(last_hidden_state=None, ids_restore=None, mask=hidden.float())
        reference.decoder = Fixed(logits=theirs)
        want = reference(model.net.normalise(images)).loss
        assert torch.allclose(model.loss(images, draws), want, rtol=1e-5)


@torch.no_grad()
def test_a_drawing_shows_true_patches_where_they_are_visible_and_grey_where_hidden():
    model = tiny().eval()
    images, draws = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8), torch.rand(2, 16, 1)
    shown = model.reconstruct(images, draws)
    _, hidden = model.predict(images, draws)
    true, seen, made = (to_patches(part, 4) for part in shown)
    assert torch.allclose(shown.pictures, images / 255, atol=1e-5)
    assert (seen[hidden] == 0.5).all()
    assert torch.equal(seen[~hidden], true[~hidden])
    assert torch.equal(made[~hidden], true[~hidden])
    assert not torch.allclose(made[hidden], true[hidden])
