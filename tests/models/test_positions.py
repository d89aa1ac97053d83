"""vit/models/positions.py: where a position embedding lands on another grid."""

import pytest
import torch

from vit.models.positions import resample_table


def test_the_same_grid_gives_the_same_tensor():
    table = torch.randn(1, 33, 4)
    assert resample_table(table, (4, 8), (4, 8), prefix=1) is table


# Case B2.
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_prefix_rows_stay_and_a_ramp_along_x_stays_a_ramp_along_x(prefix):
    ramp = torch.arange(8.0).expand(4, 8)
    grid = torch.stack([ramp, ramp.flip(1)], dim=-1).flatten(0, 1)
    head = torch.randn(prefix, 2)
    table = torch.cat([head, grid])[None]
    old = (4, 8)
    for new in ((8, 4), (16, 16), (4, 8)):
        table = resample_table(table, old, new, prefix=prefix)
        old = new
        assert torch.equal(table[0, :prefix], head)
        moved = table[0, prefix:, 0].unflatten(0, new)
        assert moved.diff(dim=1).min() > -1e-5
        torch.testing.assert_close(moved, moved[:1].expand_as(moved), atol=1e-5, rtol=0)
        torch.testing.assert_close(moved.flip(1), table[0, prefix:, 1].unflatten(0, new), atol=1e-4, rtol=0)


# Case B4.
def test_the_number_of_rows_is_exact_for_every_size():
    table = torch.randn(1, 1 + 37 * 37, 1)
    for size in range(14, 2000, 14):
        assert resample_table(table, (37, 37), (size // 14, 3), prefix=1).shape[1] == 1 + size // 14 * 3


def test_half_precision_tables_are_resampled_in_float32():
    table = torch.randn(1, 16, 8).half()
    exact = resample_table(table.float(), (4, 4), (7, 7), prefix=0)
    assert torch.equal(resample_table(table, (4, 4), (7, 7), prefix=0), exact.half())


def test_a_table_of_another_length_is_refused():
    with pytest.raises(ValueError, match="1 prefix rows and 4x4 patches, but got 16 rows"):
        resample_table(torch.zeros(1, 16, 2), (4, 4), (2, 2), prefix=1)
