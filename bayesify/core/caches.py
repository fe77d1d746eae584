"""Recurrent layers keep a list of the weights that their last forward read: drop what came from a draw."""

from torch import nn


def find(model: nn.Module) -> list[nn.RNNBase]:
    """Return the modules of a model that keep such a list."""
    return [m for m in model.modules() if isinstance(m, nn.RNNBase)]


def forget_weights(modules: list[nn.RNNBase]) -> None:
    """Let RNNs drop the list of weights that their last forward read; they read them anew in the next one."""
    for module in modules:
        kept = getattr(module, "parametrizations", {})
        module._flat_weights = [
            kept[name].original if name in kept else getattr(module, name, None) for name in module._flat_weights_names
        ]
