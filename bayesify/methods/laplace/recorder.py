"""Note what the layers of a model take in a forward pass, and where the gradients of their outputs arrive."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize

from bayesify.prediction.batches import logits_of


class NoRuleError(Exception):
    """The per-example gradients of a call cannot be had in one go."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: what it took, what it returned, and where the gradient of that arrives.

    The place is kept beside the tensor, since what follows may change the tensor in place.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shape: torch.Size
    row: Tensor
    edge: Any

    @property
    def inputs(self) -> Tensor:
        """The first thing that it took, which must be a tensor."""
        first = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        if not isinstance(first, Tensor) or not first.dim():
            raise NoRuleError
        return first.detach()


class Recorder:
    """Notes the calls of the modules that some parameters belong to, and of the modules around these.

    What all examples share is spread over them, (1, ...) to (examples, ...), so that each has a gradient of its own:
    embeddings of positions, class tokens. That this changes nothing is seen in a second forward of the first batch.

    Attributes:
        calls: Those of the last forward.
        owned: The names of a module's own parameters, by attribute.
        around: For each parameter, the modules that it is in, from the inside, without the model itself.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        self.calls: list[Call] = []
        self.owned: dict[nn.Module, dict[str, str]] = {}
        self.around: dict[str, list[nn.Module]] = {name: [] for name in params}
        self._tokens: set[nn.Module] = set()
        self._spread: bool | None = None  # not known before the first batch
        names = {id(param): name for name, param in params.items()}
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            for attribute, own in _parameters(module).items():
                if (name := names.get(id(own))) is None:
                    continue
                self.owned.setdefault(module, {})[attribute] = name
                bare = attribute not in ("weight", "bias")  # which layers have rules for
                if bare and own.dim() > 1 and len(own) == 1 and parametrize.is_parametrized(module, attribute):
                    self._tokens.add(module.parametrizations[attribute])
                    self.owned.setdefault(module.parametrizations[attribute], {})[""] = name
                parts = path.split(".") if path else []
                above = [modules[".".join(parts[:end])] for end in range(len(parts), 0, -1)]
                self.around[name] += [m for m in above if m not in self.around[name]]

    def forward(self, run: Callable[[], Any], count: int) -> Any:
        """Run the model on a batch of `count` examples, and note the calls."""
        if count == 1 or self._spread is False:
            return self._noted(run, 0)[0]
        try:
            found, spread = self._noted(run, count)
        except Exception:
            self._spread = False
            return self._noted(run, 0)[0]
        if self._spread is None and spread:
            with torch.no_grad():
                plain = logits_of(run())
            self._spread = plain.shape == (ours := logits_of(found)).shape and torch.allclose(
                plain.float(), ours.float(), rtol=1e-3, atol=1e-3 * float(plain.float().abs().max())
            )
            return found if self._spread else self._noted(run, 0)[0]
        return found

    def _noted(self, run: Callable[[], Any], count: int) -> tuple[Any, bool]:
        """Run, and return also whether anything was spread; with a count of 0 nothing is."""
        self.calls, spread = [], []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(first, Tensor) or not first.requires_grad or not first.dim():
                return None
            shared = count > 0 and self._is_shared(module, args, first, count)
            if shared:
                first = first.expand(count, *(first.shape[1:] if len(first) == 1 else first.shape))
                spread.append(True)
            row = first.detach().reshape(-1, first.shape[-1])[:1].clone()
            self.calls.append(Call(module, args, kwargs, first.shape, row, get_gradient_edge(first)))
            return first if shared else None

        watched = {**self.owned, **{m: None for found in self.around.values() for m in found}}
        with _hooks(watched, note):
            return run(), bool(spread)

    def _is_shared(self, module: nn.Module, args: tuple[Any, ...], output: Tensor, count: int) -> bool:
        """Return whether an output has no dimension for the examples."""
        if module in self._tokens:
            return True
        ids = args[0] if args and isinstance(module, nn.Embedding) else None
        return (
            isinstance(ids, Tensor) and ids.dim() in (1, 2) and len(ids) != count and (ids.dim() == 1 or len(ids) == 1)
        )


@contextmanager
def _hooks(modules: Mapping[nn.Module, Any], note: Callable[..., Any]) -> Iterator[None]:
    handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters by attribute, those behind one parametrization too."""
    if isinstance(module, parametrize.ParametrizationList):
        return {}
    found: dict[str, Tensor] = {name: p for name, p in module._parameters.items() if p is not None}
    for attribute in getattr(module, "parametrizations", {}) if parametrize.is_parametrized(module) else ():
        original = module.parametrizations[attribute]._parameters.get("original")  # type: ignore[index, union-attr]
        if original is not None and len(module.parametrizations[attribute]) == 1:  # type: ignore[index]
            found[attribute] = original
    return found
