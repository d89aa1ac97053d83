"""Which picture comes when: seeded, resumable at any picture, sliced over processes.

A sampler yields keys (epoch, repeat, position). The random numbers of a picture come from its key and the
seed, so its pixels do not depend on which worker decodes it, on how workers start, or on where a run was
resumed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch.utils.data import Sampler

_MASK = (1 << 64) - 1
_PIECE = 65_536


class Key(NamedTuple):
    """A picture at a moment of training: epoch, which copy of it in the epoch, its position in the split."""

    epoch: int
    repeat: int
    position: int


def mix(*values: int) -> int:
    """A well-mixed 64-bit number from integers, the same on every machine.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied once per value.
    """
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from torch's CPU generator as seeded, then put it back: training's own draws stay apart."""
    generator = torch.random.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


class TrainSampler(Sampler[Key]):
    """Training pictures in an order drawn from (seed, epoch), sliced over processes.

    Process r of w takes every w-th picture of the order from the r-th on. All processes get equally many: the
    last `size mod world` pictures of the order, others in every epoch, are left out. Every picture comes once
    per epoch, unless `weights` or `repeats` say otherwise; its copies are numbered over all processes, so that
    no two look alike.

    Args:
        size: pictures in the split.
        seed: of the order.
        rank: this process, from 0.
        world: number of processes.
        weights: (size,) how often each picture comes, in proportion; an epoch still has `size` pictures. Each
            comes as often as its share says, rounded down or up by a draw (systematic sampling).
        strata: (size,) a class per picture; with weights, the shares of these are kept exactly too.
        repeats: copies of a picture that follow each other; an epoch then shows `size / repeats` pictures.
            Source: Hoffer et al., "Augment your batch" (2020).

    Raises:
        ValueError: fewer pictures than processes, weights that are no shares, or both weights and repeats.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        weights: Float[ndarray, " n"] | None = None,
        strata: Int[ndarray, " n"] | None = None,
        repeats: int = 1,
    ) -> None:
        if size < world:
            raise ValueError(f"expected at least one training picture per process, but got {size} for {world}.")
        if repeats < 1 or (repeats > 1 and weights is not None):
            raise ValueError(f"expected repeats of at least 1, and 1 with weights, but got {repeats}.")
        if weights is not None and (len(weights) != size or not _are_shares(weights)):
            raise ValueError("expected one finite weight of at least 0 per training picture, and one above 0.")
        self.size, self.seed, self.rank, self.world = size, seed, rank, world
        self.weights, self.strata, self.repeats = weights, strata, repeats
        self.epoch = 0
        self.started_epoch = 0
        self._resume = (0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterator; Lightning calls this at the start of each epoch."""
        self.epoch = epoch

    def resume_at(self, epoch: int, pictures: int) -> None:
        """Let iterators of `epoch` begin after that many pictures of all processes together."""
        self.epoch = epoch
        self._resume = (epoch, pictures // self.world)

    def __len__(self) -> int:
        """Pictures per epoch and process, also of an epoch that is resumed in its middle."""
        return self.size // self.world

    def __iter__(self) -> Iterator[Key]:
        epoch = self.started_epoch = self.epoch
        start = self._resume[1] if self._resume[0] == epoch else 0
        mine = slice(self.rank + start * self.world, len(self) * self.world, self.world)
        return self._keys(epoch, mine)

    def _keys(self, epoch: int, mine: slice) -> Iterator[Key]:
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        order = torch.randperm(self.size, generator=generator)
        copies: Int[ndarray, " n"] | None = None
        if self.weights is not None:
            positions, copies = _weighted(order.numpy(), self.weights, self.strata, generator)
            shuffled = torch.randperm(self.size, generator=generator).numpy()
            positions, copies = positions[shuffled], copies[shuffled]
        else:
            positions = order.numpy().repeat(self.repeats)[: self.size] if self.repeats > 1 else order.numpy()
            if self.repeats > 1:
                copies = np.arange(self.size) % self.repeats
        positions = positions[mine]
        copies = None if copies is None else copies[mine]
        # In pieces: as a list of Python numbers a large epoch would take nine times the memory.
        for start in range(0, len(positions), _PIECE):
            piece = positions[start : start + _PIECE].tolist()
            numbers = [0] * len(piece) if copies is None else copies[start : start + _PIECE].tolist()
            for position, repeat in zip(piece, numbers, strict=True):
                yield Key(epoch, repeat, position)


def _are_shares(weights: Float[ndarray, " n"]) -> bool:
    return bool(np.isfinite(weights).all() and (weights >= 0).all() and (weights > 0).any())


def _weighted(
    order: Int[ndarray, " n"],
    weights: Float[ndarray, " n"],
    strata: Int[ndarray, " n"] | None,
    generator: torch.Generator,
) -> tuple[Int[ndarray, " n"], Int[ndarray, " n"]]:
    """As many positions as there are pictures, each by its share, and the number of each among its copies.

    Systematic sampling: the shares lie end to end on a line, in random order within each stratum, and are met
    by n equally spaced marks with one random offset.
    """
    if strata is not None:
        order = order[np.argsort(strata[order], kind="stable")]
    ends = np.cumsum(weights[order], dtype=np.float64)
    marks = (np.arange(len(order)) + torch.rand(1, generator=generator, dtype=torch.float64).item()) / len(order)
    slots = np.searchsorted(ends, marks * ends[-1], side="right")
    slots = np.minimum(slots, np.flatnonzero(weights[order])[-1])  # rounding may pass the last end
    first = np.searchsorted(slots, slots, side="left")
    return order[slots], np.arange(len(order)) - first


class EvalSampler(Sampler[Key]):
    """Every picture exactly once over all processes, in order, without padding.

    Processes may get one picture more or less than others, and none when there are fewer pictures than
    processes.

    Args:
        size: pictures in the split.
        rank: this process, from 0.
        world: number of processes.
    """

    def __init__(self, size: int, *, rank: int = 0, world: int = 1) -> None:
        self.positions = range(rank, size, world)

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Key]:
        return (Key(0, 0, position) for position in self.positions)
