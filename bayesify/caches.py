"""Modules that keep copies of their weights between forwards, and how to make them forget.

A copy of a sampled weight must not survive the draw that it came from.
"""

from torch import nn

EVAL_CACHE = "attention_bias_cache"  # timm: levit, efficientformer, efficientformer_v2, tiny_vit, efficientvit_msra


def find(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that cache weights."""
    return [m for m in model.modules() if isinstance(m, nn.RNNBase) or hasattr(m, EVAL_CACHE)]


def forget_weights(modules: list[nn.Module]) -> None:
    """Let RNNs drop the list of weights that their last forward read; they read them anew in the next one."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            kept = getattr(module, "parametrizations", {})
            module._flat_weights = [
                kept[name].original if name in kept else getattr(module, name, None)
                for name in module._flat_weights_names
            ]


def forget_eval(modules: list[nn.Module]) -> None:
    """Empty the caches that timm fills in eval mode."""
    for module in modules:
        if hasattr(module, EVAL_CACHE):
            setattr(module, EVAL_CACHE, {})
