"""Buffers as they were at `bayesify`, such as BatchNorm's running statistics: `prior` reads them with the prior mean.

Each is a plain attribute of its module, beside the buffer: no forward writes to it, and DistributedDataParallel does
not broadcast it. State dicts and saved files hold it.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.core.stored import Stored

SUFFIX = "_at_start"
_LOCK = threading.Lock()


def lasting(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (plain name, module, attribute) of every buffer that a state dict holds, the posteriors' own left out."""
    for path, module in root.named_modules():
        if not isinstance(module, Stored):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}" if path else name, module, name


def check(root: nn.Module, known: Mapping[str, Tensor]) -> None:
    """Raise a ValueError where a buffer that comes with a prior mean has another shape than the model's."""
    for path, module, name in lasting(root):
        shape = module._buffers[name].shape  # type: ignore[union-attr]
        if path in known and known[path].shape != shape:
            raise ValueError(
                f"prior_mean has {path!r} in shape {tuple(known[path].shape)}, the model in {tuple(shape)}; give a "
                "model of the same architecture"
            )


def keep(root: nn.Module, known: Mapping[str, Tensor] | None = None) -> None:
    """Keep the buffers as they are now, or as they were by what is known under their plain names."""
    for path, module, name in list(lasting(root)):
        now: Any = module._buffers[name]
        setattr(module, name + SUFFIX, (known or {}).get(path, now).detach().to(now, copy=True))


def kept(root: nn.Module) -> dict[str, Tensor]:
    """Return the buffers as they were, under their plain names."""
    return {path: getattr(m, name + SUFFIX) for path, m, name in lasting(root) if hasattr(m, name + SUFFIX)}


def drop(root: nn.Module) -> None:
    """Forget the buffers as they were."""
    for _, module, name in lasting(root):
        module.__dict__.pop(name + SUFFIX, None)


def put_back(view: nn.Module) -> None:
    """Give a view of a model, whose buffers are its own, the buffers of the start."""
    for _, module, name in list(lasting(view)):
        if hasattr(module, name + SUFFIX):
            module._buffers[name] = getattr(module, name + SUFFIX).to(module._buffers[name], copy=True)


@contextmanager
def started(model: nn.Module) -> Iterator[None]:
    """Use the buffers of the start inside a `with` block, in the model itself."""
    now = [(module, dict(module._buffers)) for module in model.modules()]
    put_back(model)
    try:
        yield
    finally:
        for module, buffers in now:
            module._buffers.update(buffers)


class Buffers:
    """The buffers of a bayesified model: those of now, or for a while those of the start.

    Attributes:
        now: Where those of now belong while those of the start are in their place: module, attribute and tensor.
    """

    def __init__(self) -> None:
        self.now: list[tuple[nn.Module, str, Tensor]] = []

    def put(self, root: nn.Module | None, *, start: bool) -> None:
        """Put those of the start in place, in copies that a forward may write to; or those of now."""
        if root is None or start == bool(self.now):
            return
        with _LOCK:
            if start and not self.now:
                self.now = [(m, name, m._buffers[name]) for _, m, name in lasting(root) if hasattr(m, name + SUFFIX)]  # type: ignore[misc]
                for module, name, tensor in self.now:
                    module._buffers[name] = getattr(module, name + SUFFIX).to(tensor, copy=True)
            elif not start:
                for module, name, tensor in self.now:
                    module._buffers[name] = tensor
                self.now = []


def plain(state_dict: dict[str, Any]) -> None:
    """Take the buffers of the start out of a state dict that is to be a plain model's."""
    for key in [k for k in state_dict if k.endswith(SUFFIX) and k.removesuffix(SUFFIX) in state_dict]:
        del state_dict[key]


def save_start(root: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the buffers of the start to a state dict; a hook on the bayesified model."""
    state_dict.update({prefix + name + SUFFIX: tensor for name, tensor in kept(root).items()})


def restore(root: nn.Module, *_: Any) -> None:
    """Put the buffers of now in place before a state dict is made; a hook on the bayesified model."""
    scope: Any = root._bayesify_scope
    scope.buffers.put(root, start=False)


def load_start(root: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the buffers of the start out of a state dict that is loaded; a hook on the bayesified model."""
    restore(root)
    for path, module, name in lasting(root):
        found = state_dict.pop(prefix + path + SUFFIX, None)
        if found is not None:
            with torch.no_grad():
                setattr(module, name + SUFFIX, found.detach().to(module._buffers[name].device, copy=True))  # type: ignore[union-attr]
