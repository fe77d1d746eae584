"""What a posterior is: the distribution of one parameter, with its mean, its draw and its penalty.

A posterior is a parametrization: the model reads its weight, `forward` hands out theta. The parameter that the
model was built with stays where it was, as the mean; what else the posterior keeps lives in this module.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bayesify.core import distributed as shards
from bayesify.core.prior import Energy, Factor, Prior, evaluated, quadratic_pull, state_dtype, wide
from bayesify.core.stored import CENTER, LOW_PRECISION, Stored
from bayesify.engine import noise as noises
from bayesify.engine.dispatch import Job, run
from bayesify.engine.writing import Formula


class Step(NamedTuple):
    """What a backward pass of the penalty says to those of the samples, for natural steps of the spread.

    Attributes:
        kappa: The factor of the energy in the penalty.
        grad: What the penalty was multiplied by, as the loss is: 1, or the scale of a GradScaler.
        ratio: r, of the running sums of all the model's weights, for gradients of a loss that is multiplied by 1.
        size: The factor of the spread's gradients.
    """

    kappa: float
    grad: Factor
    ratio: Factor
    size: float


class Reader(Protocol):
    """What decides which theta a posterior hands out (`bayesify.core.reading.Scope`)."""

    told: set[str]
    """What a user has been told, or will be."""

    penalized: bool
    """Whether a penalty was ever computed, or need not be."""

    def read(self, posterior: "Posterior", original: Tensor) -> Tensor:
        """Return the theta that a read of this posterior sees now."""


class Posterior(Stored):
    """The posterior of one parameter; subclasses say how theta is drawn and what the penalty is.

    A subclass gives `drawing` (theta's formula) and `terms` (the formulas that the penalty, before its division by the
    number of data, is the sum of), which every engine runs, or else `theta` and `energy`, which torch runs. The
    gradients `pullback` and `energy_pull` follow from these by autograd; they may be given as formulas.
    """

    stochastic: ClassVar[bool] = True
    """Whether `train()` draws a sample per forward (else the parameter itself is used)."""
    random: bool = True
    """Whether there is anything to sample at all."""
    particles: ClassVar[bool] = False
    """Whether a draw is one of several values that are kept, by the number of the mode's member (`member_theta`)."""
    p_drop: float = 0.0
    """Of a formula that takes a mask, the probability of False."""
    neutral_noise: ClassVar[float] = 0.0
    """The noise with which `theta` is the mean."""

    gaussian: ClassVar[bool] = False
    """Whether theta is Gaussian with independent elements, of standard deviation `std` around `core`."""

    pulls_by_hand: ClassVar[bool] = False
    """Whether a subclass gives `pullback`, and does not leave it to autograd."""

    natural: bool = False
    """Whether the spread takes natural steps (`bayesify.methods.vi`)."""
    observed: Tensor | None
    """For natural steps, the running means of two sums that backward passes saw."""
    step: "Step | None" = None
    """What the last backward pass of the penalty said, for natural steps."""

    drawn_with: ClassVar[tuple[str, ...]] = (CENTER,)
    """The kept tensors that a draw needs beside the mean and `learnable()`."""
    draws_on_shards: bool = False
    """Whether all processes draw the same theta at all times, so that each can draw the part that it holds."""

    layout: shards.Layout | None = None
    """Which rows this process holds of a sharded posterior; None where it is whole."""
    start: int = 0
    """The place of the first element, in the stand-in for a part."""

    prior_center: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.pulls_by_hand = cls.pullback is not Posterior.pullback

    def __init__(
        self, param: Tensor, prior: Prior, *, flat: bool = False, fixed_row: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        vars(self).update(options)  # attributes that a subclass declares
        self.prior_sig = prior.sig
        self.is_bias = prior.is_bias
        self.relative = prior.relative
        self.flat = flat
        self.prior_center = prior.mean
        self._look_at_center()
        self.shape = param.shape
        self.fixed_row = fixed_row
        self.register_buffer("observed", None)
        self.name = ""
        self.key = 0
        self._key = self._number = torch.tensor(0)
        self.reader: Reader | None = None
        # A tuple hides the owner from nn.Module, which would register it as a child.
        self._home: tuple[nn.Module, str] | None = None
        self._shards: dict[str, Any] = {}

    def attach(self, name: str, home: nn.Module, attribute: str, reader: Reader) -> None:
        """Tell the posterior its plain name, where its mean is kept and who decides its reads."""
        self.name, self.key = name, noises.name_key(name)
        self._key = torch.tensor(noises.signed(self.key))  # for compilers, which would take a number for a constant
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
        if self.layout is not None:
            return self.layout.joined(shards.part_of(self).mean)
        return self.mean_theta(self.original.detach())

    @property
    def std(self) -> Tensor:
        """The posterior standard deviation, with the factor that `calibrate` found; 0 in a fixed row."""
        if self.layout is not None:
            return self.layout.joined(shards.part_of(self).std)
        std = self.own_std
        if self.fixed_row is not None:
            std = std.clone()
            std[self.fixed_row] = 0
        return std if self.calibration == 1 else std * self.calibration

    @property
    def own_std(self) -> Tensor:
        """The standard deviation of `theta`, whatever the fixed row."""
        return torch.zeros_like(self.original)

    def whitened(self, grads: Tensor) -> tuple[str, Tensor] | None:
        """Return A^T g of gradients (N, *shape), for theta = core + A eps with eps ~ N(0, 1), and whose noise eps is.

        The variance of <g, theta> is |A^T g|^2. None where theta is no such Gaussian.
        """
        return (self.name, grads * self.std) if self.gaussian else None

    @property
    def untrained(self) -> str:
        """Why the spread says nothing about the data, or nothing where it does."""
        return ""

    @property
    def prior_mean(self) -> Tensor:
        """The prior mean theta0, in the parameter's shape."""
        return self.prior_center.expand(self.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Posterior":
        """Move or cast: the prior mean follows the parameter, the posterior's own state never goes below float32."""
        center = fn(self.prior_center)
        super()._apply(lambda tensor: _in_state_dtype(tensor, fn(tensor)), recurse)  # type: ignore[no-untyped-call]
        for name, tensor in self.held().items():
            setattr(self, name, _in_state_dtype(tensor, fn(tensor)))
        self.prior_center = center
        return self

    @property
    def center(self) -> Factor:
        """The prior mean for a formula: a tensor, or a number where it is constant."""
        return self.prior_center if self.constant is None or torch.compiler.is_compiling() else self.constant

    def learnable(self) -> tuple[nn.Parameter, ...]:
        """Return the trainable parameters of this module, beside the mean."""
        return ()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the tensors of `state()`, keeping the identity of parameters."""
        with torch.no_grad():
            for name, tensor in state.items():
                if name in self._parameters:
                    shards.copy_whole(getattr(self, name), tensor)
                else:
                    setattr(self, name, tensor.to(self.original.device).clone())
            self.prior_center = self.prior_center.to(self.original.dtype)
        self._was_loaded()
        shards.follow([self])

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self._home is not None:
            shards.follow([self])
        self._was_loaded()

    def _was_loaded(self) -> None:
        """Take note of a state that was loaded, of whose training nothing is known."""
        self._look_at_center()
        if self.reader is not None:
            self.reader.penalized = True

    def _look_at_center(self) -> None:
        """Note the prior mean where it is a constant: a look at the tensor would wait for an accelerator."""
        self.constant = None if self.prior_center.dim() else float(self.prior_center)
        self.zero_prior = self.constant == 0

    def configure_like(self, other: "Posterior") -> None:
        """Take over the settings of another posterior of the same parameter, but none of its tensors."""
        own = {"reader", "name", "key", "training", "layout", "start", *self.kept}
        self.__dict__.update({k: v for k, v in vars(other).items() if not k.startswith("_") and k not in own})

    def like_mean(self) -> tuple[str, ...]:
        """Return the names of the kept tensors with an element for each of the parameter's, which are cut like it."""
        return self.kept

    def check_ready(self) -> None:
        """Raise if the posterior cannot be sampled yet."""

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return theta in mean mode."""
        return original

    def drawing(self, mean: Tensor) -> "tuple[Formula, tuple[Any, ...]] | None":
        """Return theta's formula, which takes noise and further inputs, and these; a fixed row keeps the first."""
        return None

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Return a sample, as a differentiable function of the mean and of `learnable()`."""
        given = self.drawing(mean)
        if given is None:
            raise NotImplementedError
        formula, inputs = given
        dtype = state_dtype(mean)
        found: Tensor = formula(noise, *(x.to(dtype) if isinstance(x, Tensor) else x for x in inputs))
        return found.to(mean.dtype)

    def draw(self, mean: Tensor, seed: Any) -> Tensor:
        """Compute `theta` of a draw where no gradient is wanted."""
        theta = torch.empty_like(mean, requires_grad=False)
        job = self.job(mean, seed, theta)
        if job is None:
            return self.theta(mean, self.noise_of(seed))
        run(job.formula, job.stream, job.inputs, job.outputs, p_drop=job.p_drop)
        return self.settled(job)

    def job(self, mean: Tensor, seed: Any, theta: Tensor) -> Job | None:
        """Return what an engine has to do for a draw, which `settled` ends; None where there is no formula."""
        given = self.drawing(mean)
        return None if given is None else Job(given[0], self.stream(seed), given[1], (theta,), self.p_drop)

    def settled(self, job: Job) -> Tensor:
        """Return the theta of a job, with the fixed row as it was."""
        theta = job.outputs[0]
        if self.fixed_row is not None:
            theta[self.fixed_row] = job.inputs[0][self.fixed_row]
        return theta

    def with_noise(
        self, formula: Formula, seed: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...] = ()
    ) -> Tensor | None:
        """Run a formula with the noise of a draw; return its sums without those of the fixed row, which has none."""
        stream, row = self.stream(seed), self.fixed_row
        sums = run(formula, stream, inputs, outputs, p_drop=self.p_drop)
        if sums is None or row is None:
            return sums
        cut = [x[row] if isinstance(x, Tensor) and x.dim() else x for x in inputs]
        place = stream._replace(shape=self.shape[1:], start=self.start + row * self.shape[1:].numel())
        of_row = run(formula, place, cut, [torch.empty_like(y[row]) for y in outputs], p_drop=self.p_drop)
        assert of_row is not None
        return sums - of_row

    def core(self, mean: Tensor) -> Tensor:
        """Return what a calibrated spread is taken around: theta without its noise."""
        return self.mean_theta(mean)

    def calibrated(self, mean: Tensor, theta: Tensor) -> Tensor:
        """Return core + f (theta - core), with the factor f that `calibrate` found."""
        return theta if self.calibration == 1 else torch.lerp(self.core(mean).to(theta.dtype), theta, self.calibration)

    def drawn(self, mean: Tensor, seed: int) -> Tensor:
        """Return theta of a draw as a forward reads it: calibrated, and whole."""
        if self.layout is not None:
            return shards.drawn(self, mean, seed)
        return self.calibrated(mean, self.draw(mean, seed))

    def terms(self, mean: Tensor, scale: float) -> Energy | None:
        """Return the sums of formulas that `scale` times the penalty's sum is made of."""
        return None

    def energy(self, mean: Tensor, scale: float) -> Tensor:
        """Return `scale` times the penalty's sum, a differentiable 0-dim tensor, float64 on a CPU."""
        if self.flat:
            return mean.new_zeros((), dtype=wide(mean))
        terms = self.terms(mean, scale)
        if terms is None:
            raise NotImplementedError
        return evaluated(terms)

    def member_theta(self, original: Tensor, number: int) -> Tensor:
        """Return a particle as a forward reads it."""
        raise NotImplementedError

    @property
    def moves(self) -> bool:
        """Whether a draw may differ from the mean."""
        return self.random

    def noise(self, stream: noises.Stream) -> Tensor:
        """Return the noise of a draw: N(0, 1), unless a subclass asks the stream for another kind."""
        return stream.normal()

    def stream(self, seed: int) -> noises.Stream:
        """Return where the noise of a draw comes from."""
        key = self._key if torch.compiler.is_compiling() else self.key
        dtype, device = state_dtype(self.original), self.original.device
        return noises.Stream(seed, key, self.shape, dtype, device, self.start)

    def noise_of(self, seed: int) -> Tensor:
        """Return the noise of a draw; a fixed row (an embedding's padding) holds `neutral_noise`."""
        noise = self.noise(self.stream(seed))
        if self.fixed_row is not None:
            noise[self.fixed_row] = self.neutral_noise
        return noise

    def pullback(self, mean: Tensor, seed: int, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `<grad, theta>` with respect to the mean and `learnable()`.

        Args:
            mean: The parameter that holds the mean.
            seed: The draw of the sample, whose noise is made again.
            grad: The gradient of the loss with respect to theta.
        """
        return autograd_pullback(self, mean, seed, grad, create_graph=False)

    def energy_pull(self, mean: Tensor, coef: Factor, pull: Factor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `coef * energy + pull/2 |(m - theta0)/sigma|^2`, as `pullback` does.

        The second term is that of a prior whose scale is unknown (`bayesify.core.penalty`).
        """
        tensors = [mean, *self.learnable()]
        wanted = [t for t in tensors if t.requires_grad]
        with torch.enable_grad():
            energy = self.energy(mean, 1.0)
            found = torch.autograd.grad(energy, wanted, torch.full_like(energy, coef), allow_unused=True)  # type: ignore[arg-type]
        by_id = {id(x): g for x, g in zip(wanted, found, strict=True)}
        first, *others = (by_id.get(id(x)) for x in tensors)
        away = quadratic_pull(mean, self, pull / self.prior_sig**2) if pull else None
        return (first if away is None else away if first is None else first + away, *others)

    def calibrated_pullback(self, mean: Tensor, seed: int, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Pull back through core + f (theta - core): (1 - f) of it through the core, which moves as the mean."""
        f = self.calibration
        if f == 1:
            return self.pullback(mean, seed, grad)
        first, *others = self.pullback(mean, seed, grad * f)
        return (grad * (1 - f) if first is None else first.add(grad, alpha=1 - f), *others)


def autograd_pullback(
    posterior: Posterior, mean: Tensor, seed: int, grad: Tensor, *, create_graph: bool
) -> tuple[Tensor | None, ...]:
    """Compute `Posterior.pullback` by autograd: always right, twice differentiable, slower."""
    inputs = [mean, *posterior.learnable()]
    wanted = [x for x in inputs if x.requires_grad]
    with torch.enable_grad():
        theta = posterior.calibrated(mean, posterior.theta(mean, posterior.noise_of(seed)))
        found = torch.autograd.grad([theta], wanted, [grad], create_graph=create_graph, allow_unused=True)
    by_id = {id(x): g for x, g in zip(wanted, found, strict=True)}
    grads = tuple(by_id.get(id(x)) for x in inputs)
    if create_graph and posterior.natural:  # natural steps of the spread, which are no gradient
        with torch.no_grad():
            grads = (grads[0], *posterior.calibrated_pullback(mean, seed, grad)[1:])
    return grads


class Sampled(torch.autograd.Function):
    """The autograd node of a sample.

    The noise is not kept: backward makes it again from the seed. What backward needs is kept outside autograd's saved
    tensors, since activation checkpointing must not count it.
    """

    @staticmethod
    def forward(ctx: Any, posterior: Posterior, seed: int, *tensors: Tensor) -> Tensor:
        """Return theta of the seed."""
        ctx.set_materialize_grads(False)
        ctx.posterior, ctx.seed, ctx.tensors = posterior, seed, tensors
        ctx.versions = [t._version for t in tensors]
        return posterior.drawn(tensors[0], seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to the mean and what else is learnable."""
        posterior, (mean, *_) = ctx.posterior, ctx.tensors
        if grad is None:
            return (None, None, *(None for _ in ctx.tensors))
        check_versions(posterior, ctx.tensors, ctx.versions, "the forward pass and its")
        if posterior.layout is not None:
            return (None, None, *shards.pulled(posterior, mean, ctx.seed, grad))
        with holding(posterior, ctx.tensors[1:]):
            if torch.is_grad_enabled():
                return (None, None, *autograd_pullback(posterior, mean, ctx.seed, grad, create_graph=True))
            return (None, None, *posterior.calibrated_pullback(mean, ctx.seed, grad))


def check_versions(posterior: Posterior, tensors: Sequence[Tensor], versions: Sequence[int], between: str) -> None:
    """Raise if a backward pass comes after a change of the posterior that it would need."""
    if [t._version for t in tensors] != list(versions):
        raise RuntimeError(
            f"the posterior of {posterior.name!r} was modified between {between} backward pass; call optimizer.step() "
            "(or load) only after backward()"
        )


@contextmanager
def holding(posterior: Posterior, learned: tuple[Tensor, ...]) -> Iterator[None]:
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


def _in_state_dtype(before: Tensor, after: Tensor) -> Tensor:
    """Undo the rounding of a cast to low precision."""
    return before.to(after.device, torch.float32) if after.dtype in LOW_PRECISION else after
