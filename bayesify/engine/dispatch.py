"""Run a formula over all elements: by a compiled loop on a CPU, a Triton kernel on a GPU, torch's operations elsewhere.

`formula(*inputs)` returns what is written to the outputs. Its inputs are tensors of one size, in any floating point
type, and numbers, be they Python's or 0-dim tensors, which are not waited for. If its first argument is named `eps`,
`keep` or `word`, it is handed noise as well: N(0, 1), a mask that is False with probability `p_drop`, or 32 random
bits. An output may be one of the inputs. Programs are kept by the formula's identity: define it at module level.

The device chooses the engine. BAYESIFY_ENGINE=torch, numba or triton forces one; "triton" runs CPU tensors in Triton's
interpreter, for tests. Whatever an engine cannot do, such as tensors that are not contiguous, torch's operations do.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.engine import generator
from bayesify.engine.writing import KINDS, Formula, noise_of, several, sort

ENGINES = {"cpu": "numba", "cuda": "triton", "xpu": "triton"}
MODULES = {"numba": "bayesify.engine.cpu", "triton": "bayesify.engine.gpu"}
PIECE = {"cpu": 1 << 16}  # elements: what lies between two operations fits into the cache
LARGEST_PIECE = 1 << 22  # elsewhere: so that temporaries stay bounded
INSTALL = {
    "numba": "numba cannot be used ({}); draws and training steps take many times as long: pip install numba",
    "triton": "Triton cannot be used ({}); draws and training steps take many times as long: pip install triton "
    "(pytorch-triton-xpu for Intel) and a C compiler such as gcc, which Triton calls",
}


class Job(NamedTuple):
    """A formula to run over some tensors, among others; see `run`."""

    formula: Formula
    stream: Any
    inputs: Sequence[Any]
    outputs: Sequence[Tensor] = ()
    p_drop: float = 0.0


def run(
    formula: Formula, stream: Any, inputs: Sequence[Any], outputs: Sequence[Tensor] = (), *, p_drop: float = 0.0
) -> Tensor | None:
    """Write what a formula returns to the outputs; return the sums of the results beyond them, if there are any.

    Args:
        formula: See the module.
        stream: Where the noise comes from; None where the formula takes none.
        inputs: What it is called with.
        outputs: A tensor for each of its first results.
        p_drop: The probability with which a mask is False.
    """
    inputs, outputs = _flattened(inputs, outputs)
    size = _size([*outputs, *(x for x in inputs if isinstance(x, Tensor))])
    engine = _engine([*inputs, *outputs])
    if engine is None:
        return _run_by_torch(formula, stream, inputs, outputs, p_drop, size)
    sums: Tensor | None = engine.run(formula, stream, inputs, outputs, size, p_drop)
    _raise_versions(inputs, outputs)
    return sums


def total(formula: Formula, inputs: Sequence[Any], stream: Any = None, *, p_drop: float = 0.0) -> Tensor:
    """Return the sums of what a formula returns over all elements, where the inputs are; float64 where there is any."""
    sums = run(formula, stream, inputs, p_drop=p_drop)
    assert sums is not None
    return sums


def run_all(jobs: Sequence[Job]) -> Tensor | None:
    """Run formulas over many tensors of a device: on a GPU in a launch for each formula and kind of arguments.

    Of sums, of which all formulas have equally many, there is a row for each job.
    """
    parts, order = [], []
    for engine, places, group, alone in _grouped(jobs):
        if engine is None:
            found = [run(j.formula, j.stream, j.inputs, j.outputs, p_drop=j.p_drop) for j in alone]
            sums = None if found[0] is None else torch.stack(found)  # type: ignore[arg-type]
        else:
            sums = engine.run_all(group)
            for job in alone:
                _raise_versions(job.inputs, job.outputs)
        if sums is not None:
            parts.append(sums)
            order += places
    if order == list(range(len(order))):
        return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)
    rows = [row for part in parts for row in part]
    return torch.stack([rows[order.index(i)] for i in range(len(rows))])


def fresh(likes: Sequence[Tensor]) -> list[Tensor]:
    """Make an uninitialised tensor like each of some, where one piece of memory serves all better in one piece."""
    one_kind = len({(t.dtype, t.device) for t in likes}) == 1
    if len(likes) > 1 and one_kind and (engine := _engine(likes)) is not None and hasattr(engine, "fresh"):
        made: list[Tensor] = engine.fresh(likes)
        return made
    return [torch.empty_like(t, requires_grad=False) for t in likes]


def sent(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device, which is not waited for: they are sent again only where they changed."""
    if device.type == "cpu" or torch.compiler.is_compiling():
        return torch.tensor(rows, dtype=torch.float64, device=device)
    return _sent(tuple(map(tuple, rows)), device)


@lru_cache(maxsize=64)
def _sent(rows: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    found = torch.tensor(rows, dtype=torch.float64 if device.type in ENGINES else torch.float32)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def transformed() -> bool:
    """Return whether a compiler, torch.func or forward-mode differentiation is at work: they want plain operations."""
    return torch.compiler.is_compiling() or functional()


def functional() -> bool:
    """Return whether torch.func or forward-mode differentiation is at work."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


# As torch.compiler.assume_constant_result does, which would import the compiler.
functional._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -- which engine ------------------------------------------------------------------------------------------------------

PLAIN = (Tensor, nn.Parameter)
LOADS = {"numba": (torch.float32, torch.float64, torch.int32), "triton": tuple(KINDS)}


def chosen(device: str) -> str:
    """Return the name of the engine of a type of device, "torch" where there is none.

    Raises:
        ValueError: BAYESIFY_ENGINE names no engine, or one that the device cannot use.
    """
    forced = os.environ.get("BAYESIFY_ENGINE")
    if not forced:
        return ENGINES.get(device, "torch")
    if forced not in ("torch", *MODULES):
        raise ValueError(f"BAYESIFY_ENGINE must be one of {['torch', *MODULES]}, got {forced!r}")
    if forced == "numba" and device != "cpu":
        raise ValueError(
            f"BAYESIFY_ENGINE=numba serves tensors of a CPU, got one on {device!r}; unset it, or use torch"
        )
    if forced == "triton" and device == "cpu":
        _check_interpreter()
    return forced


def _check_interpreter() -> None:
    """Raise unless Triton interprets kernels, as it must on a CPU."""
    triton = sys.modules.get("triton")
    if os.environ.get("TRITON_INTERPRET") != "1" or (triton is not None and not triton.knobs.runtime.interpret):
        raise ValueError(
            "BAYESIFY_ENGINE=triton runs tensors of a CPU in Triton's interpreter, which needs TRITON_INTERPRET=1 in "
            "the environment before triton is imported; set it before Python starts, or unset BAYESIFY_ENGINE"
        )


def _engine(tensors: Sequence[Any]) -> ModuleType | None:
    """Return the engine that can work on these, plain contiguous tensors of one device; None is torch's operations."""
    device = None
    for t in tensors:
        if isinstance(t, Tensor):
            if type(t) not in PLAIN or not t.is_contiguous():
                return None
            if t.dim() or t.device.type != "cpu":
                if device is not None and t.device != device:
                    return None
                device = t.device
    if device is None or transformed():
        return None
    name = chosen(device.type)
    if name == "torch" or any(isinstance(t, Tensor) and t.dim() and t.dtype not in LOADS[name] for t in tensors):
        return None
    return ready(name)


@cache
def ready(name: str) -> ModuleType | None:
    """Import an engine; None where it does not work, which is said once."""
    try:
        engine = import_module(MODULES[name])
        if name == "triton":
            _probe(engine)
    except Exception as error:  # a missing package, compiler or driver: each raises what it likes
        warnings.warn(INSTALL[name].format(str(error).strip().split("\n")[0] or type(error).__name__), stacklevel=2)
        return None
    return engine


def in_use() -> list[str]:
    """Return the names of the engines that have been imported."""
    return [name for name, module in MODULES.items() if module in sys.modules]


def _probe(engine: ModuleType) -> None:
    """Raise unless a first, small kernel gives the defined numbers."""
    device = next((d for d in ("cuda", "xpu") if getattr(torch, d).is_available()), "cpu")
    stream = SimpleNamespace(seed=1, key=2, shape=(4,), start=0, device="cpu")
    out = torch.empty(4, dtype=torch.int32, device=device)
    engine.run(as_word, stream, (), [out], 4, 0.0)
    if not torch.equal(out.cpu(), generator.tensor("word", stream, torch.float32)):
        raise RuntimeError("a kernel gave wrong numbers")


def as_word(word: Any) -> Any:
    """Return the bits as an int32."""
    return word.to(torch.int32)


def as_normal(eps: Any) -> Any:
    """Return the noise."""
    return eps


# -- arguments ---------------------------------------------------------------------------------------------------------


def _flattened(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """View tensors as vectors where all are numbers, such as a parameter without dimensions: 0-dim is for constants."""
    if any(x.dim() for x in (*inputs, *outputs) if isinstance(x, Tensor)):
        return list(inputs), list(outputs)
    seen = {id(x): x.detach().view(1) for x in (*inputs, *outputs) if isinstance(x, Tensor)}
    return [seen.get(id(x), x) for x in inputs], [seen[id(y)] for y in outputs]


def _size(tensors: list[Tensor]) -> int:
    """Return how many elements each tensor has."""
    sizes = {t.numel() for t in tensors if t.dim()}
    if len(sizes) != 1:
        raise ValueError(f"a formula runs over tensors of one size, got {sorted(sizes)} elements")
    return sizes.pop()


def _raise_versions(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Tell autograd which of the inputs were written to."""
    for out in outputs:
        if any(out is x for x in inputs) and not out.is_inference():
            torch.autograd.graph.increment_version(out)


def _grouped(jobs: Sequence[Job]) -> list[tuple[ModuleType | None, list[int], Any, list[Job]]]:
    """Sort jobs by what one launch can do; of each group the engine, the places, what it is given, and the jobs."""
    groups: dict[Any, tuple[ModuleType | None, list[tuple[int, Job, Any]]]] = {}
    for i, job in enumerate(jobs):
        inputs, outputs = _flattened(job.inputs, job.outputs)
        job = job._replace(inputs=inputs, outputs=outputs)
        engine = _engine([*inputs, *outputs])
        key: Any = i
        given = None
        if engine is not None and hasattr(engine, "run_all"):
            given = sort(inputs, outputs, held=True)
            seed = None if job.stream is None else job.stream.seed
            seed = id(seed) if isinstance(seed, Tensor) else seed
            key = (job.formula, given.kinds, given.targets, job.p_drop, given.arrays[0].device, seed)
        groups.setdefault(key, (engine, []))[1].append((i, job, given))
    found: list[tuple[ModuleType | None, list[int], Any, list[Job]]] = []
    for engine, members in groups.values():
        places, alone = [i for i, _, _ in members], [job for _, job, _ in members]
        if engine is None or members[0][2] is None:
            found.append((None, places, None, alone))
            continue
        rows = [
            (given, j.stream, _size([x for x in (*j.inputs, *j.outputs) if isinstance(x, Tensor)]))
            for _, j, given in members
        ]
        found.append((engine, places, engine.Group(alone[0].formula, alone[0].p_drop, rows), alone))
    return found


# -- torch's operations ------------------------------------------------------------------------------------------------


def by_torch(
    formula: Formula, stream: Any, inputs: Sequence[Any], dtype: torch.dtype, p_drop: float = 0.0
) -> tuple[Any, ...]:
    """Evaluate a formula by torch's operations, in float64 or else float32; the noise has the stream's shape."""
    kind, wide = noise_of(formula), torch.float64 if dtype == torch.float64 else torch.float32
    made = [generator.tensor(kind, stream, wide, p_drop).view(torch.Size(stream.shape))] if kind else []
    return several(formula(*made, *(_widened(x, wide) for x in inputs)))


def _widened(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.dim() and x.is_floating_point() else x


def _pieces(device: torch.device, size: int) -> list[tuple[int, int]]:
    step = PIECE.get(device.type, LARGEST_PIECE)
    return [(first, min(step, size - first)) for first in range(0, max(size, 1), step)]


def _cut(stream: Any, inputs: Sequence[Any], first: int, count: int) -> tuple[Any, list[Any]]:
    """Return a piece of the noise and of the inputs."""
    stream = None if stream is None else stream._replace(shape=(count,), start=stream.start + first)
    return stream, [x[first : first + count] if isinstance(x, Tensor) and x.dim() else x for x in inputs]


@torch.no_grad()
def _run_by_torch(
    formula: Formula, stream: Any, inputs: Sequence[Any], outputs: Sequence[Tensor], p_drop: float, size: int
) -> Tensor | None:
    dtype = _precision([*inputs, *outputs])
    flat = [x.detach().reshape(-1) if isinstance(x, Tensor) and x.dim() else x for x in inputs]
    whole = [y.detach().view(-1) if y.is_contiguous() else y.new_empty(y.numel()) for y in outputs]
    device = next(x.device for x in (*whole, *flat) if isinstance(x, Tensor) and x.dim())
    wide = torch.float64 if device.type in ENGINES else torch.float32  # others, such as MPS, have no float64
    sums: Tensor | None = None
    for first, count in _pieces(device, size):
        found = by_torch(formula, *_cut(stream, flat, first, count), dtype, p_drop)
        for y, piece in zip(whole, found, strict=False):
            y[first : first + count].copy_(piece)
        if len(found) > len(whole):
            piece = torch.stack([x.sum(dtype=wide) for x in found[len(whole) :]])
            sums = piece if sums is None else sums + piece
    for y, target in zip(whole, outputs, strict=True):
        if not target.is_contiguous():
            target.copy_(y.view(target.shape))
    return sums


def _precision(tensors: Sequence[Any]) -> torch.dtype:
    """Return the type to compute in."""
    double = any(isinstance(t, Tensor) and t.dim() and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32
