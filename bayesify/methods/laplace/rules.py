"""The rules: how each operation's parameters get their gradients, from what autograd has saved of it.

Whatever is not understood raises `NoRuleError`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayesify.methods.laplace.graphs import Use, kind
from bayesify.methods.laplace.parts import Convolved, Layout, Looked, Masked, NoRuleError, Part, Product, Summed


def part_of(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
    """Return the gradients of each example through one use.

    Args:
        use: The use.
        grad: The gradient that arrives at its output.
        layout: Where the examples are in it.
        batch: How many there are.

    Raises:
        NoRuleError: There is no rule for it.
    """
    try:
        part = RULES[kind(use.node), use.place](use, grad, layout, batch)
    except (KeyError, AttributeError, RuntimeError) as error:
        raise NoRuleError from error
    part.use = use
    if isinstance(part, Product) and use.steps and kind(use.steps[-1].node) == "T":
        part.transpose()
        part.use = use._replace(steps=use.steps[:-1])
    return part


def _sum_to(values: Tensor, layout: Layout, batch: int, shape: torch.Size) -> Summed:
    """Sum what arrives for each example over everything that the parameter was broadcast over."""
    aligned = (1,) * (values.dim() - len(shape)) + tuple(shape)
    if aligned[layout.dim] != 1:
        raise NoRuleError
    split = layout.split(values, batch)
    dims = [i for i, size in enumerate(aligned, 1) if size == 1 and split.shape[i] != 1]
    return Summed((split.sum(dims) if dims else split).reshape(batch, *shape))


def _matrix(saved: str, scale: str | None = None) -> Callable[..., Part]:
    """Rule for x @ W, with x saved under a name."""

    def rule(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
        node: Any = use.node
        if layout.dim != grad.dim() - 2 or math.prod(grad.shape[:-2]) != 1:
            raise NoRuleError
        layout = Layout(0, layout.inner)
        x, d = getattr(node, saved), grad if scale is None else _scaled(grad, getattr(node, scale))
        x, d = (t.reshape(-1, t.shape[-1]) for t in (x, d))
        return Product(layout.split(x, batch), layout.split(d, batch), use.shape)

    return rule


def _scaled(grad: Tensor, factor: float) -> Tensor:
    return grad if factor == 1 else grad * factor


def _added(scale: str | None = None, sign: int = 1) -> Callable[..., Part]:
    """Rule for a broadcast summand."""

    def rule(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
        factor = sign if scale is None else sign * getattr(use.node, scale)
        return _sum_to(_scaled(grad, factor), layout, batch, use.shape)

    return rule


def _multiplied(other: str) -> Callable[..., Part]:
    """Rule for a broadcast factor."""

    def rule(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
        factor = getattr(use.node, other)
        if factor is None:
            raise NoRuleError
        return _sum_to(grad * factor, layout, batch, use.shape)

    return rule


def _prelu(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
    """Rule for the slope of a PReLU, which multiplies what is negative."""
    node: Any = use.node
    return _sum_to(grad * node._saved_self.clamp(max=0), layout, batch, use.shape)


def _convolution(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
    """Rule for a convolution's weight."""
    node: Any = use.node
    if layout.dim != 0:
        raise NoRuleError
    x, d = layout.split(node._saved_input, batch), layout.split(grad, batch)
    plain = math.prod(use.shape[2:]) == 1 and node._saved_groups == 1 and not node._saved_transposed
    if plain and not any(node._saved_padding) and all(s == 1 for s in node._saved_stride):
        # A 1x1 convolution is a linear map at every place.
        return Product(d.movedim(2, -1).flatten(1, -2), x.movedim(2, -1).flatten(1, -2), use.shape)
    return Convolved(node, x, d)


def _per_channel(use: Use, values: Tensor, layout: Layout, batch: int) -> Part:
    """Sum over all but the examples and the channels, which are dimension 1."""
    if layout.dim != 0 or len(use.shape) != 1:
        raise NoRuleError
    summed = _sum_to(values, layout, batch, torch.Size((*use.shape, *(1,) * (values.dim() - 2))))
    return Summed(summed.values.flatten(1))


def _layer_norm(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
    """Rule for a LayerNorm's weight: the gradient times (x - mean) * rstd."""
    node: Any = use.node
    values = (node._saved_input - node._saved_result1).mul_(node._saved_result2).mul_(grad)
    return _sum_to(values, layout, batch, use.shape)


def _batch_norm(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
    """Rule for a BatchNorm's weight in eval mode: the gradient times (x - mean)/sqrt(variance + eps), both running."""
    node: Any = use.node
    if node._saved_training:
        raise NoRuleError
    shape = (-1, *(1,) * (grad.dim() - 2))
    rstd = (node._saved_running_var + node._saved_eps).rsqrt()
    values = (node._saved_input - node._saved_running_mean.view(shape)).mul_(rstd.view(shape)).mul_(grad)
    return _per_channel(use, values, layout, batch)


def _batch_norm_bias(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
    """Rule for a BatchNorm's bias in eval mode."""
    node: Any = use.node
    if node._saved_training:
        raise NoRuleError
    return _per_channel(use, grad, layout, batch)


def _group_norm(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
    """Rule for a GroupNorm's weight: the gradient times (x - mean) * rstd of its group."""
    node: Any = use.node
    groups = node._saved_input.reshape(node._saved_N, node._saved_group, -1)
    normal = (groups - node._saved_result1.unsqueeze(-1)) * node._saved_result2.unsqueeze(-1)
    return _per_channel(use, normal.view_as(grad) * grad, layout, batch)


def _embedding(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
    """Rule for an embedding; the padding row has no gradient."""
    node: Any = use.node
    rows = node._saved_indices
    if node._saved_scale_grad_by_freq or layout.dim >= rows.dim():
        raise NoRuleError
    padding = int(node._saved_padding_idx)
    d = grad if padding < 0 else grad * (rows != padding).unsqueeze(-1)
    split_rows, split_d = layout.split(rows, batch), layout.split(d, batch)
    return Looked(split_rows.reshape(batch, -1), split_d.reshape(batch, -1, d.shape[-1]), use.shape)


def _copied(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
    """Rule for a parameter that was expanded."""
    return _sum_to(grad, layout, batch, use.shape)


def _own_backward(use: Use, grad: Tensor, layout: Layout, batch: int) -> Part:
    """Rule for every other way of spreading a parameter over the examples."""
    return Masked(use, grad, layout, batch)


RULES: dict[tuple[str, int], Callable[[Use, Tensor, Layout, int], Part]] = {
    ("Addmm", 0): _added("_saved_beta"),
    ("Addmm", 2): _matrix("_saved_mat1", "_saved_alpha"),
    ("Mm", 1): _matrix("_saved_self"),
    ("Bmm", 1): _matrix("_saved_self"),
    ("Convolution", 1): _convolution,
    ("Convolution", 2): _per_channel,
    ("NativeLayerNorm", 1): _layer_norm,
    ("NativeLayerNorm", 2): _added(),
    ("NativeBatchNorm", 1): _batch_norm,
    ("NativeBatchNorm", 2): _batch_norm_bias,
    ("NativeGroupNorm", 1): _group_norm,
    ("NativeGroupNorm", 2): _per_channel,
    ("Add", 0): _added(),
    ("Add", 1): _added("_saved_alpha"),
    ("Sub", 0): _added(),
    ("Sub", 1): _added("_saved_alpha", -1),
    ("Mul", 0): _multiplied("_saved_other"),
    ("Mul", 1): _multiplied("_saved_self"),
    ("PreluKernel", 1): _prelu,
    ("Embedding", 0): _embedding,
    ("Expand", 0): _copied,
    ("Repeat", 0): _own_backward,
    ("Index", 0): _own_backward,
    ("IndexSelect", 0): _own_backward,
}
"""The rules by operation and input; each takes (use, gradient, layout, batch)."""
