"""The curvature of a loss, summed over batches: squared per-example gradients, and Kronecker factors.

Module hooks record what each layer takes and where the gradient of its output arrives, as implementations of KFAC do
(Martens & Grosse 2015; Eschenhagen et al. 2023 for layers that are applied at many places). One backward pass per seed
then gives every example's gradients by the layers' rules, and the rows whose outer products are Kronecker factors.

Every batch is checked: for random weights w_n on the examples, sum_n w_n g_n from the rules must be the gradient of
the weighted sum, which takes one more backward pass. A parameter that fails (ragged examples, a weight that is used
outside its layer too, a loss that mixes the examples) takes a backward pass per example.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from bayesify.core.prior import state_dtype
from bayesify.methods.laplace import rules
from bayesify.methods.laplace.method import Kron
from bayesify.methods.laplace.recorder import Call, NoRuleError, Recorder

# Beyond this many outputs B is kept as its diagonal, and A beyond this many inputs: there is no eigenbasis of
# 50,000 x 50,000 here.
LARGEST_OUTPUT, LARGEST_INPUT = 4096, 8192
Ruled = dict[str, list[tuple[Call, str]]]  # the calls that a parameter's rules are for, with its attribute there


class Layer(NamedTuple):
    """A weight with Kronecker factors."""

    bias: str | None  # that is one Gaussian with it
    inputs_first: bool  # whether the weight is of (in, out)


class Curvature:
    """Sums sum_n g_n^2 of parameters, and for `pairs` of a weight and its bias or None Kronecker factors if it can.

    A = sum a a^T over the rows a that a layer is applied to, and B is the mean of d d^T over the gradients d of the
    same rows.
    """

    def __init__(
        self, model: nn.Module, params: Mapping[str, Tensor], pairs: Mapping[str, str | None] | None = None
    ) -> None:
        self.params, self.pairs = dict(params), dict(pairs or {})
        self.recorder = Recorder(model, self.params)
        self.squares: dict[str, Tensor] = {}  # of parameters that a gradient has reached
        self.inputs: dict[str, Tensor] = {}  # A, by the weight's name
        self.outputs: dict[str, Tensor] = {}  # B times the number of rows
        self.counts: Counter[str] = Counter()  # of rows
        self.layers: dict[str, Layer] | None = None if self.pairs else {}  # None before the first batch
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
        weights = torch.randn(len(seeds), len(output), generator=self._generator, device="cpu")
        weights = (weights + weights.sign()).to(output)
        total = torch.zeros_like(output)
        for seed, own in zip(seeds, weights, strict=True):
            total += seed * own.view(-1, *(1,) * (output.dim() - 1))
        layers = self._candidates(calls)
        found = _grads(output, total, [*self.params.values(), *(call.edge for call in layers.values())])
        truth = {name: g for name, g in zip(self.params, found, strict=False) if g is not None}
        arriving = dict(zip(layers, found[len(self.params) :], strict=True))
        waiting = self._add_layers(layers, arriving, truth, output, summed)
        for name in truth:
            param = self.params[name]
            self.squares.setdefault(name, torch.zeros_like(param, dtype=state_dtype(param), requires_grad=False))
        ruled, again = self._sources(calls if len(output) > 1 else (), truth)
        sums = {name: Sums(self.squares[name]) for names in (ruled, *again.values()) for name in names}
        needed = dict.fromkeys((*(call for uses in ruled.values() for call, _ in uses), *again, *waiting.values()))
        for seed, own in zip(seeds if needed else (), weights, strict=False):
            grads = dict(zip(needed, _grads(output, seed, [call.edge for call in needed]), strict=True))
            for name, call in waiting.items():
                if (grad := grads[call]) is not None:
                    _add_outer(self.outputs[name], rules.output_rows(call, grad))
            self._add_squares(ruled, again, grads, own, sums)
        slow = [name for name in truth if name not in sums or not sums[name].agree(truth[name])]
        for name in sums.keys() - set(slow):
            self.squares[name] += sums[name].squares
        self._add_one_by_one(output, seeds, slow)

    # -- squares ---------------------------------------------------------------------------------------------------

    def _sources(self, calls: Sequence[Call], truth: Mapping[str, Tensor]) -> tuple[Ruled, dict[Call, list[str]]]:
        """Find the calls that each parameter's gradient comes from: those with rules, and those to be run again.

        What has no rule is left to the innermost module around it that was called, if that was once.
        """
        ruled: Ruled = {}
        again: dict[Call, list[str]] = {}
        by_module: dict[nn.Module, list[Call]] = {}
        for call in calls:
            by_module.setdefault(call.module, []).append(call)
            for role, name in self.recorder.owned.get(call.module, {}).items():
                if name in truth and rules.has_rule(call, role):
                    ruled.setdefault(name, []).append((call, role))
        for name in truth.keys() - ruled.keys():
            found = next((by_module[m] for m in self.recorder.around[name] if m in by_module), [])
            if len(found) == 1:
                again.setdefault(found[0], []).append(name)
        return ruled, again

    def _add_squares(
        self,
        ruled: Ruled,
        again: Mapping[Call, list[str]],
        grads: Mapping[Call, Tensor | None],
        weights: Tensor,
        sums: "dict[str, Sums]",
    ) -> None:
        """Add one seed's gradients, and drop the sums of parameters for which that fails: there is a slower way."""
        for name in ruled.keys() & sums.keys():
            try:
                parts = []
                for call, role in ruled[name]:
                    if (grad := grads[call]) is not None:
                        parts.append(rules.part_of(call, role, grad, len(weights)))
                        sums[name].note(call, grad, weights)
                sums[name].add(parts, weights)
            except Exception:
                del sums[name]
        for call, names in again.items():
            if (grad := grads[call]) is not None and names[0] in sums:
                try:
                    self._run_again(call, names, grad, weights, sums)
                except Exception:  # a module may fail on a single example
                    for name in names:
                        del sums[name]

    def _run_again(
        self, call: Call, names: Sequence[str], grad: Tensor, weights: Tensor, sums: "dict[str, Sums]"
    ) -> None:
        """Run a module again for each example, and add its parameters' gradients."""
        dim, count = rules.example_dim(grad.shape, len(weights)), len(weights)
        if grad.shape[dim] != count:
            raise NoRuleError

        def example(tensor: Tensor) -> Tensor:
            at = next((d for d in (dim, 0) if tensor.dim() > d and tensor.shape[d] == count), None)
            return tensor.detach() if at is None else tensor.detach().narrow(at, n, 1)

        for n in range(count):
            args, kwargs = tree_map_only(Tensor, example, (call.args, dict(call.kwargs)))
            with torch.enable_grad():
                output = call.module(*args, **kwargs)
            output = output[0] if isinstance(output, tuple) else output
            found = _grads(output, grad.narrow(dim, n, 1), [self.params[name] for name in names], keep=False)
            for name, own in zip(names, found, strict=True):
                if own is not None:
                    sums[name].add([rules.Part(own[None])], weights[n : n + 1])
        for name in names:
            sums[name].note(call, grad, weights)

    def _add_one_by_one(self, output: Tensor, seeds: Sequence[Tensor], names: list[str]) -> None:
        """Run a backward pass of the whole model for each example and seed."""
        if names and len(output) > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"no batched rule for {len(names)} parameters (the first is {names[0]!r}): they take a backward pass "
                "per example, which is exact but slow",
                stacklevel=7,
            )
        for seed in seeds if names else ():
            for n in range(len(output)):
                alone = torch.zeros_like(seed)
                alone[n] = seed[n]
                for name, grad in zip(names, _grads(output, alone, [self.params[n] for n in names]), strict=True):
                    if grad is not None:
                        self.squares[name] += grad.to(self.squares[name].dtype).square()

    # -- Kronecker factors -----------------------------------------------------------------------------------------

    def _candidates(self, calls: Sequence[Call]) -> dict[str, Call]:
        """Return the calls of weights that are used once, by a linear map or a convolution."""
        wanted = self.pairs if self.layers is None else self.layers
        uses = [(self.recorder.owned.get(call.module, {}).get("weight", ""), call) for call in calls]
        times = Counter(name for name, _ in uses)
        return {name: call for name, call in uses if name in wanted and times[name] == 1 and rules.has_rows(call)}

    def _add_layers(
        self,
        candidates: Mapping[str, Call],
        grads: Mapping[str, Tensor | None],
        truth: dict[str, Tensor],
        output: Tensor,
        summed: Callable[[bool], Tensor] | None,
    ) -> dict[str, Call]:
        """Add to A, and to B of a layer whose outputs are the model's; return the layers whose B waits for the seeds.

        The first batch finds the layers: a layer's gradient must be what the rows say, there and in every other batch.
        The layers' parameters leave `truth`.
        """
        found, waiting = {}, {}
        for name, call in candidates.items():
            if (grad := grads[name]) is None or name not in truth:
                continue
            d, x = rules.output_rows(call, grad), rules.input_rows(call)
            layer = self._layer(name, x.to(d.dtype), d, rules.is_turned(call), truth)
            if layer is None or (self.layers is not None and layer != self.layers[name]):
                continue
            found[name] = layer
            x = x if layer.bias is None else F.pad(x, (0, 1), value=1.0)
            if name not in self.inputs:
                self.inputs[name] = _total(x, LARGEST_INPUT, self.params[name])
                self.outputs[name] = _total(d, LARGEST_OUTPUT, self.params[name])
            _add_outer(self.inputs[name], x)
            self.counts[name] += len(x)
            if summed is not None and call.edge.node is output.grad_fn and output.dim() == 2:
                total = self.outputs[name]
                total += summed(total.dim() == 1).to(total)  # the curvature there is known, without a backward pass
            else:
                waiting[name] = call
        self.layers = found if self.layers is None else self.layers
        if lost := self.layers.keys() & truth.keys() - found.keys():
            raise ValueError(f"the model uses {min(lost)!r} in another way than before; use structure='diag'")
        for name, layer in found.items():
            truth.pop(name)
            truth.pop(layer.bias or "", None)
        return waiting

    def _layer(self, name: str, x: Tensor, d: Tensor, inputs_first: bool, truth: Mapping[str, Tensor]) -> Layer | None:
        """Return the layer if its weight's gradient is what inputs and outputs say, with its bias if that is so too."""
        size, eps = float(d.abs().sum()) * max(1.0, float(x.abs().max())), torch.finfo(d.dtype).eps
        if not _agree((x.T @ d if inputs_first else d.T @ x).view_as(truth[name]), truth[name], size, eps):
            return None
        bias = self.pairs.get(name) or ""
        own = truth.get(bias)
        joined = own is not None and own.shape == d.shape[1:] and _agree(d.sum(0), own, size, eps)
        # An A that is kept as its diagonal has no eigenvectors that a bias could have a row of.
        return Layer(bias if joined and x.shape[1] < LARGEST_INPUT else None, inputs_first)

    def factors(self, scales: Mapping[str, float]) -> dict[str, Kron]:
        """Return the eigendecompositions by parameter, with B times the weight's scale, and forget the sums."""
        out: dict[str, Kron] = {}
        for name, (bias, inputs_first) in (self.layers or {}).items():
            if name not in self.inputs:
                continue
            vectors, values = eigen(self.inputs.pop(name))
            b = eigen(self.outputs.pop(name).mul_(scales[name] / self.counts[name]))
            for own, rows in ((name, slice(None) if bias is None else slice(-1)), (bias, slice(-1, None))):
                if own is not None:
                    a = None if vectors is None else vectors[rows].contiguous(), values
                    out[own] = Kron(*a, *b) if inputs_first else Kron(*b, *a)
        return out


class Sums:
    """One parameter's sums over a batch: of squares, and of gradients weighted by example and seed."""

    def __init__(self, like: Tensor) -> None:
        self.squares, self.weighted = torch.zeros_like(like), torch.zeros_like(like)
        self.size, self.eps = 0.0, torch.finfo(like.dtype).eps  # the scale and precision of rounding errors

    def note(self, call: Call, grad: Tensor, weights: Tensor) -> None:
        """Note the size and the precision of the gradient that arrives at a call."""
        inputs = call.args[0] if call.args else None
        known = isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.numel()
        largest = float(inputs.abs().max()) if known else 1.0  # type: ignore[union-attr]
        self.size += float(grad.abs().sum()) * max(1.0, largest) * float(weights.abs().max())
        self.eps = max(self.eps, torch.finfo(grad.dtype).eps)

    def add(self, parts: Sequence[rules.Part], weights: Tensor) -> None:
        """Add the gradients for one seed, through all calls."""
        if len(parts) == 1:
            parts[0].add(self.squares, self.weighted, weights)
        elif parts:
            rules.add_in_chunks(parts, self.squares, self.weighted, weights)

    def agree(self, truth: Tensor) -> bool:
        """Return whether the weighted sum is autograd's."""
        return _agree(self.weighted, truth, self.size, self.eps)


def _agree(found: Tensor, truth: Tensor, size: float, eps: float) -> bool:
    """Return whether two gradients are equal up to rounding, of terms whose absolute values sum to `size`."""
    error = float(torch.linalg.vector_norm(found.to(torch.promote_types(found.dtype, truth.dtype)) - truth))
    # The gradient may be nothing but rounding, as that of an attention's key bias; then its terms give the scale.
    return bool(error <= 3 * eps**0.5 * float(torch.linalg.vector_norm(truth)) + 100 * eps * size)


def _total(rows: Tensor, largest: int, param: Tensor) -> Tensor:
    """Return zeros for a sum of outer products of such rows, or of its diagonal."""
    size = rows.shape[1]
    return torch.zeros((size, size) if size <= largest else (size,), dtype=state_dtype(param), device=param.device)


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


def eigen(factor: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return eigenvectors and eigenvalues of a factor, in its dtype but computed in float64 on the CPU.

    A factor that was kept as its diagonal (one dimension) has the identity as its basis, which is None.
    """
    if factor.dim() == 1:
        return None, factor.clamp_min(0)
    exact = factor.cpu().double()
    values, vectors = torch.linalg.eigh((exact + exact.T) / 2)
    return vectors.contiguous().to(factor), values.clamp_(min=0).to(factor)


def _refuse_hidden(output: Tensor) -> None:
    """Raise where reentrant checkpointing hides parameters from autograd's graph."""
    stack = [output.grad_fn]
    seen: set[Any] = {None}
    while stack:
        if (node := stack.pop()) in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":  # type: ignore[union-attr]
            raise ValueError(
                "the model checkpoints activations with use_reentrant=True, which hides its parameters from autograd's "
                "graph; use use_reentrant=False, or switch checkpointing off"
            )
        stack.extend(below for below, _ in node.next_functions)  # type: ignore[union-attr]
