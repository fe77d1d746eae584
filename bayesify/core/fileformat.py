"""Write safetensors files that are complete or absent, with a version and a checksum.

A file is written into a temporary folder beside its place, synced to the disk and renamed. The checksum covers names,
types, shapes, metadata and every byte of the tensors.
"""

import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "bayesify"
VERSION = 2
CHECKSUM = "checksum"
TEMPORARY = ".bayesify-"
STALE = 24 * 3600  # seconds after which a temporary folder belongs to a process that was killed
Content = tuple[dict[str, Tensor], dict[str, str]]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not belong to the model."""


def damaged(path: Path, reason: object) -> CheckpointError:
    """Return the error for a file that is not as it was written."""
    return CheckpointError(f"{path} is damaged ({reason}); save the model again, or use another copy")


def write(folder: Path, files: Mapping[str, Content]) -> None:
    """Replace some files of a folder, which is made if it does not exist; a failure before the renames leaves the old.

    Metadata of our own format gets version and checksum.
    """
    if folder.is_file():
        raise CheckpointError(f"dir must be a folder, got the file {folder}; give the name of a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):  # another process may have finished, or removed it
            if time.time() - left.stat().st_mtime > STALE:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder, ignore_cleanup_errors=True) as temporary:
        for name, (tensors, about) in files.items():
            own = _own_copies(tensors)
            if about.get("format") == FORMAT:
                about = {**about, "version": str(VERSION)}
                about[CHECKSUM] = checksum(own, about)
            save_file(own, Path(temporary, name), metadata=about)
            _sync(Path(temporary, name), os.O_RDWR)
        for name in files:
            os.replace(Path(temporary, name), folder / name)
        if os.name == "posix":  # Windows cannot open a folder
            _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    """Wait until a file, or a folder's entries, are on the disk."""
    entry = os.open(path, flags)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


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
    """Read a file of our own format; a CheckpointError if it is missing, damaged, or of another format or version."""
    if not path.is_file():
        raise CheckpointError(f"there is no {path}; give the folder that bayesify.save wrote")
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise CheckpointError(f"{path} was not written by bayesify.save; load it with safetensors instead")
            if (version := int(about["version"])) != VERSION:
                fix = "upgrade it" if version > VERSION else "save the model again, or install the older release"
                raise CheckpointError(f"{path} has format version {version}, this bayesify reads {VERSION}; {fix}")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if checksum(tensors, about) != about[CHECKSUM]:
            raise damaged(path, "checksum mismatch")
    except CheckpointError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise damaged(path, error) from error
    return tensors, about
