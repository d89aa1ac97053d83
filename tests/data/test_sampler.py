import numpy as np
import pytest
import torch

from vit.data.sampler import EvalSampler, Key, TrainSampler, mix, seeded


def positions(sampler, epoch=0):
    sampler.set_epoch(epoch)
    return [key.position for key in sampler]


# E9
def test_evaluation_covers_every_picture_once_for_any_number_of_processes():
    for size in range(1, 21):
        for world in range(1, 5):
            ranks = [EvalSampler(size, rank=rank, world=world) for rank in range(world)]
            seen = [key.position for sampler in ranks for key in sampler]
            assert sorted(seen) == list(range(size))
            assert [len(sampler) for sampler in ranks] == [len(list(sampler)) for sampler in ranks]


def test_training_ranks_share_an_epoch_equally_without_overlap():
    for size in range(4, 21):
        for world in range(1, 5):
            ranks = [positions(TrainSampler(size, seed=1, rank=rank, world=world)) for rank in range(world)]
            seen = [position for rank in ranks for position in rank]
            assert {len(rank) for rank in ranks} == {size // world}
            assert len(set(seen)) == len(seen) == size // world * world


def test_pictures_left_out_by_several_processes_differ_from_epoch_to_epoch():
    left_out = set()
    for epoch in range(20):
        seen = {p for rank in range(3) for p in positions(TrainSampler(11, seed=0, rank=rank, world=3), epoch)}
        left_out |= set(range(11)) - seen
    assert len(left_out) == 11


# C14, C19
def test_the_order_depends_on_seed_and_epoch_alone():
    first = positions(TrainSampler(100, seed=1))
    assert first == positions(TrainSampler(100, seed=1))
    assert first != positions(TrainSampler(100, seed=2))
    assert first != positions(TrainSampler(100, seed=1), epoch=1)
    assert sorted(first) == list(range(100))


@pytest.mark.parametrize("world", [1, 2])
def test_an_epoch_goes_on_from_any_picture_and_the_next_is_whole(world):
    for rank in range(world):
        whole = TrainSampler(24, seed=5, rank=rank, world=world)
        epochs = [positions(whole, epoch) for epoch in range(3)]
        for start in range(0, 24, world):
            resumed = TrainSampler(24, seed=5, rank=rank, world=world)
            resumed.resume_at(1, start)
            assert [key.position for key in resumed] == epochs[1][start // world :]
            assert len(resumed) == len(whole)
            assert positions(resumed, 2) == epochs[2]


def test_keys_carry_their_epoch():
    sampler = TrainSampler(3, seed=0)
    sampler.set_epoch(7)
    assert {key.epoch for key in sampler} == {7}
    assert sampler.started_epoch == 7
    assert isinstance(next(iter(sampler)), Key)


def test_fewer_pictures_than_processes_are_refused():
    with pytest.raises(ValueError, match="3 for 4"):
        TrainSampler(3, seed=0, world=4)


def test_mix_spreads_neighbouring_numbers_over_all_bits():
    keys = [(seed, epoch, index, 0) for seed in range(4) for epoch in range(8) for index in range(500)]
    mixed = np.array([mix(*key) for key in keys], dtype=np.uint64)
    low = mixed & np.uint64(0xFFFFFFFF)  # torch's CPU generator takes these bits
    assert len(np.unique(low)) >= len(keys) - 2
    bits = (mixed[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.02
    assert np.abs(np.corrcoef(bits.T.astype(float)) - np.eye(64)).max() < 0.05
    assert mix(1, 2) != mix(2, 1)
    assert 0 <= mix(-1, 2**70) < 2**64


def test_drawing_for_a_picture_leaves_trainings_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    with seeded(3):
        inside = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(inside, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    with pytest.raises(RuntimeError), seeded(3):
        raise RuntimeError


def drawn(seed=0, epoch=0, world=1, **options):
    samplers = [TrainSampler(120, seed=seed, rank=rank, world=world, **options) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


LABELS = np.repeat(np.arange(3), [90, 20, 10])
BALANCED = {"weights": 1 / np.bincount(LABELS)[LABELS], "strata": LABELS}


# A28
@pytest.mark.parametrize("world", [1, 2, 3])
def test_balanced_sampling_shows_classes_equally_often_and_no_copy_twice(world):
    ranks = drawn(world=world, **BALANCED)
    keys = [key for rank in ranks for key in rank]
    assert len(keys) == len(set(keys)) == 120
    assert np.bincount([LABELS[key.position] for key in keys]).tolist() == [40, 40, 40]
    assert sorted(keys) == sorted(drawn(**BALANCED)[0])
    for rank in ranks:
        share = np.bincount([LABELS[key.position] for key in rank], minlength=3) / len(rank)
        assert np.abs(share - 1 / 3).max() < 0.2
    copies = {}
    for key in keys:
        copies.setdefault(key.position, []).append(key.repeat)
    assert all(sorted(repeats) == list(range(len(repeats))) for repeats in copies.values())
    assert [len(copies[p]) for p in range(110, 120)] == [4] * 10


# A28
def test_weighted_orders_change_with_seed_and_epoch_and_resume_anywhere():
    first = drawn(**BALANCED)[0]
    assert first == drawn(**BALANCED)[0]
    assert first != drawn(seed=1, **BALANCED)[0]
    assert first != drawn(epoch=1, **BALANCED)[0]
    for start in (0, 1, 60, 119):
        resumed = TrainSampler(120, seed=0, **BALANCED)
        resumed.resume_at(0, start)
        assert list(resumed) == first[start:]


def test_weights_are_met_on_average():
    weights = np.random.default_rng(0).random(120) ** 3
    weights[:10] = 0
    counts = np.zeros(120)
    for epoch in range(50):
        for key in drawn(epoch=epoch, weights=weights)[0]:
            counts[key.position] += 1
    assert np.abs(counts / 50 - 120 * weights / weights.sum()).max() < 0.35
    assert counts[:10].sum() == 0


def test_repeated_pictures_follow_each_other_and_fill_an_epoch():
    keys = drawn(repeats=3)[0]
    assert len(keys) == len(set(keys)) == 120
    assert len({key.position for key in keys}) == 40
    assert all([k.repeat for k in keys[i : i + 3]] == [0, 1, 2] for i in range(0, 120, 3))
    assert all(len({k.position for k in keys[i : i + 3]}) == 1 for i in range(0, 120, 3))


@pytest.mark.parametrize("weights", [np.zeros(120), np.full(120, np.nan), np.ones(119), -np.ones(120)])
def test_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match="finite weight"):
        TrainSampler(120, seed=0, weights=weights)
    with pytest.raises(ValueError, match="repeats"):
        TrainSampler(120, seed=0, weights=np.ones(120), repeats=2)
