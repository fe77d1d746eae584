"""Record what the layers of a model take in a forward pass, and where the gradients of their outputs arrive."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize

from bayesify.prediction.batches import logits_of


class NoRuleError(Exception):
    """The per-example gradients of a call cannot be computed in one go."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shape: torch.Size  # of the output
    row: Tensor  # the output's first row
    edge: Any  # where the output's gradient arrives, kept since later operations may change the tensor in place

    @property
    def inputs(self) -> Tensor:
        """The first argument, which must be a tensor."""
        first = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        if not isinstance(first, Tensor) or not first.dim():
            raise NoRuleError
        return first.detach()


class Recorder:
    """Records the calls of the modules that own some parameters, and of the modules around these.

    Outputs that all examples share (embeddings of positions, class tokens) are expanded from (1, ...) to (examples,
    ...), so that each example has a gradient of its own. A second forward of the first batch checks that this leaves
    the model's outputs as they are.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        self.calls: list[Call] = []  # of the last forward
        self.owned: dict[nn.Module, dict[str, str]] = {}  # a module's own parameters: names by attribute
        self.around: dict[str, list[nn.Module]] = {name: [] for name in params}  # from the inside, without the model
        self._tokens: set[nn.Module] = set()
        self._expands: bool | None = None  # unknown before the first batch
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
        """Run the model on a batch of `count` examples, and record the calls."""
        if count > 1 and self._expands is not False:
            try:
                found, expanded = self._recorded(run, count)
                if expanded and self._expands is None:
                    self._expands = _same(run, found)
                if self._expands or not expanded:
                    return found
            except Exception:  # of a model that does not take expanded outputs
                self._expands = False
        return self._recorded(run, 0)[0]

    def _recorded(self, run: Callable[[], Any], count: int) -> tuple[Any, bool]:
        """Run, and return also whether anything was expanded to `count` examples; with a count of 0 nothing is."""
        self.calls, expanded = [], []

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(first, Tensor) or not first.requires_grad or not first.dim():
                return None
            shared = count > 0 and self._is_shared(module, args, count)
            if shared:
                first = first.expand(count, *(first.shape[1:] if len(first) == 1 else first.shape))
                expanded.append(True)
            row = first.detach().reshape(-1, first.shape[-1])[:1].clone()
            self.calls.append(Call(module, args, kwargs, first.shape, row, get_gradient_edge(first)))
            return first if shared else None

        with ExitStack() as stack:
            for module in {m: None for found in (self.owned, *self.around.values()) for m in found}:
                stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
            return run(), bool(expanded)

    def _is_shared(self, module: nn.Module, args: tuple[Any, ...], count: int) -> bool:
        """Return whether an output has no dimension for the examples."""
        if module in self._tokens:
            return True
        ids = args[0] if args and isinstance(module, nn.Embedding) else None
        if not isinstance(ids, Tensor) or ids.dim() not in (1, 2):
            return False
        return ids.numel() == ids.shape[-1] and len(ids) != count


def _same(run: Callable[[], Any], found: Any) -> bool:
    """Return whether a run without expanded outputs gives the same."""
    with torch.no_grad():
        plain, ours = logits_of(run()).float(), logits_of(found).float()
    return plain.shape == ours.shape and torch.allclose(plain, ours, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


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
