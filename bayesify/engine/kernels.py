"""Loops over the elements of CPU tensors, compiled by numba: noise, a method's formula and threads in one pass.

This module imports numba, which takes a while: `bayesify.engine.fusion` imports it at the first draw. A formula is a
plain function of one element, `element(i, noise, ins, outs, par)`, which reads `ins[...][i]`, writes `outs[...][i]` and
takes its numbers from `par`; for sums `element(i, ins, par)` returns three terms. Compiled loops are kept on disk,
under the sources that they were made from.

A loop is compiled for one floating point type and takes its arrays as addresses, its numbers as Python's: to unpack
arrays at every call would take longer than the loop over a small tensor.
"""

import hashlib
import inspect
import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.extending import intrinsic, overload, register_jitable

from bayesify.engine import elements
from bayesify.engine import generator as noise
from bayesify.engine.naming import name_alone

KEEPS = name_alone()  # loops on disk: not where their names might be those of others
TILE = 512  # counters at a time: their noise stays in the fastest cache
BLOCK, HALF = noise.BLOCK, noise.HALF
CONTRACT = frozenset({"contract"})  # x * y + z may be one instruction
REORDER = frozenset({"contract", "reassoc", "nsz"})  # sums may be added up in another order
OPTIONS: Any = {"fastmath": set(CONTRACT), "error_model": "numpy"}  # a check for division by 0 is in the way of vectors

u32, i32, f32, f64 = np.uint32, np.int32, np.float32, np.float64
PARITY, ODD = u32(noise.PARITY), u32(1)
ZERO, TURN = f32(0), f32(2.0**-32)
SQRT_HALF, ONE_BITS = i32(noise.SQRT_HALF_BITS), i32(0x3F800000)


# -- what one element needs --------------------------------------------------------------------------------------------


def _bitcast(source: Any, target: Any) -> Any:
    def typed(context: Any, x: Any) -> Any:
        return target(source), lambda c, builder, sig, args: builder.bitcast(args[0], c.get_value_type(target))

    return intrinsic(typed)


_float_bits = _bitcast(types.float32, types.int32)
_bits_float = _bitcast(types.int32, types.float32)
overload(elements.bits, inline="always")(lambda x: lambda x: _float_bits(x))
overload(elements.from_bits, inline="always")(lambda n: lambda n: _bits_float(n))
overload(elements.like)(lambda x, y: (lambda x, y: f32(x)) if y == types.float32 else (lambda x, y: x))


def _by_precision(single: Callable[..., Any], double: Callable[..., Any]) -> None:
    """Let a loop call a function of one float32, which in a loop over float64 is the library's own."""

    def choose(x: Any) -> Callable[..., Any]:
        return double if x == types.float64 else single

    overload(single, jit_options=OPTIONS, strict=False)(choose)


_by_precision(elements.exp, lambda x: math.exp(x))
_by_precision(elements.log1p, lambda y: math.log1p(y))
_by_precision(elements.log, lambda x: math.log(x))
_known: set[Callable[..., Any]] = {elements.exp, elements.log1p, elements.log}
for _function in (elements.softplus, elements.sigmoid):
    _known.add(_function)
    register_jitable(**OPTIONS)(_function)


def _pointed(context: Any, address: Any, dtype: Any) -> Any:
    """Read a number as the address of a float."""
    pointer = types.CPointer(dtype.dtype)
    return pointer(address, dtype), lambda c, builder, sig, args: builder.inttoptr(args[0], c.get_value_type(pointer))


_pointer: Any = intrinsic(_pointed)


def _arrays(addresses: Any, size: Any, dtype: Any) -> Any:
    """View the memory at some addresses as arrays."""


def _numbers(par: Any, dtype: Any) -> Any:
    """Round a formula's numbers to the precision of its arrays: one of double precision would lift all others."""


@overload(_arrays)
def _arrays_of(addresses, size, dtype):
    if len(addresses) == 0:
        return lambda addresses, size, dtype: ()

    def more(addresses, size, dtype):
        first = (carray(_pointer(addresses[0], dtype), (size,)),)
        return first + _arrays(addresses[1:], size, dtype)  # a star is nothing that numba knows

    return more


@overload(_numbers)
def _numbers_of(par, dtype):
    if len(par) == 0:
        return lambda par, dtype: ()
    return lambda par, dtype: (dtype(par[0]),) + _numbers(par[1:], dtype)  # noqa: RUF005


@register_jitable
def _round(x0: Any, x1: Any, turn: Any) -> Any:
    """Do one round of Threefry; numba makes 64 bits of everything that is not cast."""
    x0 = u32(x0 + x1)
    return x0, u32(u32(u32(x1 << u32(turn)) | u32(x1 >> u32(32 - turn))) ^ x0)


@register_jitable
def _four(x0: Any, x1: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Do four rounds."""
    x0, x1 = _round(x0, x1, a)
    x0, x1 = _round(x0, x1, b)
    x0, x1 = _round(x0, x1, c)
    return _round(x0, x1, d)


@register_jitable
def _threefry(k0: Any, k1: Any, x0: Any, x1: Any) -> Any:
    """Compute `noise.threefry` with 13 rounds."""
    k2 = u32(u32(k0 ^ k1) ^ PARITY)
    x0, x1 = _four(u32(x0 + k0), u32(x1 + k1), 13, 15, 26, 6)
    x0, x1 = _four(u32(x0 + k1), u32(x1 + u32(k2 + u32(1))), 17, 29, 16, 24)
    x0, x1 = _four(u32(x0 + k2), u32(x1 + u32(k0 + u32(2))), 13, 15, 26, 6)
    return _round(u32(x0 + k0), u32(x1 + u32(k1 + u32(3))), 17)


@register_jitable
def _secret(k0: Any, k1: Any, x0: Any, x1: Any) -> Any:
    """Compute `noise.threefry` with 20 rounds, as `Stream.secret` does."""
    k2 = u32(u32(k0 ^ k1) ^ PARITY)
    x0, x1 = _four(u32(x0 + k0), u32(x1 + k1), 13, 15, 26, 6)
    x0, x1 = _four(u32(x0 + k1), u32(x1 + u32(k2 + u32(1))), 17, 29, 16, 24)
    x0, x1 = _four(u32(x0 + k2), u32(x1 + u32(k0 + u32(2))), 13, 15, 26, 6)
    x0, x1 = _four(u32(x0 + k0), u32(x1 + u32(k1 + u32(3))), 17, 29, 16, 24)
    x0, x1 = _four(u32(x0 + k1), u32(x1 + u32(k2 + u32(4))), 13, 15, 26, 6)
    return u32(x0 + k2), u32(x1 + u32(k0 + u32(5)))


def normal_pair(dtype: Any) -> Callable[..., Any]:
    """Return a function that computes both numbers of `noise._normal`.

    What is made in a function must not name an intrinsic, whose name on disk is another in every process.
    """
    one, minus_two, minus_2_log_2 = dtype(1), dtype(-2), dtype(noise.MINUS_2_LOG_2)
    l0, l1, l2, l3, l4, l5, l6 = map(dtype, noise.LOG)
    s0, s1, s2, s3, s4 = map(dtype, noise.SIN)
    c0, c1, c2, c3, c4 = map(dtype, noise.COS)

    def pair(w0: Any, w1: Any) -> Any:
        n = elements.bits(f32(u32(w0 | ODD)))
        k = i32(i32(n - SQRT_HALF) >> i32(23))
        f = dtype(elements.from_bits(i32(n - i32(k << i32(23))))) - one
        log = l0 + f * (l1 + f * (l2 + f * (l3 + f * (l4 + f * (l5 + f * l6)))))
        r = dtype(np.sqrt(dtype(i32(k - i32(32))) * minus_2_log_2 + f * (minus_two + f * (one + f * log))))
        t = dtype(f32(i32(w1)) * TURN)
        z = t * t
        sin = t * (s0 + z * (s1 + z * (s2 + z * (s3 + z * s4))))
        cos = c0 + z * (c1 + z * (c2 + z * (c3 + z * c4)))
        sign = dtype(elements.from_bits(i32(ONE_BITS | i32(i32(w1) << i32(31)))))  # 1 or -1
        return r * cos * sign, r * sin

    return pair


def word_pair(dtype: Any) -> Callable[..., Any]:
    """Return a function that leaves the words as they are."""
    return lambda w0, w1: (w0, w1)


@register_jitable
def as_it_is(noise: Any, bound: Any) -> Any:
    """Hand the noise to the formula."""
    return noise


@register_jitable
def kept(word: Any, bound: Any) -> Any:
    """Hand out the mask z of an element: false where its word is below a bound."""
    return word >= bound


def store(i: Any, noise: Any, ins: Any, outs: Any, par: Any) -> None:
    """Write the noise to memory."""
    outs[0][i] = noise


def store_word(i: Any, noise: Any, ins: Any, outs: Any, par: Any) -> None:
    """Write a word to memory."""
    outs[0][i] = i32(noise)


KINDS = {"normal": (normal_pair, as_it_is), "words": (word_pair, as_it_is), "mask": (word_pair, kept)}
FILL = {"normal": store, "words": store_word}


# -- the loops ---------------------------------------------------------------------------------------------------------


@cache
def noisy(kind: str, element: Callable[..., None], dtype: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile the loop of a formula with noise, for one thread and for several.

    The arguments of the first are (key, seed, bound, start, lo, hi, ins, outs, par): the stream's key and seed in words
    of 32 bits, the word below which a mask drops, the place of element 0 in its stream, which elements to do, and the
    formula's arrays and numbers. The second takes the number of pieces in place of lo, and the number of elements in
    place of hi.

    Args:
        kind: One of KINDS.
        element: The formula.
        dtype: numpy's type of the formula's arrays.
    """
    tag = _tag(element) + kind
    make_pair, seen = KINDS[kind]
    pair, held = _inner(make_pair(dtype)), dtype if kind == "normal" else u32

    def tile(k0, k1, counter, buffer):
        low, high = u32(counter & 0xFFFFFFFF), u32(counter >> 32)
        for j in range(i32(TILE)):  # an index of 64 bits would halve the vectors
            w0, w1 = _threefry(k0, k1, u32(low + u32(j)), high)
            buffer[j], buffer[j + TILE] = pair(w0, w1)

    def apply(buffer, shift, first, count, bound, ins, outs, par):
        for j in range(count):
            element(np.uint64(first + j), seen(buffer[np.uint64(shift + j)], bound), ins, outs, par)

    tile, apply = _inner(tile), _inner(apply)

    def serial(key, seed, bound, start, lo, hi, ins, outs, par):
        if len(tag) == 0:  # never; a name that a loop sees is part of its place on disk
            return
        k0, k1 = _secret(u32(key[0]), u32(key[1]), u32(seed[0]), u32(seed[1]))
        arrays, results, numbers = _arrays(ins, hi, dtype), _arrays(outs, hi, dtype), _numbers(par, dtype)
        buffer = np.empty(2 * TILE, held)
        for block in range((start + lo) // BLOCK, (start + hi - 1) // BLOCK + 1):
            for offset in range(0, HALF, TILE):
                there = block * BLOCK + offset - start
                first, last = max(there, lo), min(there + TILE, hi)
                first2, last2 = max(there + HALF, lo), min(there + HALF + TILE, hi)
                if first < last or first2 < last2:
                    tile(k0, k1, block * HALF + offset, buffer)
                    if first < last:
                        apply(buffer, first - there, first, last - first, u32(bound), arrays, results, numbers)
                    if first2 < last2:
                        shift = TILE + first2 - there - HALF
                        apply(buffer, shift, first2, last2 - first2, u32(bound), arrays, results, numbers)

    _inner(serial)

    def several(key, seed, bound, start, pieces, size, ins, outs, par):
        step = -(-size // (pieces * BLOCK)) * BLOCK
        for piece in numba.prange(pieces):
            lo, hi = piece * step, min((piece + 1) * step, size)
            if lo < hi:
                serial(key, seed, bound, start, lo, hi, ins, outs, par)

    return _compile(serial, tag, dtype), _compile(several, tag, dtype, parallel=True)


@cache
def plain(element: Callable[..., None], dtype: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile the loop of a formula without noise: (lo, hi, ins, outs, par), and (pieces, size, ins, outs, par)."""
    tag = _tag(element)

    def apply(lo, hi, ins, outs, par):
        for j in range(hi - lo):
            element(np.uint64(lo + j), ZERO, ins, outs, par)

    apply = _inner(apply)

    def serial(lo, hi, ins, outs, par):
        if len(tag) == 0:
            return
        apply(lo, hi, _arrays(ins, hi, dtype), _arrays(outs, hi, dtype), _numbers(par, dtype))

    _inner(serial)

    def several(pieces, size, ins, outs, par):
        step = -(-size // (pieces * BLOCK)) * BLOCK
        for piece in numba.prange(pieces):
            lo, hi = piece * step, min((piece + 1) * step, size)
            if lo < hi:
                serial(lo, hi, ins, outs, par)

    return _compile(serial, tag, dtype), _compile(several, tag, dtype, parallel=True)


@cache
def summed(element: Callable[..., Any], dtype: Any) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Compile the loop of three sums: (lo, hi, ins, par) returns them, (size, ins, par, totals) a row per piece."""
    tag = _tag(element)

    def add(first, count, ins, par):
        a = b = c = dtype(0)
        for j in range(count):
            x, y, z = element(np.uint64(first + j), ins, par)
            a, b, c = a + x, b + y, c + z
        return a, b, c

    add = _inner(add, REORDER)

    def serial(lo, hi, ins, par):
        a = b = c = 0.0
        if len(tag) == 0:
            return a, b, c
        arrays, numbers = _arrays(ins, hi, dtype), _numbers(par, dtype)
        for first in range(lo, hi, TILE):  # float32 holds the sum of a tile, not that of a tensor
            x, y, z = add(first, min(TILE, hi - first), arrays, numbers)
            a, b, c = a + x, b + y, c + z
        return a, b, c

    _inner(serial)

    def several(size, ins, par, totals):
        step = -(-size // (len(totals) * BLOCK)) * BLOCK
        for piece in numba.prange(len(totals)):
            lo, hi = piece * step, min((piece + 1) * step, size)
            if lo < hi:
                totals[piece, 0], totals[piece, 1], totals[piece, 2] = serial(lo, hi, ins, par)

    return _compile(serial, tag, dtype), _compile(several, tag, dtype, parallel=True)


# -- numba -------------------------------------------------------------------------------------------------------------


def _inner(function: Callable[..., Any], fastmath: frozenset[str] = CONTRACT) -> Callable[..., Any]:
    """Let a loop call a function, which numba wants to be told once."""
    if function not in _known:
        _known.add(function)
        register_jitable(**{**OPTIONS, "fastmath": set(fastmath)})(function)
    return function


def _compile(function: Callable[..., Any], tag: str, dtype: Any, *, parallel: bool = False) -> Callable[..., Any]:
    """Compile when called first, and keep the machine code on disk where there is a place for it.

    Every loop has files of its own: numba numbers the files of one name without a lock, so that processes that start
    together could read each other's.
    """
    own = hashlib.blake2b(f"{tag}{np.dtype(dtype)}".encode(), digest_size=8).hexdigest()
    function.__qualname__ = f"{function.__qualname__}.{own}"
    jit = partial(numba.njit, nogil=True, parallel=parallel, error_model="numpy")
    try:
        return jit(cache=KEEPS)(function)
    except RuntimeError:  # no source file, or nowhere to write
        return jit()(function)


def _tag(element: Callable[..., Any]) -> str:
    """Let numba see an element's formula, with the functions that it is made of; name it by its source and ours."""
    parts: list[Any] = [_inner(part) for part in (element, *(c.cell_contents for c in element.__closure__ or ()))]
    files = {inspect.getsourcefile(f) for f in (*parts, _tag, elements.exp, noise.mix)} - {None}
    sources = (Path(str(f)).read_bytes() for f in sorted(map(str, files)) if Path(str(f)).exists())
    names = "".join(getattr(part, "__qualname__", repr(part)) for part in parts)
    return hashlib.blake2b(b"\0".join(sources), digest_size=8).hexdigest() + names


def choose_threads() -> bool:
    """Ask numba for the OpenMP that torch uses too, so that both share one pool; tell whether threads can be used."""
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


def use_threads(count: int) -> int:
    """Tell numba how many threads the next loop may use; return how many it has."""
    config: Any = numba.config
    count = max(1, min(count, config.NUMBA_NUM_THREADS))
    if count > 1:
        numba.set_num_threads(count)
    return count
