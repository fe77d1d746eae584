"""The engine of a CPU: loops that numba compiles, on torch's own threads.

numba is imported at the first draw: the rounding of a number must not depend on what was drawn before it. Machine code
is kept on disk beside the programs.
"""

import itertools
import math
import os
import secrets
import warnings
from collections.abc import Sequence
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

from bayesify.engine.generator import drop_bound, horner, words_of
from bayesify.engine.writing import ATANH, Formula, Kinds, Writer, imported, sort, write


def name_alone() -> bool:
    """Let this process name its machine code as no other does; return whether it could.

    numba numbers the functions that it compiles, from 1 in every process, and names their code by it. Where code of two
    formulas, which two processes left on disk, bears one name, the first that is loaded would answer for both.
    """
    numbered: Any = getattr(import_module("numba.core.bytecode"), "FunctionIdentity", None)
    if not isinstance(getattr(numbered, "_unique_ids", None), itertools.count):
        return False
    numbered._unique_ids = itertools.count(secrets.randbits(62))
    return True


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

    mark, load, store = "@inner", "{}[i]", "{}[i] = {}"
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
from bayesify.engine.generator import BLOCK, HALF
from bayesify.engine.cpu import FEW, SUMS, TILE, adding, as_f32, as_i32, carray, f32, f64, i32, inner, loop, pointer, prange, threads, u32, u64

number = f64
sums = {sums}

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
    totals = carray(pointer(totals, f64), ({sums},))
{loops}
@threads
def several({all}pieces, size, start, totals, key0, key1, seed0, seed1, bound):
    step = -(-size // (pieces * BLOCK)) * BLOCK
    for piece in prange(pieces):
        lo, hi = piece * step, min((piece + 1) * step, size)
        if lo < hi:
            serial({all}lo, hi, start, totals + 8 * SUMS * piece, key0, key1, seed0, seed1, bound)
"""
PLAIN = """    for first in range(lo, hi, {step}):
        apply({all}first, min({step}, hi - first), totals)
"""
NOISY = """    buffer, bound = np.empty(TILE * 2, {held}), u32(bound)
    k0, k1 = secret(u32(key0), u32(key1), u32(seed0), u32(seed1))
    for counter in range((start + lo) // BLOCK * HALF, ((start + hi - 1) // BLOCK + 1) * HALF, TILE):
        made = False
        for half in range(2):
            at = counter // HALF * BLOCK + counter % HALF + half * HALF - start
            first, last = max(at, lo), min(at + TILE, hi)
            if first < last:
                if not made:
                    tile(k0, k1, u32(counter & 0xFFFFFFFF), u32(counter >> 32), buffer)
                    made = True
                apply({all}first, last - first, totals, buffer, half * TILE + first - at, bound)
"""
TILED = """@inner
def tile(k0, k1, low, high, buffer):
    for j in range(i32(TILE)):  # an index of 64 bits would halve the vectors
        buffer[j], buffer[j + TILE] = pair(k0, k1, u32(low + u32(j)), high)

"""


@cache
def program(formula: Formula, kinds: Kinds, targets: Kinds) -> Any:
    """Write a formula's loops, `serial` and `several` on more than one thread; `sums` is how many results are summed."""
    made = write(NumbaWriter, formula, kinds, targets)
    sums = [f"s{r}" for r in made.summed]
    added = [f"{s} += {r}" for s, r in zip(sums, made.summed, strict=True)]
    loops = (NOISY if made.noise else PLAIN).format(
        all=made.all, held=made.real if made.noise == "eps" else "u32", step="FEW" if sums else "BLOCK"
    )
    text = TEXT.format(
        **made._asdict(),
        sums=len(sums),
        tile=TILED if made.noise else "",
        apply="adding" if sums else "inner",
        buffer=", buffer, shift, bound" if made.noise else "",
        item="buffer[u64(shift + j)], bound" if made.noise else "",
        before=f"{' = '.join(sums)} = {made.real}(0)" if sums else "",  # float32 holds the sum of a few
        each="; ".join([*made.stores, *added]),
        after="; ".join(f"totals[{j}] += {s}" for j, s in enumerate(sums)),
        views="; ".join(f"{x} = carray(pointer({x}, {kind}), (hi,))" for x, kind in made.arrays.items()),
        loops=loops,
    )
    return imported(text, __file__)


def run(
    formula: Formula, stream: Any, inputs: Sequence[Any], outputs: Sequence[Tensor], size: int, p_drop: float
) -> Tensor | None:
    """Run a formula over CPU tensors; tiles are summed in their own precision, which holds them, the rest in float64."""
    given = sort(inputs, outputs)
    found, pieces = program(formula, given.kinds, given.targets), _pieces(size)
    totals = np.zeros((pieces, SUMS)) if found.sums else None
    start, words = 0, (0, 0, 0, 0)
    if stream is not None:
        start, words = stream.start, (*words_of(int(stream.key)), *words_of(int(stream.seed)))
    if size:
        loop, first = (found.serial, 0) if pieces == 1 else (found.several, pieces)
        address = 0 if totals is None else totals.ctypes.data
        arrays = (t.data_ptr() for t in given.arrays)
        loop(*arrays, *given.numbers, first, size, start, address, *words, drop_bound(p_drop))
    return None if totals is None else torch.from_numpy(totals[:, : found.sums].sum(0))


# -- threads -----------------------------------------------------------------------------------------------------------


def _pieces(size: int) -> int:
    """Return on how many threads to work on so many elements, all of them torch's own."""
    if not _threaded or size < 2 * PIECE:
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
    global _threaded
    _threaded = False


_count = torch.get_num_threads()
_threaded = _choose_threads()
torch.set_num_threads(_count)  # numba has set the OpenMP that both share to use every core
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
