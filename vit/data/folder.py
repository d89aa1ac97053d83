"""Class folders: root/{train,val,test}/class/picture, or root/class/picture, which is then split."""

import contextlib
import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.decode import SUFFIXES, check_suffixes, is_picture
from vit.data.source import Source
from vit.data.split import SPLIT_NAMES
from vit.data.stratify import TRAIN
from vit.data.table import SPLITS, UNASSIGNED, Rows

log = logging.getLogger("vit.data")

_HIDDEN = frozenset({"__MACOSX", "@eaDir"})

EXPECTED_TREE = """expected either
  root/train/<class>/<picture>, and val and test (each optional) beside train, or
  root/<class>/<picture>, which is then split"""


@dataclass(frozen=True, kw_only=True)
class Folder(Source):
    """Pictures in class folders.

    A class is a folder name; the classes of train count for all splits, in plain (code point) order: "10"
    stands before "2", capitals before small letters, as in torchvision's `ImageFolder`. Pictures in folders
    within a class folder belong to the class. Hidden files and folders are left out, other files skipped; one
    line says so.

    Args:
        root: the folder that holds train/, val/, test/ (also named training, valid, validation, testing), or
            the class folders.
        classes: the class names in the order of their labels, where they should not be read from train.
        nested: every folder that holds pictures is a class of its own, named by its path ("dog/terrier").
        suffixes: endings of the files that are pictures, such as .npy; default those of all picture formats.

    Raises:
        ValueError: a value out of its range.
    """

    root: str
    classes: tuple[str, ...] | None = None
    nested: bool = False
    suffixes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suffixes is not None:
            check_suffixes(self.suffixes)

    def scan(self) -> Rows:
        """Find the pictures.

        Raises:
            ValueError: missing root, no pictures, split names in the place of classes, an empty class in
                train, a class in val or test that train lacks.
        """
        suffixes = SUFFIXES if self.suffixes is None else frozenset(self.suffixes)
        return scan_folder(Path(self.root), classes=self.classes, nested=self.nested, suffixes=suffixes)


@dataclass(kw_only=True)
class Scan:
    """State of one scan: what was found, and what was left out and why.

    Args:
        root: absolute folder.
        nested: whether every folder with pictures is a class.
        suffixes: endings of pictures, in lower case.
    """

    root: Path
    nested: bool = False
    suffixes: frozenset[str] = SUFFIXES
    hidden: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    unused: list[str] = field(default_factory=list)

    def info(self) -> dict[str, Any]:
        """What was left out, for the plan."""
        return {
            "hidden": dict(sorted(self.hidden.items())),
            "skipped": dict(sorted(self.skipped.items())),
            "unused": self.unused,
        }


def scan_folder(
    root: Path,
    *,
    classes: tuple[str, ...] | None = None,
    nested: bool = False,
    suffixes: frozenset[str] = SUFFIXES,
) -> Rows:
    """Rows of a folder of class folders; see `Folder`."""
    root = Path(os.path.abspath(root.expanduser()))
    if not root.is_dir():
        state = "is a file" if root.exists() else "does not exist"
        raise ValueError(f"expected a folder of pictures at {root}, but it {state}. Check data.root.")
    scan = Scan(root=root, nested=nested, suffixes=suffixes)
    folders, loose = entries_of(scan, str(root))
    found: dict[int, dict[str, list[bytes]]] = {}
    split_folders = _split_folders(root, folders)
    if split_folders:
        scan.unused += [f"{name}/" for name in folders if name not in split_folders.values()]
        for code, name in split_folders.items():
            inner, inner_loose = entries_of(scan, str(root / name))
            _refuse_split_names(root / name, inner)
            _skip_loose(scan, inner_loose)
            found[code] = class_pictures(scan, name, inner)
    else:
        runs = [name for name in folders if _holds_runs(os.path.join(root, name), suffixes)]
        scan.unused += [f"{name}/ (runs of this toolkit)" for name in runs]
        folders = [name for name in folders if name not in runs]
        if not folders:
            came = f"{len(loose)} pictures and no folders" if loose else "no folders"
            raise ValueError(f"{EXPECTED_TREE}\nbut {root} holds {came}. Sort the pictures into class folders.")
        _refuse_split_level(root, folders)
        found[UNASSIGNED] = class_pictures(scan, "", folders)
    _skip_loose(scan, loose)
    names = _class_names(scan, found, classes)
    say(scan)
    return _rows(scan, found, names)


def _holds_runs(folder: str, suffixes: frozenset[str], depth: int = 1) -> bool:
    """Whether runs were started where the pictures lie, and left a folder there: <name>/<n>/run.json, or less.

    A class folder, which may hold a million pictures, is told by its first one.
    """
    started = os.environ.get(_RUN_FOLDER, "")
    if started.startswith(os.path.join(folder, "")):
        return True  # a process of a run that has just begun
    with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir():
                if is_picture(entry.name, suffixes):
                    return False
                if entry.name == "sweep.json":
                    return True
                continue
            is_run = entry.name.isdecimal() and os.path.exists(os.path.join(entry.path, "run.json"))
            if is_run or (depth and _holds_runs(entry.path, suffixes, depth - 1)):
                return True
    return False


# Set for the processes of a run, by `vit.run.folder`: its folder.
_RUN_FOLDER = "VIT_RUN_FOLDER"


def _split_folders(root: Path, folders: list[str]) -> dict[int, str]:
    """Folder name of each split, if the folders are named as splits."""
    found: dict[int, str] = {}
    for name in folders:
        code = SPLIT_NAMES.get(name.lower())
        if code is None:
            continue
        if code in found:
            raise ValueError(
                f"expected one folder for the {SPLITS[code]} split, but {root} holds both {found[code]}/ and "
                f"{name}/. Move or rename one of them."
            )
        found[code] = name
    return dict(sorted(found.items()))


def _refuse_split_names(folder: Path, classes: list[str]) -> None:
    named = [name for name in classes if name.lower() in SPLIT_NAMES]
    if named:
        raise ValueError(
            f"{EXPECTED_TREE}\nbut {folder} holds folders named like splits: {', '.join(named)}. "
            f"Give the folder that holds {named[0]}/ directly, or rename the class."
        )
    if not classes:
        raise ValueError(
            f"{EXPECTED_TREE}\nbut {folder} is named like a split and holds no class folders. "
            "Put its pictures into class folders, or rename it if it is a class."
        )


def _refuse_split_level(root: Path, folders: list[str]) -> None:
    """A class folder that holds train/ and val/ is the real root."""
    for name in folders:
        inner = [entry.name for entry in os.scandir(root / name) if entry.is_dir()]
        named = [child for child in inner if child.lower() in SPLIT_NAMES]
        if named:
            listed = ", ".join(f"{name}/{child}/" for child in sorted(inner)[:6])
            raise ValueError(
                f"{EXPECTED_TREE}\nbut {root} is one level too high: it holds {listed}. "
                f"Give {root / name} as data.root."
            )


def entries_of(scan: Scan, folder: str) -> tuple[list[str], list[str]]:
    """Folders and pictures of a folder, in plain order; hidden and foreign names are counted and left out."""
    folders, pictures, suffixes = [], [], scan.suffixes
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name[0] == "." or name in _HIDDEN:
                scan.hidden[name if entry.is_dir() else ".*"] += 1
            elif entry.is_dir():
                folders.append(name)
            # As `is_picture`, in a third of the time: a folder may hold a million names.
            elif name[name.rfind(".") :].lower() in suffixes:
                pictures.append(name)
            else:
                scan.skipped[os.path.splitext(name)[1].lower() or "no suffix"] += 1
    return sorted(folders), sorted(pictures)


def _skip_loose(scan: Scan, pictures: list[str]) -> None:
    if pictures:
        scan.skipped["pictures outside of class folders"] += len(pictures)


def class_pictures(scan: Scan, prefix: str, folders: list[str]) -> dict[str, list[bytes]]:
    """Pictures of each class folder, as paths below the root."""
    found: dict[str, list[bytes]] = {}
    above = frozenset(_identity(os.path.join(scan.root, folder)) for folder in ("", prefix))
    for folder in folders:
        # A Mac writes "é" as two characters, others as one: one class, whoever made the folder.
        name = unicodedata.normalize("NFC", folder)
        if name in found:
            raise ValueError(f"expected one folder per class, but {scan.root} holds {name}/ in two spellings.")
        start = f"{prefix}/{folder}" if prefix else folder
        below = list(_walk(scan, start, above))
        if not scan.nested:
            found[name] = [path for place, files, _ in below for path in _paths(place, files)]
            continue
        for place, files, has_folders in below:
            if files or not has_folders:
                nested = unicodedata.normalize("NFC", place[len(prefix) + 1 if prefix else 0 :])
                found[nested] = _paths(place, files)
    return found


def _paths(folder: str, files: list[str]) -> list[bytes]:
    """Paths of files, encoded together: one by one would take longer than to list them."""
    return os.fsencode("\0".join([f"{folder}/{file}" for file in files])).split(b"\0") if files else []


def _walk(scan: Scan, folder: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, list[str], bool]]:
    """Every folder from this one down, its pictures, and whether it holds folders.

    Links to folders are followed, except into a folder that is being walked.
    """
    absolute = os.path.join(scan.root, folder)
    here = _identity(absolute)
    if here in above:
        scan.unused.append(f"{folder}/ (a link to a folder above it)")
        return
    folders, pictures = entries_of(scan, absolute)
    yield folder, pictures, bool(folders)
    for name in folders:
        yield from _walk(scan, f"{folder}/{name}", above | {here})


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _class_names(
    scan: Scan, found: dict[int, dict[str, list[bytes]]], given: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Names in the order of their labels, checked against every split."""
    root = scan.root
    for code, split in found.items():
        if not any(split.values()):
            where = f"the {SPLITS[code]} folder of {root}" if code != UNASSIGNED else str(root)
            listed = ", ".join(f"{name}/" for name in list(split)[:10])
            told = ""
            if scan.skipped:
                others = ", ".join(f"{count} {what}" for what, count in scan.skipped.most_common(4))
                told = f" Left out: {others}. If these are pictures, name their endings in data.suffixes."
            raise ValueError(f"{EXPECTED_TREE}\nbut the class folders in {where} hold no picture: {listed}.{told}")
    main = TRAIN if TRAIN in found else UNASSIGNED
    if main in found:
        empty = [name for name, pictures in found[main].items() if not pictures and name in (given or [name])]
        if empty:
            raise ValueError(
                f"expected pictures in every class to train on, but there are none in {', '.join(empty)} "
                f"(below {root}). Add pictures, or remove the folder."
            )
    elif given is None:
        raise ValueError(f"{EXPECTED_TREE}\nbut {root} holds no train folder. Add it, or name the classes.")
    names = given or tuple(sorted(found[main]))
    for code, split in found.items():
        unknown = [name for name in split if name not in names]
        if unknown:
            of = "train" if given is None else "data.classes"
            where = "root" if code == UNASSIGNED else SPLITS[code]
            raise ValueError(
                f"expected the classes of {of} ({', '.join(names[:20])}), but the {where} folder also holds "
                f"{', '.join(unknown)} (below {root}). Rename or remove it there, or add it to {of}."
            )
    if len(names) < 2:
        raise ValueError(f"{EXPECTED_TREE}\nbut {root} holds a single class, {names[0]}. Give at least two.")
    return names


def _rows(scan: Scan, found: dict[int, dict[str, list[bytes]]], names: tuple[str, ...]) -> Rows:
    parts = [(code, k, split.get(name, [])) for code, split in found.items() for k, name in enumerate(names)]
    counts = [len(pictures) for _, _, pictures in parts]
    return Rows(
        classes=names,
        root=scan.root,
        paths=[path for _, _, pictures in parts for path in pictures],
        labels=np.repeat(np.array([k for _, k, _ in parts], dtype=np.int32), counts),
        splits=np.repeat(np.array([code for code, _, _ in parts], dtype=np.int8), counts),
        info=scan.info(),
    )


def say(scan: Scan) -> None:
    """Log what was left out, in one line."""
    parts = [f"{count} {suffix}" for suffix, count in sorted(scan.skipped.items())]
    parts += [f"{count} hidden ({name})" for name, count in sorted(scan.hidden.items())]
    parts += scan.unused
    if parts:
        log.warning("not used below %s: %s", scan.root, ", ".join(parts))
