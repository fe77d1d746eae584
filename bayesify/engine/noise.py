"""The noise of tensors as a pure function of (draw seed, parameter name, element).

Neither the reading order, nor the number of threads, nor the device, nor a cut into shards changes a number:
`bayesify.engine.generator` defines them, and every engine computes the same words, and the same numbers to rounding.
For compilers noise is one operation, `bayesify::noise`, of a seed and a key that are tensors: one graph serves every
draw, and every tensor of one shape.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bayesify.engine import dispatch
from bayesify.engine.generator import MASK64, drop_bound, secret, unsigned, words_of
from bayesify.engine.generator import mix as mix
from bayesify.engine.generator import name_key as name_key
from bayesify.engine.generator import signed as signed

# torch 2.6 cannot tell export from compilation; of the two only export works there.
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
SUBSTREAM = 0x9E3779B97F4A7C15  # odd: its multiples are different keys


def global_seed() -> int:
    """Take one number from torch's global generator."""
    return int(torch.randint(MASK64 >> 1, (), dtype=torch.int64, device="cpu"))


@dataclass
class Stream:
    """The noise of one tensor in one draw, not in memory.

    Each call of `normal`, `uniform`, `keep_mask` or `words` takes numbers of its own: the first those of the key, which
    formulas take too, later ones those of further keys.

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
    calls: int = field(default=0, init=False, repr=False, compare=False)

    def _replace(self, **changes: Any) -> "Stream":
        return replace(self, **changes)

    @property
    def secret(self) -> tuple[Any, Any]:
        """The key of the tensor's counters."""
        return secret(words_of(self.key), words_of(self.seed))

    def normal(self) -> Tensor:
        """Return N(0, 1), to the precision of float32."""
        own = self._next()
        return own._by_operation("normal") if _opaque() else own._filled(dispatch.as_normal, self.dtype)

    def uniform(self) -> Tensor:
        """Return numbers spread evenly over [-1, 1]."""
        own = self._next()
        if _opaque():
            return own._by_operation("uniform")
        return (own._filled(dispatch.as_word, torch.int32).to(torch.float32) * 2.0**-31).to(self.dtype)

    def keep_mask(self, p_drop: float) -> Tensor:
        """Return a bool tensor z with P(z = 1) = 1 - p_drop, to 2**-32."""
        own = self._next()
        if _opaque():
            return own._by_operation("keep_mask", p_drop)
        return unsigned(own._filled(dispatch.as_word, torch.int32)) >= drop_bound(p_drop)

    def words(self) -> Tensor:
        """Return 32 random bits an element, as int64."""
        return unsigned(self._next()._filled(dispatch.as_word, torch.int32))

    def _next(self) -> "Stream":
        """Return the sub-stream of the next call."""
        key, call = self.key, self.calls
        self.calls += 1
        return replace(self, key=key ^ _bits(key, call * SUBSTREAM))

    def _filled(self, formula: Any, dtype: torch.dtype) -> Tensor:
        """Return what a formula of the noise alone gives."""
        with torch.inference_mode(False):
            out = torch.empty(torch.Size(self.shape), dtype=dtype, device=self.device)
        dispatch.run(formula, self, (), (out,))
        return out

    def _by_operation(self, kind: str, p_drop: float = 0.0) -> Tensor:
        """Leave the numbers to an operation that compilers do not look into: they would trace for a long time."""
        seed, key = (n if isinstance(n, Tensor) else torch.tensor(signed(n)) for n in (self.seed, self.key))
        shape, device = list(self.shape), torch.device(self.device)
        out: Tensor = noise(seed, key, shape, kind, p_drop, self.dtype, device, self.start)
        return out


def _opaque() -> bool:
    """Return whether a compiler traces; what `torch.export` writes is for places where only torch's operations are."""
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


def _bits(key: Any, number: int) -> int:
    """Return a number that can be combined with a key, which is a tensor or not."""
    return signed(number) if isinstance(key, Tensor) else number & MASK64
