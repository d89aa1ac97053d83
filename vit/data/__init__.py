"""Files -> seeded, resumable batches. Knows no model."""

from typing import TYPE_CHECKING

from vit.data.augment import Augmentation
from vit.data.batch import Batch
from vit.data.cifar import CIFAR10, CIFAR100
from vit.data.csv_table import Table
from vit.data.digits import Digits
from vit.data.folder import Folder
from vit.data.header import DecodeError
from vit.data.hugging_face import HuggingFace
from vit.data.idx import IDX, MNIST, FashionMNIST
from vit.data.imagenet import ImageNet
from vit.data.source import Source
from vit.data.split import read_split, write_split
from vit.data.table import DataTable, Rows, write_table
from vit.data.transforms import Preprocessing, evaluation_transform, training_transform
from vit.data.webdataset import WebDataset

if TYPE_CHECKING:
    from vit.data.module import ImageDataModule

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "IDX",
    "MNIST",
    "Augmentation",
    "Batch",
    "DataTable",
    "DecodeError",
    "Digits",
    "FashionMNIST",
    "Folder",
    "HuggingFace",
    "ImageDataModule",
    "ImageNet",
    "Preprocessing",
    "Rows",
    "Source",
    "Table",
    "WebDataset",
    "evaluation_transform",
    "read_split",
    "training_transform",
    "write_split",
    "write_table",
]


def __getattr__(name: str) -> object:
    # Lightning is imported with the datamodule only: a spawned worker process starts in half the time without.
    if name == "ImageDataModule":
        from vit.data.module import ImageDataModule

        return ImageDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
