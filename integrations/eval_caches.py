"""timm's attention layers cache a copy of their weights in eval mode, which must not survive the draw it came from.

Those of levit, efficientformer, efficientformer_v2, tiny_vit and efficientvit_msra do. Each gets a cache that keeps
nothing, put back before every forward, since timm makes a new one when it loads weights or moves buffers.
"""

import threading
from typing import Any

from torch import nn

CACHE = "attention_bias_cache"


class NullCache(dict[str, Any]):
    """A cache without entries; the value that was put in last can be read once."""

    def __init__(self) -> None:
        super().__init__()
        self._last = threading.local()

    def __setitem__(self, key: str, value: Any) -> None:
        self._last.value = value

    def __getitem__(self, key: str) -> Any:
        value, self._last.value = self._last.value, None
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> "NullCache":
        return NullCache()


def _disable(module: nn.Module, _: Any) -> None:
    """Replace the cache of a module; a forward pre-hook."""
    if not isinstance(getattr(module, CACHE), NullCache):
        setattr(module, CACHE, NullCache())


def put_on(model: nn.Module) -> None:
    """Disable the caches of a bayesified model."""
    for module in model.modules():
        if hasattr(module, CACHE):
            module.register_forward_pre_hook(_disable)


def take_off(model: nn.Module) -> None:
    """Undo `put_on`."""
    for module in model.modules():
        if hasattr(module, CACHE):
            hooks = module._forward_pre_hooks
            for key in [k for k, hook in hooks.items() if hook is _disable]:
                del hooks[key]
            setattr(module, CACHE, {})
