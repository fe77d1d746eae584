"""Random numbers as a pure function of (draw seed, parameter name, element).

Neither the reading order, nor the number of threads, nor what ran before changes a number. On a CPU the
elements are cut into chunks, each with a generator of its own, which a few threads fill side by side.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify import threads

CHUNK = 1 << 18
_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1

Fill = Callable[[Tensor, torch.Generator], None]
Piece = tuple[Tensor, Fill, int]


class Job(NamedTuple):
    """One tensor to fill with noise: `fill(flat_piece, generator)` does a piece of it."""

    out: Tensor
    fill: Fill
    seed: int
    key: int


def name_key(name: str) -> int:
    """Hash a parameter's name to 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def mix(seed: int, *words: int) -> int:
    """Mix a seed with further words into 64 bits (splitmix64 rounds)."""
    state = seed & _MASK64
    for word in (0, *words):
        state = (state + 0x9E3779B97F4A7C15 * (2 * (word & _MASK64) + 1)) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


def global_seed() -> int:
    """Take one number from torch's global generator."""
    return int(torch.randint(_MASK64 >> 1, (), dtype=torch.int64, device="cpu"))


def chunk_seed(seed: int, key: int, chunk: int) -> int:
    """Seed of one chunk's generator.

    A CPU generator keeps only 32 bits of its seed. The map is one to one in the low 32 bits of the draw's
    seed, so that draws with consecutive seeds never repeat each other's noise.
    """
    return _scramble32(((seed & _MASK32) + mix(key, chunk, seed >> 32)) & _MASK32)


def _scramble32(word: int) -> int:
    """Permute the 32-bit integers (a bijection)."""
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _MASK32
    word = ((word ^ (word >> 15)) * 0x735A2D97) & _MASK32
    return word ^ (word >> 15)


def fill(jobs: Iterable[Job]) -> None:
    """Fill every job's tensor with its noise."""
    pieces = list(_pieces(jobs))
    # Small pieces go together: handing one to a thread costs more than filling it.
    small = [piece for piece in pieces if piece[0].numel() < CHUNK // 16]
    groups = [[piece] for piece in pieces if piece[0].numel() >= CHUNK // 16] + ([small] if small else [])
    threads.run([partial(_fill_pieces, group) for group in groups])


def _fill_pieces(pieces: list[Piece]) -> None:
    generator = torch.Generator()
    for out, fill_piece, seed in pieces:
        fill_piece(out, generator.manual_seed(seed))


def _pieces(jobs: Iterable[Job]) -> Iterator[Piece]:
    """Cut CPU tensors into chunks; a tensor elsewhere is filled at once, on its own device."""
    for job in jobs:
        flat = job.out.view(-1)
        if flat.device.type == "cpu":
            for i, piece in enumerate(torch.split(flat, CHUNK)):
                yield piece, job.fill, chunk_seed(job.seed, job.key, i)
        elif flat.device.type != "meta":
            job.fill(flat, torch.Generator(flat.device).manual_seed(mix(job.seed, job.key) >> 1))


def normal_(out: Tensor, generator: torch.Generator) -> None:
    """Fill with N(0, 1); low-precision tensors get rounded float32 noise."""
    out.normal_(generator=generator)


def keep_mask_(out: Tensor, generator: torch.Generator, p_drop: float) -> None:
    """Fill a bool tensor with z ~ Bernoulli(1 - p_drop), by comparing raw random integers.

    Sixteen bits an element where p_drop and 1 - p_drop are multiples of 2**-16 within one part in a thousand, else 32.
    """
    coarse = p_drop * 2**16
    enough = abs(round(coarse) - coarse) <= 1e-3 * min(coarse, 2**16 - coarse)
    bits, dtype = (16, torch.int16) if enough else (32, torch.int32)
    dropped = min(round(p_drop * 2**bits), 2**bits - 1)
    size = -(-out.numel() * bits // 64)
    if out.device.type == "cpu":
        words = threads.scratch_tensor(size, torch.int64)
    else:
        words = torch.empty(size, dtype=torch.int64, device=out.device)
    words.random_(-(2**63), None, generator=generator)
    torch.ge(words.view(dtype)[: out.numel()], dropped - 2 ** (bits - 1), out=out)
