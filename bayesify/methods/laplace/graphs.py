"""Read autograd's graph: where each parameter enters the computation, and what gradient arrives there.

The graph knows every use of a parameter, whatever module or function it happens in: tied weights, functional reads and
bare parameters need no special care.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

SHAPING = frozenset(
    (
        *("Alias", "Clone", "Permute", "ReshapeAlias", "Slice", "Split", "SplitWithSizes"),
        *("T", "ToCopy", "Transpose", "Unbind", "UnsafeSplit", "View"),
    )
)
"""Operations whose result has a part for each example only if their input has; on a parameter they need no trial."""


def kind(node: Node) -> str:
    """Return an operation's name, without what autograd adds to it."""
    head, found, _ = node.name().rpartition("Backward")
    return head if found else node.name()


class Read(NamedTuple):
    """`reader` takes output `output` of a node as its input `place`."""

    reader: Node
    place: int
    output: int


class Step(NamedTuple):
    """An operation on a parameter alone, and which of its outputs is meant."""

    node: Node
    output: int


class Use(NamedTuple):
    """A place where a parameter, or what `steps` make of it, meets the examples: input `place` of `node`.

    Attributes:
        param: The parameter.
        node: The operation.
        place: Which of its inputs.
        steps: What was done to the parameter before, first to last.
        shape: The shape of the input.
    """

    param: Tensor
    node: Node
    place: int
    steps: tuple[Step, ...]
    shape: torch.Size


class Graph:
    """The graph below an output: its nodes, inputs first, and who reads each of them.

    Graphs of one `signature` have the same operations on the same parameters.
    """

    def __init__(self, output: Tensor) -> None:
        assert output.grad_fn is not None
        self.order: list[Node] = []
        self.inputs: dict[Node, list[Node]] = {}
        self.readers: dict[Node, list[Read]] = {}
        self.leaves: dict[int, Node] = {}
        self._visit(output.grad_fn)
        owners = {node: key for key, node in self.leaves.items()}
        self.signature = tuple(owners.get(node, node.name()) for node in self.order)

    def _visit(self, root: Node) -> None:
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                self.order.append(node)
            elif node not in self.inputs:
                self.inputs[node] = []
                stack.append((node, True))
                for place, (below, output) in enumerate(node.next_functions):
                    if below is not None:
                        self.inputs[node].append(below)
                        self.readers.setdefault(below, []).append(Read(node, place, output))
                        stack.append((below, False))
                if (variable := getattr(node, "variable", None)) is not None:
                    self.leaves[id(variable)] = node

    def uses(self, param: Tensor, separates: Callable[[Node], bool | None]) -> Iterator[Use]:
        """Yield a parameter's uses: the operations above it whose result has a part for each example.

        Args:
            param: The parameter.
            separates: Tells whether a node's result has, or None where this is not known.
        """
        leaf = self.leaves[id(param)]
        todo: list[tuple[Node, tuple[Step, ...]]] = [(leaf, ())]
        seen = {leaf}
        while todo:
            node, steps = todo.pop()
            for read in self.readers.get(node, ()):
                above = () if node is leaf else (*steps, Step(node, read.output))
                if kind(read.reader) not in SHAPING and separates(read.reader) is not False:
                    shape = _shape(above[-1]) if above else param.shape
                    yield Use(param, read.reader, read.place, above, shape)
                elif read.reader not in seen:
                    # Two ways to one operation are one: autograd goes down both.
                    seen.add(read.reader)
                    todo.append((read.reader, above))

    def backward(
        self,
        output: Tensor,
        seed: Tensor,
        watched: Mapping[Node, Callable[[Tensor], None]],
        *,
        inputs: Sequence[Tensor] = (),
    ) -> tuple[Tensor | None, ...]:
        """Run a backward pass that stops at the lowest watched nodes, so that no parameter's gradient is computed.

        Args:
            output: What this graph was made from.
            seed: Its gradient.
            watched: Called with the gradient that arrives at (the first output of) each node.
            inputs: Tensors whose gradients are wanted nevertheless.

        Returns:
            The gradients of `inputs`.
        """
        lowest = self._lowest(watched)
        hooks = [n.register_prehook(partial(_tell, tell)) for n, tell in watched.items() if n not in lowest]
        try:
            wanted: list[Any] = [*inputs, *(GradientEdge(n, 0) for n in lowest)]
            found = grads(output, seed, wanted) if wanted else ()
        finally:
            for hook in hooks:
                hook.remove()
        for node, grad in zip(lowest, found[len(inputs) :], strict=True):
            if grad is not None:
                watched[node](grad)
        return found[: len(inputs)]

    def _lowest(self, watched: Mapping[Node, Any]) -> dict[Node, None]:
        """Return the watched nodes that have no watched node below them."""
        above: dict[Node, bool] = {}
        for node in self.order:
            above[node] = any(n in watched or above[n] for n in self.inputs[node])
        return {node: None for node in watched if not above[node]}


def grads(output: Tensor, seed: Tensor, inputs: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Return the gradients of <seed, output>, None where there is none, and keep the graph."""
    # A scalar: with grad_outputs= torch would first import a computer algebra system.
    with torch.enable_grad():
        total = (output * seed).sum()
    return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)


def _shape(step: Step) -> torch.Size:
    """Return the shape of an operation's output."""
    metadata: Any = step.node._input_metadata[step.output]
    return torch.Size(metadata.shape)


def _tell(tell: Callable[[Tensor], None], grads: tuple[Tensor | None, ...]) -> None:
    """Prehook of a node: pass on the gradient of its first output."""
    if grads[0] is not None:
        tell(grads[0])


def apply_steps(grads: Tensor, use: Use) -> Tensor:
    """Carry gradients, one per example along dim 0, from a use back to the parameter itself."""
    for node, output in reversed(use.steps):
        match kind(node):
            case "T":
                grads = grads.mT if grads.dim() == 3 else grads
            case "View" | "UnsafeView" | "ReshapeAlias":
                grads = grads.reshape(len(grads), *node._saved_self_sym_sizes)  # type: ignore[attr-defined]
            case _:
                return torch.stack([pull(node, output, use.param, g) for g in grads])
    return grads


def pull(node: Node, output: int, param: Tensor, grad: Tensor) -> Tensor:
    """Carry the gradient of an operation's output back to a parameter below it."""
    found: Tensor = torch.autograd.grad(GradientEdge(node, output), param, grad, retain_graph=True)[0]
    return found
