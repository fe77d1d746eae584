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
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.engine import generator
from bayesify.engine.writing import KINDS, Formula, noise_of, several, sort

ENGINES = {"cpu": "numba", "cuda": "triton", "xpu": "triton"}
MODULES = {"numba": "bayesify.engine.cpu", "triton": "bayesify.engine.gpu"}
PLAIN = (Tensor, nn.Parameter)
LOADS = {"numba": (torch.float32, torch.float64, torch.int32), "triton": tuple(KINDS)}
PIECE = {"cpu": 1 << 16}  # elements: what lies between two operations fits into the cache
LARGEST_PIECE = 1 << 22  # elsewhere: so that temporaries stay bounded
INSTALL = {
    "numba": "numba cannot be used ({}); draws and training steps take many times as long: pip install numba",
    "triton": "Triton cannot be used ({}); draws and training steps take many times as long: pip install triton "
    "(pytorch-triton-xpu for Intel) and a C compiler such as gcc, which Triton calls",
}


class Job(NamedTuple):
    """A formula to run over some tensors; see `run`."""

    formula: Formula
    stream: Any
    inputs: Sequence[Any]
    outputs: Sequence[Tensor] = ()
    p_drop: float = 0.0


def run(
    formula: Formula, stream: Any, inputs: Sequence[Any], outputs: Sequence[Tensor] = (), *, p_drop: float = 0.0
) -> Tensor | None:
    """Write what a formula returns to the outputs; return the sums of the results beyond them, if there are any.

    The noise comes from the `stream`; `p_drop` is the probability with which a mask is False.
    """
    job = _as_vectors(Job(formula, stream, inputs, outputs, p_drop))
    return _run(job, _engine(job))


def total(formula: Formula, inputs: Sequence[Any], stream: Any = None, *, p_drop: float = 0.0) -> Tensor:
    """Return the sums of what a formula returns over all elements, where the inputs are; float64 where there is any."""
    sums = run(formula, stream, inputs, p_drop=p_drop)
    assert sums is not None
    return sums


def run_all(jobs: Sequence[Job]) -> Tensor | None:
    """Run formulas over many tensors of a device: on a GPU in a launch for each formula and kind of arguments.

    Of sums, of which all formulas have equally many, there is a row for each job.
    """
    rows: dict[int, Any] = {}
    groups: dict[Any, list[tuple[int, Job, Any]]] = {}
    for i, job in enumerate(map(_as_vectors, jobs)):
        engine = _engine(job)
        if engine is None or not hasattr(engine, "run_all"):
            rows[i] = _run(job, engine)
            continue
        given, seed = sort(job.inputs, job.outputs), None if job.stream is None else job.stream.seed
        seed = id(seed) if isinstance(seed, Tensor) else seed
        key = (engine, job.formula, job.p_drop, given.kinds, given.targets, given.arrays[0].device, seed)
        groups.setdefault(key, []).append((i, job, given))
    sums: Tensor | None = None
    for (engine, formula, p_drop, *_), members in groups.items():
        sums = engine.run_all(formula, p_drop, [(given, job.stream, _size(job)) for _, job, given in members])
        for row, (i, job, _) in enumerate(members):
            _raise_versions(job)
            rows[i] = None if sums is None else sums[row]
    if sums is not None and len(sums) == len(rows):
        return sums
    found = [rows[i] for i in range(len(jobs))]
    return None if not found or found[0] is None else torch.stack(found)


def transformed() -> bool:
    """Return whether a compiler, torch.func or forward-mode differentiation is at work: they want plain operations."""
    return torch.compiler.is_compiling() or functional()


def functional() -> bool:
    """Return whether torch.func or forward-mode differentiation is at work."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


# As torch.compiler.assume_constant_result does, which would import the compiler.
functional._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -- which engine ------------------------------------------------------------------------------------------------------


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
        raise ValueError(f"BAYESIFY_ENGINE=numba serves tensors of a CPU, got one on {device!r}; unset it")
    triton = sys.modules.get("triton")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and (triton is None or triton.knobs.runtime.interpret)
    if forced == "triton" and device == "cpu" and not interpreted:
        raise ValueError(
            "BAYESIFY_ENGINE=triton runs tensors of a CPU in Triton's interpreter, which needs TRITON_INTERPRET=1 in "
            "the environment before triton is imported; set it before Python starts, or unset BAYESIFY_ENGINE"
        )
    return forced


def groups(device: torch.device) -> bool:
    """Return whether jobs on a device are better run together, since each takes a launch."""
    return chosen(device.type) == "triton"


def _engine(job: Job) -> ModuleType | None:
    """Return the engine that can do a job on plain contiguous tensors of one device; None is torch's operations."""
    tensors = [t for t in (*job.inputs, *job.outputs) if isinstance(t, Tensor)]
    placed = [t for t in tensors if t.dim() or not t.is_cpu]
    if not placed or transformed():
        return None
    device = placed[0].device
    loads = LOADS.get(name := chosen(device.type), ())
    for t in tensors:
        if type(t) not in PLAIN or not t.is_contiguous() or (t.dim() and t.dtype not in loads):
            return None
    return ready(name) if loads and all(t.device == device for t in placed) else None


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


# -- jobs --------------------------------------------------------------------------------------------------------------


def _run(job: Job, engine: ModuleType | None) -> Tensor | None:
    if engine is None:
        return _run_by_torch(job)
    sums: Tensor | None = engine.run(job.formula, job.stream, job.inputs, job.outputs, _size(job), job.p_drop)
    _raise_versions(job)
    return sums


def _as_vectors(job: Job) -> Job:
    """View tensors as vectors where all are numbers, such as a parameter without dimensions: 0-dim is for constants."""
    if any(x.dim() for x in (*job.inputs, *job.outputs) if isinstance(x, Tensor)):
        return job
    seen = {id(x): x.detach().view(1) for x in (*job.inputs, *job.outputs) if isinstance(x, Tensor)}
    inputs = [seen.get(id(x), x) for x in job.inputs]
    return job._replace(inputs=inputs, outputs=[seen[id(y)] for y in job.outputs])


def _size(job: Job) -> int:
    """Return how many elements each tensor has."""
    sizes = {t.numel() for t in (*job.inputs, *job.outputs) if isinstance(t, Tensor) and t.dim()}
    if len(sizes) != 1:
        raise ValueError(f"a formula runs over tensors of one size, got {sorted(sizes)} elements")
    return sizes.pop()


def _raise_versions(job: Job) -> None:
    """Tell autograd which of the inputs were written to."""
    for out in job.outputs:
        if any(out is x for x in job.inputs) and not out.is_inference():
            torch.autograd.graph.increment_version(out)


# -- torch's operations ------------------------------------------------------------------------------------------------


def by_torch(
    formula: Formula, stream: Any, inputs: Sequence[Any], dtype: torch.dtype, p_drop: float = 0.0
) -> tuple[Any, ...]:
    """Evaluate a formula by torch's operations, in float64 or else float32; the noise has the stream's shape."""
    kind, real = noise_of(formula), torch.float64 if dtype == torch.float64 else torch.float32
    made = [generator.tensor(kind, stream, real, p_drop).view(torch.Size(stream.shape))] if kind else []
    vectors = [isinstance(x, Tensor) and x.dim() > 0 and x.is_floating_point() for x in inputs]
    return several(formula(*made, *(x.to(real) if v else x for x, v in zip(inputs, vectors, strict=True))))


@torch.no_grad()
def _run_by_torch(job: Job) -> Tensor | None:
    """Do a job in pieces."""
    size = _size(job)
    flat = [x.detach().reshape(-1) if isinstance(x, Tensor) and x.dim() else x for x in job.inputs]
    whole = [y.detach().view(-1) if y.is_contiguous() else y.new_empty(y.numel()) for y in job.outputs]
    vectors = [x for x in (*whole, *flat) if isinstance(x, Tensor) and x.dim()]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in vectors) else torch.float32
    device = vectors[0].device
    wide = torch.float64 if device.type in ENGINES else torch.float32  # others, such as MPS, have no float64
    step, stream, sums = PIECE.get(device.type, LARGEST_PIECE), job.stream, None
    for first in range(0, max(size, 1), step):
        last = min(first + step, size)
        if job.stream is not None:
            stream = job.stream._replace(shape=(last - first,), start=job.stream.start + first)
        cut = [x[first:last] if isinstance(x, Tensor) and x.dim() else x for x in flat]
        found = by_torch(job.formula, stream, cut, dtype, job.p_drop)
        for y, piece in zip(whole, found, strict=False):
            y[first:last].copy_(piece)
        if len(found) > len(whole):
            piece = torch.stack([x.sum(dtype=wide) for x in found[len(whole) :]])
            sums = piece if sums is None else sums + piece
    for y, target in zip(whole, job.outputs, strict=True):
        if not target.is_contiguous():
            target.copy_(y.view(target.shape))
    return sums
