"""What a method is: validated options, and the posterior that it gives to each parameter.

A subclass with a `name` of its own is known to `bayesify(model, name)` and to `load` as soon as it is defined.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import Tensor

from bayesify.posteriors import Posterior, Prior

REGISTRY: dict[str, type["Method"]] = {}
ALIASES = {"laplace": "la", "dropout": "mc_dropout", "variational": "vi", "langevin": "sgld", "map": "vanilla"}
ARGUMENTS = ("prior_sig", "prior_mean", "bias", "include", "exclude")  # of bayesify, for every method


@dataclass(frozen=True, kw_only=True)
class Method:
    """Options of a method.

    Attributes:
        bias: How biases are treated, one of `bias_treatments`.
        nst: How many posterior samples `predict` takes by default.
    """

    name: ClassVar[str]
    bias_treatments: ClassVar[tuple[str, ...]]

    bias: str
    nst: int = 5

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            REGISTRY[cls.name] = cls

    def __post_init__(self) -> None:
        if self.bias not in self.bias_treatments:
            raise ValueError(f"bias must be one of {list(self.bias_treatments)} for {self.name!r}, got {self.bias!r}")
        if not isinstance(self.nst, int) or isinstance(self.nst, bool) or self.nst < 0:
            raise ValueError(f"nst must be an integer >= 0, got {self.nst!r}")

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, which starts at its current value."""
        raise NotImplementedError

    def scale(self, num_data: float) -> float:
        """Return the factor between the posteriors' energies and the penalty on a mean loss."""
        raise NotImplementedError

    def check(self, option: str, *, above: float | None = None, least: float | None = None) -> None:
        """Raise unless a numeric option is finite and within its range."""
        value = getattr(self, option)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{option} must be a number, got {value!r}")
        if not math.isfinite(value) or (above is not None and value <= above) or (least is not None and value < least):
            bound = f"> {above:g}" if above is not None else f">= {least:g}"
            raise ValueError(f"{option} must be a finite number {bound}, got {value!r}")


def resolve(method: "str | Method", bias: str | None, options: Mapping[str, Any]) -> Method:
    """Turn `bayesify`'s method, bias and options into a validated `Method`.

    Raises:
        ValueError: The method, an option or its value is unknown; the message names the valid ones.
    """
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
    for option in given:
        if option not in known:
            raise ValueError(
                f"unknown option {option!r} for method {cls.name!r}{_closest(option, [*known, *ARGUMENTS])}; "
                f"options: {known}, and for every method {list(ARGUMENTS)}"
            )
    return replace(method, **given) if isinstance(method, Method) else cls(**given)


def _closest(word: str, words: Any) -> str:
    """Return a hint at the closest known word, or nothing."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
