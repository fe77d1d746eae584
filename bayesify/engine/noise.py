"""The noise of tensors as a pure function of (draw seed, parameter name, element).

Neither the reading order, nor the number of threads, nor the device, nor a cut into shards changes a number:
`bayesify.engine.generator` defines them, and every engine computes the same words, and the same numbers to rounding.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bayesify.engine import dispatch
from bayesify.engine.generator import MASK64, drop_bound, unsigned
from bayesify.engine.generator import mix as mix
from bayesify.engine.generator import name_key as name_key
from bayesify.engine.generator import signed as signed

# torch 2.6 cannot tell export from compilation; of the two only export works there.
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
SUBSTREAM = 0x9E3779B97F4A7C15  # odd: its multiples are different keys
DTYPES = {"keep_mask": torch.bool, "words": torch.int64}  # others have the stream's


def global_seed() -> int:
    """Take one number from torch's global generator."""
    return int(torch.randint(MASK64 >> 1, (), dtype=torch.int64, device="cpu"))


@dataclass
class Stream:
    """The noise of one tensor in one draw, not in memory.

    Each call of `normal`, `uniform`, `keep_mask` or `words` takes numbers of its own: the first those of the key, which
    formulas take too, later ones those of further keys.
    """

    seed: Any  # the draw's, 64 bits: a number or a 0-dim int64 tensor
    key: Any  # the parameter's, `name_key` of its name; likewise
    shape: Iterable[int]
    dtype: torch.dtype = torch.float32  # of what `normal` and `uniform` return
    device: "torch.device | str" = "cpu"
    start: int = 0  # the number of elements before the first, where the tensor is a shard
    calls: int = field(default=0, init=False, repr=False, compare=False)

    def _replace(self, **changes: Any) -> "Stream":
        return replace(self, **changes)

    def normal(self) -> Tensor:
        """Return N(0, 1), to the precision of float32."""
        return self._next("normal")

    def uniform(self) -> Tensor:
        """Return numbers spread evenly over [-1, 1]."""
        return self._next("uniform")

    def keep_mask(self, p_drop: float) -> Tensor:
        """Return a bool tensor z with P(z = 1) = 1 - p_drop, to 2**-32."""
        return self._next("keep_mask", p_drop)

    def words(self) -> Tensor:
        """Return 32 random bits an element, as int64."""
        return self._next("words")

    def _next(self, kind: str, p_drop: float = 0.0) -> Tensor:
        """Return the numbers of the next call."""
        step = self.calls * SUBSTREAM
        self.calls += 1
        own = replace(self, key=self.key ^ (signed(step) if isinstance(self.key, Tensor) else step & MASK64))
        if not torch.compiler.is_compiling() or is_exporting():  # exported code runs where only torch's operations are
            return own.computed(kind, p_drop)
        seed, key = (n if isinstance(n, Tensor) else torch.tensor(signed(n)) for n in (own.seed, own.key))
        shape, device = list(self.shape), torch.device(self.device)
        found: Tensor = noise(seed, key, shape, kind, p_drop, self.dtype, device, self.start)
        return found

    def computed(self, kind: str, p_drop: float) -> Tensor:
        """Compute the numbers of the key."""
        formula, dtype = (dispatch.as_normal, self.dtype) if kind == "normal" else (dispatch.as_word, torch.int32)
        with torch.inference_mode(False):
            out = torch.empty(torch.Size(self.shape), dtype=dtype, device=self.device)
        dispatch.run(formula, self, (), (out,))
        if kind == "normal":
            return out
        if kind == "uniform":
            return (out.to(torch.float32) * 2.0**-31).to(self.dtype)
        return unsigned(out) if kind == "words" else unsigned(out) >= drop_bound(p_drop)


# Compilers do not look into this: they would trace the generator for a long time. Seed and key are tensors, so that one
# graph serves every draw, and every tensor of one shape. The schema is written out: torch 2.6 reads no `list[int]`.
@torch.library.custom_op(
    "bayesify::noise",
    mutates_args=(),
    schema="(Tensor seed, Tensor key, SymInt[] shape, str kind, float p_drop, ScalarType dtype, Device device, "
    "SymInt start) -> Tensor",
)
def noise(
    seed: Tensor, key: Tensor, shape: list[int], kind: str, p_drop: float, dtype: Any, device: Any, start: int
) -> Tensor:
    """Compute the numbers of a `Stream`."""
    return Stream(int(seed), int(key), shape, dtype, device, start).computed(kind, p_drop)


@noise.register_fake
def _(
    seed: Tensor, key: Tensor, shape: list[int], kind: str, p_drop: float, dtype: Any, device: Any, start: int
) -> Tensor:
    return torch.empty(shape, dtype=DTYPES.get(kind, dtype), device=device)
