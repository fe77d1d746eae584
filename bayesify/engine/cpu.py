"""The engine of a CPU: loops that numba compiles, on torch's own threads.

numba is imported at the first draw: the rounding of a number must not depend on what was drawn before it. Machine code
is kept on disk beside the programs.
"""

import math
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from numba import carray, prange  # type: ignore[attr-defined]  # noqa: F401
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from bayesify.engine.generator import BLOCK, HALF, drop_bound, horner, words_of
from bayesify.engine.naming import name_alone
from bayesify.engine.programs import imported
from bayesify.engine.writing import ATANH, Formula, Kinds, Sorted, Writer, sort, write

KEEPS = name_alone()  # loops on disk: not where their names might be those of others
TILE = 512  # counters at a time: their noise stays in the fastest cache
FEW = 128  # elements that float32 sums without a bias, were they all equal
PIECE = 1 << 15  # elements that are worth a thread
SUMS = 16  # float64 numbers of a thread: two threads on one cache line would wait for each other

u32, i32, u64, f32, f64 = np.uint32, np.int32, np.uint64, np.float32, np.float64
CONTRACT = {"contract"}  # x * y + z may be one instruction
inner = numba.njit(fastmath=CONTRACT, error_model="numpy")
adding = numba.njit(fastmath={*CONTRACT, "reassoc", "nsz"}, error_model="numpy")  # sums in another order
loop = numba.njit(nogil=True, cache=KEEPS, error_model="numpy")
threads = numba.njit(nogil=True, cache=KEEPS, error_model="numpy", parallel=True)


# -- the dialect -------------------------------------------------------------------------------------------------------


def _bitcast(old: Any, new: Any) -> Any:
    def typed(context: Any, x: Any) -> Any:
        return new(old), lambda c, builder, sig, args: builder.bitcast(args[0], c.get_value_type(new))

    return intrinsic(typed)


def _pointed(context: Any, address: Any, dtype: Any) -> Any:
    kind = types.CPointer(dtype.dtype)  # type: ignore[no-untyped-call]
    return kind(address, dtype), lambda c, builder, sig, args: builder.inttoptr(args[0], c.get_value_type(kind))


as_i32, as_f32 = _bitcast(types.float32, types.int32), _bitcast(types.int32, types.float32)
pointer: Any = intrinsic(_pointed)

ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds to a whole number, which is then in the lowest bits
LN_2_HIGH, LN_2_LOW = 0.693359375, -2.12194440e-4  # the first has few bits: exact times a whole number
SQRT_HALF_BITS = 0x3F3504F3
EXP = (
    1.000000071654367,
    0.9999996919773643,
    0.4999889485334902,
    0.16667574776860541,
    0.04191538181333573,
    0.008297651842933393,
)


def _exp(x: Any) -> Any:
    """Return e^x = 2^k e^r without a call into a library, at least e^-87.3, at most e^88.7."""
    if x.kind != "f32":
        return x.writer.line(f"math.exp({x})", x.kind)
    x = x.clamp(-87.3, 88.7)
    shifted = x * math.log2(math.e) + ROUND
    k = shifted - ROUND
    r = (x - k * LN_2_HIGH) - k * LN_2_LOW
    return (horner(EXP, r).view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)


def _log(x: Any) -> Any:
    """Return the logarithm of a normal positive x = m 2^k, k log 2 + 2 atanh((m - 1)/(m + 1)), likewise."""
    if x.kind != "f32":
        return x.writer.line(f"math.log({x})", x.kind)
    k = (x.view(torch.int32) - SQRT_HALF_BITS) >> 23
    f = (x.view(torch.int32) - (k << 23)).view(torch.float32) - 1
    z = f / (f + 2)
    return k.to(torch.float32) * math.log(2) + z * horner(ATANH, z * z)


class NumbaWriter(Writer):
    """Casts every constant and every whole number: numba would make 64 bits of it."""

    constant = cast = whole = "{kind}({x})"
    view = "as_{kind}({x})"
    functions: ClassVar[dict[str, Any]] = {
        "exp": _exp,
        "log": _log,
        "sqrt": "np.sqrt({})",
        "abs": "abs({})",
        "where": "{1} if {0} else {2}",
    }


TEXT = """import math
import numpy as np
from bayesify.engine.cpu import adding, as_f32, as_i32, carray, f32, f64, i32, inner, loop, pointer, prange, threads, u32, u64

number = f64

{functions}{tile}
@{apply}
def apply({all}first, count, totals{buffer}):
    {before}
    for j in range(count):
        i = u64(first + j)
        {results} = element({items}{item})
        {each}
    {after}

@loop
def serial({all}lo, hi, start, totals, key0, key1, seed0, seed1, bound):
    {views}
    totals = carray(pointer(totals, f64), ({count},))
{loops}
@threads
def several(pieces, {all}size, start, totals, key0, key1, seed0, seed1, bound):
    step = -(-size // (pieces * {BLOCK})) * {BLOCK}
    for piece in prange(pieces):
        lo, hi = piece * step, min((piece + 1) * step, size)
        if lo < hi:
            serial({all}lo, hi, start, totals + {row} * piece, key0, key1, seed0, seed1, bound)
"""
PLAIN = """    for first in range(lo, hi, {STEP}):
        apply({all}first, min({STEP}, hi - first), totals)
"""
NOISY = """    buffer, bound = np.empty({TILE} * 2, {held}), u32(bound)
    k0, k1 = secret(u32(key0), u32(key1), u32(seed0), u32(seed1))
    for counter in range((start + lo) // {BLOCK} * {HALF}, ((start + hi - 1) // {BLOCK} + 1) * {HALF}, {TILE}):
        made = False
        for half in range(2):
            at = counter // {HALF} * {BLOCK} + counter % {HALF} + half * {HALF} - start
            first, last = max(at, lo), min(at + {TILE}, hi)
            if first < last:
                if not made:
                    tile(k0, k1, u32(counter & 0xFFFFFFFF), u32(counter >> 32), buffer)
                    made = True
                apply({all}first, last - first, totals, buffer, half * {TILE} + first - at, bound)
"""
TILED = """@inner
def tile(k0, k1, low, high, buffer):
    for j in range(i32({TILE})):  # an index of 64 bits would halve the vectors
        buffer[j], buffer[j + {TILE}] = pair(k0, k1, u32(low + u32(j)), high)

"""


@cache
def program(formula: Formula, kinds: Kinds, targets: Kinds) -> tuple[Callable[..., None], Callable[..., None], int]:
    """Write the loops of a formula, for one thread and for several, and return how many of its results are summed."""
    made = write(NumbaWriter, "@inner", "{}[i]", "{}[i] = {}", formula, kinds, targets)
    summed = made.results[len(targets) :]
    own: dict[str, Any] = {
        "functions": made.functions,
        "all": made.all,
        "items": made.items,
        "held": made.held,
        "count": len(summed),
        "BLOCK": BLOCK,
        "HALF": HALF,
        "TILE": TILE,
        "STEP": FEW if summed else BLOCK,
        "row": 8 * SUMS,
        "before": "",
        "each": "; ".join(made.stores),
        "after": "",
        "apply": "inner",
        "buffer": "",
        "item": "",
        "tile": "",
        "results": ", ".join(made.results),
    }
    own["views"] = "; ".join(f"{x} = carray(pointer({x}, {kind}), (hi,))" for x, kind in made.arrays.items())
    if summed:  # float32 holds the sum of a few, not that of a tensor
        own["before"] = f"{' = '.join(f's{r}' for r in summed)} = {made.real}(0)"
        own["each"] = "; ".join([*made.stores, *(f"s{r} += {r}" for r in summed)])
        own["after"], own["apply"] = "; ".join(f"totals[{j}] += s{r}" for j, r in enumerate(summed)), "adding"
    if made.noise:
        own |= {"buffer": ", buffer, shift, bound", "item": "buffer[u64(shift + j)], bound"}
        own["tile"] = TILED.format(**own)
    own["loops"] = (NOISY if made.noise else PLAIN).format(**own)
    module = imported(TEXT.format(**own), __file__)
    return module.serial, module.several, len(summed)


def run(
    formula: Formula, stream: Any, inputs: Sequence[Any], outputs: Sequence[Tensor], size: int, p_drop: float
) -> Tensor | None:
    """Run a formula over CPU tensors; tiles are summed in their own precision, which holds them, the rest in float64."""
    given = sort(inputs, outputs, held=False)
    found, pieces = program(formula, given.kinds, given.targets), _pieces(size)
    if not found[2]:
        _call(found, given, stream, p_drop, size, pieces, 0)
        return None
    totals = np.zeros((pieces, SUMS))
    _call(found, given, stream, p_drop, size, pieces, totals.ctypes.data)
    return torch.from_numpy(totals[:, : found[2]].sum(0))


def _call(found: Any, given: Sorted, stream: Any, p_drop: float, size: int, pieces: int, totals: int) -> None:
    serial, several, _ = found
    start, words = 0, (0, 0, 0, 0)
    if stream is not None:
        start, words = stream.start, (*words_of(int(stream.key)), *words_of(int(stream.seed)))
    arguments = (*(t.data_ptr() for t in given.arrays), *given.numbers)
    tail = (size, start, totals, *words, drop_bound(p_drop))
    if size:
        launch(serial if pieces == 1 else several, 0 if pieces == 1 else pieces, arguments, tail)


def launch(loop: Any, first: int, arguments: Sequence[Any], tail: Sequence[Any]) -> None:
    """Call a loop: the one place where it is done."""
    loop(*arguments, 0, *tail) if first == 0 else loop(first, *arguments, *tail)


# -- threads -----------------------------------------------------------------------------------------------------------

_threads = {"usable": False}


def _pieces(size: int) -> int:
    """Return on how many threads to work on so many elements, all of them torch's own."""
    if not _threads["usable"] or size < 2 * PIECE:
        return 1
    config: Any = numba.config
    count: int = max(1, min(torch.get_num_threads(), size // PIECE, config.NUMBA_NUM_THREADS))
    if count > 1:
        numba.set_num_threads(count)
    return count


def _choose_threads() -> bool:
    """Ask numba for the OpenMP that torch uses too, so that both share one pool; return whether threads can be used."""
    try:
        import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    config: Any = numba.config
    if config.THREADING_LAYER == "default":
        config.THREADING_LAYER = "omp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel = import_module("numba.np.ufunc.parallel")
        try:
            parallel._launch_threads()
        except Exception:  # numba raises what it likes
            return False
    return parallel.threading_layer() in ("omp", "tbb")  # the third kind does not bear calls from several threads


def _forked() -> None:
    """Stay on one thread in a forked child: its copy of OpenMP has lost the other threads, and numba would end it."""
    _threads["usable"] = False


_count = torch.get_num_threads()
_threads["usable"] = _choose_threads()
torch.set_num_threads(_count)  # numba has told the OpenMP that both share to use every core
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
