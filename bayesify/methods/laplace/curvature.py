"""The curvature of a loss, summed over batches: squared per-example gradients, and Kronecker factors.

Module hooks note what each layer takes and where the gradient of its output arrives, as implementations of KFAC do
(Martens & Grosse 2015; Eschenhagen et al. 2023 for layers that are applied at many places). One backward pass per seed
then gives every example's gradients by the layers' rules, and the rows whose outer products are Kronecker factors.

Nothing is taken on trust: for random weights w_n on the examples, sum_n w_n g_n from the rules must be the gradient of
the weighted sum, which one more backward pass gives for every batch. A parameter that fails (ragged examples, a weight
that is used outside its layer too, a loss that mixes the examples) takes a backward pass per example.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.core.prior import state_dtype
from bayesify.methods.laplace.kron import Kron, eigen
from bayesify.methods.laplace.recorder import Call, NoRuleError, Recorder
from bayesify.methods.laplace.rules import Part, Rows, add_in_chunks, example_dim, has_rule, parts_of, rows_of

LARGEST_OUTPUT = 4096
"""From how many outputs on B is kept as its diagonal: there is no eigenbasis of 50,000 x 50,000 here."""
LARGEST_INPUT = 8192
"""Likewise for A."""
HIDING = "CheckpointFunctionBackward"


class Layer(NamedTuple):
    """A weight with Kronecker factors: the bias that is one Gaussian with it, and whether it is of (in, out)."""

    bias: str | None
    inputs_first: bool


class Batch(NamedTuple):
    """A batch after its forward: its calls, its output, the seeds, and a random number for each seed and example.

    `truth` are the gradients of sum_nk mix_k w_n <s_k, output_n>; a parameter that no gradient reaches has none.
    """

    calls: list[Call]
    output: Tensor
    seeds: Sequence[Tensor]
    mix: list[float]
    weights: Tensor
    truth: dict[str, Tensor]


class Curvature:
    """Collects sum_n g_n^2 of some parameters, and the Kronecker factors of others.

    Args:
        model: The model.
        params: The parameters by name.
        pairs: The weights that get Kronecker factors where they can, each with the name of its bias or None.

    Attributes:
        squares: sum_n g_n^2 so far, of parameters that a gradient has reached.
        inputs: A = sum a a^T over the rows that a layer is applied to, by the weight's name.
        outputs: sum d d^T over the rows of gradients; B is its mean over `counts` rows.
        layers: The weights with Kronecker factors, found in the first batch; None before.
    """

    def __init__(
        self, model: nn.Module, params: Mapping[str, Tensor], pairs: Mapping[str, str | None] | None = None
    ) -> None:
        self.params, self.pairs = dict(params), dict(pairs or {})
        self.recorder = Recorder(model, self.params)
        self.squares: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.layers: dict[str, Layer] | None = None if self.pairs else {}
        self._generator = torch.Generator().manual_seed(0)
        self._warned = False

    @torch.no_grad()
    def add(self, output: Tensor, seeds: Sequence[Tensor], summed: Callable[[bool], Tensor] | None = None) -> None:
        """Add a batch, whose forward was run by `recorder.forward`.

        Args:
            output: Of the shape (examples, ...), with its graph.
            seeds: Tensors s_k of the output's shape: the gradients are those of <s_k, output_n>.
            summed: Returns sum_nk s_k s_k^T, or (True) its diagonal; exactly, where the seeds are draws.
        """
        _refuse_hidden(output)
        calls, self.recorder.calls = self.recorder.calls, []
        rows = self._rows(calls)
        weights = torch.randn(len(output), generator=self._generator, device="cpu")
        weights = (weights + weights.sign()).to(output)
        mix = torch.randn(len(seeds), generator=self._generator, device="cpu").tolist() if len(seeds) > 1 else [1.0]
        total = sum((r * s for r, s in zip(mix, seeds, strict=True)), torch.zeros_like(output))
        total = total * weights.view(-1, *(1,) * (output.dim() - 1))
        found = _grads(output, total, [*self.params.values(), *(call.edge for call, _ in rows.values())])
        truth = {n: g for n, g in zip(self.params, found, strict=False) if g is not None}
        self._check_layers(rows, dict(zip(rows, found[len(self.params) :], strict=True)), truth)
        assert self.layers is not None
        joined = {name for weight, layer in self.layers.items() for name in (weight, layer.bias)}
        batch = Batch(calls, output, seeds, mix, weights, {n: g for n, g in truth.items() if n not in joined})
        watched = self._add_inputs({n: rows[n] for n in self.layers if n in rows}, output, summed)
        self._add_squares(batch, watched)

    # -- squares ---------------------------------------------------------------------------------------------------

    def _add_squares(self, batch: Batch, watched: "Mapping[str, tuple[Call, Rows]]") -> None:
        """Run a backward pass per seed; add the squares that agree with `truth`, and the watched layers' rows."""
        truth = batch.truth
        for name in truth:
            param = self.params[name]
            self.squares.setdefault(name, torch.zeros_like(param, dtype=state_dtype(param), requires_grad=False))
        uses, alone = self._sources(batch)
        slow = truth.keys() - uses.keys() - {name for names in alone.values() for name in names}
        needed = list(dict.fromkeys([*(call for found in uses.values() for call, _ in found), *alone]))
        edges = [*(call.edge for call in needed), *(call.edge for call, _ in watched.values())]
        sums = {name: Sums(self.squares[name], batch) for name in truth if name not in slow} if needed else {}
        for k, seed in enumerate(batch.seeds if edges else ()):
            found = _grads(batch.output, seed, edges)
            for (name, (_, rows)), grad in zip(watched.items(), found[len(needed) :], strict=True):
                if grad is not None:
                    _add_outer(self.outputs[name], rows.read(grad))
            grads = {call: grad for call, grad in zip(needed, found, strict=False) if grad is not None}
            slow |= self._add_seed(k, batch, grads, uses, alone, {n: s for n, s in sums.items() if n not in slow})
        for name, own in sums.items():
            if name not in slow and own.agree(truth[name]):
                self.squares[name] += own.squares
            else:
                slow.add(name)
        self._add_one_by_one(batch, sorted(slow))

    def _add_seed(
        self,
        k: int,
        batch: Batch,
        grads: Mapping[Call, Tensor],
        uses: Mapping[str, list[tuple[Call, str]]],
        alone: Mapping[Call, list[str]],
        sums: "Mapping[str, Sums]",
    ) -> set[str]:
        """Add one seed's gradients to the sums, and return the parameters for which that cannot be."""
        failed: set[str] = set()
        parts: dict[Call, dict[str, Part]] = {}
        for name, own in sums.items():
            try:
                reached = [(call, role) for call, role in uses.get(name, ()) if call in grads]
                for call, _ in reached:
                    parts[call] = parts.get(call) or parts_of(call, grads[call], len(batch.output))
                    own.note(call, grads[call])
                own.add(k, [parts[call][role] for call, role in reached])
            except (NoRuleError, RuntimeError, KeyError):
                failed.add(name)
        for call, names in alone.items():
            inside = [name for name in names if name in sums]
            if call in grads and inside:
                try:
                    for n, found in enumerate(self._each_alone(call, grads[call], inside, len(batch.output))):
                        for name, grad in zip(inside, found, strict=True):
                            if grad is not None:
                                sums[name].add_one(k, n, grad)
                    for name in inside:
                        sums[name].note(call, grads[call])
                except Exception:  # whatever a module does with one example: it is only a cheaper way
                    failed.update(inside)
        return failed

    def _sources(self, batch: Batch) -> tuple[dict[str, list[tuple[Call, str]]], dict[Call, list[str]]]:
        """Find the calls that each parameter's gradient comes from, by rules or by a module that is run again.

        What has no rule is left to the innermost module around it that was called, if that was once.
        """
        uses: dict[str, list[tuple[Call, str]]] = {}
        alone: dict[Call, list[str]] = {}
        if len(batch.output) == 1:
            return uses, alone
        by_module: dict[nn.Module, list[Call]] = {}
        for call in batch.calls:
            by_module.setdefault(call.module, []).append(call)
            for role, name in self.recorder.owned.get(call.module, {}).items():
                if name in batch.truth and has_rule(call, role):
                    uses.setdefault(name, []).append((call, role))
        for name in batch.truth.keys() - uses.keys():
            found = next((by_module[m] for m in self.recorder.around[name] if m in by_module), [])
            if len(found) == 1:
                alone.setdefault(found[0], []).append(name)
        return uses, alone

    def _each_alone(
        self, call: Call, grad: Tensor, names: list[str], count: int
    ) -> Iterator[tuple[Tensor | None, ...]]:
        """Run a module again for each example alone, and yield the gradients of its parameters."""
        dim = example_dim(grad.shape, count)
        if grad.shape[dim] != count:
            raise NoRuleError
        for n in range(count):
            args, kwargs = _one_of((call.args, dict(call.kwargs)), n, count, dim)
            with torch.enable_grad():
                output = call.module(*args, **kwargs)
            output = output[0] if isinstance(output, tuple) else output
            yield _grads(output, grad.narrow(dim, n, 1), [self.params[name] for name in names], keep=False)

    def _add_one_by_one(self, batch: Batch, names: list[str]) -> None:
        """Run a backward pass of the whole model for each example and seed."""
        count = len(batch.output)
        if not names:
            return
        if count > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"no batched rule for {len(names)} parameters (the first is {names[0]!r}): they take a backward pass "
                "per example, which is exact but slow",
                stacklevel=7,
            )
        for seed in batch.seeds:
            for n in range(count):
                alone = torch.zeros_like(seed)
                alone[n] = seed[n]
                found = _grads(batch.output, alone, [self.params[name] for name in names])
                for name, grad in zip(names, found, strict=True):
                    if grad is not None:
                        grad = grad.to(self.squares[name].dtype)
                        self.squares[name].addcmul_(grad, grad)

    # -- Kronecker factors -----------------------------------------------------------------------------------------

    def _rows(self, calls: Sequence[Call]) -> dict[str, tuple[Call, Rows]]:
        """Return the weights that are used once, by a linear map or a convolution, with the rows of that call."""
        wanted = self.pairs if self.layers is None else self.layers
        found: dict[str, list[Call]] = {}
        for call in calls:
            if (name := self.recorder.owned.get(call.module, {}).get("weight")) in wanted:
                found.setdefault(name, []).append(call)  # type: ignore[arg-type]
        out = {}
        for name, uses in found.items():
            try:
                if len(uses) == 1:
                    out[name] = uses[0], rows_of(uses[0])
            except NoRuleError:
                continue
        return out

    def _check_layers(
        self, rows: "dict[str, tuple[Call, Rows]]", grads: Mapping[str, Tensor | None], truth: Mapping[str, Tensor]
    ) -> None:
        """Find the layers in the first batch, and see in every other that their gradients are what the rules say."""
        found: dict[str, Layer] = {}
        for name, (_, layer) in rows.items():
            arrived, exact = grads[name], truth.get(name)
            if arrived is None or exact is None:
                continue
            d = layer.read(arrived)
            x = torch.cat([piece.to(d.dtype) for piece in layer.inputs()])
            weight = (x.T @ d if layer.inputs_first else d.T @ x).view_as(exact)
            size = float(d.abs().sum()) * max(1.0, float(x.abs().max()))
            if not _agree(weight, exact, size, d.dtype):
                continue
            bias = self.pairs.get(name)
            own = truth.get(bias) if bias is not None and bias in self.params else None
            joined = own is not None and own.shape == d.shape[1:] and _agree(d.sum(0), own, size, d.dtype)
            # Kept as its diagonal, A has no eigenvectors that a bias could have a row of.
            joined = joined and x.shape[1] < LARGEST_INPUT
            found[name] = Layer(bias if joined else None, layer.inputs_first)
        if self.layers is None:
            self.layers = found
        lost = next((n for n, layer in self.layers.items() if n in truth and found.get(n) != layer), None)
        if lost is not None:
            raise ValueError(f"the model uses {lost!r} in another way than in the first batch; use structure='diag'")

    def _add_inputs(
        self,
        rows: "Mapping[str, tuple[Call, Rows]]",
        output: Tensor,
        summed: Callable[[bool], Tensor] | None,
    ) -> "dict[str, tuple[Call, Rows]]":
        """Add to A, and to B of a layer whose outputs are the model's; return the layers that wait for gradients."""
        assert self.layers is not None
        watched = {}
        for name, (call, layer) in rows.items():
            bias = self.layers[name].bias is not None
            for piece in layer.inputs():
                if name not in self.inputs:
                    self._start(name, piece.shape[1] + bias, self.params[name].numel() // piece.shape[1])
                _add_outer(self.inputs[name], F.pad(piece, (0, 1), value=1.0) if bias else piece)
            self.counts[name] += layer.number
            if summed is not None and call.edge.node is output.grad_fn and output.dim() == 2:
                total = self.outputs[name]
                total += summed(total.dim() == 1).to(total)  # the curvature there is known, without a backward pass
            else:
                watched[name] = call, layer
        return watched

    def _start(self, name: str, inputs: int, outputs: int) -> None:
        param = self.params[name]
        for totals, size, largest in ((self.inputs, inputs, LARGEST_INPUT), (self.outputs, outputs, LARGEST_OUTPUT)):
            square = (size, size) if size <= largest else (size,)
            totals[name] = torch.zeros(square, dtype=state_dtype(param), device=param.device)
        self.counts[name] = 0

    def factors(self, scales: Mapping[str, float]) -> dict[str, Kron]:
        """Return the eigendecompositions by parameter, with B times the weight's scale, and forget the sums."""
        out: dict[str, Kron] = {}
        for name, (bias, inputs_first) in (self.layers or {}).items():
            if name not in self.inputs:
                continue
            a = eigen(self.inputs.pop(name))
            b = eigen(self.outputs.pop(name).mul_(scales[name] / max(self.counts[name], 1)))
            own = slice(None) if bias is None else slice(0, -1)
            whole = Kron(*a, *b) if inputs_first else Kron(*b, *a)
            out[name] = whole.rows(own, None) if inputs_first else whole.rows(None, own)
            if bias is not None:
                last = slice(-1, None)
                out[bias] = whole.rows(last, None) if inputs_first else whole.rows(None, last)
        return out


class Sums:
    """One parameter's sums over a batch: of squares, and of gradients weighted by example and seed."""

    def __init__(self, like: Tensor, batch: Batch) -> None:
        self.squares, self.weighted = torch.zeros_like(like), torch.zeros_like(like)
        self.weights, self.mix = batch.weights.to(like), batch.mix
        self.size, self.dtype = 0.0, like.dtype

    def note(self, call: Call, grad: Tensor) -> None:
        """Take note of the size and the precision of what arrives at a call, the scale of the rounding errors."""
        inputs = call.args[0] if call.args else None
        known = isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.numel()
        largest = float(inputs.abs().max()) if known else 1.0  # type: ignore[union-attr]
        self.size += float(grad.abs().sum()) * max(1.0, largest) * max(abs(r) for r in self.mix)
        if torch.finfo(grad.dtype).eps > torch.finfo(self.dtype).eps:
            self.dtype = grad.dtype

    def add(self, k: int, parts: Sequence[Part]) -> None:
        """Add the gradients for one seed, through all calls."""
        if len(parts) == 1:
            parts[0].add(self.squares, self.weighted, self.weights * self.mix[k])
        elif parts:
            add_in_chunks(parts, self.squares, self.weighted, self.weights * self.mix[k])

    def add_one(self, k: int, n: int, grad: Tensor) -> None:
        """Add the gradient of one example for one seed."""
        grad = grad.to(self.squares.dtype)
        self.squares.addcmul_(grad, grad)
        self.weighted += grad * (self.weights[n] * self.mix[k])

    def agree(self, truth: Tensor) -> bool:
        """Return whether the weighted sum is autograd's."""
        return _agree(self.weighted, truth, self.size, self.dtype)


def _agree(found: Tensor, truth: Tensor, size: float, dtype: torch.dtype) -> bool:
    """Return whether two gradients are equal but for rounding, of terms whose absolute values sum to `size`."""
    eps = torch.finfo(dtype).eps
    error = float(torch.linalg.vector_norm(found.to(torch.promote_types(found.dtype, truth.dtype)) - truth))
    # The gradient may be nothing but rounding, as that of an attention's key bias; then its terms give the scale.
    return bool(error <= 3 * eps**0.5 * float(torch.linalg.vector_norm(truth)) + 100 * eps * size)


def _add_outer(total: Tensor, rows: Tensor) -> None:
    """Add the sum of r r^T over the rows, or its diagonal."""
    rows = rows.to(total.dtype)
    total += rows.square().sum(0) if total.dim() == 1 else rows.T @ rows


def _grads(output: Tensor, seed: Tensor, inputs: Sequence[Any], *, keep: bool = True) -> tuple[Tensor | None, ...]:
    """Return the gradients of <seed, output>, None where there is none, and keep the graph."""
    # A scalar: with grad_outputs= torch would first import a computer algebra system.
    with torch.enable_grad():
        total = (output * seed).sum()
    return torch.autograd.grad(total, inputs, retain_graph=keep, allow_unused=True)


def _one_of(value: Any, n: int, count: int, dim: int) -> Any:
    """Keep example n of every tensor that has `count` along `dim`, or along the first dimension."""
    if isinstance(value, Tensor):
        at = next((d for d in (dim, 0) if value.dim() > d and value.shape[d] == count), None)
        return value.detach() if at is None else value.detach().narrow(at, n, 1)
    if isinstance(value, Mapping):
        return {k: _one_of(v, n, count, dim) for k, v in value.items()}
    return type(value)(_one_of(v, n, count, dim) for v in value) if type(value) in (tuple, list) else value


def _refuse_hidden(output: Tensor) -> None:
    """Raise where reentrant checkpointing hides parameters from autograd's graph."""
    seen, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == HIDING:
            raise ValueError(
                "the model checkpoints activations with use_reentrant=True, which hides its parameters from autograd's "
                "graph; use use_reentrant=False, or switch checkpointing off"
            )
        stack.extend(below for below, _ in node.next_functions)
