"""Modules that keep copies of their weights between forwards, and how to make them forget.

A copy of a sampled weight must not survive the draw that it came from.
"""

import threading
from typing import Any

from torch import nn

EVAL_CACHE = "attention_bias_cache"  # timm: levit, efficientformer, efficientformer_v2, tiny_vit, efficientvit_msra


class Forgetful(dict[str, Any]):
    """A cache that never has what is asked for, so that it is computed anew; what was put in last can be taken out."""

    def __init__(self) -> None:
        super().__init__()
        self._last = threading.local()

    def __setitem__(self, key: str, value: Any) -> None:
        self._last.value = value

    def __getitem__(self, key: str) -> Any:
        value, self._last.value = self._last.value, None
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forgetful":
        return Forgetful()


def find(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that cache weights."""
    return [m for m in model.modules() if isinstance(m, nn.RNNBase) or hasattr(m, EVAL_CACHE)]


def take_over(modules: list[nn.Module]) -> None:
    """Replace the caches that timm fills in eval mode, and makes anew now and then, by one that keeps nothing."""
    for module in modules:
        if type(getattr(module, EVAL_CACHE, None)) is dict:
            setattr(module, EVAL_CACHE, Forgetful())


def forget_weights(modules: list[nn.Module]) -> None:
    """Let RNNs drop the list of weights that their last forward read; they read them anew in the next one."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            kept = getattr(module, "parametrizations", {})
            module._flat_weights = [
                kept[name].original if name in kept else getattr(module, name, None)
                for name in module._flat_weights_names
            ]


def release(modules: list[nn.Module]) -> None:
    """Give the modules of an unwrapped model back what they had."""
    forget_weights(modules)
    for module in modules:
        if hasattr(module, EVAL_CACHE):
            setattr(module, EVAL_CACHE, {})
