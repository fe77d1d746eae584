"""Sums of squared per-example gradients, in batched passes and exactly.

One backward pass brings the gradients to every use of a parameter; a rule turns them into the gradients of each
example. Nothing is taken on trust: where the examples are in a tensor is found by weighting them, and each parameter's
rules must reproduce a weighted gradient of autograd's. What does not takes a backward pass per example.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bayesify.core.posterior import state_dtype
from bayesify.core.quadratics import wide
from bayesify.methods.laplace.graphs import Graph, Use, grads, kind
from bayesify.methods.laplace.parts import Layout, NoRuleError, Part, add_squares, chunks
from bayesify.methods.laplace.rules import RULES, part_of

ROUNDS = 12  # operations on parameters alone, one after the other, that are looked into
HIDING = "CheckpointFunctionBackward"
EVERY_LAYOUT = [Layout(dim, inner) for dim in range(5) for inner in (False, True)]

Finished = Callable[[str, list[Part]], None]


class Layouts(dict[Node, list[Layout]]):
    """Every place where the examples may be in the gradient at a node.

    None where the examples are mixed; several where what was seen could not tell them apart.
    """

    def separate(self, node: Node) -> bool | None:
        """Tell whether the gradient at a node has a part for each example, or None where this is not known."""
        return bool(self[node]) if node in self else None

    def unsure(self) -> bool:
        """Tell whether a node has several possible layouts."""
        return any(len(found) > 1 for found in self.values())

    def narrow(self, found: "Layouts") -> None:
        """Keep what another trial allows too."""
        for node, layouts in found.items():
            self[node] = [layout for layout in self.get(node, layouts) if layout in layouts]


class Plan:
    """What was found out about a kind of graph: layouts by the position of the nodes, and what has no rule."""

    def __init__(self, graph: Graph, layouts: Layouts) -> None:
        self.uncovered: set[str] = set()
        self.keep(graph, layouts)

    def keep(self, graph: Graph, layouts: Layouts) -> None:
        """Remember layouts."""
        self._layouts = {i: layouts[node] for i, node in enumerate(graph.order) if node in layouts}

    def bind(self, graph: Graph) -> Layouts:
        """Return the layouts for another graph of the kind."""
        return Layouts({graph.order[i]: found for i, found in self._layouts.items()})


class SquaredGradients:
    """Collects sum_n g_n^2 for several parameters, where g_n is the gradient of example n.

    Attributes:
        totals: The sums so far by name; a parameter that was in no graph yet has none.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = dict(params)
        self.totals: dict[str, Tensor] = {}
        self._plans: dict[tuple[str | int, ...], Plan] = {}
        self._warned = False

    @torch.no_grad()
    def add(self, output: Tensor, seeds: Sequence[Tensor], smaller: Callable[[], Tensor | None]) -> None:
        """Add the squared gradients of a batch: of <seed_n, output_n> for every example n and every seed.

        Args:
            output: Of the shape (examples, ...), with its graph, which is used up.
            seeds: Tensors of the output's shape.
            smaller: Returns the same output for a few examples only, or None; trials on it are cheap.
        """
        graph = Graph(output)
        if HIDING in graph.signature:
            raise ValueError(
                "the model checkpoints activations with use_reentrant=True, which hides its parameters from autograd's "
                "graph; use use_reentrant=False, or switch checkpointing off"
            )
        names = [name for name, param in self.params.items() if id(param) in graph.leaves]
        if not names:
            return
        plan = self._plan(graph, output, smaller) if len(output) > 1 else None
        for name in names:
            if name not in self.totals:
                param = self.params[name]
                self.totals[name] = torch.zeros(param.shape, dtype=state_dtype(param), device=param.device)
        for seed in seeds:
            slow = names if plan is None else self._add_fast(names, graph, output, seed, plan)
            if slow and len(output) == 1:
                self._add_single(slow, output, seed)
            elif slow:
                self._add_one_by_one(slow, output, seed)

    def _add_fast(self, names: list[str], graph: Graph, output: Tensor, seed: Tensor, plan: Plan) -> list[str]:
        """Add the squared gradients of all parameters that have a rule, and return the others."""
        layouts = plan.bind(graph)
        fast = {name: self.params[name] for name in names if name not in plan.uncovered}
        failed = each_part(graph, output, seed, fast, layouts, self._add_parts, guess=False)
        if failed and layouts.unsure():
            # The trial saw no gradients there, or too few to tell whose they are; this batch has some.
            params = {name: self.params[name] for name in failed}
            trial, uncovered = explore(graph, output, params)
            layouts.narrow(trial.layouts)
            plan.keep(graph, layouts)
            self._give_up(plan, uncovered)
            for name in uncovered:
                del params[name]
            each_part(graph, output, seed, params, layouts, self._add_parts, guess=True)
            failed = list(uncovered)
        return [*failed, *(name for name in names if name in plan.uncovered and name not in failed)]

    def _plan(self, graph: Graph, output: Tensor, smaller: Callable[[], Tensor | None]) -> Plan:
        """Find out about a kind of graph, on a few examples if that gives the same one."""
        if graph.signature in self._plans:
            return self._plans[graph.signature]
        with torch.enable_grad():
            few = smaller()
        if few is not None and few.grad_fn is not None and 1 < len(few) < len(output):
            small = Graph(few)
            if small.signature == graph.signature:
                graph, output = small, few
        params = {name: p for name, p in self.params.items() if id(p) in graph.leaves}
        trial, uncovered = explore(graph, output, params)
        self._plans[graph.signature] = plan = Plan(graph, trial.layouts)
        self._give_up(plan, uncovered)
        return plan

    def _give_up(self, plan: Plan, uncovered: Mapping[str, str]) -> None:
        """Send parameters down the slow path from now on, and say so once."""
        plan.uncovered |= set(uncovered)
        if uncovered and not self._warned:
            self._warned = True
            name, why = next(iter(uncovered.items()))
            warnings.warn(
                f"no batched rule for {len(uncovered)} parameters (the first is {name!r}, because of {why}): they take "
                "a backward pass per example, which is exact but slow",
                stacklevel=7,
            )

    def _add_single(self, names: list[str], output: Tensor, seed: Tensor) -> None:
        """Add the squared gradients of the only example that the seed is not zero for."""
        found = grads(output, seed, [self.params[name] for name in names])
        for name, grad in zip(names, found, strict=True):
            if grad is not None:
                grad = grad.to(self.totals[name].dtype)
                self.totals[name].addcmul_(grad, grad)

    def _add_one_by_one(self, names: list[str], output: Tensor, seed: Tensor) -> None:
        for n in range(len(output)):
            alone = torch.zeros_like(seed)
            alone[n] = seed[n]
            self._add_single(names, output, alone)

    def _add_parts(self, name: str, parts: list[Part]) -> None:
        """Add the squares of one parameter's gradients, summed over its uses before."""
        total = self.totals[name]
        if len(parts) == 1:
            parts[0].add_squares(total)
            return
        for start, stop in chunks(parts[0].batch, total.numel()):
            add_squares(total, reduce(torch.add, (part.grads(start, stop) for part in parts)))


def each_part(
    graph: Graph,
    output: Tensor,
    seed: Tensor,
    params: Mapping[str, Tensor],
    layouts: Layouts,
    finished: Finished,
    *,
    guess: bool,
) -> list[str]:
    """Run a backward pass, and hand over each parameter's parts as soon as all its uses have been passed.

    Args:
        graph: The graph.
        output: What it was made from.
        seed: The gradient of the output.
        params: The parameters.
        layouts: Where the examples are.
        finished: Takes a parameter's name and its parts.
        guess: Whether, of several possible layouts, the first is as good as any.

    Returns:
        The parameters that turned out to have no rule, for which nothing was handed over.
    """
    uses = {name: list(graph.uses(p, layouts.separate)) for name, p in params.items()}
    waiting = {name: len(found) for name, found in uses.items()}
    parts: dict[str, list[Part]] = {name: [] for name in params}
    failed: list[str] = []
    at: dict[Node, list[tuple[str, Use]]] = {}
    for name, found in uses.items():
        for use in found:
            at.setdefault(use.node, []).append((name, use))

    def arrive(node: Node, grad: Tensor) -> None:
        found = layouts.get(node, [])
        unsure = len(found) > 1
        if unsure and not grad.any():
            return  # zero, whosever it is: as if it had not arrived
        for name, use in at[node]:
            if name in failed:
                continue
            try:
                if not found or (unsure and not guess):
                    raise NoRuleError
                parts[name].append(part_of(use, grad, found[0], len(output)))
            except NoRuleError:
                failed.append(name)
                del parts[name]
                continue
            waiting[name] -= 1
            if waiting[name] == 0:
                finished(name, parts.pop(name))

    graph.backward(output, seed, {node: partial(arrive, node) for node in at})
    for name, rest in parts.items():
        # Where no gradient arrived, it is zero.
        if rest:
            finished(name, rest)
    return failed


class Trial(NamedTuple):
    """What weighting the examples has shown.

    Attributes:
        layouts: The layouts that fit.
        sizes: The sum of the absolute values of the gradient at each node.
        eps: The coarsest rounding among the gradients, and at least float32's, which models may use within.
    """

    layouts: Layouts
    sizes: dict[Node, float]
    eps: float

    def with_more(self, other: "Trial") -> "Trial":
        """Join two trials on different nodes."""
        layouts = Layouts(self.layouts | other.layouts)
        return Trial(layouts, self.sizes | other.sizes, max(self.eps, other.eps))


def try_weights(graph: Graph, output: Tensor, nodes: Sequence[Node]) -> Trial:
    """Find where the examples are in the gradients that arrive at some nodes.

    Two backward passes, the second with random weights w_n on the examples: the slice of a gradient that belongs to
    example n alone is w_n times what it was. All slices along all dimensions are compared by random projections.
    """
    generator = torch.Generator().manual_seed(0)
    seed, weights = random_like(output, generator), example_weights(output, generator)
    plain, weighted = (_projections(graph, output, s, nodes) for s in (seed, seed * weights))
    eps = max(torch.finfo(t).eps for t in (torch.float32, *(found.dtype for found in plain.values())))
    weight = weights.flatten().cpu().double()
    layouts = Layouts()
    for node in nodes:
        if node not in weighted or plain[node].size == 0:
            # A gradient that is zero, or did not arrive, may be anyone's.
            layouts[node] = EVERY_LAYOUT
            continue
        layouts[node] = [
            Layout(dim, inner)
            for dim, (a, b) in enumerate(zip(plain[node].slices, weighted[node].slices, strict=True))
            if a.shape[1] % len(output) == 0
            for inner in ((False, True) if a.shape[1] > len(output) else (False,))
            if _fits(a, b, weight[Layout(dim, inner).owners(a.shape[1], len(output))], eps**0.5)
        ]
    return Trial(layouts, {node: found.size for node, found in plain.items()}, eps)


def _fits(plain: Tensor, weighted: Tensor, weight: Tensor, tolerance: float) -> bool:
    """Tell whether every slice has its weight, by two projections of each, measured by the slice's norm."""
    norm = plain[2].sqrt()
    error = (weighted[:2] - plain[:2] * weight).abs().amax(0)
    return bool((error <= tolerance * (norm + norm.max() / 100)).all())


class Projections(NamedTuple):
    """A gradient's slices along each dimension: two random projections and the sum of squares, (3, slices).

    And the sum of all absolute values, and the dtype.
    """

    slices: list[Tensor]
    size: float
    dtype: torch.dtype


def _projections(graph: Graph, output: Tensor, seed: Tensor, nodes: Sequence[Node]) -> dict[Node, Projections]:
    """Project the gradients that arrive at some nodes."""
    out: dict[Node, Projections] = {}

    def project(node: Node, grad: Tensor) -> None:
        generator, exact = torch.Generator().manual_seed(1), grad.to(state_dtype(grad))
        terms = torch.stack([exact * rank_one(exact, generator), exact * rank_one(exact, generator), exact**2])
        others = ([d for d in range(1, terms.dim()) if d != dim] for dim in range(1, terms.dim()))
        slices = [(terms.sum(dims) if dims else terms).cpu().double() for dims in others]
        out[node] = Projections(slices, float(exact.abs().sum(dtype=wide(exact))), grad.dtype)

    graph.backward(output, seed, {node: partial(project, node) for node in nodes})
    return out


def explore(graph: Graph, output: Tensor, params: Mapping[str, Tensor]) -> tuple[Trial, dict[str, str]]:
    """Find where the examples are in every use of some parameters, and which parameters have no rule, and why."""
    trial = Trial(Layouts(), {}, 0.0)
    for _ in range(ROUNDS):
        uses = (use for p in params.values() for use in graph.uses(p, trial.layouts.separate))
        unknown = {use.node: None for use in uses if use.node not in trial.layouts}
        if not unknown:
            break
        trial = trial.with_more(try_weights(graph, output, list(unknown)))
    try:
        return trial, find_uncovered(graph, output, params, trial)
    except RuntimeError as error:
        # Checkpointing, for one, lets nobody else read what it has saved.
        return trial, dict.fromkeys(params, type(error).__name__)


def find_uncovered(graph: Graph, output: Tensor, params: Mapping[str, Tensor], trial: Trial) -> dict[str, str]:
    """Return the parameters whose rules do not exist or do not give autograd's gradient, with an operation to blame.

    For random weights w_n on the examples, sum_n w_n g_n from the rules must be the gradient of the weighted sum.
    """
    uses = {name: list(graph.uses(p, trial.layouts.separate)) for name, p in params.items()}
    out = {}
    for name, found in uses.items():
        for use in found:
            if use.node not in trial.layouts or (kind(use.node), use.place) not in RULES:
                out[name] = kind(use.node)
    good = {name: param for name, param in params.items() if name not in out}
    generator = torch.Generator().manual_seed(2)
    seed, weights = random_like(output, generator), example_weights(output, generator)
    exacts = graph.backward(output, seed * weights, {}, inputs=list(good.values()))
    truth = dict(zip(good, exacts, strict=True))

    def compare(name: str, parts: list[Part]) -> None:
        exact = truth.pop(name)
        error = torch.zeros_like(params[name]) if exact is None else exact.neg()
        for part in parts:
            error += part.weighted_sum(weights.flatten().to(error.dtype))
        size = 0.0 if exact is None else float(torch.linalg.vector_norm(exact))
        # The gradient may be nothing but rounding, as that of an attention's key bias; then its terms give the scale.
        terms = sum(trial.sizes.get(use.node, 0.0) for use in uses[name])
        if not float(torch.linalg.vector_norm(error)) <= 10 * trial.eps**0.5 * size + 100 * trial.eps * terms:
            out[name] = kind(uses[name][0].node)

    failed = each_part(graph, output, seed, good, trial.layouts, compare, guess=True)
    for name in set(truth).difference(failed):
        compare(name, [])  # nothing arrived for it
    return out | {name: kind(uses[name][0].node) for name in failed}


def random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal numbers in a tensor's shape, the same on every device."""
    return torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor)


def rank_one(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return the outer product of a random vector per dimension: as good to project on, and cheaper to make."""
    out = tensor.new_ones(())
    for dim, size in enumerate(tensor.shape):
        vector = torch.randn(size, generator=generator, device="cpu").to(tensor)
        out = out * vector.view(-1, *(1,) * (tensor.dim() - 1 - dim))
    return out


def example_weights(output: Tensor, generator: torch.Generator) -> Tensor:
    """Return a weight per example, away from zero, in a shape that broadcasts over the output."""
    weights = torch.randn(len(output), generator=generator, device="cpu")
    weights = weights + weights.sign()
    return weights.to(output).view(-1, *(1,) * (output.dim() - 1))
