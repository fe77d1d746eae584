"""The random numbers, defined once: on tensors by torch, and on words of 32 bits by the engines it is written out for.

The generator is Threefry-2x32 with 13 rounds (Salmon et al. 2011): a bijection of 64-bit counters for every 64-bit key.
Elements come in blocks of 8192; elements r and r + 4096 of a block share a counter, one takes its first word (or the
first number of Box and Muller's pair), the other the second. Words are Python integers, int32 or int64 tensors, or the
variables of a program (`bayesify.engine.writing`).
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

HALF = 4096
BLOCK = 2 * HALF
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1
SQRT_HALF_BITS = 0x3F3504F3  # of the float32 sqrt(1/2)

# Polynomials, lowest power first; their errors are below the rounding of float32.
LOG = (  # (log(1 + f) + ...) as in `normal_pair`, for 1 + f between sqrt(1/2) and sqrt(2)
    -0.6666771620060011,
    0.5000349381194014,
    -0.39930792991809244,
    0.3313127231886893,
    -0.2975396436888174,
    0.2870037621566761,
    -0.1783556549093823,
)
SIN = (3.141592640183968, -5.1677100903285265, 2.5500776598636555, -0.5982921590519754, 0.07765940739182568)
COS = (0.9999999534665515, -4.934792858660291, 4.058411913867328, -1.3318801593293799, 0.21969679476329637)
MINUS_2_LOG_2 = -1.3862943611198906


def name_key(name: str) -> int:
    """Hash a parameter's name to 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


name_key._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what `torch.compiler` does, without its import


def mix(seed: int, *words: int) -> int:
    """Mix a seed with further words into 64 bits (splitmix64 rounds)."""
    state = seed & MASK64
    for word in (0, *words):
        state = (state + 0x9E3779B97F4A7C15 * (2 * (word & MASK64) + 1)) & MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
        state ^= state >> 31
    return state


def signed(number: int, bits: int = 64) -> int:
    """Return the signed integer with the same bits, which a tensor can hold."""
    return (number & ((1 << bits) - 1)) - ((number & (1 << (bits - 1))) << 1)


def words_of(number: Any) -> tuple[Any, Any]:
    """Return the low and the high 32 of 64 bits."""
    return number & MASK32, (number >> 32) & MASK32


def threefry(key: tuple[Any, Any], x: tuple[Any, Any], rounds: int = 13) -> tuple[Any, Any]:
    """Encrypt the counter x = (x0, x1) under a key."""
    schedule = (*key, key[0] ^ key[1] ^ PARITY)
    x0, x1 = (_wrap(word + _addend(k)) for word, k in zip(x, key, strict=True))
    for i in range(rounds):
        turn = ROTATIONS[i % 8]
        x0 = _wrap(x0 + x1)
        x1 = _wrap((x1 << turn) | ((x1 >> (32 - turn)) & ((1 << turn) - 1))) ^ x0
        if i % 4 == 3:
            s = i // 4 + 1
            x0 = _wrap(x0 + _addend(schedule[s % 3]))
            x1 = _wrap(x1 + _addend(schedule[(s + 1) % 3] + s))
    return x0, x1


def secret(key: tuple[Any, Any], seed: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the key of a tensor's counters: one to one in the seed, so that draws never share one."""
    return threefry(key, seed, rounds=20)


def normal_pair(words: tuple[Any, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """Turn two words into two independent N(0, 1), after Box and Muller.

    With u = (w0 | 1)/2^32 and t = w1/2^32 (signed, between -1/2 and 1/2), both rounded to float32, the pair is
    sqrt(-2 log u) (+-cos(pi t), sin(pi t)); the sign is the lowest bit of w1. For u = m 2^k with m = 1 + f,
    -2 log u = -2 log(2) k + f (-2 + f (1 + f LOG(f))).
    """
    w0, w1 = words
    bits = _float(w0 | 1).view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32).to(dtype) - 1
    r = ((exponent - 32).to(dtype) * MINUS_2_LOG_2 + f * (f * (f * horner(LOG, f) + 1) - 2)).sqrt()
    w1 = w1.to(torch.int32)
    t = (w1.to(torch.float32) * 2.0**-32).to(dtype)
    sign = ((w1 << 31) | 0x3F800000).view(torch.float32).to(dtype)
    return r * horner(COS, t * t) * sign, r * (t * horner(SIN, t * t))


def drop_bound(p_drop: float) -> int:
    """Return the word below which an element is dropped."""
    return min(round(p_drop * 2**32), MASK32)


def horner(coefficients: tuple[float, ...], x: Any) -> Any:
    """Evaluate a polynomial, lowest power first."""
    out: Any = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        out = out * x + c
    return out


def tensor(kind: str, stream: Any, dtype: torch.dtype, p_drop: float = 0.0) -> Tensor:
    """Compute the noise of a stream by torch's operations, flat: "word", "keep" (a bool mask) or "eps" (N(0, 1))."""
    size, first = torch.Size(stream.shape).numel(), stream.start // BLOCK
    blocks = -(-(stream.start + size) // BLOCK) - first
    low = torch.arange(blocks * HALF, dtype=torch.int64, device=stream.device) + first * HALF  # whole blocks
    key = tuple(map(_narrow, secret(words_of(stream.key), words_of(stream.seed))))
    pair = threefry(key, tuple(_narrow(w) for w in words_of(low)))
    found = normal_pair(pair, dtype) if kind == "eps" else pair
    flat = torch.stack([x.view(blocks, HALF) for x in found], 1).flatten()[stream.start - first * BLOCK :][:size]
    return unsigned(flat) >= drop_bound(p_drop) if kind == "keep" else flat


def unsigned(words: Tensor) -> Tensor:
    """Return words of 32 bits as the int64 numbers between 0 and 2^32."""
    return words.to(torch.int64) & MASK32


def _wrap(x: Any) -> Any:
    """Keep 32 bits, where a type has more."""
    return x & MASK32 if isinstance(x, int) or (isinstance(x, Tensor) and x.dtype == torch.int64) else x


def _addend(k: Any) -> Any:
    """Return a number as one that can be added to int32."""
    return signed(k, 32) if isinstance(k, int) else k


def _narrow(x: Any) -> Any:
    """Return a word of 64-bit integers as an int32, whatever its highest bit."""
    return ((x ^ (1 << 31)) - (1 << 31)).to(torch.int32) if isinstance(x, Tensor) else x


def _float(word: Any) -> Any:
    """Round a word, between 0 and 2^32, to float32."""
    return (unsigned(word) if isinstance(word, Tensor) else word).to(torch.float32)
