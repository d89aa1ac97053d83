"""Stored features in the place of pictures, for a head on a frozen backbone."""

from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.data import Dataset

from vit.data.batch import Sample
from vit.data.sampler import Key
from vit.data.table import DataTable


class Vectors(Dataset[Sample]):
    """One split of the table, with a stored vector for each picture; nothing is decoded.

    Args:
        table: the data table.
        split: name of the split.
        x: the vectors, in the order of the split.
        index: row of the picture that each was made of: another one than its place has where that is damaged.

    Raises:
        ValueError: another number of vectors than of pictures.
    """

    def __init__(self, table: DataTable, split: str, x: Float[Tensor, "n d"], index: Int64[Tensor, " n"]) -> None:
        self.table, self.x, self.index = table, x, index.tolist()
        if len(x) != len(table.rows(split)):
            raise ValueError(
                f"expected a vector for each of the {len(table.rows(split))} pictures of {split}, but got {len(x)}."
            )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: int | Key) -> Sample:
        position = key.position if isinstance(key, Key) else key
        row = self.index[position]
        return Sample(self.x[position], self.table.target(row), row, self.table.weight(row))
