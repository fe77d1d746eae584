"""Read a network linearly in its weights: f(x, m) + J(x) (theta - m), for draws theta or in closed form.

A Gauss-Newton posterior belongs to this linear model, not to the network: sampled weights of a network that is only
locally known give outputs that no data supports. The work is done on a plain copy of the model at the posterior mean.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from bayesify.core.mixture import Mixture, mixture_in
from bayesify.core.modes import Mode, override
from bayesify.core.reading import Scope
from bayesify.core.scopes import named_posteriors
from bayesify.core.wrap import unbayesify
from bayesify.prediction.batches import call_model, device_of, logits_of, split_batch, to_device
from bayesify.prediction.gaussian import GaussianLogits
from bayesify.prediction.last_layer import NotLastError

Thetas = dict[str, Tensor]
Exactly = tuple[Tensor, GaussianLogits, Any]  # outputs in mean mode, their distribution, and the labels

FEW_OUTPUTS = 8  # per example, up to which the closed form is cheaper than samples
AT_ONCE = 1 << 25  # elements of per-example Jacobians in memory
TANGENTS = 1 << 30  # bytes of the directions of one batched derivative
ALIKE = 1e-3  # relative difference up to which one example alone gives the output that it has in its batch


class Linearized:
    """A model (of a mixture, one member) at its posterior mean, with the posteriors of its weights."""

    def __init__(self, model: nn.Module, scopes: Sequence[Scope]) -> None:
        if mixture_in(model) is not None:
            raise ValueError("linear=True reads one model; predict with the mixture itself, not a module around it")
        self.model, self.scopes = model, scopes
        self.posteriors = {name: p for name, p in named_posteriors(model) if p.moves}
        self.plain = unbayesify(copy.deepcopy(model)).eval().requires_grad_(False)
        params = dict(self.plain.named_parameters())
        self.mean = {name: params[name].detach() for name in self.posteriors}
        self.ways = [self._batched, self._one_by_one, self._twice_backward]  # those that the model may allow

    def directions(self, mode: Mode) -> Thetas:
        """Return theta - m for a draw."""
        with override(self.scopes, mode), torch.no_grad():
            read = {name: attrgetter(name)(self.model) for name in self.mean}  # as a forward does
            return {name: read[name].detach().to(mean) - mean for name, mean in self.mean.items()}

    def outputs(self, inputs: Any, target: Any, directions: Sequence[Thetas]) -> Tensor:
        """Return the logits f(x, m) + J(x) d for every direction d, (directions, N, ...)."""
        stacked = {name: torch.stack([d[name] for d in directions]) for name in self.mean}
        while True:
            try:
                with _differentiable(self.plain):
                    output, slopes = self.ways[0](inputs, target, stacked)
                return output + slopes
            except Exception as error:
                if len(self.ways) == 1:
                    raise ValueError(
                        f"the model cannot be differentiated in its weights ({error}); predict with linear=False"
                    ) from error
                del self.ways[0]

    def gaussians(self, batches: Iterable[Any]) -> Iterator[Exactly]:
        """Yield each batch's output in mean mode, its distribution with the variances diag(J Sigma J^T), its labels.

        Raises:
            NotLastError: There are many outputs, no Gaussian, or an example's output depends on its batch.
        """
        device = device_of(self.model)
        for batch in batches:
            inputs, target = split_batch(to_device(batch, device))
            found = self._gaussian(inputs, target)
            if found is None:
                raise NotLastError("the linear reading has a closed form")
            yield *found, target

    def _gaussian(self, inputs: Any, target: Any) -> tuple[Tensor, GaussianLogits] | None:
        leaves, spec = pytree.tree_flatten(inputs)
        output = self._call(self.mean, inputs, target).detach()
        count = len(output)
        per_example = [isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count for leaf in leaves]
        size = sum(m.numel() for m in self.mean.values()) * output[0].numel() if count else 0
        if not count or output[0].numel() > FEW_OUTPUTS or size > AT_ONCE or not any(per_example):
            return None
        if any(p.whitened(p.original.detach().unsqueeze(0)) is None for p in self.posteriors.values()):
            return None

        def alone(mean: Thetas, *rows: Any) -> tuple[Tensor, Tensor]:
            one = [row.unsqueeze(0) if own else row for row, own in zip(rows, per_example, strict=True)]
            found = self._call(mean, pytree.tree_unflatten(one, spec), None)[0]
            return found.flatten(), found

        jacobian = vmap(jacrev(alone, has_aux=True), in_dims=(None, *(0 if own else None for own in per_example)))
        variances = []
        step = max(1, AT_ONCE // max(size, 1))
        for start in range(0, count, step):
            part = [v[start : start + step] if own else v for v, own in zip(leaves, per_example, strict=True)]
            try:
                with _differentiable(self.plain):
                    slopes, found = jacobian(self.mean, *part)
            except Exception:
                return None
            expected = output[start : start + step]
            if not torch.allclose(found, expected, rtol=ALIKE, atol=ALIKE * float(expected.abs().max())):
                return None
            variances.append(self._variance(slopes).view_as(found))
        variance = torch.cat(variances)
        return output, GaussianLogits(output.to(variance), variance, None)

    def _variance(self, slopes: Thetas) -> Tensor:
        """Return g^T Sigma g = |A^T g|^2 of gradients (examples, outputs, *shape), for theta = m + A eps."""
        whole: dict[str, Tensor] = {}
        for name, slope in slopes.items():
            found = self.posteriors[name].whitened(slope.flatten(0, 1))
            assert found is not None
            noise, pulled = found
            whole[noise] = whole[noise] + pulled if noise in whole else pulled  # of one noise, as weight and bias have
        return torch.stack([pulled.flatten(1).square().sum(1) for pulled in whole.values()]).sum(0)

    # -- derivatives -------------------------------------------------------------------------------------------

    def _call(self, thetas: Thetas, inputs: Any, target: Any) -> Tensor:
        return logits_of(call_model(cast(Any, _Bound(self.plain, thetas)), inputs, target))

    def _batched(self, inputs: Any, target: Any, directions: Thetas) -> tuple[Tensor, Tensor]:
        """Return f and J d in forward mode, for many directions at once."""
        pushed = vmap(partial(self._pushed, inputs, target), out_dims=cast(Any, (None, 0)))
        chunk = max(1, TANGENTS // max(sum(mean.nbytes for mean in self.mean.values()), 1))
        pieces = [pushed(some) for some in _split(directions, chunk)]
        return pieces[0][0], torch.cat([slopes for _, slopes in pieces])

    def _one_by_one(self, inputs: Any, target: Any, directions: Thetas) -> tuple[Tensor, Tensor]:
        found = [self._pushed(inputs, target, {n: d[0] for n, d in one.items()}) for one in _split(directions, 1)]
        return found[0][0], torch.stack([slope for _, slope in found])

    def _pushed(self, inputs: Any, target: Any, direction: Thetas) -> Any:
        return jvp(lambda thetas: self._call(thetas, inputs, target), (self.mean,), (direction,))

    def _twice_backward(self, inputs: Any, target: Any, directions: Thetas) -> tuple[Tensor, Tensor]:
        """Return f and J d as the derivative of <J^T u, d>, which is linear in u."""
        with torch.enable_grad():
            mean = {name: m.clone().requires_grad_() for name, m in self.mean.items()}
            output = self._call(mean, inputs, target)
            u = torch.zeros_like(output, requires_grad=True)
            pulled = torch.autograd.grad(output, list(mean.values()), u, create_graph=True, materialize_grads=True)
            slopes = []
            for one in _split(directions, 1):
                product = sum((g * one[name][0]).sum() for name, g in zip(mean, pulled, strict=True))
                slopes.append(torch.autograd.grad(product, u, retain_graph=True)[0])  # type: ignore[arg-type]
        return output.detach(), torch.stack(slopes).detach()


def member_of(model: nn.Module, number: int) -> nn.Module:
    """Return a mixture's member, or another model itself."""
    return model.member(number) if isinstance(model, Mixture) else model


def _split(directions: Thetas, size: int) -> Iterator[Thetas]:
    """Cut stacked directions into chunks."""
    count = len(next(iter(directions.values())))
    for start in range(0, count, size):
        yield {name: d[start : start + size] for name, d in directions.items()}


class _Bound:
    """A plain model with other weights, to be called as the model is."""

    def __init__(self, plain: nn.Module, thetas: Thetas) -> None:
        self.plain, self.thetas = plain, thetas
        self.config = getattr(plain, "config", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.plain, self.thetas, args, kwargs)


class _Plainly(TorchFunctionMode):
    """Does nothing; torch's fused layers, which have no derivative, step aside where any such mode is active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Use kernels that can be differentiated forward, or twice; the choice of kernels is the whole process's."""
    with ExitStack() as stack:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            torch._C._set_mkldnn_enabled(False)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_Plainly())
        yield
