"""Collect what a model makes of its inputs before its last layer: the features of `metrics.feature_distance`."""

from typing import Any

import torch
from torch import Tensor, nn

from bayesify.core.draws import MEAN
from bayesify.core.evaluating import evaluation
from bayesify.core.modes import override
from bayesify.core.posterior import Posterior
from bayesify.core.wrap import check_module, scopes_of
from bayesify.prediction.batches import as_batches, call_model, device_of, logits_of, split_batch, to_device
from bayesify.prediction.last_layer import Call, same_output, watching


def features(model: nn.Module, data: Any, layer: str | None = None) -> tuple[Tensor, Tensor | None]:
    """Return what a model's last layer takes, in eval mode and at the posterior mean, for `metrics.feature_distance`.

    Args:
        model: Any model, bayesified or not; of a mixture the first member.
        data: As `predict` takes it.
        layer: The name of the layer whose inputs are wanted; None is the linear layer that gives the model's output.

    Returns:
        The features, (N, D), and the labels or None, on the CPU.

    Raises:
        ValueError: There is no such layer, it is not called once for every example, or there is no data.

    Example:
        >>> import torch
        >>> from bayesify import active
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
        >>> found, labels = active.features(net, torch.ones(4, 3))
        >>> found.shape, labels
        (torch.Size([4, 5]), None)
    """
    check_module(model)
    watched = _candidates(model, layer)
    scopes = scopes_of(model) if any(isinstance(m, Posterior) for m in model.modules()) else []
    device, found, labels = device_of(model), list[Tensor](), list[Any]()
    with evaluation(model), override(scopes, MEAN), watching(watched) as calls:
        for batch in as_batches(data):
            calls.clear()
            inputs, target = split_batch(batch)
            output = logits_of(call_model(model, to_device(inputs, device), to_device(target, device)))
            found.append(_only(calls, layer, output))
            labels.append(target)
    if not found:
        raise ValueError("data has no batches; give at least one")
    known = all(target is not None for target in labels)
    return torch.cat(found), torch.cat([torch.as_tensor(t).cpu() for t in labels]) if known else None


def _candidates(model: nn.Module, layer: str | None) -> dict[str, nn.Module]:
    """Return the layers that may be meant, by name."""
    if layer is None:
        return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    modules = dict(model.named_modules())
    if layer not in modules:
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        raise ValueError(f"the model has no layer {layer!r}; its last linear layers are {linear[-3:]}")
    return {layer: modules[layer]}


def _only(calls: list[Call], layer: str | None, output: Tensor) -> Tensor:
    """Return the inputs of the one call that counts."""
    if layer is None:
        calls = [call for call in calls if same_output(call.output, output)]
        if len(calls) != 1:
            raise ValueError("no single linear layer gives the model's output; name the one that counts with layer=")
    elif len(calls) != 1:
        raise ValueError(f"layer={layer!r} is called {len(calls)} times in a forward pass; name another layer")
    found = calls[0].inputs
    if found.dim() != 2 or len(found) != len(output):
        raise ValueError(
            f"the inputs of {calls[0].name!r} have the shape {tuple(found.shape)}, not (examples, features); name a "
            "layer after the pooling with layer="
        )
    return found.detach().cpu()
