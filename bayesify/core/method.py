"""What methods are made of: validated options, which give each parameter its posterior, and posteriors that many share.

A `Method` with a `name` of its own is known to `bayesify(model, name)` and to `load` as soon as it is defined.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bayesify.core.distributed import on_shard
from bayesify.core.posterior import Posterior
from bayesify.core.prior import (
    PULL,
    Energy,
    Factor,
    Prior,
    following,
    pulled,
    quadratic_terms,
    scaled,
    state_dtype,
    tempered_scale,
)
from bayesify.core.sampling import Recipe
from bayesify.engine.dispatch import run
from bayesify.engine.writing import Formula

REGISTRY: dict[str, type["Method"]] = {}
ALIASES = {
    "laplace": "la",
    "dropout": "mc_dropout",
    "variational": "vi",
    "langevin": "sgld",
    "map": "vanilla",
    "deep_ensemble": "ensemble",
}
NAMES = {"num_samples": "nst", "kl_weight": "kld", "data_multiplier": "Ninflate", "noise_scale": "nd"}
"""Readable names of the options that go by the paper's: both are taken and can be read, the paper's is stored."""

ARGUMENTS = ("prior_sig", "prior_mean", "bias", "include", "exclude")  # of bayesify, for every method


class Options(type):
    """The class of method classes, which take options by their readable names too."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Return the options of a method."""
        return super().__call__(*args, **stored_names(cls, options))


def stored_names(cls: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under the names that a method stores them by; a ValueError if one is given under both names."""
    known = {f.name for f in fields(cls)}
    out: dict[str, Any] = {}
    for name, value in options.items():
        own = NAMES[name] if NAMES.get(name) in known else name
        if own in out:
            readable = next(readable for readable, stored in NAMES.items() if stored == own)
            raise ValueError(f"{readable!r} and {own!r} are one option, got both; give one of them")
        out[own] = value
    return out


@dataclass(frozen=True, kw_only=True)
class Method(metaclass=Options):
    """Options of a method.

    `num_samples`, `kl_weight`, `data_multiplier`, `noise_scale` are other names of `nst`, `kld`, `Ninflate`, `nd`.

    Attributes:
        bias: How biases are treated, one of `bias_treatments`.
        nst: How many posterior samples `predict` takes by default.
        same_draw: Whether the processes of a distributed training draw one theta together; else each draws its own,
            which makes less noise. All of them must then run their training forwards together.
    """

    name: ClassVar[str]
    bias_treatments: ClassVar[tuple[str, ...]]
    optimizer: ClassVar[str] = ""  # of this library, without which the method gets no posterior
    stages: ClassVar[Any] = None  # what the method does in the cycles of a training (`bayesify.methods.cycles.Stages`)
    fitted: ClassVar[tuple[str, ...]] = ()  # the options that a fit finds, which a state dict holds

    bias: str
    nst: int = 5
    same_draw: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            REGISTRY[cls.name] = cls

    def __getattr__(self, name: str) -> Any:
        if NAMES.get(name) in {f.name for f in fields(self)}:
            return getattr(self, NAMES[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __post_init__(self) -> None:
        if self.bias not in self.bias_treatments:
            raise ValueError(f"bias must be one of {list(self.bias_treatments)} for {self.name!r}, got {self.bias!r}")
        if not isinstance(self.nst, int) or isinstance(self.nst, bool) or self.nst < 0:
            raise ValueError(f"nst must be an integer >= 0, got {self.nst!r}")
        if not isinstance(self.same_draw, bool):
            raise ValueError(f"same_draw must be True or False, got {self.same_draw!r}")

    def resolve_defaults(self, *, relative: bool, weights: int) -> Self:
        """Return the options with those filled in that depend on the model: `bayesify` asks before it wraps.

        `relative` is whether priors are relative to their tensors (`prior_sig=None`), `weights` the number of Bayesian
        weights.
        """
        return self

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, which starts at its current value."""
        raise NotImplementedError

    def flat(self, prior: Prior) -> bool:
        """Return whether a parameter is a bias that is left out of the penalty."""
        return prior.is_bias and self.bias in ("uninformative", "ignore")

    def scale(self, num_data: float) -> float:
        """Return the factor between the posteriors' energies and the penalty on a mean loss."""
        raise NotImplementedError

    @property
    def pull_strength(self) -> float:
        """Nats that an e times larger distance from the prior mean must gain (`bayesify.core.penalty`)."""
        return 0.0

    def wrapped(self, scope: Any) -> None:
        """Hook, called when a model (the scope's root) has got its posteriors."""

    def bake(self, scope: Any, mode: Any) -> None:
        """Hook of `unbayesify`: write what a mode reads beside the parameters into the model."""

    def default_samples(self, posteriors: Sequence[Posterior]) -> int:
        """Return how many samples `predict` takes by default."""
        return self.nst

    def split(self, root: nn.Module, scope: Any) -> list[nn.Module]:
        """Return a model's members, where its posteriors are particles."""
        return [root]

    @property
    def linear(self) -> bool:
        """Whether predictions of a regression are linear in the weights by default (`bayesify.prediction.linear`)."""
        return False

    def check_ready(self, posteriors: Sequence[Posterior]) -> None:
        """Raise if one of a model's posteriors cannot be sampled yet."""
        for posterior in posteriors:
            posterior.check_ready()

    def closed_form(self, scope: Any) -> Any:
        """Return a way to predict without samples (as `bayesify.methods.laplace.closed_form.LastLayer`), or None."""
        return None

    def check_optional(self, *options: str, above: float | None = None, least: float | None = None) -> None:
        """Check numeric options that may be None."""
        for option in options:
            if getattr(self, option) is not None:
                self.check(option, above=above, least=least)

    def check(self, option: str, *, above: float | None = None, least: float | None = None) -> None:
        """Raise unless a numeric option is finite and within its range."""
        value = getattr(self, option)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{option} must be a number, got {value!r}")
        if not math.isfinite(value) or (above is not None and value <= above) or (least is not None and value < least):
            bound = f"> {above:g}" if above is not None else f">= {least:g}"
            raise ValueError(f"{option} must be a finite number {bound}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Tempered(Method):
    """Options of a method whose prior is tempered, by an option of its own or by the number of weights.

    Attributes:
        pull: Nats that an e times larger distance from the prior mean must gain (`bayesify.core.penalty`); None is PULL
            where `prior_sig` is None and the method's own factor was not given, else 0.
        weights: How many weights share the tolerance (`bayesify.core.prior`); chosen by `bayesify` where `prior_sig`
            is relative and the method's own factor was not given, else None.
    """

    tempers: ClassVar[str] = "Ninflate"  # the option that tempers: it multiplies the data, or the penalty ("kld")
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative", "uninformative")

    bias: str = "informative"
    pull: float | None = None
    weights: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_optional("pull", least=0)
        self.check_optional(self.tempers, **({"least": 0} if self.tempers == "kld" else {"above": 0}))

    def resolve_defaults(self, *, relative: bool, weights: int) -> Self:
        """Temper by the number of weights where the prior is relative; else the factor is 1."""
        if getattr(self, self.tempers) is not None:
            return self
        return replace(self, weights=weights) if relative else replace(self, **{self.tempers: 1.0})  # type: ignore[arg-type]

    def scale(self, num_data: float) -> float:
        """Return kld/N, or 1/(N Ninflate); with neither min(1/N, 2 TOLERANCE/weights)."""
        value = getattr(self, self.tempers)
        if value is None:
            return 1 / num_data if self.weights is None else tempered_scale(num_data, self.weights)
        return float(value / num_data if self.tempers == "kld" else 1 / (num_data * value))

    @property
    def pull_strength(self) -> float:
        """The option `pull`, or PULL where the prior is tempered by the number of weights."""
        return self.pull if self.pull is not None else 0.0 if self.weights is None else PULL

    def inflation(self, num_data: float) -> float:
        """Return how many times each item counts: 1/(N scale), which is Ninflate where it is given."""
        return 1 / (num_data * self.scale(num_data))


def resolve(method: "str | Method", bias: str | None, options: Mapping[str, Any]) -> Method:
    """Turn `bayesify`'s method, bias and options into a validated `Method`."""
    given = dict(options) if bias is None else {**options, "bias": bias}
    if isinstance(method, Method):
        cls = type(method)
    elif isinstance(method, str):
        if method not in REGISTRY:
            hint = _closest(ALIASES.get(method.lower(), method.lower()), REGISTRY)
            raise ValueError(f"unknown method {method!r}{hint}; methods: {sorted(REGISTRY)}")
        cls = REGISTRY[method]
    else:
        hint = f"; make one: {method.__name__}()" if isinstance(method, type) else ""
        raise TypeError(
            f"method must be a name {sorted(REGISTRY)} or an object of bayesify.methods, got {method!r}{hint}"
        )
    known = [f.name for f in fields(cls)]
    given = stored_names(cls, given)
    for option in given:
        if option not in known:
            names = [*known, *(name for name, own in NAMES.items() if own in known), *ARGUMENTS]
            raise ValueError(
                f"unknown option {option!r} for method {cls.name!r}{_closest(option, names)}; "
                f"options: {known}, and for every method {list(ARGUMENTS)}"
            )
    return replace(method, **given) if isinstance(method, Method) else cls(**given)


def _closest(word: str, words: Any) -> str:
    """Return a hint at the closest known word, or nothing."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


# -- posteriors that methods share -------------------------------------------------------------------------------------


def gaussian(eps: Any, center: Any, std: Any) -> Any:
    """Return center + eps * std."""
    return center + eps * std


def collected(x: Any, average: Any, scatter: Any, rate: Any, keep: Any, add: Any) -> Any:
    """Return mean and scatter after one more state (Welford's recurrence)."""
    away = x - average
    return average + rate * away, keep * scatter + add * (away * away)


class NotReadyError(ValueError, RuntimeError):
    """A posterior that cannot be sampled yet."""


class QuadraticPosterior(Posterior):
    """A posterior whose penalty is precision/2 |m - theta0|^2, and whose sample has the gradient of the parameter."""

    @property
    def precision(self) -> float:
        """1/sigma^2, the curvature of the energy."""
        return 1 / self.prior_sig / self.prior_sig

    def terms(self, mean: Tensor, scale: float) -> Energy:
        """Return precision/2 |m - theta0|^2."""
        return quadratic_terms(mean, self, self.precision, scale)

    def pulling(self, mean: Tensor, seed: int, grad: Tensor) -> Recipe:
        """Return the gradient at theta, as it is."""
        return Recipe(inputs=(grad,), passes=True)

    def energy_pulling(self, mean: Tensor, coef: Factor, pull: Factor) -> Recipe:
        """Return (coef precision + pull/sigma^2) (m - theta0)."""
        if self.flat:
            return Recipe()
        factors = self.precision, 1 / self.prior_sig / self.prior_sig
        largest = () if isinstance(coef, Tensor) else (coef * factors[0] + pull * factors[1],)
        return Recipe(pulled, (*scaled((mean, self.center), *largest), coef, pull, *factors), (0,))


class MomentsPosterior(QuadraticPosterior):
    """theta = mean + std * eps with eps ~ N(0, 1), once there are moments.

    A subclass names its tensors in `kept` and gives `ready`, `own_std`, `mean_theta` and `missing`.
    """

    stochastic = False
    gaussian = True
    draws_on_shards = True
    missing: ClassVar[str]  # what the error says before there are moments, with the way out

    @property
    def ready(self) -> bool:
        """Whether there are moments."""
        raise NotImplementedError

    def check_ready(self) -> None:
        """Raise before there are moments."""
        if not self.ready:
            raise NotReadyError(f"{self.name!r} cannot be sampled yet: {self.missing}")

    def drawing(self, mean: Tensor) -> tuple[Formula, tuple[Any, ...]] | None:
        """Return center + std * eps; its gradient passes to the parameter as it is."""
        return gaussian, (self.mean_theta(mean), self.own_std)


class CollectedPosterior(MomentsPosterior):
    """The Gaussian of states that training passes through; the parameter before there are any.

    Tensors: `count`, how many there were; `average`, their mean; `scatter`, the sum of their squared deviations.
    """

    kept = Posterior.kept | {"count": "count", "average": "same", "scatter": "same"}

    count: Tensor | None
    average: Tensor | None
    scatter: Tensor | None

    @property
    def ready(self) -> bool:
        """Whether there was a state."""
        return self.count is not None

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return the states' mean, or the parameter before there are any; the gradient passes to the parameter."""
        return original if self.average is None else following(self.average.to(original.dtype), original)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameter's present value to the moments (Welford's recurrence).

        n <- n + 1; d = theta - average; average <- average + d/n; scatter <- scatter + (n-1)/n d^2.
        """
        theta = self.original.detach()
        theta = theta.to(state_dtype(theta))
        if self.count is None or self.average is None or self.scatter is None:
            self.count = torch.ones((), dtype=torch.int64, device=theta.device)
            self.average = theta.clone(memory_format=torch.contiguous_format)
            self.scatter = torch.zeros_like(self.average)
            return
        moments = (self.average, self.scatter)
        run(collected, None, (theta, *moments, *self.recurrence(int(self.count.add_(1)))), moments)

    def recurrence(self, n: int) -> tuple[float, float, float]:
        """Return the factors of the n-th value: of d, of the scatter so far and of d^2."""
        return 1 / n, 1.0, (n - 1) / n


def collect_states(posteriors: Iterable[Posterior], kind: type[CollectedPosterior]) -> None:
    """Let the posteriors of one kind collect the present state of their parameters."""
    for posterior in posteriors:
        if isinstance(posterior, kind):
            with on_shard(posterior) as own:
                own.collect()
