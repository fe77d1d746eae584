"""The engine of a GPU: Triton kernels, of one tensor, or of many in one launch.

Values are loaded in the precision of their memory, computed in float32 (float64 where one of them is), and rounded to
the nearest number of the output's precision: stochastic rounding would add noise of its own to a theta, and other
numbers on every engine.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesify.engine.generator import BLOCK, HALF, drop_bound, signed
from bayesify.engine.programs import imported
from bayesify.engine.writing import Formula, Kinds, Sorted, Writer, sort, write

LANES = 1024  # counters of one program, which has twice as many elements
OPTIONS = {"enable_fp_fusion": True, "num_warps": 4}  # x * y + z may be one instruction
ALIGNED = 64  # elements, at a multiple of which each of many outputs begins
HEAD = 3  # numbers of a table's row before the addresses: size, start, key


class TritonWriter(Writer):
    """Writes what Triton does not guess: a Python float would be a float32."""

    constant, cast, view = "tl.full((), {x}, {kind})", "{x}.to({kind})", "{x}.to({kind}, bitcast=True)"
    functions: ClassVar[dict[str, Any]] = {
        "exp": "tl.exp({})",
        "log": "tl.log({})",
        "sqrt": "tl.sqrt({})",
        "abs": "tl.abs({})",
        "where": "tl.where({}, {}, {})",
    }


TEXT = """import triton
import triton.language as tl

f32, f64, f16 = tl.constexpr(tl.float32), tl.constexpr(tl.float64), tl.constexpr(tl.float16)
i32, u32, bf16, number = tl.constexpr(tl.int32), tl.constexpr(tl.uint32), tl.constexpr(tl.bfloat16), tl.constexpr(tl.float64)

{functions}@triton.jit
def work({all}program, slot, n, start, key, seed, bound, totals):
    first = start // {BLOCK} * {HALF} + program * {LANES}
    lane = tl.arange(0, {LANES})
    {noise}
    for half in tl.static_range(2):
        at = first // {HALF} * {BLOCK} + first % {HALF} + half * {HALF} - start
        inside = (lane >= tl.maximum(-at, 0).to(i32)) & (lane < tl.minimum(n - at, {LANES}).to(i32))
        {results} = element({items}{item})
        {each}

@triton.jit(do_not_specialize=["key", "seed", "bound"])
def kernel({arguments}n: tl.int64, start: tl.int64, key: tl.int64, seed: tl.int64, bound: tl.int64, held, totals, HELD: tl.constexpr):
    {scalars}
    seed = tl.load(held) if HELD else tl.full((), seed, tl.int64)
    program = tl.program_id(0).to(tl.int64)
    n, start, key = tl.full((), n, tl.int64), tl.full((), start, tl.int64), tl.full((), key, tl.int64)
    work({all}program, program, n, start, key, seed, tl.full((), bound, tl.int64).to(u32), totals)

@triton.jit(do_not_specialize=["seed", "bound"])
def grouped(table, owners, seed: tl.int64, bound: tl.int64, held, totals, HELD: tl.constexpr):
    seed = tl.load(held) if HELD else tl.full((), seed, tl.int64)
    slot = tl.program_id(0).to(tl.int64)
    row = table + tl.load(owners + 2 * slot) * {width}
    {rows}
    work({all}tl.load(owners + 2 * slot + 1), slot, tl.load(row), tl.load(row + 1), tl.load(row + 2), seed, tl.full((), bound, tl.int64).to(u32), totals)
"""
NOISE = """k0, k1 = secret((key & 0xFFFFFFFF).to(u32), (key >> 32).to(u32), (seed & 0xFFFFFFFF).to(u32), (seed >> 32).to(u32))
    a, b = pair(k0, k1, (first & 0xFFFFFFFF).to(u32) + lane.to(u32), (first >> 32).to(u32))"""
SUM = "tl.store(totals + (2 * slot + half) * {count} + {j}, tl.sum(tl.where(inside, {r}, 0.0), 0).to(f64))"


class Kernels(NamedTuple):
    """The kernels of a formula, for one tensor and for many, and how many of its results are summed."""

    kernel: Any
    grouped: Any
    sums: int


@cache
def program(formula: Formula, kinds: Kinds, targets: Kinds) -> Kernels:
    """Write the kernels of a formula, whose results beyond the targets are summed."""
    load, store = "tl.load({} + at + lane, inside, 1.0)", "tl.store({} + at + lane, {}, inside)"
    made = write(TritonWriter, "@triton.jit", load, store, formula, kinds, targets)
    summed, numbers = made.results[len(targets) :], {x: str(kinds[int(x[1:])]) for x in made.numbers}
    arguments = [*made.arrays, *(x if kind[0] == "&" else f"{x}: tl.float64" for x, kind in numbers.items())]
    scalars = [
        f"{x} = tl.load({x}).to(f64)" if kind[0] == "&" else f"{x} = tl.full((), {x}, f64)"
        for x, kind in numbers.items()
    ]
    rows = [f"{x} = tl.load(row + {j}).to(tl.pointer_type({k}))" for j, (x, k) in enumerate(made.arrays.items(), HEAD)]
    for j, (x, kind) in enumerate(numbers.items(), HEAD + len(made.arrays)):
        pointed = f"tl.load(tl.load(row + {j}).to(tl.pointer_type({kind[1:]}))).to(f64)"
        rows.append(f"{x} = " + (pointed if kind[0] == "&" else f"tl.load(row + {j}).to(f64, bitcast=True)"))
    text = TEXT.format(
        functions=made.functions,
        all=made.all,
        items=made.items,
        results=", ".join(made.results),
        BLOCK=BLOCK,
        HALF=HALF,
        LANES=LANES,
        width=HEAD + len(made.arrays) + len(numbers),
        noise=NOISE if made.noise else "",
        item="(a if half == 0 else b), bound" if made.noise else "",
        each="; ".join([*made.stores, *(SUM.format(count=len(summed), j=j, r=r) for j, r in enumerate(summed))]),
        arguments="".join(f"{x}, " for x in arguments),
        scalars="; ".join(scalars),
        rows="; ".join(rows),
    )
    module = imported(text, __file__)
    return Kernels(module.kernel, module.grouped, len(summed))


def programs(size: int, start: int) -> int:
    """Return how many programs go over a tensor."""
    return ((start + size - 1) // BLOCK - start // BLOCK + 1) * (HALF // LANES) if size else 0


# -- launches ----------------------------------------------------------------------------------------------------------


def launch(kernel: Any, grid: int, arguments: Sequence[Any], *, held: bool) -> None:
    """Launch a kernel: the one place where it is done."""
    kernel[(grid,)](*arguments, HELD=held, **OPTIONS)


def address(tensor: Tensor) -> int:
    """Return where a tensor lies."""
    return tensor.data_ptr()


def run(
    formula: Formula, stream: Any, inputs: Sequence[Any], outputs: Sequence[Tensor], size: int, p_drop: float
) -> Tensor | None:
    """Run a formula over tensors of a GPU; a thousand elements are summed by a tree, what is left in float64."""
    given = sort(inputs, outputs, held=True)
    found, first = program(formula, given.kinds, given.targets), given.arrays[0]
    if not found.sums:
        _launch_one(found.kernel, given, stream, p_drop, size, first)
        return None
    totals = torch.empty(2 * _count(stream, size), found.sums, dtype=torch.float64, device=first.device)
    _launch_one(found.kernel, given, stream, p_drop, size, totals)
    return totals.sum(0)


def _launch_one(kernel: Any, given: Sorted, stream: Any, p_drop: float, size: int, totals: Tensor) -> None:
    start, key = (0, 0) if stream is None else (stream.start, signed(int(stream.key)))
    seed, held = _seed(stream, totals.device)
    if size:
        tail = (size, start, key, seed, drop_bound(p_drop), totals if held is None else held, totals)
        launch(kernel, programs(size, start), (*given.arrays, *given.numbers, *tail), held=held is not None)


def _seed(stream: Any, device: torch.device) -> tuple[int, Tensor | None]:
    """Return a stream's seed as a number or, where it is in the device's memory, as it is."""
    seed = 0 if stream is None else stream.seed
    if isinstance(seed, Tensor) and seed.device == device:
        return 0, seed
    if stream is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, and the seed of a draw is a number of the host: every replay would repeat "
            "one noise; draw outside of the capture, or give bayesify.sample a seed that is a CUDA tensor"
        )
    return signed(int(seed)), None


# -- many tensors in one launch ----------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Work of one formula on many tensors of one device: what `sort` says of each, its stream and its size."""

    formula: Formula
    p_drop: float
    rows: list[tuple[Sorted, Any, int]]


def run_all(group: Group) -> Tensor | None:
    """Run a formula over many tensors in one launch; of sums there is a row for each tensor."""
    given = group.rows[0][0]
    found, device = program(group.formula, given.kinds, given.targets), given.arrays[0].device
    if not found.sums:
        _launch_group(found.grouped, group, given.arrays[0])
        return None
    counts = tuple(2 * _count(stream, size) for _, stream, size in group.rows)
    totals = torch.empty(sum(counts), found.sums, dtype=torch.float64, device=device)
    _launch_group(found.grouped, group, totals)
    return torch.segment_reduce(totals, "sum", lengths=_sent((counts, device)), axis=0)


def _count(stream: Any, size: int) -> int:
    return programs(size, 0 if stream is None else stream.start)


def _launch_group(kernel: Any, group: Group, totals: Tensor) -> None:
    seed, held = _seed(group.rows[0][1], totals.device)
    lines = []
    for given, stream, size in group.rows:
        numbers = (address(x) if isinstance(x, Tensor) else _bits(x) for x in given.numbers)
        head = (size, 0, 0) if stream is None else (size, stream.start, signed(int(stream.key)))
        lines.append((*head, *map(address, given.arrays), *numbers))
    table = _sent((tuple(lines), totals.device))
    owners = _owners(tuple(_count(stream, size) for _, stream, size in group.rows), totals.device)
    tail = (seed, drop_bound(group.p_drop), totals if held is None else held, totals)
    if len(owners):
        launch(kernel, len(owners), (table, owners, *tail), held=held is not None)


@lru_cache(maxsize=64)
def _owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the row and the place within its tensor of every program."""
    each = torch.tensor(counts)
    owner = torch.arange(len(counts)).repeat_interleave(each)
    return _to(torch.stack([owner, torch.arange(len(owner)) - (each.cumsum(0) - each)[owner]], 1), device)


@lru_cache(maxsize=64)
def _sent(what: tuple[tuple[Any, ...], torch.device]) -> Tensor:
    """Send whole numbers to a device: again only where they have changed, since the addresses of a step often stay."""
    return _to(torch.tensor(what[0]), what[1])


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _bits(number: float) -> int:
    """Return the bits of a double."""
    return int(np.float64(number).view(np.int64))


def fresh(likes: Sequence[Tensor]) -> list[Tensor]:
    """Make a tensor like each of some, all of one type and device, in one piece of memory."""
    places = np.cumsum([0, *(-(-t.numel() // ALIGNED) * ALIGNED for t in likes)]).tolist()
    flat = likes[0].new_empty(places[-1], requires_grad=False)
    # No views: these would share one version, and a change of one would spoil the graphs of all.
    return [
        flat.new_empty(0).set_(flat.untyped_storage(), p, t.shape, t.stride())
        for p, t in zip(places, likes, strict=False)
    ]
