"""Sum the Kronecker factors of linear and convolutional weights over the data, by the rules for gradients.

A layer takes part if its weight is used once, by a matrix product or a convolution, and if the rule's gradients are
autograd's on a first trial; its bias takes part if it is a summand of the same outputs. Whatever is not is left to the
diagonal.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F

from bayesify.core.posterior import state_dtype
from bayesify.methods.laplace.curvature import random_like
from bayesify.methods.laplace.graphs import Graph, Use, kind
from bayesify.methods.laplace.kron import Kron, eigen
from bayesify.methods.laplace.parts import Layout, NoRuleError, Product
from bayesify.methods.laplace.rules import part_of

LARGEST_OUTPUT = 4096
"""From how many outputs on B is kept as its diagonal: there is no eigenbasis of 50,000 x 50,000 here."""
LARGEST_INPUT = 8192
"""Likewise for A."""
ROWS = 1 << 24  # elements of unfolded patches at a time


class Layer(NamedTuple):
    """A weight with its bias: their names (None where there is none that takes part), and how the weight lies.

    Attributes:
        weight: The weight's name.
        bias: The bias's name, or None.
        inputs_first: Whether the weight is of (inputs, outputs), as in x @ W.
    """

    weight: str
    bias: str | None
    inputs_first: bool


class Rows(NamedTuple):
    """One use of a weight: the rows of inputs that it is applied to, in pieces, and how to read a gradient as rows."""

    inputs: Callable[[], Any]
    number: int
    read: Callable[[Tensor], Tensor]
    inputs_first: bool


class Factors:
    """Collects A and B of several layers.

    Args:
        params: All parameters that get a variance, by name.
        pairs: The bias's name for each weight that has one and may take part.
    """

    def __init__(self, params: Mapping[str, Tensor], pairs: Mapping[str, str | None]) -> None:
        self.params = dict(params)
        self.pairs = dict(pairs)
        self.layers: dict[str, Layer] = {}
        self._tried = False
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def names(self) -> set[str]:
        """Return the parameters that are taken care of."""
        return {n for layer in self.layers.values() for n in (layer.weight, layer.bias) if n is not None}

    @torch.no_grad()
    def add(
        self,
        output: Tensor,
        seeds: Callable[[], Sequence[Tensor]],
        summed: Callable[[bool], Tensor],
        smaller: Callable[[], Tensor | None],
    ) -> None:
        """Add the factors of a batch.

        Args:
            output: Of the shape (examples, ...), with its graph.
            seeds: Returns vectors whose outer products sum to the curvature of the loss in each example's output.
            summed: Returns that curvature exactly, summed over the examples, or (True) its diagonal only.
            smaller: Returns the same output for a few examples only, or None; the trial on it is cheap.
        """
        if not self._tried:
            self._tried, self.layers = True, self._trial(output, smaller)
        graph = Graph(output)
        found = {n: self._rows(graph, n) for n in self.layers if id(self.params[n]) in graph.leaves}
        watched: dict[Node, Callable[[Tensor], None]] = {}
        for name, (use, rows) in found.items():
            self._start(name, rows)
            for piece in rows.inputs():
                self._add_outer(self.inputs, name, self._with_ones(name, piece))
            self.counts[name] += rows.number
            if use.node is output.grad_fn and output.dim() == 2:
                # The layer's outputs are the model's: their curvature is known, and no backward pass is needed.
                self.outputs[name] += summed(self.outputs[name].dim() == 1).to(self.outputs[name])
            else:
                watched[use.node] = partial(self._arrive, name, rows)
        if watched:
            for seed in seeds():
                graph.backward(output, seed, watched)

    def finish(self, scales: Mapping[str, float]) -> dict[str, Kron]:
        """Return the eigendecompositions by parameter, with B times the weight's scale, and forget the sums."""
        out: dict[str, Kron] = {}
        for name, (weight, bias, inputs_first) in self.layers.items():
            if name not in self.inputs:
                continue
            a = eigen(self.inputs.pop(name))
            b = eigen(self.outputs.pop(name).mul_(scales[name] / max(self.counts[name], 1)))
            own = slice(None) if bias is None else slice(0, -1)
            whole = Kron(*a, *b) if inputs_first else Kron(*b, *a)
            out[weight] = whole.rows(own, None) if inputs_first else whole.rows(None, own)
            if bias is not None:
                last = slice(-1, None)
                out[bias] = whole.rows(last, None) if inputs_first else whole.rows(None, last)
        return out

    # -- sums --------------------------------------------------------------------------------------------------

    def _start(self, name: str, rows: Rows) -> None:
        if name in self.inputs:
            return
        param = self.params[name]
        shape = (param.shape[0], param[0].numel())
        inputs, outputs = shape if rows.inputs_first else shape[::-1]
        inputs += self.layers[name].bias is not None
        for totals, size, largest in ((self.inputs, inputs, LARGEST_INPUT), (self.outputs, outputs, LARGEST_OUTPUT)):
            square = (size, size) if size <= largest else (size,)
            totals[name] = torch.zeros(square, dtype=state_dtype(param), device=param.device)
        self.counts[name] = 0

    def _with_ones(self, name: str, piece: Tensor) -> Tensor:
        return piece if self.layers[name].bias is None else F.pad(piece, (0, 1), value=1.0)

    def _arrive(self, name: str, rows: Rows, grad: Tensor) -> None:
        self._add_outer(self.outputs, name, rows.read(grad))

    @staticmethod
    def _add_outer(totals: dict[str, Tensor], name: str, rows: Tensor) -> None:
        """Add the sum of r r^T over the rows, or its diagonal."""
        total = totals[name]
        rows = rows.to(total.dtype)
        total += rows.square().sum(0) if total.dim() == 1 else rows.T @ rows

    # -- uses --------------------------------------------------------------------------------------------------

    def _rows(self, graph: Graph, name: str) -> tuple[Use, Rows]:
        """Return the one use of a weight; what is used in another way than at the trial is an error."""
        try:
            return rows_of(graph, self.params[name])
        except NoRuleError as error:
            raise ValueError(
                f"the model uses {name!r} in another way than in the first batch; use structure='diag'"
            ) from error

    def _trial(self, output: Tensor, smaller: Callable[[], Tensor | None]) -> dict[str, Layer]:
        """Find the layers whose gradients are what the rules say."""
        with torch.enable_grad():
            few = smaller()
        output = output if few is None or few.grad_fn is None or not len(few) else few
        graph = Graph(output)
        found: dict[str, tuple[Use, Rows]] = {}
        for name in self.pairs:
            if id(self.params[name]) in graph.leaves:
                try:
                    found[name] = rows_of(graph, self.params[name])
                except NoRuleError:
                    continue
        biases = {n: b for n, b in self.pairs.items() if n in found and b is not None and b in self.params}
        arrived: dict[str, Tensor] = {}

        def note(name: str, grad: Tensor) -> None:
            arrived[name] = found[name][1].read(grad)

        params = [self.params[n] for n in (*found, *biases.values())]
        seed = random_like(output, torch.Generator().manual_seed(0))
        watched = {use.node: partial(note, name) for name, (use, _) in found.items()}
        exact = dict(zip((*found, *biases.values()), graph.backward(output, seed, watched, inputs=params), strict=True))
        layers = {}
        for name, (_, rows) in found.items():
            truth, d = exact[name], arrived.get(name)
            if d is None or truth is None or not _equal(_weight_grad(rows, d).view_as(truth), truth):
                continue
            bias = biases.get(name)
            summand = None if bias is None else exact[bias]
            joined = summand is not None and summand.shape == d.shape[1:] and _equal(d.sum(0), summand)
            # Kept as its diagonal, A has no eigenvectors that a bias could have a row of.
            joined = joined and truth.numel() // d.shape[1] < LARGEST_INPUT
            layers[name] = Layer(name, bias if joined else None, rows.inputs_first)
        return layers


def _weight_grad(rows: Rows, d: Tensor) -> Tensor:
    x = torch.cat([piece.to(d.dtype) for piece in rows.inputs()])
    return x.T @ d if rows.inputs_first else d.T @ x


def _equal(found: Tensor, exact: Tensor) -> bool:
    size = float(torch.linalg.vector_norm(exact))
    tolerance = 10 * max(torch.finfo(exact.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    return size > 0 and float(torch.linalg.vector_norm(found.to(exact.dtype) - exact)) <= tolerance * size


def rows_of(graph: Graph, param: Tensor) -> tuple[Use, Rows]:
    """Return the only use of a weight as rows of inputs and outputs.

    Raises:
        NoRuleError: There are several uses, or it is neither a matrix product nor a plain convolution.
    """
    uses = list(graph.uses(param, lambda node: None))
    if len(uses) != 1:
        raise NoRuleError
    use = uses[0]
    node: Any = use.node
    if (kind(node), use.place) == ("Convolution", 1) and not use.steps:
        return use, _convolved(node)
    shape = torch.Size(node._input_metadata[0].shape)
    fake = torch.empty(shape, dtype=param.dtype, device="meta")
    part = part_of(use, fake, Layout(len(shape) - 2, False), 1)  # the batch as one example: rows are rows
    if not isinstance(part, Product) or part.use.steps:
        raise NoRuleError
    first = not part.left.is_meta
    inputs = part.left if first else part.right
    factor = float(getattr(node, "_saved_alpha", 1))
    return use, Rows(lambda: [inputs[0]], inputs.shape[1], lambda d: d.reshape(-1, d.shape[-1]) * factor, first)


def _convolved(node: Any) -> Rows:
    """Return the patches that a convolution's kernel is applied to, as rows."""
    x, kernel = node._saved_input, node._saved_weight.shape[2:]
    if node._saved_groups != 1 or node._saved_transposed or len(kernel) not in (1, 2):
        raise NoRuleError
    pad, stride, dilation = (tuple(v) for v in (node._saved_padding, node._saved_stride, node._saved_dilation))
    if len(kernel) == 1:  # a row of one pixel's height
        x, kernel = x.unsqueeze(2), (1, *kernel)
        pad, stride, dilation = (0, *pad), (1, *stride), (1, *dilation)
    shape = node._input_metadata[0].shape

    def patches() -> Any:
        step = max(1, ROWS // max(1, x[0].numel() * kernel[0] * kernel[1]))
        for piece in torch.split(x, step):
            yield F.unfold(piece, kernel, dilation, pad, stride).mT.flatten(0, 1)

    count = shape[0]
    for size in shape[2:]:
        count *= size
    return Rows(patches, int(count), lambda d: d.flatten(2).mT.flatten(0, 1), False)
