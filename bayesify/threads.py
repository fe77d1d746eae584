"""A few threads for work that releases the interpreter lock: random numbers and numpy's functions.

A chain of elementwise operations costs least block by block, while a block is in the cache. Torch's own threads are too
slow to start for that; numpy has none, and so it runs on these.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray[Any, Any]

BLOCK = 1 << 16
TYPES = {torch.float32: "<f4", torch.float64: "<f8", torch.bool: "|b1"}

_executor: ThreadPoolExecutor | None = None
_local = threading.local()


def run(tasks: Sequence[Callable[[], None]]) -> None:
    """Do all the tasks, on as many threads as torch may use; the order is not fixed."""
    todo = iter(tasks)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                task = next(todo, None)
            if task is None:
                return
            task()

    others = [_pool().submit(work) for _ in range(min(torch.get_num_threads(), len(tasks)) - 1)]
    work()
    for other in others:
        if not other.cancel():  # a thread that has not even started is not worth waiting for
            other.result()


def blocks(kernel: Callable[..., None], *tensors: Tensor) -> None:
    """Call kernel(*arrays) on corresponding flat blocks of several tensors, in any order.

    Args:
        kernel: Works on numpy arrays, in place.
        *tensors: Of one size, all `blockwise`.
    """
    arrays = [np.asarray(_Memory(t)) for t in tensors]
    size = tensors[0].numel()
    tasks = [partial(_quietly, kernel, *(a[i : i + BLOCK] for a in arrays)) for i in range(0, size, BLOCK)]
    if len(tasks) < 4:
        for task in tasks:
            task()
    else:
        run(tasks)


def _quietly(kernel: Callable[..., None], *arrays: Array) -> None:
    """Call a kernel; infinite values are its caller's business, as they are with torch."""
    with np.errstate(all="ignore"):
        kernel(*arrays)


def scratch(like: Array, number: int = 0) -> Array:
    """Return memory for an array of a block's size: the thread's own (one by number), used again for every block."""
    kept: dict[str, Array] = _local.__dict__
    name = f"{like.dtype.str}{number}"
    if name not in kept:
        kept[name] = np.empty(BLOCK, like.dtype)
    return kept[name][: like.size]


def scratch_tensor(size: int, dtype: torch.dtype) -> Tensor:
    """Return memory for a flat CPU tensor: the thread's own, used again by whoever asks next."""
    kept: dict[str, Tensor] = _local.__dict__
    name = f"tensor of {dtype}"
    if name not in kept or kept[name].numel() < size:
        kept[name] = torch.empty(size, dtype=dtype, device="cpu")
    return kept[name][:size]


def transformed() -> bool:
    """Tell whether a compiler, torch.func or forward-mode differentiation is at work: they want plain operations."""
    return (
        torch.compiler.is_compiling()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def blockwise(*tensors: Tensor) -> bool:
    """Tell whether `blocks` can work on these tensors: plain ones in the CPU's memory, floats all of one type."""
    if transformed():
        return False
    floats = {t.dtype for t in tensors} - {torch.bool}
    return len(floats) == 1 and all(
        type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" and t.is_contiguous() and t.dtype in TYPES
        for t in tensors
    )


class _Memory:
    """A tensor's memory as numpy sees it. Tensor.numpy() would forbid to resize it, which sharded parameters need."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # kept alive
        self.__array_interface__ = {
            "version": 3,
            "shape": (tensor.numel(),),
            "typestr": TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
        }


def _pool() -> ThreadPoolExecutor:
    """Return the process's threads, made on first use."""
    global _executor
    if _executor is None:
        _executor = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="bayesify")
    return _executor


def _forget_pool() -> None:
    """Drop the pool in a forked child: its threads stayed with the parent."""
    global _executor
    _executor = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
