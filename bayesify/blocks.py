"""Elementwise work block by block: a chain of operations costs least while a block stays in the cache."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bayesify.threads import scratch_tensor

BLOCK = 1 << 18  # elements per thread: torch gives a thread the same part of a block in every operation
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def blocks(kernel: Callable[..., None], *tensors: Tensor) -> None:
    """Call kernel(*pieces) on corresponding flat pieces of several tensors, one after another.

    Args:
        kernel: Works in place.
        *tensors: Of one size, all `blockwise`.
    """
    flat = [t.detach().view(-1) for t in tensors]
    size = BLOCK * torch.get_num_threads()
    if 0 < len(flat[0]) <= size:
        kernel(*flat)
        return
    for start in range(0, len(flat[0]), size):
        kernel(*(t[start : start + size] for t in flat))


def blockwise(*tensors: Tensor) -> bool:
    """Tell whether `blocks` can work on these tensors: plain ones in the CPU's memory, floats all of one type."""
    if transformed():
        return False
    floats = {t.dtype for t in tensors} - {torch.bool}
    return len(floats) == 1 and all(
        type(t) in (Tensor, nn.Parameter)
        and t.device.type == "cpu"
        and t.is_contiguous()
        and (t.dtype in INTEGERS or t.dtype == torch.bool)
        for t in tensors
    )


def transformed() -> bool:
    """Tell whether a compiler, torch.func or forward-mode differentiation is at work: they want plain operations."""
    return (
        torch.compiler.is_compiling()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def scratch(like: Tensor) -> Tensor:
    """Return memory of a piece's size and type, used again for the next piece."""
    return scratch_tensor(like.numel(), like.dtype)


def bits(tensor: Tensor) -> Tensor:
    """View floats as integers: times 0 or 1 is faster than a choice, and exact for every value."""
    return tensor.view(INTEGERS[tensor.dtype])
