"""Names of machine code, which must differ between processes that share a folder of it."""

import itertools
import secrets
from importlib import import_module
from typing import Any


def name_alone() -> bool:
    """Let this process name its machine code as no other does; tell whether it could.

    numba numbers the functions that it compiles, from 1 in every process, and names their code by it. Where code of two
    formulas, which two processes left on disk, bears one name, the first that is loaded would answer for both.
    """
    numbered: Any = getattr(import_module("numba.core.bytecode"), "FunctionIdentity", None)
    if not isinstance(getattr(numbered, "_unique_ids", None), itertools.count):
        return False
    numbered._unique_ids = itertools.count(secrets.randbits(62))
    return True
