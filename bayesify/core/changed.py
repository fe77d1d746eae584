"""Gradients that a method has changed already, so that none is changed twice.

Several optimizers may share a model, and one may call another: each of their steps is announced.
"""

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_versions: Any = WeakTensorKeyDictionary()  # by gradient


def is_new(grad: Tensor | None) -> bool:
    """Tell whether there is a gradient, and whether anything was added to it since it was changed."""
    return grad is not None and _versions.get(grad) != grad._version


def mark(grad: Tensor | None) -> None:
    """Note that a gradient was changed."""
    if grad is not None:
        _versions[grad] = grad._version
