"""What a posterior is: the distribution of one parameter, with its mean, its draw and its penalty.

A posterior is a parametrization: the model reads its weight, `forward` hands out theta. The parameter that the
model was built with stays where it was, as the mean; what else the posterior keeps lives in this module.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from bayesify import noise as noises
from bayesify.blocks import blocks, blockwise, scratch

ROW = 1024  # elements that are summed in float32
LOW_PRECISION = (torch.float16, torch.bfloat16)
Factor = float | Tensor


@dataclass(frozen=True)
class Prior:
    """The Gaussian prior N(mean, sig^2) of one parameter.

    Attributes:
        mean: theta0, of the parameter's shape, or 0-dim for a constant (a zero mean costs no memory).
        sig: The prior's standard deviation.
        is_bias: Whether the parameter is a bias, which methods may treat in another way.
    """

    mean: Tensor
    sig: float
    is_bias: bool = False


class Reader(Protocol):
    """Whoever decides which theta a posterior hands out (`bayesify.scopes.Scope`)."""

    def read(self, posterior: "Posterior", original: Tensor) -> Tensor:
        """Return the theta that a read of this posterior sees now."""


class Posterior(nn.Module):
    """The posterior of one parameter; subclasses say how theta is drawn and what the penalty is.

    A subclass gives `theta` (a sample as a differentiable function of mean and noise) and `energy` (the penalty
    before its division by the number of data). Everything else has a default; `pullback` may be given in closed
    form where autograd's own way is too slow.
    """

    stochastic: ClassVar[bool] = True
    """Whether `train()` draws a sample per forward (else the parameter itself is used)."""
    random: bool = True
    """Whether there is anything to sample at all."""
    neutral_noise: ClassVar[float] = 0.0
    """The noise with which `theta` is the mean."""

    prior_center: Tensor

    def __init__(self, param: Tensor, prior: Prior, *, flat: bool = False, fixed_row: int | None = None) -> None:
        super().__init__()
        self.prior_sig = prior.sig
        self.is_bias = prior.is_bias
        self.flat = flat
        self.register_buffer("prior_center", prior.mean)
        self._look_at_center()
        self.shape = param.shape
        self.fixed_row = fixed_row
        self.name = ""
        self.key = 0
        self.reader: Reader | None = None
        # A tuple hides the owner from nn.Module, which would register it as a child.
        self._home: tuple[nn.Module, str] | None = None

    def attach(self, name: str, home: nn.Module, attribute: str, reader: Reader) -> None:
        """Tell the posterior its plain name, where its mean is kept and who decides its reads."""
        self.name, self.key = name, noises.name_key(name)
        self._home = (home, attribute)
        self.reader = reader

    def forward(self, original: Tensor) -> Tensor:
        """Return theta, as the parametrization of `original`."""
        return original if self.reader is None else self.reader.read(self, original)

    @property
    def original(self) -> nn.Parameter:
        """The parameter of the wrapped model (identical to the one before `bayesify`)."""
        assert self._home is not None, "the posterior is not attached to a model"
        home, attribute = self._home
        parameter = home._parameters[attribute]
        assert parameter is not None
        return parameter

    @property
    def mean(self) -> Tensor:
        """The posterior mean."""
        return self.mean_theta(self.original.detach())

    @property
    def std(self) -> Tensor:
        """The posterior standard deviation."""
        return torch.zeros_like(self.original)

    @property
    def prior_mean(self) -> Tensor:
        """The prior mean theta0, in the parameter's shape."""
        return self.prior_center.expand(self.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Posterior":
        """Move or cast: the prior mean follows the parameter, the posterior's own state never goes below float32."""
        center = fn(self.prior_center)
        super()._apply(lambda tensor: _in_state_dtype(tensor, fn(tensor)), recurse)  # type: ignore[no-untyped-call]
        self.prior_center = center
        return self

    def learnable(self) -> tuple[nn.Parameter, ...]:
        """Return the trainable parameters of this module, beside the mean."""
        return ()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps beside the mean, by attribute name."""
        return {n: t for n, t in (*self._parameters.items(), *self._buffers.items()) if t is not None}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the tensors of `state()`, keeping the identity of parameters."""
        with torch.no_grad():
            for name, tensor in state.items():
                if name in self._parameters:
                    getattr(self, name).copy_(tensor)
                else:
                    self._buffers[name] = tensor.to(self.original.device).clone()
            self.prior_center = self.prior_center.to(self.original.dtype)
        self._look_at_center()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._look_at_center()

    def _look_at_center(self) -> None:
        """Note whether the prior mean is a zero constant: a look at the tensor would wait for an accelerator."""
        self.zero_prior = self.prior_center.dim() == 0 and not bool(self.prior_center)

    def configure_like(self, other: "Posterior") -> None:
        """Take over the settings of another posterior of the same parameter, but none of its tensors."""
        own = {"reader", "name", "key", "training"}
        self.__dict__.update({k: v for k, v in vars(other).items() if not k.startswith("_") and k not in own})

    def check_ready(self) -> None:
        """Raise if the posterior cannot be sampled yet."""

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return theta in mean mode."""
        return original

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Return a sample, as a differentiable function of the mean and of `learnable()`."""
        raise NotImplementedError

    def draw(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Compute `theta` where no gradient is wanted; may be given in a faster way."""
        return self.theta(mean, noise)

    def energy(self, mean: Tensor, scale: float) -> Tensor:
        """Return `scale` times the penalty's sum, a differentiable 0-dim float64 tensor."""
        raise NotImplementedError

    def empty_noise(self) -> Tensor:
        """Return an uninitialised tensor for this posterior's noise."""
        return torch.empty(self.shape, dtype=state_dtype(self.original), device=self.original.device)

    def fill_noise(self, out: Tensor, generator: torch.Generator) -> None:
        """Fill a flat piece of noise."""
        noises.normal_(out, generator)

    def pullback(
        self, mean: Tensor, noise: Tensor | None, grad: Tensor | None, coef: "Tensor | None"
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of `<grad, theta> + coef * energy` with respect to the mean and `learnable()`.

        Args:
            mean: The parameter that holds the mean.
            noise: The noise of the sample; may be overwritten. None where `grad` is None.
            grad: The gradient of the loss with respect to theta, or None.
            coef: The 0-dim gradient with respect to the energy, or None.
        """
        return autograd_pullback(self, mean, noise, grad, coef, create_graph=False)


def autograd_pullback(
    posterior: Posterior,
    mean: Tensor,
    noise: Tensor | None,
    grad: Tensor | None,
    coef: Tensor | None,
    *,
    create_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Compute `Posterior.pullback` by autograd: always right, twice differentiable, slower."""
    inputs = [mean, *posterior.learnable()]
    wanted = [x for x in inputs if x.requires_grad]
    outputs, grads = [], []
    with torch.enable_grad():
        if grad is not None:
            assert noise is not None
            outputs.append(posterior.theta(mean, noise))
            grads.append(grad)
        if coef is not None:
            outputs.append(posterior.energy(mean, 1.0))
            grads.append(coef.to(torch.float64))
        kept = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in kept], wanted, [g for _, g in kept], create_graph=create_graph, allow_unused=True
        )
    by_id = {id(x): g for x, g in zip(wanted, found, strict=True)}
    return tuple(by_id.get(id(x)) for x in inputs)


def make_noise(posteriors: "list[Posterior]", seed: int) -> dict[Posterior, Tensor]:
    """Draw the noise of several posteriors at once.

    Args:
        posteriors: Whose noise.
        seed: The draw's seed.

    Returns:
        The noise by posterior. A fixed row (an embedding's padding) holds `neutral_noise`.
    """
    # The threads that fill it are in no inference mode, even if this one is.
    with torch.inference_mode(False), torch.no_grad():
        out = {p: p.empty_noise() for p in posteriors}
        noises.fill(noises.Job(tensor, p.fill_noise, seed, p.key) for p, tensor in out.items())
        for p, tensor in out.items():
            if p.fixed_row is not None:
                tensor[p.fixed_row] = p.neutral_noise
    return out


class Sampled(torch.autograd.Function):
    """The autograd node of a sample: (theta, handle), with both gradients in one backward.

    `handle` is a 0-dim zero that stands for the posterior's energy: `penalty` sends its coefficient through it, so
    that the prior's gradient is added where the sample's is computed instead of in a pass of its own. What backward
    needs is kept outside autograd's saved tensors: activation checkpointing must not count it, and the noise's
    memory becomes the gradient's.
    """

    @staticmethod
    def forward(
        ctx: Any, posterior: Posterior, seed: int, noise: Tensor | None, value: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return theta (from the noise, or an alias of a value known already) and the handle."""
        ctx.set_materialize_grads(False)
        ctx.posterior, ctx.seed, ctx.tensors = posterior, seed, tensors
        ctx.versions = [t._version for t in tensors]
        if value is None:
            if noise is None:
                noise = make_noise([posterior], seed)[posterior]
            value = posterior.draw(tensors[0], noise)
        else:
            value = value.detach()
        ctx.noise = noise
        return value, torch.zeros((), dtype=torch.float64, device=value.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, coef: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of theta's and the energy's parts together."""
        posterior, (mean, *_) = ctx.posterior, ctx.tensors
        depends = posterior.stochastic or coef is not None or torch.is_grad_enabled()
        if depends and [t._version for t in ctx.tensors] != ctx.versions:
            raise RuntimeError(
                f"the posterior of {posterior.name!r} was modified between the forward pass and its backward pass; "
                "call optimizer.step() (or load) only after backward()"
            )
        noise, ctx.noise = ctx.noise, None
        if grad is not None and noise is None and (posterior.stochastic or torch.is_grad_enabled()):
            noise = make_noise([posterior], ctx.seed)[posterior]
        with _holding(posterior, ctx.tensors[1:]):
            if torch.is_grad_enabled():
                grads = autograd_pullback(posterior, mean, noise, grad, coef, create_graph=True)
            else:
                grads = posterior.pullback(mean, noise, grad, coef)
        return (None, None, None, None, *grads)


@contextmanager
def _holding(posterior: Posterior, learned: tuple[Tensor, ...]) -> Iterator[None]:
    """Give a posterior the tensors of its forward, which torch.func.functional_call has taken away again since."""
    own = posterior.learnable()
    if all(a is b for a, b in zip(own, learned, strict=True)):
        yield
        return
    put = {id(a): b for a, b in zip(own, learned, strict=True)}
    kept = dict(posterior._parameters)
    posterior._parameters.update({n: put.get(id(p), p) for n, p in kept.items()})  # type: ignore[misc]
    try:
        yield
    finally:
        posterior._parameters.update(kept)


def state_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a posterior's own state: the parameter's, but never below float32."""
    return torch.float32 if tensor.dtype in LOW_PRECISION else tensor.dtype


def _in_state_dtype(before: Tensor, after: Tensor) -> Tensor:
    """Undo the rounding of a cast to low precision."""
    return before.to(after.device, torch.float32) if after.dtype in LOW_PRECISION else after


def deviation(mean: Tensor, posterior: Posterior) -> Tensor:
    """Return m - theta0 in the state's dtype: a new tensor, or `mean` itself where theta0 is zero."""
    mean = mean.to(state_dtype(mean))
    return mean if posterior.zero_prior else mean - posterior.prior_center


def axpy_(out: Tensor, tensor: Tensor, factor: Factor) -> Tensor:
    """Add factor * tensor in place, finite wherever the exact product is, also for factors beyond float32."""
    if isinstance(factor, Tensor):
        return out.add_(tensor * factor)
    if 1e-30 < abs(factor) < 1e30 or tensor.dtype == torch.float64:
        return out.add_(tensor, alpha=factor)
    return out.add_(tensor.double() * factor)


def sum_of_squares(tensor: Tensor, factor: float) -> Tensor:
    """Return sum (factor * x)^2 as a differentiable float64 0-dim tensor, without overflow on the way."""
    if tensor.dtype == torch.float64 or not 1e-15 < factor < 1e15:
        return (tensor.double() * factor).square().sum()
    if torch.is_grad_enabled() and tensor.requires_grad:
        return (tensor * factor).square().sum(dtype=torch.float64)
    return square_norm(tensor) * factor**2


def square_norm(tensor: Tensor) -> Tensor:
    """Return sum x^2 in float64; by rows, because a float32 norm of ten million elements is off in the fourth digit."""
    if tensor.numel() < ROW:
        return tensor.double().square().sum()
    flat = tensor.reshape(-1)
    whole = flat.numel() // ROW * ROW
    rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    return rows.double().square().sum() + flat[whole:].double().square().sum()


def quadratic_energy(mean: Tensor, posterior: Posterior, precision: float, scale: float) -> Tensor:
    """Return scale * precision/2 |m - theta0|^2, or 0 under a flat prior."""
    if posterior.flat:
        return mean.new_zeros((), dtype=torch.float64)
    factor = math.sqrt(scale) * math.sqrt(precision / 2)
    wants_grad = torch.is_grad_enabled() and mean.requires_grad
    center = () if posterior.prior_center.dim() == 0 else (posterior.prior_center,)
    if not wants_grad and 1e-15 < factor < 1e15 and blockwise(mean, *center):
        return mean.new_tensor(_block_square_distance(mean, posterior, center) * factor**2, dtype=torch.float64)
    return sum_of_squares(deviation(mean, posterior), factor)


def _block_square_distance(mean: Tensor, posterior: Posterior, center: tuple[Tensor, ...]) -> float:
    """Return |m - theta0|^2, block by block."""
    constant = 0.0 if center else float(posterior.prior_center)
    squares: list[Tensor] = []

    def kernel(m: Tensor, *theta0: Tensor) -> None:
        out = scratch(m)
        away = torch.sub(m, theta0[0] if theta0 else constant, out=out) if theta0 or constant else m
        squares.append(torch.mul(away, away, out=out).sum())

    blocks(kernel, mean, *center)
    return math.fsum(squares)


def quadratic_pull(
    mean: Tensor, posterior: Posterior, precision: float, grad: Tensor | None, coef: Tensor | None
) -> Tensor | None:
    """Return grad + coef * precision (m - theta0): the gradient of `quadratic_energy`, folded into another."""
    if coef is None or posterior.flat:
        return grad
    factor = host(coef) * precision
    away = deviation(mean, posterior)
    extreme = isinstance(factor, float) and not 1e-30 < abs(factor) < 1e30
    if isinstance(factor, Tensor) or extreme or away is mean or (grad is not None and grad.dtype != away.dtype):
        start = torch.zeros_like(away) if grad is None else grad.to(away.dtype, copy=True)
        return axpy_(start, away, factor).to(mean.dtype)
    # The common case, in the memory of m - theta0.
    away = away.mul_(factor) if grad is None else torch.add(grad, away, alpha=factor, out=away)
    return away.to(mean.dtype)


def host(coef: Tensor) -> Factor:
    """Return a CPU scalar as a float; leave one on an accelerator there, so that nothing waits for it."""
    return float(coef) if coef.device.type == "cpu" else coef
