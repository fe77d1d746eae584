"""Which tensors a compiled loop can work on, and the call of it: numba where it helps, and nothing where it does not.

numba is imported at the first draw in a CPU's memory, however small: the rounding of a number must not depend on what
was drawn before it. Where it cannot be imported, for other types and devices, plain torch operations compute the same,
to rounding. On a CPU they take many times as long.
"""

import os
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from bayesify.engine.noise import Stream

PIECE = 1 << 15
"""Elements that are worth a thread."""

DTYPES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32}

_state: dict[str, Any] = {"kernels": None, "missing": False, "threads": False}


class Element(Protocol):
    """The formula of one element (see `bayesify.engine.kernels`)."""

    def __call__(self, i: Any, *args: Any) -> Any:
        """Compute element i."""


def ready() -> bool:
    """Tell whether there are compiled loops, and whether they are wanted."""
    return not transformed() and (_state["kernels"] or _kernels()) is not None


def fused(*tensors: Tensor) -> bool:
    """Tell whether a compiled loop can work on these: plain tensors in the CPU's memory, all float32 or all float64."""
    dtype = tensors[0].dtype
    return (
        dtype in (torch.float32, torch.float64)
        and all(
            type(t) in (Tensor, nn.Parameter) and t.dtype == dtype and t.device.type == "cpu" and t.is_contiguous()
            for t in tensors
        )
        and ready()
    )


def transformed() -> bool:
    """Tell whether a compiler, torch.func or forward-mode differentiation is at work: they want plain operations."""
    return torch.compiler.is_compiling() or functional()


def functional() -> bool:
    """Tell whether torch.func or forward-mode differentiation is at work."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


# As torch.compiler.assume_constant_result does, which would import the compiler.
functional._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run(
    element: Element,
    stream: "Stream",
    ins: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
    par: tuple[float, ...] = (),
    *,
    p_drop: float | None = None,
) -> None:
    """Run a formula with noise over all elements.

    Args:
        element: `element(i, noise, ins, outs, par)`.
        stream: The noise: N(0, 1), or with `p_drop` a mask that is False with that probability.
        ins: What the formula reads, `fused` together with `outs`.
        outs: What it writes.
        par: Its numbers.
        p_drop: See `stream`.
    """
    if p_drop is None:
        _noisy("normal", element, stream, 0, ins, outs, par)
    else:
        from bayesify.engine.generator import drop_bound

        _noisy("mask", element, stream, drop_bound(p_drop), ins, outs, par)


def fill(what: str, stream: "Stream", out: Tensor) -> None:
    """Fill a flat tensor with the noise or the words of a stream."""
    _noisy(what, _kernels().FILL[what], stream, 0, (), (out,), ())


def run_plain(element: Element, ins: tuple[Tensor, ...], outs: tuple[Tensor, ...], par: tuple[float, ...] = ()) -> None:
    """Run a formula without noise over all elements; the noise that it is handed is 0."""
    one, several = _kernels().plain(element, DTYPES[outs[0].dtype])
    size, pieces = outs[0].numel(), _pieces(outs[0].numel())
    arguments = (_addresses(ins), _addresses(outs), par)
    one(0, size, *arguments) if pieces == 1 else several(pieces, size, *arguments)


def total(element: Element, ins: tuple[Tensor, ...], par: tuple[float, ...] = ()) -> tuple[float, float, float]:
    """Return the three sums of what `element(i, ins, par)` returns, over all elements."""
    one, several = _kernels().summed(element, DTYPES[ins[0].dtype])
    size, pieces = ins[0].numel(), _pieces(ins[0].numel())
    if pieces == 1:
        sums: tuple[float, float, float] = one(0, size, _addresses(ins), par)
        return sums
    totals = np.zeros((pieces, 3))
    several(size, _addresses(ins), par, totals)
    a, b, c = totals.sum(0).tolist()
    return a, b, c


def _noisy(
    kind: str,
    element: Element,
    stream: "Stream",
    bound: int,
    ins: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
    par: tuple[float, ...],
) -> None:
    size = outs[0].numel()
    if not size:
        return
    one, several = _kernels().noisy(kind, element, DTYPES[outs[0].dtype])
    head = (*stream.key_words, bound, stream.start)
    arguments = (_addresses(ins), _addresses(outs), par)
    pieces = _pieces(size)
    one(*head, 0, size, *arguments) if pieces == 1 else several(*head, pieces, size, *arguments)


def _addresses(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return where tensors lie, which their caller keeps alive."""
    return tuple(t.data_ptr() for t in tensors)


def _pieces(size: int) -> int:
    """Return on how many threads to work on so many elements, all of them torch's own."""
    if not _state["threads"] or size < 2 * PIECE:
        return 1
    return int(_kernels().use_threads(min(torch.get_num_threads(), size // PIECE)))


def _kernels() -> Any:
    """Import the compiled loops, on the first call; None where there is no numba, which is said once."""
    if _state["kernels"] is None and not _state["missing"]:
        try:
            from bayesify.engine import kernels
        except ImportError as error:
            _state["missing"] = True
            warnings.warn(
                f"numba cannot be imported ({error}); without it draws and training steps take many times as "
                "long: pip install numba",
                stacklevel=2,
            )
        else:
            threads = torch.get_num_threads()
            _state["kernels"], _state["threads"] = kernels, kernels.choose_threads()
            torch.set_num_threads(threads)  # numba has told the OpenMP that both share to use every core
    loaded: ModuleType | None = _state["kernels"]
    return loaded


def _forked() -> None:
    """Stay on one thread in a forked child: its copy of OpenMP has lost the other threads, and numba would end it."""
    _state["threads"] = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
