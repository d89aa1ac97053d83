"""Training pictures that are decoded and shrunk once; later epochs read them back.

One file per picture: a head and the raw uint8 pixels (h, w, c). It is written beside and renamed, so that neither a
kill nor a second process ever meets half a picture. With a cache *every* crop is taken from the shrunken picture, also
while the cache is being filled and for pictures it has no room for: what is drawn never depends on what is stored.
"""

import errno
import hashlib
import logging
import math
import os
import shutil
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import get_worker_info

from vit.data.decode import VIEW_MARGIN, View
from vit.data.source import available_memory
from vit.data.table import make_cache_folder
from vit.data.transforms import Preprocessing, Still, Training

log = logging.getLogger("vit.data")

Kind = Literal["none", "ram", "disk"]

SHARED_MEMORY = Path("/dev/shm")
_RAM_PREFIX = "vit-toolkit-"
_HEAD = struct.Struct("<8sIII")
_MAGIC = b"vit-pix1"
_DRAFT = ".tmp"
_STALE_SECONDS = 3600.0


class PictureCache:
    """Shrunken pictures of one way of preparing them, in a folder that worker processes share.

    A picture is shrunk so that its short side is 1.25 · (longer side of the model's image) / √(mean of crop_scale):
    a crop of the mean share then still has a quarter more pixels per side than the model wants, which is left for the
    crop's own resize to smooth. Smaller crops are softer than from the original: with the usual crop_scale of
    (0.08, 1) those below about a quarter of a 4:3 picture's area. Pictures that are no larger are kept as they are, and
    where training crops nothing, pictures are kept exactly as it shows them.

    Args:
        folder: holds the pictures of all settings.
        room: bytes that this process and its workers may add.
        writers: worker processes that write at the same time.
        preprocessing: of the model.
        transform: of training; its crop says how large pictures are needed, its filter shrinks them.
        max_pixels: largest picture that is decoded.

    Raises:
        ValueError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        room: int,
        writers: int,
        preprocessing: Preprocessing,
        transform: Training | Still,
        max_pixels: int,
    ) -> None:
        p = preprocessing
        shown: tuple[object, ...] = (p,)
        self.short_side = 0
        if isinstance(transform, Training):
            self.short_side = shrunken_side(p.size, transform.scale)
            shown = (self.short_side, p.interpolation, p.channels, p.background, p.value_range, p.orient)
        # Another decoder gives other pixels: an upgrade must not mix them with the old ones.
        versions = tuple(version(name) for name in ("pillow", "torch", "torchvision"))
        settings = repr((_MAGIC, *shown, max_pixels, *versions))
        self.folder = folder / hashlib.blake2b(settings.encode(), digest_size=10).hexdigest()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"expected a folder for decoded pictures at {folder}, but it cannot be made ({error.strerror}). "
                "Choose another with data.cache_dir."
            ) from error
        self.room = room
        # Bytes that each writer added, and at the end whether the cache was said to be full: no locks are needed, as
        # each writer changes its own number alone.
        self._added = torch.zeros(writers + 1, dtype=torch.int64).share_memory_()

    def view(self, width: int, height: int) -> View:
        """A whole upright picture of this size, and the size that is kept of it."""
        factor = min(1.0, self.short_side / min(width, height))
        return View((0, 0, width, height), max(1, round(width * factor)), max(1, round(height * factor)))

    def pixels(self, identity: bytes, decode: Callable[[], UInt8[Tensor, "c h w"]]) -> UInt8[Tensor, "c h w"]:
        """What is kept of a picture, from the cache or else decoded and stored.

        Args:
            identity: changes when the picture changes.
            decode: makes what is to be kept.
        """
        name = hashlib.blake2b(identity, digest_size=16).hexdigest()
        file = self.folder / name[:2] / name[2:]
        pixels = _read(file)
        if pixels is None:
            pixels = decode().permute(1, 2, 0).contiguous()
            self._store(file, pixels)
        # The memory layout is the same in both cases, and the one that is resized twice as fast.
        return pixels.permute(2, 0, 1)

    def _store(self, file: Path, pixels: UInt8[Tensor, "h w c"]) -> None:
        size, writers = _HEAD.size + pixels.numel(), len(self._added) - 1
        worker = get_worker_info()
        mine = worker.id % writers if worker is not None else 0
        if self._added[-1]:
            return
        # Each of the others may be writing a picture of this size just now.
        if int(self._added[:-1].sum()) + size * writers > self.room:
            self._stop("full")
            return
        try:
            _write(file, pixels)
        except OSError as error:
            if file.exists() or not self.folder.exists():  # stored by another process, or the run is at its end
                return
            reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
            self._stop(f"not writable ({reason})")
            return
        self._added[mine] += size

    def _stop(self, why: str) -> None:
        self._added[-1] = 1
        ours, all_of_it = (held_bytes(folder) / 1e6 for folder in (self.folder, self.folder.parent))
        log.warning(
            "the cache of pictures in %s is %s, with %.0f MB of this run's settings and %.0f MB of others that may be "
            "deleted. Further pictures are decoded in every epoch, with the same pixels. More room: data.cache_size",
            self.folder.parent,
            why,
            ours,
            all_of_it - ours,
        )


def shrunken_side(size: tuple[int, int], crop_scale: tuple[float, ...]) -> int:
    """Short side in pixels of a picture whose crops of the mean share keep a quarter more pixels than wanted."""
    return math.ceil(VIEW_MARGIN * max(size) / math.sqrt(sum(crop_scale) / len(crop_scale)))


def _read(file: Path) -> UInt8[Tensor, "h w c"] | None:
    """A stored picture; None where there is none, or one that is not whole."""
    try:
        with open(file, "rb", buffering=0) as stream:
            head = stream.read(_HEAD.size)
            if len(head) != _HEAD.size:
                return None
            magic, *shape = _HEAD.unpack(head)
            size = math.prod(shape)
            if magic != _MAGIC or os.fstat(stream.fileno()).st_size != _HEAD.size + size:
                return None
            pixels = torch.empty(shape, dtype=torch.uint8)
            return pixels if stream.readinto(pixels.numpy().data) == size else None
    except OSError:
        return None


def _write(file: Path, pixels: UInt8[Tensor, "h w c"]) -> None:
    file.parent.mkdir(exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=file.parent, suffix=_DRAFT)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(_HEAD.pack(_MAGIC, *pixels.shape))
            stream.write(pixels.numpy().data)
        os.chmod(draft, 0o644)  # a cache may be shared; temporary files are private
        os.replace(draft, file)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def held_bytes(folder: Path) -> int:
    """Bytes of all pictures below a folder; what killed writers left behind is removed."""
    total, entries = 0, [str(folder)]
    while entries:
        with suppress(OSError), os.scandir(entries.pop()) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    entries.append(entry.path)
                elif entry.name.endswith(_DRAFT) and time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                    os.unlink(entry.path)
                else:
                    total += entry.stat().st_size
    return total


def disk_room(cache_dir: str | None, megabytes: int | None, processes: int) -> tuple[Path, int]:
    """Folder of the disk cache and the bytes that each process may add: to what is asked for, else half of the room.

    Raises:
        ValueError: the folder cannot be made.
    """
    folder = make_cache_folder("pictures") if cache_dir is None else Path(cache_dir).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(folder).free // 2
    except OSError as error:
        raise ValueError(
            f"expected a folder for decoded pictures at {folder}, but it cannot be made ({error.strerror}). "
            "Choose another with data.cache_dir."
        ) from error
    if megabytes is not None:
        room = max(0, megabytes * 1_000_000 - held_bytes(folder))
    return folder, room // processes


class RamFolder:
    """A folder in shared memory, gone when it is closed, when the process ends or, after a kill, at the next start.

    Args:
        megabytes: what it may hold; default half of the memory that is free.
        processes: training processes on this machine, of which each has its own.

    Raises:
        ValueError: the system has no such folders.
    """

    def __init__(self, megabytes: int | None, processes: int) -> None:
        if sys.platform != "linux" or not SHARED_MEMORY.is_dir():
            raise ValueError(
                f"expected a folder in shared memory ({SHARED_MEMORY}, as on Linux) for data.cache ram, but there is "
                "none. Choose data.cache disk: the system keeps in memory what is read often."
            )
        _remove_left_behind()
        free = min(shutil.disk_usage(SHARED_MEMORY).free, available_memory())
        self.limit = (megabytes * 1_000_000 if megabytes is not None else free // 2) // processes
        self.path = Path(tempfile.mkdtemp(prefix=_RAM_PREFIX, dir=SHARED_MEMORY))
        # Held open and locked for as long as any process of this run lives. It has its name once it is locked, so
        # that another run that starts just now does not take this one for dead.
        draft = self.path / "lock.new"
        lock = open(draft, "wb")  # noqa: SIM115
        _try_lock(lock)
        draft.rename(self.path / "lock")
        self.close = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    @property
    def room(self) -> int:
        """Bytes that may be added."""
        return max(0, self.limit - held_bytes(self.path))


def _remove(folder: Path, lock: BinaryIO, owner: int) -> None:
    lock.close()
    if os.getpid() == owner:  # not in forked workers, which have a copy of the owner's objects
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left_behind() -> None:
    """Remove folders whose process was killed: their lock is free."""
    for folder in SHARED_MEMORY.glob(f"{_RAM_PREFIX}*"):
        with suppress(OSError), open(folder / "lock", "rb") as lock:
            if _try_lock(lock):
                shutil.rmtree(folder, ignore_errors=True)


def _try_lock(file: BinaryIO) -> bool:
    import fcntl  # Linux, as is the whole of the cache in memory

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
