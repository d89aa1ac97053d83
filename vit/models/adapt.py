"""Weights of one model for another size, patch or number of channels, and the report of what became of each tensor."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vit.models.config import ViTConfig
from vit.models.positions import resample_table
from vit.models.relative import resample_offsets
from vit.models.vit import VisionTransformer


@dataclass(kw_only=True)
class Report:
    """What became of each tensor.

    Args:
        matched: names of those taken as they are.
        resized: name, and how it changed.
        new: name, and why it starts anew.
        dropped: name of the file's tensor, and why it is not used.
        notes: what else to know, such as what the file does not say.
    """

    matched: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def table(self) -> str:
        """The report as text, one line per tensor that was not simply taken."""
        lines = [f"{'matched':<18}{len(self.matched)} tensors"]
        for title, entries in (
            ("resized", self.resized),
            ("newly initialised", self.new),
            ("dropped", self.dropped),
        ):
            lines.append(f"{title:<18}{len(entries)} tensors")
            lines += [f"    {name}: {what}" for name, what in list(entries.items())[:40]]
            lines += [f"    and {len(entries) - 40} more"] if len(entries) > 40 else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def resize_patches(kernel: Float[Tensor, "d c p p"], patch_size: int) -> Float[Tensor, "d c q q"]:
    """The patch embedding for another patch size, so that resized patches keep their tokens.

    With B the matrix that resizes a patch of the old size to the new one, the new kernel is the pseudo-inverse of
    its transpose times the old one (Beyer et al. 2023, FlexiViT, eq. 4). To a smaller patch that is only a least-
    squares answer; a constant is then added, so that patches of one colour keep their tokens there too.

    Args:
        kernel: of the convolution.
        patch_size: side wanted, in pixels.
    """
    old = kernel.shape[-1]
    if old == patch_size:
        return kernel
    basis = torch.eye(old * old).unflatten(1, (1, old, old))
    b = F.interpolate(basis, size=(patch_size, patch_size), mode="bicubic", antialias=True).flatten(1).T  # (q², p²)
    inverse = torch.linalg.pinv(b.T.double()).float()  # (q², p²)
    flat = kernel.float().flatten(2)
    moved = flat @ inverse.T
    moved = moved + (flat.sum(-1, keepdim=True) - moved.sum(-1, keepdim=True)) / patch_size**2
    return moved.unflatten(2, (patch_size, patch_size)).to(kernel.dtype)


def adapt_channels(kernel: Float[Tensor, "d c p p"], channels: int) -> Float[Tensor, "d k p p"]:
    """The patch embedding for another number of channels.

    One channel gets the sum, so that grey pictures give the tokens of their colour copies; more get the old ones in
    turn, scaled by the ratio of the numbers.

    Args:
        kernel: of the convolution.
        channels: wanted.
    """
    old = kernel.shape[1]
    if channels == old:
        return kernel
    if channels == 1:
        return kernel.sum(dim=1, keepdim=True)
    return kernel[:, torch.arange(channels) % old] * (old / channels)


def fit(
    state: dict[str, Tensor], source: ViTConfig, target: ViTConfig, report: Report, *, keep_head: bool
) -> VisionTransformer:
    """A model of `target` with the weights of `source`, in evaluation mode.

    Args:
        state: all tensors of a model of `source`, by our names.
        source: what the tensors are from.
        target: what is wanted.
        report: gets an entry for every tensor.
        keep_head: whether the head's weights are taken too.

    Raises:
        ValueError: a tensor of the backbone is missing, left over, or of a shape that cannot be changed.
    """
    model = VisionTransformer(target)
    wanted = model.state_dict()
    with torch.device("meta"):
        known = VisionTransformer(source).state_dict()
    _check_complete(state, known)
    moved = _move({name: tensor.to(torch.float32) for name, tensor in state.items()}, source, target, report)
    for name in list(moved):
        if name.startswith("head.") and not keep_head:
            report.dropped[name] = "head re-initialised for other classes"
            del moved[name]
        elif name not in wanted:
            report.dropped[name] = "the options leave it out"
            del moved[name]
    wrong = [n for n, tensor in moved.items() if tensor.shape != wanted[n].shape]
    if wrong:
        shown = "; ".join(f"{n}: file {tuple(moved[n].shape)}, model {tuple(wanted[n].shape)}" for n in wrong[:5])
        raise ValueError(f"expected options that fit the weights, but {len(wrong)} tensors differ: {shown}.")
    for name in wanted:
        if name not in moved:
            head = name.startswith("head.")
            report.new[name] = "head re-initialised" if head else "not in the file; the options ask for it"
    report.matched += [n for n in moved if n not in report.resized]
    model.load_state_dict({**wanted, **moved})
    return model.eval()


def _check_complete(state: dict[str, Tensor], known: dict[str, Tensor]) -> None:
    missing = [n for n in known if n not in state and not n.startswith("head.")]
    extra = [n for n in state if n not in known]
    if missing or extra:
        parts = [
            f"{len(names)} {what}: {_some(names)}"
            for names, what in ((missing, "are missing"), (extra, "have no place in the model"))
            if names
        ]
        raise ValueError(f"expected every tensor of the backbone, but {'; '.join(parts)}.")
    wrong = [n for n, tensor in state.items() if tensor.shape != known[n].shape]
    if wrong:
        shown = "; ".join(f"{n}: file {tuple(state[n].shape)}, expected {tuple(known[n].shape)}" for n in wrong[:5])
        raise ValueError(f"expected tensors that fit together, but {len(wrong)} do not: {shown}.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _move(state: dict[str, Tensor], old: ViTConfig, new: ViTConfig, report: Report) -> dict[str, Tensor]:
    """Resize what depends on the grid, the patch and the channels."""
    kernel = state["patch_embed.proj.weight"]
    changed = adapt_channels(resize_patches(kernel, new.patch_size), new.channels)
    if changed is not kernel:
        report.resized["patch_embed.proj.weight"] = f"{tuple(kernel.shape)} -> {tuple(changed.shape)}"
        state["patch_embed.proj.weight"] = changed
    if old.position == new.position == "learned":
        _move_prefix(state, old, new, report)
    for name, tensor in list(state.items()):
        place = None
        if old.position == new.position == "learned" and (name == "pos_embed" or name.startswith("layer_pos_embed.")):
            prefix = new.prefix_tokens if new.prefix_position else 0
            place = resample_table(tensor, old.grid, new.grid, prefix=prefix, antialias=new.position_antialias)
        elif name.endswith((".rows", ".columns")) and old.position == new.position == "learned_2d":
            axis = int(name.endswith(".columns"))
            before, after = (old.grid[axis], 1), (new.grid[axis], 1)
            place = resample_table(tensor, before, after, prefix=0, antialias=new.position_antialias)
        elif name.startswith("rel_pos.") and name.endswith(".table"):
            place = resample_offsets(tensor, new.grid)
        if place is not None and place is not tensor:
            report.resized[name] = f"grid {old.grid[0]}x{old.grid[1]} -> {new.grid[0]}x{new.grid[1]}"
            state[name] = place
    return state


def _move_prefix(state: dict[str, Tensor], old: ViTConfig, new: ViTConfig, report: Report) -> None:
    """Position rows of the prefix tokens: kept, added, dropped, or added into the tokens themselves."""
    before = (old.class_token, old.registers, old.prefix_position)
    after = (new.class_token, new.registers, new.prefix_position)
    if before == after:
        return
    tables = [n for n in state if n == "pos_embed" or n.startswith("layer_pos_embed.")]
    for name in tables:
        rows = state[name]
        own = old.prefix_tokens if old.prefix_position else 0
        prefix, patches = rows[:, :own], rows[:, own:]
        if not own:
            prefix = rows.new_zeros(1, old.prefix_tokens, rows.shape[2])
        first, others = prefix[:, : int(old.class_token)], prefix[:, int(old.class_token) :]
        if not new.prefix_position and old.prefix_position and name == "pos_embed":
            if old.class_token:
                state["cls_token"] = state["cls_token"] + first
            if old.registers:
                state["reg_token"] = state["reg_token"] + others
        made = [patches]
        if new.prefix_position:
            token = first if old.class_token else rows.new_zeros(1, 1, rows.shape[2])
            room = rows.new_zeros(1, max(new.registers - old.registers, 0), rows.shape[2])
            made = [token[:, : int(new.class_token)], others[:, : new.registers], room, patches]
        state[name] = torch.cat(made, dim=1)
        report.resized[name] = f"{rows.shape[1]} -> {state[name].shape[1]} rows of prefix and patches"
