"""Files that are whole or not there: safetensors with a checksum, replaced by a rename.

A file is written in a temporary folder beside its place, down to the disk, and renamed; so is the folder's entry. The
temporary's name tells whose it is, and the next write removes those of the dead, with whatever safetensors has begun in
them. The checksum covers names, types, shapes, metadata and every byte of the tensors.
"""

import itertools
import json
import os
import re
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bayesify.core import ranks

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = "bayesify"
VERSION = 1
CHECKSUM = "checksum"
OLD = 24 * 3600  # seconds after which a temporary is nobody's, whatever its process
Content = tuple[dict[str, Tensor], dict[str, str]]

_TEMPORARY = re.compile(r"\..+\.safetensors\.(?P<host>.*)\.(?P<pid>\d+)\.\d+\.partial")
_HOST = re.sub(r"[^\w-]", "_", socket.gethostname())
_number = itertools.count()
_writing: set[str] = set()  # the temporaries of this process, by name
_renames = threading.Lock()


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not belong to the model."""


def damaged(path: Path, reason: object) -> CheckpointError:
    """Return the error for a file that is not as it was written."""
    return CheckpointError(f"{path} is damaged ({reason}); save the model again, or use another copy")


def write(folder: Path, files: Mapping[str, Content], *, by_one: bool = False) -> None:
    """Replace some files of a folder, all or none; concurrent writes come one after the other.

    Args:
        folder: Is made if it does not exist.
        files: Tensors and metadata by file name. Metadata of our own format gets a checksum.
        by_one: Whether rank 0 writes for all processes of a group, while the others wait.

    Raises:
        CheckpointError: The folder is a file, or rank 0 could not write, and this process is another.
    """
    if not by_one:
        _write(folder, files)
        return
    failure: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            _write(folder, files)
        except Exception as error:  # the others must not wait for ever
            failure = error
    told = ranks.gathered(None if failure is None else repr(failure))[0]
    if failure is not None:
        raise failure
    if told is not None:
        raise CheckpointError(f"rank 0 could not write to {folder} ({told}); see its own error")


def _write(folder: Path, files: Mapping[str, Content]) -> None:
    if folder.is_file():
        raise CheckpointError(f"dir must be a folder, got the file {folder}; give the name of a folder")
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    temporaries: dict[str, Path] = {}
    try:
        for name, (tensors, about) in files.items():
            temporary = temporaries[name] = folder / f".{name}.{_HOST}.{os.getpid()}.{next(_number)}.partial"
            _writing.add(temporary.name)
            temporary.mkdir()
            own = _own_copies(tensors)
            if about.get("format") == FORMAT:
                about = {**about, CHECKSUM: checksum(own, about)}
            save_file(own, temporary / name, metadata=about)
            del own
            with open(temporary / name, "rb") as file:
                os.fsync(file.fileno())
        with _renaming(folder):
            for name, temporary in temporaries.items():
                os.replace(temporary / name, folder / name)
    finally:
        for temporary in temporaries.values():
            shutil.rmtree(temporary, ignore_errors=True)
            _writing.discard(temporary.name)


@contextmanager
def _renaming(folder: Path) -> Iterator[None]:
    """Let one thread of one process at a time rename, and put the folder's entries on the disk."""
    with _renames:
        if fcntl is None:
            yield
            return
        entry = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(entry, fcntl.LOCK_EX)
            yield
            with suppress(OSError):  # nor a way to sync a folder
                os.fsync(entry)
        finally:
            os.close(entry)


def remove_stale(folder: Path) -> None:
    """Remove the temporaries of writers that are dead."""
    for path in folder.glob(".*.partial"):
        if _is_stale(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_stale(path: Path) -> bool:
    """Tell whether this is a temporary of ours that nobody writes any more."""
    owner = _TEMPORARY.fullmatch(path.name)
    if owner is None or path.name in _writing:
        return False
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > OLD:
            return True
    if owner["host"] != _HOST or os.name != "posix":
        return False  # only the clock can tell
    pid = int(owner["pid"])
    return pid == os.getpid() or not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    """Tell whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def _own_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors, none of which shares its memory with another."""
    out: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        shares = tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in taken
        out[name] = tensor.clone() if shares else tensor
        taken.add(out[name].data_ptr())
    return out


def checksum(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    """Return the CRC-32 of a file's description, which holds the CRC-32 of each tensor's bytes."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        sums = pool.map(_crc, tensors.values())  # zlib works outside of the interpreter's lock
        kept = {name: [str(t.dtype), list(t.shape), crc] for (name, t), crc in zip(tensors.items(), sums, strict=True)}
    whole = [{k: v for k, v in about.items() if k != CHECKSUM}, kept]
    return f"{zlib.crc32(json.dumps(whole, sort_keys=True).encode()):08x}"


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def read(path: Path) -> Content:
    """Read a file of our own format, and check that it is what was written.

    Raises:
        CheckpointError: It is missing, damaged, of another kind or newer than this version of bayesify.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no {path}; give the folder that bayesify.save wrote")
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise CheckpointError(f"{path} was not written by bayesify.save; load it with safetensors instead")
            if (version := int(about["version"])) > VERSION:
                raise CheckpointError(
                    f"{path} has format version {version}, this bayesify reads up to {VERSION}; upgrade it"
                )
            if version < 1:
                raise damaged(path, f"version {version}")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if checksum(tensors, about) != about[CHECKSUM]:
            raise damaged(path, "its checksum is another")
    except CheckpointError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise damaged(path, error) from error
    return tensors, about


def check_names(path: Path, what: str, saved: set[str], present: set[str]) -> None:
    """Raise if the names in the file and in the model differ."""
    if saved != present:
        only = {"the file": sorted(saved - present)[:3], "the model": sorted(present - saved)[:3]}
        raise CheckpointError(
            f"{path} does not fit the model: {what} differ, "
            + ", ".join(f"only in {place}: {names}" for place, names in only.items() if names)
            + "; build the model as it was when it was saved"
        )
