"""What a posterior is: the distribution of one parameter, with its mean, its draw and its penalty.

A posterior is a parametrization: the model reads its weight, `forward` hands out theta. The parameter that the
model was built with stays where it was, as the mean; what else the posterior keeps lives in this module.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core import distributed as shards
from bayesify.core.prior import Energy, Factor, Prior, evaluated, state_dtype, wide
from bayesify.core.sampling import Found, Recipe, autograd_energy_pull, autograd_pullback, draw_all, gradients
from bayesify.core.stored import CENTER, Stored
from bayesify.engine import noise as noises
from bayesify.engine.writing import Formula


class Step(NamedTuple):
    """What a backward pass of the penalty says to those of the samples, for natural steps of the spread."""

    factor: Factor  # r/kappa, for gradients of a loss that is multiplied as the penalty was, perhaps by a GradScaler
    scale: Factor  # the factor of the steps: `step_size`, times what the penalty was multiplied by
    units: Tensor  # the factors of the two running sums
    unit: float  # `step_size` over kappa, the factor of the energy in the penalty


class Posterior(Stored):
    """The posterior of one parameter; subclasses say how theta is drawn and what the penalty is.

    A subclass gives `drawing` (theta's formula) and `terms` (the formulas that the penalty, before its division by the
    number of data, is the sum of), which every engine runs, or else `theta` and `energy`, which torch runs. The
    gradients `pullback` and `energy_pull` follow from these by autograd; they may be given as formulas.
    """

    stochastic: ClassVar[bool] = True  # whether `train()` draws a sample per forward; else it reads the parameter
    gaussian: ClassVar[bool] = False  # whether theta is Gaussian around `core`, with independent elements of `std`
    particles: ClassVar[bool] = False  # whether a draw is a kept value, by the mode's member number (`member_theta`)
    random: bool = True  # whether there is anything to sample at all
    p_drop: float = 0.0  # of a formula that takes a mask, the probability of False

    drawn_with: ClassVar[tuple[str, ...]] = (CENTER,)  # the kept tensors that a draw needs
    draws_on_shards: bool = False  # whether all processes draw one theta at all times, each the rows that it holds
    start: int = 0  # the place of the first element, in the stand-in for a part

    natural: bool = False  # whether the spread takes natural steps (`bayesify.methods.vi`)
    observed: Tensor | None  # for natural steps, the running means of two sums that backward passes saw
    step: Step | None = None  # for natural steps, what the last backward pass of the penalty said

    def __init__(
        self, param: Tensor, prior: Prior, *, flat: bool = False, fixed_row: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        vars(self).update(options)  # attributes that a subclass declares
        if fixed_row is not None and (type(fixed_row) is not int or not 0 <= fixed_row < len(param)):
            raise ValueError(f"fixed_row must be the number of a row or None, got {fixed_row!r}")
        self.shape, self.flat, self.fixed_row = param.shape, flat, fixed_row
        self.prior_sig, self.is_bias, self.relative = prior.sig, prior.is_bias, prior.relative
        self.prior_center = prior.mean
        self._look_at_center()
        self.register_buffer("observed", None)
        self.name, self.key = "", 0
        self._key = self._number = torch.tensor(0)
        self.reader: Any = None  # the model's scope, which decides what a read sees
        # A tuple hides the owner from nn.Module, which would register it as a child.
        self._home: tuple[nn.Module, str] | None = None
        self._shards: dict[str, Any] = {}

    def attach(self, name: str, home: nn.Module, attribute: str, reader: Any) -> None:
        """Tell the posterior its plain name, where its mean is kept and who decides its reads."""
        self.name, self.key = name, noises.name_key(name)
        self._key = torch.tensor(noises.signed(self.key))  # for compilers, which would take a number for a constant
        self._home = (home, attribute)
        self.reader = reader

    def forward(self, original: Tensor) -> Tensor:
        """Return theta, as the parametrization of `original`."""
        theta: Tensor = original if self.reader is None else self.reader.read(self, original)
        return theta

    # -- what it is --------------------------------------------------------------------------------------------

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

    @property
    def prior_mean(self) -> Tensor:
        """The prior mean theta0, in the parameter's shape."""
        return self.prior_center.expand(self.shape)

    @property
    def center(self) -> Factor:
        """The prior mean for a formula: a tensor, or a number where it is constant."""
        return self.prior_center if self.constant is None or torch.compiler.is_compiling() else self.constant

    def learnable(self) -> tuple[nn.Parameter, ...]:
        """Return the trainable parameters of this module, beside the mean."""
        return ()

    @property
    def untrained(self) -> str:
        """Why the spread says nothing about the data, or nothing where it does."""
        return ""

    @property
    def moves(self) -> bool:
        """Whether a draw may differ from the mean."""
        return self.random

    def check_ready(self) -> None:
        """Raise if the posterior cannot be sampled yet."""

    def whitened(self, grads: Tensor) -> tuple[str, Tensor] | None:
        """Return whose noise eps is and A^T g of gradients (N, *shape), for theta = core + A eps with eps ~ N(0, 1).

        The variance of <g, theta> is |A^T g|^2. None where theta is no such Gaussian.
        """
        return (self.name, grads * self.std) if self.gaussian else None

    # -- theta -------------------------------------------------------------------------------------------------

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return theta in mean mode."""
        return original

    def member_theta(self, original: Tensor, number: int) -> Tensor:
        """Return a particle as a forward reads it."""
        raise NotImplementedError

    def drawing(self, mean: Tensor) -> tuple[Formula, tuple[Any, ...]] | None:
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
        return draw_all([self], [mean], seed)[0]

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

    def noise(self, stream: noises.Stream) -> Tensor:
        """Return the noise of a draw: N(0, 1), unless a subclass asks the stream for another kind."""
        return stream.normal()

    def stream(self, seed: int) -> noises.Stream:
        """Return where the noise of a draw comes from."""
        key = self._key if torch.compiler.is_compiling() else self.key
        dtype, device = state_dtype(self.original), self.original.device
        return noises.Stream(seed, key, self.shape, dtype, device, self.start)

    def noise_of(self, seed: int) -> Tensor:
        """Return the noise of a draw; a fixed row (an embedding's padding) has none, or keeps all of a mask."""
        noise = self.noise(self.stream(seed))
        if self.fixed_row is not None:
            noise[self.fixed_row] = noise.dtype == torch.bool
        return noise

    @property
    def pulls_by_hand(self) -> bool:
        """Whether a subclass gives `pulling`, and does not leave the gradients to autograd."""
        return type(self).pulling is not Posterior.pulling

    def pulling(self, mean: Tensor, seed: int, grad: Tensor) -> Recipe | None:
        """Return the formula of `pullback`, or None where it is autograd's."""
        return None

    @torch.no_grad()
    def pullback(self, mean: Tensor, seed: int, grad: Tensor) -> Found:
        """Return the gradients of `<grad, theta>`, of a draw, with respect to the mean and `learnable()`."""
        recipe = self.pulling(mean, seed, grad)
        if recipe is None:
            return autograd_pullback(self, mean, seed, grad, create_graph=False)
        return gradients([(self, (mean, *self.learnable()), recipe, None)])[0]

    @classmethod
    def observe(cls, posteriors: Sequence["Posterior"], sums: Tensor) -> None:
        """Take note of what the formulas of `pulling` sum up, a row for each posterior."""

    def calibrated_pullback(self, mean: Tensor, seed: int, grad: Tensor) -> Found:
        """Pull back through core + f (theta - core): (1 - f) of it through the core, which moves as the mean."""
        f = self.calibration
        if f == 1:
            return self.pullback(mean, seed, grad)
        first, *others = self.pullback(mean, seed, grad * f)
        return (grad * (1 - f) if first is None else first.add(grad, alpha=1 - f), *others)

    # -- the penalty -------------------------------------------------------------------------------------------

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

    def energy_pulling(self, mean: Tensor, coef: Factor, pull: Factor) -> Recipe | None:
        """Return the formula of `energy_pull`, or None where it is autograd's."""
        return Recipe() if self.flat else None

    @torch.no_grad()
    def energy_pull(self, mean: Tensor, coef: Factor, pull: Factor) -> Found:
        """Return the gradients of `coef * energy + pull/2 |(m - theta0)/sigma|^2`, as `pullback` does.

        The second term is that of a prior whose scale is unknown (`bayesify.core.penalty`).
        """
        recipe = self.energy_pulling(mean, coef, pull)
        if recipe is None:
            return autograd_energy_pull(self, mean, coef, pull)
        return gradients([(self, (mean, *self.learnable()), None, recipe)])[0]
