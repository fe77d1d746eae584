"""Count what fused optimizers do: they write parameters without raising the version that autograd keeps of a tensor.

A theta that is kept for several forwards is known to be out of date by the versions of what it was made from.
"""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_watched: list[Any] = []


def watch() -> None:
    """Raise the versions after every step of a fused optimizer, from now on, as other optimizers do."""
    if not _watched:
        _watched.append(register_optimizer_step_post_hook(_raise_versions))


def _raise_versions(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    written = [p for group in optimizer.param_groups if group.get("fused") for p in group["params"]]
    if written:
        torch.autograd.graph.increment_version(written)
