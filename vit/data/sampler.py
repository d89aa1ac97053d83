"""Which picture comes when: seeded, resumable at any picture, sliced over processes.

A sampler yields keys (epoch, repeat, position). The random numbers of a picture come from its key and the
seed, so its pixels do not depend on which worker decodes it, on how workers start, or on where a run was
resumed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

_MASK = (1 << 64) - 1


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
    """Every picture once per epoch, in an order drawn from (seed, epoch), sliced over processes.

    Process r of w takes every w-th picture of the order from the r-th on. All processes get equally many: the
    last `size mod world` pictures of the order, others in every epoch, are left out.

    Args:
        size: pictures in the split.
        seed: of the order.
        rank: this process, from 0.
        world: number of processes.

    Raises:
        ValueError: fewer pictures than processes.
    """

    def __init__(self, size: int, *, seed: int, rank: int = 0, world: int = 1) -> None:
        if size < world:
            raise ValueError(f"expected at least one training picture per process, but got {size} for {world}.")
        self.size, self.seed, self.rank, self.world = size, seed, rank, world
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
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(mix(self.seed, epoch)))
        mine = order[self.rank : len(self) * self.world : self.world][start:]
        return (Key(epoch, 0, position) for position in mine.tolist())


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
