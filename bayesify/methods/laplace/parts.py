"""The gradients of every example apart, through one use of a parameter, kept in factors.

A `Part` squares and sums them in chunks, so that they are never in memory all at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesify.methods.laplace.graphs import Use, apply_steps, pull

BLOCK = 1 << 19
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
        index = torch.arange(size, device="cpu")
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

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over the examples of weight times gradient."""
        cuts = chunks(self.batch, self.use.param.numel())
        terms = (torch.tensordot(weights[a:b], self.grads(a, b).to(weights.dtype), 1) for a, b in cuts)
        total: Tensor = reduce(torch.add, terms)
        return total

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

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the weighted sum, as one product."""
        if self.use.steps:
            return super().weighted_sum(weights)
        left = (self.left * weights.view(-1, 1, 1)).flatten(0, 1)
        return (left.T @ self.right.flatten(0, 1).to(left.dtype)).view(self.shape)

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
            # One matrix at a time, in bands that stay in the cache for all the examples.
            rows = max(1, BLOCK // flat.shape[1])
            scratch = torch.empty_like(flat[:rows])
            for band, columns in zip(torch.split(flat, rows), torch.split(left.mT, rows, 1), strict=True):
                for x, d in zip(columns, right, strict=True):
                    grad = torch.mm(x, d, out=scratch[: len(band)])
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
