"""Random numbers as a pure function of (draw seed, parameter name, element).

Neither the reading order, nor the number of threads, nor the device, nor a cut into shards changes a number. The
definition is the one below, in integer operations that any device runs; `bayesify.engine.kernels` computes the same
numbers, to rounding, where a loop over a CPU's memory is faster. For compilers it is one operation, `bayesify::noise`,
of a seed and a key that are tensors: one graph serves every draw, and every tensor of one shape.

The generator is Threefry-2x32 with 13 rounds (Salmon et al. 2011): a bijection of 64-bit counters for every 64-bit key.
Elements come in blocks of 8192; elements r and r + 4096 of a block share a counter, one takes its first word (or the
first number of Box and Muller's pair), the other the second.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesify.engine import fusion

# torch 2.6 cannot tell export from compilation; of the two only export works there.
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)

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
SIN = (3.141592640183968, -5.1677100903285265, 2.5500776596638555, -0.5982921590519754, 0.07765940739182568)
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


def global_seed() -> int:
    """Take one number from torch's global generator."""
    return int(torch.randint(MASK64 >> 1, (), dtype=torch.int64, device="cpu"))


def threefry(key: tuple[Any, Any], x: tuple[Any, Any], rounds: int = 13) -> tuple[Any, Any]:
    """Encrypt the counter x = (x0, x1) under a key: words of 32 bits, held by Python's integers or int64 tensors."""
    schedule = (*key, key[0] ^ key[1] ^ PARITY)
    x0, x1 = ((word + k) & MASK32 for word, k in zip(x, key, strict=True))
    for i in range(rounds):
        turn = ROTATIONS[i % 8]
        x0 = (x0 + x1) & MASK32
        x1 = (((x1 << turn) & MASK32) | (x1 >> (32 - turn))) ^ x0
        if i % 4 == 3:
            s = i // 4 + 1
            x0 = (x0 + schedule[s % 3]) & MASK32
            x1 = (x1 + schedule[(s + 1) % 3] + s) & MASK32
    return x0, x1


def signed(number: int) -> int:
    """Return the number between -2^63 and 2^63 with the same 64 bits, which a tensor can hold."""
    return (number & MASK64) - ((number & (1 << 63)) << 1)


def words_of(number: Any) -> tuple[Any, Any]:
    """Cut 64 bits into their low and high 32."""
    return number & MASK32, (number >> 32) & MASK32


class Stream(NamedTuple):
    """The noise of one tensor in one draw, not in memory.

    Attributes:
        seed: The draw's, 64 bits; a 0-dim int64 tensor will do.
        key: The parameter's, `name_key` of its name; likewise.
        shape: The tensor's.
        dtype: Of what `normal` and `uniform` return.
        device: Where the numbers are wanted.
        start: The place of the first element, where the tensor is a shard: the number of elements before it.
    """

    seed: Any
    key: Any
    shape: Iterable[int]
    dtype: torch.dtype = torch.float32
    device: "torch.device | str" = "cpu"
    start: int = 0

    @property
    def secret(self) -> tuple[Any, Any]:
        """The key of the tensor's counters: one to one in the seed, so that draws never share one."""
        seed = self.seed
        if torch.compiler.is_compiling() and not isinstance(seed, Tensor):
            seed = torch.scalar_tensor(seed, dtype=torch.int64)  # the compiler would do sums with symbols for ever
        return threefry(words_of(self.key), words_of(seed), rounds=20)

    @property
    def key_words(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The words of key and seed, from which a kernel computes the secret itself."""
        return words_of(int(self.key)), words_of(int(self.seed))

    def normal(self) -> Tensor:
        """Return N(0, 1), to the precision of float32."""
        if _opaque():
            return self._by_operation("normal")
        out = self._by_kernel("normal", self.dtype) if self.dtype in (torch.float32, torch.float64) else None
        if out is None:
            pieces = [_normal(p._counted(), p._takes_second(), self.dtype) for p in self._pieces()]
            out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return out.view(torch.Size(self.shape))

    def uniform(self) -> Tensor:
        """Return numbers spread evenly over [-1, 1]."""
        if _opaque():
            return self._by_operation("uniform")
        return (_signed(self.words()).to(torch.float32) * 2.0**-31).to(self.dtype)

    def keep_mask(self, p_drop: float) -> Tensor:
        """Return a bool tensor z with P(z = 1) = 1 - p_drop, to 2**-32."""
        if _opaque():
            return self._by_operation("keep_mask", p_drop)
        return self.words() >= drop_bound(p_drop)

    def words(self) -> Tensor:
        """Return 32 random bits an element, as int64."""
        out = self._by_kernel("words", torch.int32)
        if out is None:
            pieces = [torch.where(p._takes_second(), *p._counted()[::-1]) for p in self._pieces()]
            out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return (out.to(torch.int64) & MASK32).view(torch.Size(self.shape))

    def _by_operation(self, kind: str, p_drop: float = 0.0) -> Tensor:
        """Leave the numbers to an operation that compilers do not look into: they would trace for a long time."""
        seed, key = (n if isinstance(n, Tensor) else torch.tensor(signed(n)) for n in (self.seed, self.key))
        shape, device = list(self.shape), torch.device(self.device)
        out: Tensor = noise(seed, key, shape, kind, p_drop, self.dtype, device, self.start)
        return out

    def _by_kernel(self, what: str, dtype: torch.dtype) -> Tensor | None:
        """Let a kernel fill the tensor, where one can."""
        if torch.device(self.device).type != "cpu" or not fusion.ready():
            return None
        with torch.inference_mode(False):
            out = torch.empty(torch.Size(self.shape).numel(), dtype=dtype, device="cpu")
        fusion.fill(what, self, out)
        return out

    def _pieces(self) -> "list[Stream]":
        """Cut the elements for a CPU, whose cache then holds what lies between two operations."""
        size, step = torch.Size(self.shape).numel(), 1 << 16
        if size <= step or torch.device(self.device).type != "cpu":
            return [self]
        cuts = range(0, size, step)
        return [self._replace(shape=(min(step, size - c),), start=self.start + c) for c in cuts]

    def _index(self) -> Tensor:
        size = torch.Size(self.shape).numel()
        return torch.arange(self.start, self.start + size, dtype=torch.int64, device=self.device)

    def _counted(self) -> tuple[Tensor, Tensor]:
        """Return both words of every element's counter."""
        index = self._index()
        counter = index // BLOCK * HALF + index % HALF
        words: tuple[Tensor, Tensor] = threefry(self.secret, words_of(counter))
        return words

    def _takes_second(self) -> Tensor:
        return self._index() % BLOCK >= HALF


def _opaque() -> bool:
    """Tell whether a compiler traces; what `torch.export` writes is for places where only torch's operations are."""
    return torch.compiler.is_compiling() and not is_exporting()


# Schemas with lists are written out: torch 2.6 reads no `list[int]`.
@torch.library.custom_op(
    "bayesify::noise",
    mutates_args=(),
    schema="(Tensor seed, Tensor key, SymInt[] shape, str kind, float p_drop, ScalarType dtype, Device device, "
    "SymInt start) -> Tensor",
)
def noise(
    seed: Tensor,
    key: Tensor,
    shape: list[int],
    kind: str,
    p_drop: float,
    dtype: torch.dtype,
    device: torch.device,
    start: int,
) -> Tensor:
    """Compute the numbers of a `Stream`: "normal", "uniform" or "keep_mask"."""
    stream = Stream(int(seed), int(key), shape, dtype, device, start)
    return stream.keep_mask(p_drop) if kind == "keep_mask" else getattr(stream, kind)()


@noise.register_fake
def _(seed: Tensor, key: Tensor, shape: list[int], kind: str, *rest: Any) -> Tensor:
    _, dtype, device, _ = rest
    return torch.empty(shape, dtype=torch.bool if kind == "keep_mask" else dtype, device=device)


def drop_bound(p_drop: float) -> int:
    """Return the word below which an element is dropped."""
    return min(round(p_drop * 2**32), MASK32)


def _signed(word: Tensor) -> Tensor:
    """Read 32 bits as a signed integer."""
    return word - ((word >> 31) << 32)


def _normal(words: tuple[Tensor, Tensor], second: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn two words into one of two independent N(0, 1), after Box and Muller.

    With u = (w0 | 1)/2^32 and t = w1/2^32 (signed, between -1/2 and 1/2), both rounded to float32, the pair is
    sqrt(-2 log u) (+-cos(pi t), sin(pi t)); the sign is the lowest bit of w1. For u = m 2^k with m = 1 + f,
    -2 log u = -2 log(2) k + f (-2 + f (1 + f LOG(f))).
    """
    w0, w1 = words
    bits = (w0 | 1).to(torch.float32).view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32).to(dtype) - 1
    square = (exponent - 32).to(dtype) * MINUS_2_LOG_2 + f * (-2 + f * (1 + f * _horner(LOG, f)))
    t = (_signed(w1).to(torch.float32) * 2.0**-32).to(dtype)
    z = t * t
    cos = _horner(COS, z) * (1 - 2 * (w1 & 1)).to(dtype)
    return square.sqrt() * torch.where(second, t * _horner(SIN, z), cos)


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Evaluate a polynomial."""
    out = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out = out * x + c
    return out
