"""Which parameters become Bayesian, and with which prior: all that depends on parameter names."""

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torch import Tensor, nn

from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior, relative_sig

SMALLEST_SIG = 1e-100  # the squares of a prior's scale and of its inverse are numbers
TORCH_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Patterns = str | Iterable[str] | Callable[[str, nn.Parameter], bool] | None


class SelectionError(ValueError):
    """An invalid pattern or choice of parameters."""


@dataclass
class Candidate:
    """A parameter of the plain model."""

    param: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # that read it; several for tied weights
    names: list[str] = field(default_factory=list)  # every plain name; a place has several where its module does
    skipped: str = ""  # why it stays as it is

    @property
    def name(self) -> str:
        """The first plain name."""
        return self.names[0]

    @property
    def is_bias(self) -> bool:
        """Whether it is 1-d and called `bias`, `bias_...` or `..._bias`."""
        own = self.name.rsplit(".", 1)[-1]
        return self.param.dim() == 1 and (own == "bias" or own.startswith("bias_") or own.endswith("_bias"))

    @property
    def fan_in(self) -> int:
        """How many inputs one output sums over: of a bias, those of its module's weight."""
        module, _ = self.places[0]
        weight = self.param if self.param.dim() > 1 else module._parameters.get("weight")
        return weight[0].numel() if weight is not None and weight.dim() > 1 and len(weight) else 1

    @property
    def fixed_row(self) -> int | None:
        """The padding row of an embedding, which stays without noise."""
        for module, attribute in self.places:
            is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and attribute == "weight"
            if is_embedding and module.padding_idx is not None:
                return int(module.padding_idx)  # type: ignore[arg-type]
        return None

    @property
    def neutral(self) -> float:
        """What a "zero" prior mean is: 0, but 1 for the scale of a normalization."""
        module, attribute = self.places[0]
        if isinstance(module, TORCH_NORMS):
            return float(attribute == "weight")
        is_norm = "norm" in type(module).__name__.lower() and attribute in ("weight", "gamma", "scale")
        # Some norms multiply by (1 + weight) and start at zero; torch's own never do, whatever they start at.
        return float(is_norm and self.param.dim() == 1 and bool(self.param.detach().any()))


def candidates(model: nn.Module) -> list[Candidate]:
    """List the parameters of a plain model in `named_parameters` order, ties together."""
    found: dict[int, Candidate] = {}
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            if param is not None:
                candidate = found.setdefault(id(param), Candidate(param))
                if id(module) not in seen:
                    candidate.places.append((module, attribute))
                candidate.names.append(f"{path}.{attribute}" if path else attribute)
        seen.add(id(module))
    return list(found.values())


def select(every: list[Candidate], include: Patterns, exclude: Patterns) -> None:
    """Mark the candidates that do not become Bayesian, with the reason; raise where none is left."""
    included = _matching(every, "*" if include is None else include, "include")
    excluded = _matching(every, () if exclude is None else exclude, "exclude")
    for candidate in every:
        if id(candidate) not in included:
            candidate.skipped = "not included"
        elif id(candidate) in excluded:
            candidate.skipped = "excluded"
        elif not candidate.param.requires_grad:
            candidate.skipped = "frozen"
        elif not candidate.param.is_floating_point():
            candidate.skipped = f"dtype {candidate.param.dtype}"
    if not any(not c.skipped for c in every):
        reasons = sorted({c.skipped for c in every}) or ["the model has no parameters"]
        adapters = any(c.skipped == "frozen" and ".lora_" in c.name for c in every)
        peft = "; PEFT loads adapters frozen: PeftModel.from_pretrained(..., is_trainable=True)" if adapters else ""
        raise SelectionError(
            f"no parameter is left to become Bayesian ({', '.join(reasons)}); "
            f"widen include/exclude, or call requires_grad_(True) on what should be trained{peft}"
        )


def _matching(every: list[Candidate], patterns: Any, argument: str) -> set[int]:
    """Return the ids of the candidates that match."""
    if isinstance(patterns, nn.Module):
        own = (c.name.rpartition(".")[0] for c in every if any(module is patterns for module, _ in c.places))
        fix = f"pass '{next(filter(None, own), 'head')}.*', the pattern of its parameters"
        raise TypeError(f"{argument} takes names, got a {type(patterns).__name__}; {fix}")
    if callable(patterns):
        return {id(c) for c in every if patterns(c.name, c.param)}
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{argument} takes a glob pattern, several of them, or a callable, got {patterns!r}")
    chosen: set[int] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = {id(c) for c in every if matches(pattern, c.names, argument)}
        if not hits and every:
            raise unmatched(pattern, every, argument)
        chosen |= hits
    return chosen


def matches(pattern: Any, names: Iterable[str], argument: str) -> bool:
    """Return whether a glob pattern matches one of a parameter's names."""
    if not isinstance(pattern, str):
        raise TypeError(f"{argument} takes glob patterns such as 'encoder.*', got {pattern!r}")
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def unmatched(pattern: str, every: list[Candidate], argument: str) -> SelectionError:
    """Return the error for a pattern that matches nothing, with the closest names."""
    names = [name for c in every for name in c.names]
    if any(name.startswith(f"{pattern}.") for name in names):
        return SelectionError(f"{argument} pattern {pattern!r} matched no parameter; did you mean '{pattern}.*'?")
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return SelectionError(
        f"{argument} pattern {pattern!r} matched no parameter; patterns are globs over full names, closest: {near}"
    )


# -- priors ------------------------------------------------------------------------------------------------------------


def priors(every: list[Candidate], prior_mean: Any, prior_sig: Any) -> dict[int, Prior]:
    """Return the prior of each selected candidate, by its id."""
    for value, argument in ((prior_sig, "prior_sig"), (prior_mean, "prior_mean")):
        for pattern in value if _is_by_pattern(value) else ():
            if not any(matches(pattern, c.names, argument) for c in every):
                raise unmatched(pattern, every, argument)
    found = {}
    for c in (c for c in every if not c.skipped):
        sig = _given(c.names, prior_sig, "prior_sig")
        mean = _mean(c, _given(c.names, prior_mean, "prior_mean"))
        found[id(c)] = Prior(mean, _sig(c, sig), c.is_bias, sig is None)
    return found


def _given(names: list[str], value: Any, argument: str) -> Any:
    """Return the value for a parameter of these names: of a mapping from patterns that of the first match, or None."""
    if not _is_by_pattern(value):
        return value
    return next((v for pattern, v in value.items() if matches(pattern, names, argument)), None)


def _is_state_dict(value: Any) -> bool:
    """Return whether this maps names to tensors."""
    return isinstance(value, Mapping) and bool(value) and all(isinstance(v, Tensor) for v in value.values())


def _is_by_pattern(value: Any) -> bool:
    """Return whether this maps patterns to values."""
    return isinstance(value, Mapping) and not _is_state_dict(value)


def _sig(candidate: Candidate, value: Any) -> float:
    """Return a prior scale: a valid number, or one relative to the parameter where there is none."""
    if value is None:
        return relative_sig(candidate.param, candidate.fan_in)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"prior_sig must be None, a number, or a mapping from patterns to these, got {value!r}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"prior_sig of {candidate.name!r} must be positive and finite, got {value!r}")
    if not SMALLEST_SIG <= float(value) <= 1 / SMALLEST_SIG:
        raise ValueError(
            f"prior_sig of {candidate.name!r} must be within {SMALLEST_SIG:g} and its inverse, got {value!r}"
        )
    return float(value)


def _mean(candidate: Candidate, value: Any) -> Tensor:
    """Return the prior mean of one candidate: its current value, a constant, or a value from elsewhere."""
    param = candidate.param.detach()
    if isinstance(value, str) and value == "zero":
        return param.new_tensor(candidate.neutral)
    source = param if value is None else value
    if isinstance(value, nn.Module):
        source = _named(candidate, dict(value.named_parameters(remove_duplicate=False)), type(value).__name__)
    elif _is_state_dict(value):
        source = _named(candidate, value, "the state dict")
    if not isinstance(source, Tensor):
        raise TypeError(
            "prior_mean must be None (the current weights), 'zero', a tensor, a module, a state dict, or a mapping "
            f"from name patterns to these, got {value!r}"
        )
    if source.shape != param.shape:
        raise ValueError(
            f"prior mean of {candidate.name!r} has shape {tuple(source.shape)}, the parameter {tuple(param.shape)}; "
            "give that name another value, e.g. prior_mean={'head.*': 'zero'}"
        )
    mean = source.detach().to(param, copy=True)
    # A sum is quick, and finite only if every element is; large elements may still add up to infinity.
    if not (math.isfinite(mean.sum()) or mean.isfinite().all()):
        raise ValueError(f"prior mean of {candidate.name!r} is not finite; check the weights that it comes from")
    return mean


def _named(candidate: Candidate, values: Mapping[str, Tensor], source: str) -> Tensor:
    """Return a candidate's value in a mapping of plain names."""
    for name in candidate.names:
        if name in values:
            return values[name]
    near = difflib.get_close_matches(candidate.name, list(values), n=1)
    raise ValueError(
        f"{source} given as prior_mean has no {candidate.name!r}"
        + (f" (closest: {near[0]!r})" if near else "")
        + "; give the missing names a value by a mapping, e.g. prior_mean={'head.*': 'zero'}"
    )


def prior_buffers(buffers: Mapping[str, Tensor], prior_mean: Any) -> dict[str, Tensor]:
    """Return the buffers that come with the prior mean, from the module or state dict that it is taken from."""
    found = {}
    for name, own in buffers.items():
        value = _given([name], prior_mean, "prior_mean")
        source = dict(value.named_buffers()) if isinstance(value, nn.Module) else value if _is_state_dict(value) else {}
        if name not in source:
            continue
        if source[name].shape != own.shape:
            raise ValueError(
                f"prior_mean has {name!r} in shape {tuple(source[name].shape)}, the model in {tuple(own.shape)}; "
                "give a model of the same architecture"
            )
        found[name] = source[name]
    return found


def plain_tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers under their plain names, each once, the posteriors' own left out."""
    seen: set[int] = set()
    for path, module in root.named_modules():
        if isinstance(module, Posterior):
            continue
        lasting = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *lasting.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor
