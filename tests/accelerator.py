"""An accelerator that is none: tensors which say that they are on another device, and have their numbers on the CPU.

Like Apple's it has no float64, and a tensor of it meets one of the CPU's only as a number or in a copy. Torch knows no
device of this kind without a backend of its own, so that they pass for tensors of the device "meta".
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "meta"
TO_COPY, COPY_ = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default


class Twin(torch.Tensor):
    """A tensor on the accelerator; `inner` has its numbers."""

    @staticmethod
    def __new__(cls, inner):
        """Make a tensor without memory of its own."""
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return cls._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=NAME, **layout)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class Accelerator(TorchDispatchMode):
    """Within a `with` block the device is there, and what is made on it is a `Twin`."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _run(function, args, kwargs):
    """Run an operation on the numbers."""
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    twins = {id(t.inner): t for t in given if isinstance(t, Twin)}
    device = kwargs.get("device")
    here = bool(twins) if device is None else torch.device(device).type == NAME
    if twins and function is not COPY_ and any(t.dim() and not isinstance(t, Twin) for t in given):
        raise RuntimeError(f"{function} got tensors of two devices")
    if device is not None and here:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = function(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))
    if not here or (function is COPY_ and not isinstance(args[0], Twin)):
        return found
    return tree_map(lambda t: twins.get(id(t)) if id(t) in twins else _twin(function, t), found)


def _numbers(value):
    return value.inner if isinstance(value, Twin) else value


def _twin(function, value):
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.float64:
        raise AssertionError(f"{function} made a float64 tensor off the CPU")
    return Twin(value)
