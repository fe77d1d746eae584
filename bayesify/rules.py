"""The gradient of one parameter for every example apart, from what autograd has saved at the parameter's use.

A `Part` holds the gradients of a batch through one use, in factors; `part_of` makes it from the node and the gradient
that arrives there. Whatever is not understood raises `NoRuleError`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesify.graphs import Use, apply_steps, kind, pull

BLOCK = 1 << 18
"""Elements of per-example gradients that are worked on at a time: about what a cache holds."""


class NoRuleError(Exception):
    """The per-example gradients of a use cannot be had in one go."""


class Layout(NamedTuple):
    """Where the examples are in a tensor: along `dim`, as runs of neighbours, or (`inner`) taking turns."""

    dim: int
    inner: bool

    def split(self, tensor: Tensor, batch: int) -> Tensor:
        """Return a view with the examples in front, and the rest of `dim` where it was."""
        size = tensor.shape[self.dim]
        if size % batch:
            raise NoRuleError
        if self.inner:
            return torch.unflatten(tensor, self.dim, (size // batch, batch)).movedim(self.dim + 1, 0)
        return torch.unflatten(tensor, self.dim, (batch, size // batch)).movedim(self.dim, 0)

    def owners(self, size: int, batch: int) -> Tensor:
        """Return to which example each index along `dim` belongs."""
        index = torch.arange(size)
        return index % batch if self.inner else index // (size // batch)


class Part(ABC):
    """The gradients of each example through one use of a parameter."""

    batch: int
    use: Use

    @abstractmethod
    def local_grads(self, start: int, stop: int) -> Tensor:
        """Return the gradients of some examples with respect to the input of the use."""

    def grads(self, start: int, stop: int) -> Tensor:
        """Return the gradients of some examples, (stop - start, *shape of the parameter)."""
        return apply_steps(self.local_grads(start, stop), self.use)

    def add_squares(self, total: Tensor) -> None:
        """Add the sum over the examples of the squared gradients, where this use is the only one."""
        for start, stop in chunks(self.batch, total.numel()):
            add_squares(total, self.grads(start, stop))


def add_squares(total: Tensor, grads: Tensor) -> None:
    """Add the sum over dim 0 of the squares."""
    grads = grads.to(total.dtype)
    if len(grads) == 1:
        total.addcmul_(grads[0], grads[0])
    else:
        # Gradients may be views of what others still read: never squared in place.
        total.add_(grads.square().sum(0))


def chunks(batch: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut the examples so that their gradients of `size` elements need little memory."""
    step = max(1, BLOCK // max(size, 1))
    return ((start, min(start + step, batch)) for start in range(0, batch, step))


class Summed(Part):
    """Gradients that are at hand, as small as the parameter for each example."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.batch = values, len(values)

    def local_grads(self, start: int, stop: int) -> Tensor:
        """Return them."""
        return self.values[start:stop]


class Product(Part):
    """G_n = sum_r left[n, r] right[n, r]^T: a linear map's gradients, from its inputs and its outputs' gradients."""

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size) -> None:
        self.left, self.right, self.shape = left, right, shape
        self.batch = len(left)

    def local_grads(self, start: int, stop: int) -> Tensor:
        """Return the products, in the shape of the parameter."""
        return (self.left[start:stop].mT @ self.right[start:stop]).view(stop - start, *self.shape)

    def transpose(self) -> None:
        """Turn to the gradients of the transpose."""
        self.left, self.right, self.shape = self.right, self.left, self.shape[::-1]

    def add_squares(self, total: Tensor) -> None:
        """Add sum_n (left_n^T right_n)^2; for one row per example this is (left^2)^T (right^2)."""
        if self.use.steps:
            return super().add_squares(total)
        left, right = (t.to(total.dtype) for t in (self.left, self.right))
        flat = total.view(left.shape[2], right.shape[2])
        if left.shape[1] == 1:
            flat.addmm_(left.squeeze(1).square().T, right.squeeze(1).square())
        elif flat.numel() <= BLOCK:
            for start, stop in chunks(self.batch, flat.numel()):
                flat.add_((left[start:stop].mT @ right[start:stop]).square_().sum(0))
        else:
            # One matrix at a time, in bands that stay in the cache until they are squared.
            bands = torch.split(flat, max(1, BLOCK // flat.shape[1]))
            scratch = torch.empty_like(bands[0])
            for x, d in zip(left.mT, right, strict=True):
                for band, rows in zip(bands, torch.split(x, len(bands[0])), strict=True):
                    grad = torch.mm(rows, d, out=scratch[: len(band)])
                    band.addcmul_(grad, grad)
        return None


class Convolved(Part):
    """A convolution's weight gradients, one example at a time by the convolution's own backward."""

    def __init__(self, node: Any, inputs: Tensor, outputs: Tensor) -> None:
        self.weight = node._saved_weight
        self.setting = (
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups,
        )
        self.inputs, self.outputs, self.batch = inputs, outputs, len(inputs)

    def local_grads(self, start: int, stop: int) -> Tensor:
        """Return the weight's gradients."""
        backward, which = torch.ops.aten.convolution_backward, [False, True, False]
        found = [
            backward(d, x, self.weight, None, *self.setting, which)[1]
            for x, d in zip(self.inputs[start:stop], self.outputs[start:stop], strict=True)
        ]
        return torch.stack(found)


class Looked(Part):
    """An embedding's gradients: rows that were looked up get the sum of what arrives for them."""

    def __init__(self, rows: Tensor, outputs: Tensor, shape: torch.Size) -> None:
        self.rows, self.outputs, self.shape = rows, outputs, shape
        self.batch = len(rows)

    def local_grads(self, start: int, stop: int) -> Tensor:
        """Return dense gradients, for tables that are tied to another use."""
        rows, outputs = self.rows[start:stop], self.outputs[start:stop]
        out = outputs.new_zeros(stop - start, *self.shape)
        return out.scatter_add_(1, rows.unsqueeze(-1).expand_as(outputs), outputs)

    def add_squares(self, total: Tensor) -> None:
        """Add the squares, row by row of what was looked up."""
        if self.use.steps:
            return super().add_squares(total)
        count = self.shape[0]
        # A row that an example looks up twice is summed before it is squared.
        keys = self.rows + torch.arange(self.batch, device=self.rows.device).unsqueeze(1) * count
        found, place = torch.unique(keys, return_inverse=True)
        sums = total.new_zeros(len(found), self.shape[1])
        sums.index_add_(0, place.flatten(), self.outputs.flatten(0, 1).to(total.dtype))
        total.index_add_(0, found % count, sums.square_())
        return None


class Masked(Part):
    """The gradients by autograd itself, with the other examples' part of what arrives set to zero."""

    def __init__(self, use: Use, grad: Tensor, layout: Layout, batch: int) -> None:
        self.grad, self.batch = grad, batch
        view = [1] * grad.dim()
        view[layout.dim] = -1
        self.owners = layout.owners(grad.shape[layout.dim], batch).to(grad.device).view(view)

    def local_grads(self, start: int, stop: int) -> Tensor:
        """Return the gradients of the parameter itself."""
        alone = (self.grad * (self.owners == n) for n in range(start, stop))
        return torch.stack([pull(self.use.node, 0, self.use.param, grad) for grad in alone])

    def grads(self, start: int, stop: int) -> Tensor:
        """Return them: autograd has gone all the way."""
        return self.local_grads(start, stop)


def part_of(use: Use, grad: Tensor, layouts: Sequence[Layout], batch: int) -> Part:
    """Return the gradients of each example through one use.

    Args:
        use: The use.
        grad: The gradient that arrives at its output.
        layouts: Where the examples are in it; the first counts.
        batch: How many there are.

    Raises:
        NoRuleError: There is no rule for it.
    """
    try:
        part = RULES[kind(use.node), use.place](use, grad, layouts[0], batch)
    except (KeyError, IndexError, AttributeError, RuntimeError) as error:
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
