"""Save a posterior and load it again, exactly.

`posterior.safetensors` holds everything and is all that `load` reads; it is replaced by one atomic rename, so that a
crash leaves the old one. `model.safetensors` is a copy of the mean for people without bayesify.

The format: a tensor's key is "kind:name", where the kind is "mean", "rest", "start" (a buffer as it was at `bayesify`,
if it has changed) or an attribute of the posterior of the parameter of that name; names are the plain model's. The
metadata describes method and posteriors. A file can hold several members, whose keys are "member/kind:name"; the member
of a file of one is the empty string. What members share in memory is written once, and the metadata of the others names
the member that has it. Methods bring options and tensors of their own without another version: options are those of the
method's dataclass, and a posterior checks its own tensors (`check_state`).
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bayesify.core import fileformat, ranks
from bayesify.core.distributed import copy_whole, is_sharded, whole
from bayesify.core.fileformat import FORMAT, CheckpointError, damaged
from bayesify.core.method import REGISTRY, Method, resolve
from bayesify.core.mixture import Mixture, mixture_in, shared_copy
from bayesify.core.modes import keep_buffers, kept_buffers
from bayesify.core.penalty import GaussianNoise
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior
from bayesify.core.reading import Scope
from bayesify.core.scopes import NOISE, check_averaged, check_module, root_of, warn_of_mistakes
from bayesify.core.selection import candidates, plain_tensors
from bayesify.core.stored import CENTER
from bayesify.core.wrap import check_wrappable, wrap

M = TypeVar("M", bound=nn.Module)
Members = Mapping[str, tuple[nn.Module, Scope]]

POSTERIOR_FILE = "posterior.safetensors"
MEAN_FILE = "model.safetensors"
MEAN, REST, START, ATTACHED = "mean", "rest", "start", "attached"
ALONE = ""  # the member of a file that holds one model
ATTACHABLE: dict[str, Any] = {}
"""By attribute of the model, a class whose objects are saved with it: it has `state_dict()`, of tensors and what JSON
can hold, and `from_state_dict(state)`."""


def save(model: nn.Module, dir: "str | os.PathLike[str]") -> None:  # noqa: A002
    """Save a bayesified model into a folder, which is made if it does not exist.

    Args:
        model: A bayesified model, or a module that contains exactly one. A sharded one (FSDP2) is gathered, so that all
            processes have to call; rank 0 writes.
        dir: The folder; gets `posterior.safetensors` and `model.safetensors`.

    Raises:
        ValueError: The model has no posterior, or more than one part of it was bayesified on its own.

    Example:
        >>> import tempfile, torch
        >>> from bayesify import bayesify, load, save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(bayesify(torch.nn.Linear(3, 2), "vi"), folder)
        ...     model = load(torch.nn.Linear(3, 2), folder)
    """
    members = members_of(model)
    check_averaged(model)
    means = mean_tensors(*next(iter(members.values()))), {"format": "pt"}
    _write(Path(dir), {POSTERIOR_FILE: contents(members), MEAN_FILE: means}, members)


def save_posterior(model: nn.Module, dir: "str | os.PathLike[str]", *, frozen: bool = True) -> None:  # noqa: A002
    """Save what `load` needs, without the copy of the mean.

    If not `frozen`, without buffers and parameters that are neither Bayesian nor trained: `load` takes those of
    the model that it is given, such as the base model under an adapter.
    """
    members = members_of(model)
    _write(Path(dir), {POSTERIOR_FILE: contents(members, frozen=frozen)}, members)


def _write(folder: Path, files: Mapping[str, fileformat.Content], members: Members) -> None:
    """Write files; of sharded models rank 0 does, and all processes raise if it fails."""
    warn_of_mistakes([scope for _, scope in members.values()], stacklevel=4)
    sharded = any(p.layout is not None for _, scope in members.values() for p in scope.posteriors)
    failure: Exception | None = None
    if not sharded or torch.distributed.get_rank() == 0:
        try:
            fileformat.write(folder, files)
        except Exception as error:  # the other processes must not wait for ever
            failure = error
    reason = ranks.gathered(failure and repr(failure))[0] if sharded else None
    if failure is not None:
        raise failure
    if reason is not None:
        raise CheckpointError(f"rank 0 could not write to {folder} ({reason}); see its own error")


def members_of(model: nn.Module) -> dict[str, tuple[nn.Module, Scope]]:
    """Return the models that go into one file, by member: one alone, or those of a mixture by their numbers."""
    check_module(model)
    if (mixture := mixture_in(model)) is None:
        return {ALONE: root_of(model)}
    return {str(i): root_of(member) for i, member in enumerate(mixture.members)}


def contents(members: Members, *, frozen: bool = True) -> fileformat.Content:
    """Return tensors and metadata of a file; `frozen` is whether to keep what is neither Bayesian nor trained."""
    tensors: dict[str, Tensor] = {}
    models: dict[str, dict[str, Any]] = {}
    written: dict[tuple[str, int, torch.Size], str] = {}
    for member, (root, scope) in members.items():
        shared: dict[str, str] = {}
        attached, rest = attached_state(root)
        for key, tensor in {**posterior_tensors(root, scope), **attached}.items():
            if frozen or not key.startswith((f"{REST}:", f"{START}:")) or tensor.requires_grad:
                owner = written.setdefault((key, tensor.data_ptr(), tensor.shape), member)
                if owner == member or not tensor.numel():
                    tensors[f"{member}/{key}" if member else key] = tensor
                else:
                    shared[key] = owner
        models[member] = {**described(scope), "partial": not frozen, "shared": shared, ATTACHED: rest}
    return tensors, {"format": FORMAT, "models": json.dumps(models)}


def described(scope: Scope) -> dict[str, Any]:
    """Describe the method and each posterior's prior."""
    priors = {
        p.name: {"prior_sig": p.prior_sig, "is_bias": p.is_bias, "fixed_row": p.fixed_row, "results": p.found()}
        for p in scope.posteriors
    }
    return {"method": scope.method.name, "options": asdict(scope.method), "priors": priors}


def posterior_tensors(root: nn.Module, scope: Scope) -> dict[str, Tensor]:
    """Return all tensors of a model that `load` needs, but those of attached objects."""
    means, now = {id(p.original) for p in scope.posteriors}, dict(plain_tensors(root))
    out = {f"{REST}:{name}": t for name, t in now.items() if id(t) not in means}
    for posterior in scope.posteriors:
        out[f"{MEAN}:{posterior.name}"] = posterior.original
        out.update({f"{attribute}:{posterior.name}": t for attribute, t in posterior.state().items()})
    for name, first in kept_buffers(root).items():
        if not torch.equal(first.to(now[name]), now[name]):
            out[f"{START}:{name}"] = first
    return {key: t if not is_sharded(t) else whole(t).requires_grad_(t.requires_grad) for key, t in out.items()}


def mean_tensors(root: nn.Module, scope: Scope) -> dict[str, Tensor]:
    """Return the posterior mean and all the rest under plain names, tied weights once."""
    means = {id(p.original): p for p in scope.posteriors}
    return {
        means[id(t)].name if id(t) in means else name: whole(means[id(t)].mean if id(t) in means else t)
        for name, t in plain_tensors(root)
        if not name.startswith(f"{NOISE}.")
    }


def attached_state(root: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of what is attached to a model, by key, and all the rest by attribute."""
    tensors, rest = dict[str, Tensor](), dict[str, Any]()
    for attribute, kind in ATTACHABLE.items():
        if isinstance(found := root.__dict__.get(attribute), kind):
            rest[attribute] = found.state_dict()
            for name in [name for name, value in rest[attribute].items() if isinstance(value, Tensor)]:
                tensors[f"{ATTACHED}:{attribute}.{name}"] = rest[attribute].pop(name)
    return tensors, rest


# -- loading -----------------------------------------------------------------------------------------------------------


def load(model: M, dir: "str | os.PathLike[str]") -> M:  # noqa: A002
    """Load what `save` wrote, into a plain model of the same architecture or an already bayesified one.

    A bayesified model keeps its parameters' identity, so that optimizers stay valid; it takes over the options of the
    file. A failed call leaves the model as it was.

    A saved mixture becomes one again: a plain model becomes its first member, and copies of it the others.

    Args:
        model: The model; a plain one is bayesified.
        dir: The folder, or the file `posterior.safetensors` in it.

    Returns:
        The same model; where the file holds a mixture and the model is plain, the mixture.

    Raises:
        CheckpointError: The file is missing, damaged, of another kind, method, version or architecture.
    """
    check_module(model)
    path = file_in(dir)
    files = read(path)
    mixture = mixture_in(model)
    present: list[nn.Module] = [model] if mixture is None else list(mixture.members)
    if mixture is None and len(files) > 1 and not any(isinstance(m, Posterior) for m in model.modules()):
        apart = _different(model, list(files.values()))
        present = [model, *(shared_copy(model, apart=apart) for _ in range(len(files) - 1))]
    if len(present) != len(files):
        there, here = ("one model" if len(n) == 1 else f"a mixture of {len(n)}" for n in (files, present))
        raise CheckpointError(f"{path} holds {there}, this is {here}; load into a plain model")
    for take_over in [_prepared(file, member) for file, member in zip(files.values(), present, strict=True)]:
        take_over()
    if mixture is None and len(files) > 1:
        return Mixture(present)  # type: ignore[return-value]
    return model


def file_in(dir: "str | os.PathLike[str]") -> Path:  # noqa: A002
    """Return the posterior file in a folder; a path that names the file is taken as it is."""
    return Path(dir) if Path(dir).name == POSTERIOR_FILE else Path(dir) / POSTERIOR_FILE


class File(NamedTuple):
    """One member of `posterior.safetensors`."""

    path: Path
    method: Method
    priors: dict[str, dict[str, Any]]  # what `described` says of each posterior
    means: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]  # of each posterior, its tensors beside the mean by attribute
    rest: dict[str, Tensor]
    start: dict[str, Tensor]
    partial: bool  # whether frozen parameters and buffers are those of the model that it is loaded into
    attached: dict[str, Any]

    def posterior(self, name: str, param: Tensor) -> Posterior:
        """Build the posterior of one parameter from its settings; its tensors are checked, and loaded later."""
        if is_sharded(param):
            param = self.means[name].to(param.dtype)
        try:
            about, state = self.priors[name], self.states[name]
            results, sig = about["results"], about["prior_sig"]
            prior = Prior(state[CENTER].to(param), sig, about["is_bias"], relative="prior_sig" in results)
            posterior = self.method.posterior(param, prior, fixed_row=about["fixed_row"])
            posterior.check_state(state)
            found = {name: results[name] for name in results.keys() & posterior.taken_over()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise damaged(self.path, f"{name!r}: {error}") from error
        posterior.__dict__.update({**found, "prior_sig": sig})
        return posterior


def read(path: Path) -> dict[str, File]:
    """Read and parse a posterior file, by member; a CheckpointError if it is missing or damaged."""
    tensors, about = fileformat.read(path)
    try:
        models = json.loads(about["models"])
        return {m: _member(path, f"{m}/" if m else "", about_m, tensors) for m, about_m in models.items()}
    except CheckpointError:
        raise
    except (AttributeError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def _member(path: Path, prefix: str, about: dict[str, Any], every: Mapping[str, Tensor]) -> File:
    """Parse one member of a file, whose keys begin with a prefix."""
    if about["method"] not in REGISTRY:
        raise CheckpointError(
            f"{path} holds a posterior of method {about['method']!r}, known are {sorted(REGISTRY)}; "
            "import the module that defines the method first"
        )
    method, priors, attached = resolve(about["method"], None, about["options"]), about["priors"], about[ATTACHED]
    own = {key.removeprefix(prefix): tensor for key, tensor in every.items() if key.startswith(prefix)}
    own |= {key: every[f"{owner}/{key}"] for key, owner in about["shared"].items()}
    plain: dict[str, dict[str, Tensor]] = {MEAN: {}, REST: {}, START: {}}
    states: dict[str, dict[str, Tensor]] = {name: {} for name in priors}
    for key, tensor in own.items():
        kind, _, name = key.partition(":")
        if kind == ATTACHED:
            attribute, _, part = name.partition(".")
            attached[attribute][part] = tensor
        elif kind in plain:
            plain[kind][name] = tensor
        else:
            states[name][kind] = tensor
    objects = {attribute: ATTACHABLE[attribute].from_state_dict(state) for attribute, state in attached.items()}
    return File(path, method, priors, plain[MEAN], states, plain[REST], plain[START], about["partial"] is True, objects)


def _different(model: nn.Module, files: list[File]) -> set[int]:
    """Return the ids of a plain model's tensors that the members of a file do not share."""
    kept = {name: [file.rest.get(name) for file in files] for name, _ in plain_tensors(model)}
    common = {name for name, found in kept.items() if all(t is found[0] for t in found)}
    bayesian = set().union(*(file.priors for file in files))
    return {id(t) for name, t in plain_tensors(model) if name not in common or name in bayesian}


def _prepared(file: File, model: nn.Module) -> Callable[[], None]:
    """Check that a file's member fits a model, plain or bayesified; return what loads it, which cannot fail."""
    scope: Scope | None = None
    if any(isinstance(m, Posterior) for m in model.modules()):
        root, scope = root_of(model)
        if scope.method.name != file.method.name:
            raise CheckpointError(
                f"{file.path} holds a posterior of method {file.method.name!r}, the model is bayesified with "
                f"{scope.method.name!r}; load into a plain model, or unbayesify(model) first"
            )
        params: dict[str, Tensor] = {p.name: p.original for p in scope.posteriors}
    else:
        check_wrappable(model)
        root, params = model, {c.name: c.param for c in candidates(model) if c.name in file.priors}
        if cut := [name for name, param in params.items() if is_sharded(param)]:
            raise CheckpointError(f"{cut[0]!r} is sharded over devices; load first, then fully_shard")
    bayesian = {id(t) for t in params.values()}
    rest = {name: t for name, t in plain_tensors(root) if id(t) not in bayesian}
    noise = None
    if NOISE not in root._modules and (size := file.rest.get(f"{NOISE}.log_var")) is not None:
        noise = GaussianNoise(size.numel()).to(size.dtype)
        rest |= {f"{NOISE}.{name}": t for name, t in plain_tensors(noise)}
    rest = {name: t for name, t in rest.items() if not file.partial or name in file.rest}
    _check_fit(file, params, rest)
    built = {name: file.posterior(name, param) for name, param in params.items()}

    def take_over() -> None:
        into = scope
        if into is None:
            found = {c.name: c for c in candidates(root) if c.name in file.priors}
            into = wrap(root, file.method, [(found[n], built[n]) for n in file.priors])
        else:
            for posterior in into.posteriors:
                posterior.configure_like(built[posterior.name])
            into.method = file.method
        with torch.no_grad():
            for posterior in into.posteriors:
                copy_whole(posterior.original, file.means[posterior.name])
                posterior.load_state(file.states[posterior.name])
            for name, tensor in rest.items():
                copy_whole(tensor, file.rest[name])
            if noise is not None:
                root.add_module(NOISE, noise.to(next(root.parameters()).device))
            keep_buffers(root, file.start)
        for attribute in ATTACHABLE:
            root.__dict__.pop(attribute, None)
        root.__dict__.update(file.attached)

    return take_over


def _check_fit(file: File, params: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> None:
    """Raise unless a file has the tensors of a model: those of Bayesian parameters, and the rest."""
    for what, saved, present in (("Bayesian parameters", file.means, params), ("other tensors", file.rest, rest)):
        if saved.keys() != present.keys():
            only = {"the file": saved.keys() - present.keys(), "the model": present.keys() - saved.keys()}
            places = [f"only in {place}: {sorted(names)[:3]}" for place, names in only.items() if names]
            raise CheckpointError(
                f"{file.path} does not fit the model: {what} differ, {', '.join(places)}; build the model as it was "
                "when it was saved"
            )
        for name, tensor in saved.items():
            if tensor.shape != present[name].shape:
                raise CheckpointError(
                    f"{name!r} has shape {tuple(tensor.shape)} in {file.path}, {tuple(present[name].shape)} in the "
                    "model; build the model as it was when it was saved"
                )
