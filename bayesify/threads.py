"""A few threads for what torch does on one: random numbers."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

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


def scratch_tensor(size: int, dtype: torch.dtype) -> Tensor:
    """Return memory for a flat CPU tensor: the thread's own, used again by whoever asks next."""
    kept: dict[str, Tensor] = _local.__dict__
    name = str(dtype)
    if name not in kept or kept[name].numel() < size:
        with torch.inference_mode(False):  # which would forbid to write to it later
            kept[name] = torch.empty(size, dtype=dtype, device="cpu")
    return kept[name][:size]


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
