"""The engine of a GPU: Triton kernels, of one tensor, or of many in one launch.

Values are loaded in the precision of their memory, computed in float32 (float64 where one of them is), and rounded to
the nearest number of the output's precision: stochastic rounding would add noise of its own to a theta, and other
numbers on every engine.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bayesify.engine.generator import BLOCK, HALF, drop_bound, signed
from bayesify.engine.writing import Formula, Kinds, Sorted, Writer, imported, sort, write

LANES = 1024  # counters of one program, which has twice as many elements
OPTIONS = {"enable_fp_fusion": True, "num_warps": 4}  # x * y + z may be one instruction
CONSTANTS = {"BLOCK": BLOCK, "HALF": HALF, "LANES": LANES}
HEAD = 3  # numbers of a table's row before the addresses: size, start, key


class TritonWriter(Writer):
    """Writes what Triton does not guess: a Python float would be a float32."""

    mark, load, store = "@triton.jit", "tl.load({} + at + lane, inside, 1.0)", "tl.store({} + at + lane, {}, inside)"
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
    {noisy}
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

sums = {sums}
"""
NOISE = """k0, k1 = secret((key & 0xFFFFFFFF).to(u32), (key >> 32).to(u32), (seed & 0xFFFFFFFF).to(u32), (seed >> 32).to(u32))
    a, b = pair(k0, k1, (first & 0xFFFFFFFF).to(u32) + lane.to(u32), (first >> 32).to(u32))"""
SUM = "tl.store(totals + (2 * slot + half) * {} + {}, tl.sum(tl.where(inside, {}, 0.0), 0).to(f64))"


@cache
def program(formula: Formula, kinds: Kinds, targets: Kinds) -> Any:
    """Write a formula's kernels, `kernel` for one tensor and `grouped`; `sums` is how many results are summed."""
    made = write(TritonWriter, formula, kinds, targets)
    arguments, scalars, rows = list(made.arrays), [], []
    for j, (x, kind) in enumerate(made.arrays.items(), HEAD):
        rows.append(f"{x} = tl.load(row + {j}).to(tl.pointer_type({kind}))")
    for j, (x, kind) in enumerate(made.numbers.items(), HEAD + len(made.arrays)):
        in_memory = kind[0] == "&"
        arguments.append(x if in_memory else f"{x}: tl.float64")
        scalars.append(f"{x} = tl.load({x}).to(f64)" if in_memory else f"{x} = tl.full((), {x}, f64)")
        pointed = f"tl.load(tl.load(row + {j}).to(tl.pointer_type({kind[1:]}))).to(f64)"
        rows.append(f"{x} = " + (pointed if in_memory else f"tl.load(row + {j}).to(f64, bitcast=True)"))
    text = TEXT.format(
        **made._asdict(),
        **CONSTANTS,
        width=HEAD + len(rows),
        sums=len(made.summed),
        noisy=NOISE if made.noise else "",
        item="(a if half == 0 else b), bound" if made.noise else "",
        each="; ".join([*made.stores, *(SUM.format(len(made.summed), j, r) for j, r in enumerate(made.summed))]),
        arguments="".join(f"{x}, " for x in arguments),
        scalars="; ".join(scalars),
        rows="; ".join(rows),
    )
    return imported(text, __file__)


# -- launches ----------------------------------------------------------------------------------------------------------


def run(
    formula: Formula, stream: Any, inputs: Sequence[Any], outputs: Sequence[Tensor], size: int, p_drop: float
) -> Tensor | None:
    """Run a formula over tensors of a GPU; a thousand elements are summed by a tree, what is left in float64."""
    given = sort(inputs, outputs)
    found, device = program(formula, given.kinds, given.targets), given.arrays[0].device
    count, (_, start, key) = _programs(size, stream), _head(size, stream)
    totals = _totals(found, [count], given)
    arguments = (*given.arrays, *given.numbers, size, start, key)
    _launch(found.kernel, count, arguments, _seed(stream, device), p_drop, totals)
    return totals.sum(0) if found.sums else None


def run_all(formula: Formula, p_drop: float, rows: Sequence[tuple[Sorted, Any, int]]) -> Tensor | None:
    """Run a formula over many tensors of a device in one launch; of sums there is a row for each tensor.

    `rows` have each tensor's arguments, stream and size; the seed of the draw is the same for all.
    """
    given, stream, _ = rows[0]
    found, device = program(formula, given.kinds, given.targets), given.arrays[0].device
    counts = tuple(_programs(size, stream) for _, stream, size in rows)
    totals = _totals(found, counts, given)
    table = tuple(
        (*_head(size, own), *(t.data_ptr() for t in args.arrays), *map(_bits, args.numbers)) for args, own, size in rows
    )
    arguments = (_sent(table, device), _owners(counts, device))
    _launch(found.grouped, sum(counts), arguments, _seed(stream, device), p_drop, totals)
    lengths = _sent(tuple(2 * count for count in counts), device) if found.sums else None
    return None if lengths is None else torch.segment_reduce(totals, "sum", lengths=lengths, axis=0)


def _programs(size: int, stream: Any) -> int:
    """Return how many programs go over a tensor."""
    start = 0 if stream is None else stream.start
    return ((start + size - 1) // BLOCK - start // BLOCK + 1) * (HALF // LANES) if size else 0


def _head(size: int, stream: Any) -> tuple[int, int, int]:
    """Return a tensor's size, start and key."""
    return (size, 0, 0) if stream is None else (size, stream.start, signed(int(stream.key)))


def _totals(found: Any, counts: Sequence[int], given: Sorted) -> Tensor:
    """Return memory for two rows of sums per program; where nothing is summed, any tensor."""
    like = given.arrays[0]
    return like.new_empty(2 * sum(counts), found.sums, dtype=torch.float64) if found.sums else like


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


def _launch(
    kernel: Any, grid: int, arguments: Sequence[Any], seed: tuple[int, Tensor | None], p_drop: float, totals: Tensor
) -> None:
    number, held = seed
    if grid:
        with nullcontext() if totals.device.type == "cpu" else getattr(torch, totals.device.type).device(totals.device):
            tail = (number, drop_bound(p_drop), totals if held is None else held, totals)
            kernel[(grid,)](*arguments, *tail, HELD=held is not None, **OPTIONS)


@lru_cache(maxsize=64)
def _owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the row and the place within its tensor of every program."""
    each = torch.tensor(counts)
    owner = torch.arange(len(counts)).repeat_interleave(each)
    return _to(torch.stack([owner, torch.arange(len(owner)) - (each.cumsum(0) - each)[owner]], 1), device)


@lru_cache(maxsize=64)
def _sent(numbers: tuple[Any, ...], device: torch.device) -> Tensor:
    """Send whole numbers to a device: again only where they have changed, since the addresses of a step often stay."""
    return _to(torch.tensor(numbers), device)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _bits(number: Any) -> int:
    """Return the address of a number in memory, or the bits of a double."""
    return number.data_ptr() if isinstance(number, Tensor) else int(np.float64(number).view(np.int64))
