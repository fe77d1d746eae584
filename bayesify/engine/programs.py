"""Import programs that were written: from files of a folder that only the user can write to, since they are code."""

import atexit
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType


def imported(text: str, dialect: str) -> ModuleType:
    """Import a program.

    Its file is named by its content, which numba keeps machine code beside, and which Triton reads.

    Args:
        text: The program.
        dialect: The file of the engine that it imports from: with another engine it is another program.
    """
    name = "_" + hashlib.blake2b(text.encode() + Path(dialect).read_bytes(), digest_size=12).hexdigest()
    path = folder() / f"{name}.py"
    if not path.exists() or path.read_text() != text:
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(text)
        new.replace(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # numba looks for it there
    spec.loader.exec_module(module)
    return module


@cache
def folder() -> Path:
    """Return the user's folder of programs; a temporary one where there is none that belongs to the user alone."""
    try:
        path = _cache_folder() / "bayesify"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(path):
            tempfile.TemporaryFile(dir=path).close()
            return path
    except (OSError, RuntimeError):  # no home, or nowhere to write
        pass
    path, owner = Path(tempfile.mkdtemp(prefix="bayesify-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(path, ignore_errors=True) if os.getpid() == owner else None)
    return path


def is_private(path: Path) -> bool:
    """Return whether a folder belongs to the user, and nobody else may write to it."""
    if not hasattr(os, "getuid"):
        return True  # Windows: a user's local folder is the user's
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def _cache_folder() -> Path:
    """Return the platform's folder for what a user's programs can make again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
