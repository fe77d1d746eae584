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
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from bayesify.core import fileformat, ranks
from bayesify.core.distributed import copy_whole, is_sharded, whole
from bayesify.core.fileformat import FORMAT, CheckpointError, damaged
from bayesify.core.gaussian_noise import GaussianNoise
from bayesify.core.method import REGISTRY, Method, resolve
from bayesify.core.mixture import Mixture, mixture_in, shared_copy
from bayesify.core.modes import keep_buffers, kept_buffers
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior
from bayesify.core.reading import Scope
from bayesify.core.scopes import NOISE, check_averaged, check_module, root_of, warn_of_mistakes
from bayesify.core.selection import candidates, plain_tensors
from bayesify.core.stored import CENTER, attach_objects, attached_objects, attached_state
from bayesify.core.wrap import check_wrappable, wrap

M = TypeVar("M", bound=nn.Module)

POSTERIOR_FILE = "posterior.safetensors"
MEAN_FILE = "model.safetensors"
MEAN, REST, START, ATTACHED = "mean", "rest", "start", "attached"
OF_MODEL = (REST, START, ATTACHED)  # kinds that belong to no posterior
ALONE = ""  # the member of a file that holds one model


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
    files = {POSTERIOR_FILE: contents(members), MEAN_FILE: means}
    _write(Path(dir), files, members)


def save_posterior(model: nn.Module, dir: "str | os.PathLike[str]", *, frozen: bool = True) -> None:  # noqa: A002
    """Save what `load` needs, without the copy of the mean.

    Args:
        model: A bayesified model, or a module that contains exactly one.
        dir: The folder; gets `posterior.safetensors`.
        frozen: Whether to keep parameters that are neither Bayesian nor trained, and buffers. Without them `load`
            takes those of the model that it is given, such as the base model under an adapter.
    """
    members = members_of(model)
    files = {POSTERIOR_FILE: contents(members, frozen=frozen)}
    _write(Path(dir), files, members)


def _write(
    folder: Path, files: Mapping[str, fileformat.Content], members: Mapping[str, tuple[nn.Module, Scope]]
) -> None:
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
    path = Path(dir) if Path(dir).name == POSTERIOR_FILE else Path(dir) / POSTERIOR_FILE
    files = read(path)
    mixture = mixture_in(model)
    present: list[nn.Module] = [model] if mixture is None else list(mixture.members)
    if mixture is None and len(files) > 1 and not any(isinstance(m, Posterior) for m in model.modules()):
        apart = _different(model, list(files.values()))
        present = [model, *(shared_copy(model, apart=apart) for _ in range(len(files) - 1))]
    if len(present) != len(files):
        there, here = ("one model" if len(n) == 1 else f"a mixture of {len(n)}" for n in (files, present))
        raise CheckpointError(f"{path} holds {there}, this is {here}; load into a plain model")
    for take_over in [_prepared(path, file, member) for file, member in zip(files.values(), present, strict=True)]:
        take_over()
    if mixture is None and len(files) > 1:
        return Mixture(present)  # type: ignore[return-value]
    return model


def _different(model: nn.Module, files: "list[File]") -> set[int]:
    """Return the ids of a plain model's tensors that the members of a file do not share."""
    kept = {name: [file.tensors.get((REST, name)) for file in files] for name, _ in plain_tensors(model)}
    common = {name for name, found in kept.items() if all(t is found[0] for t in found)}
    bayesian = set().union(*(file.priors for file in files))
    return {id(t) for name, t in plain_tensors(model) if name not in common or name in bayesian}


def _prepared(path: Path, file: "File", model: nn.Module) -> Callable[[], None]:
    """Check that a file's member fits a model, plain or bayesified; return what loads it, which cannot fail."""
    scope: Scope | None = None
    if any(isinstance(m, Posterior) for m in model.modules()):
        root, scope = root_of(model)
        if scope.method.name != file.method.name:
            raise CheckpointError(
                f"{path} holds a posterior of method {file.method.name!r}, the model is bayesified with "
                f"{scope.method.name!r}; load into a plain model, or unbayesify(model) first"
            )
        params: dict[str, Tensor] = {p.name: p.original for p in scope.posteriors}
    else:
        check_wrappable(model)
        root, params = model, {c.name: c.param for c in candidates(model) if c.name in file.priors}
        if cut := [name for name, param in params.items() if is_sharded(param)]:
            raise CheckpointError(f"{cut[0]!r} is sharded over devices; load first, then fully_shard")
    size = file.tensors.get((REST, f"{NOISE}.log_var"))
    noise = None if size is None or NOISE in root._modules else GaussianNoise(size.numel()).to(size.dtype)
    built, rest = _fitting(path, file, root, params, noise)

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
                copy_whole(posterior.original, file.tensors[MEAN, posterior.name])
                posterior.load_state(file.state(posterior.name))
            for name, tensor in rest.items():
                copy_whole(tensor, file.tensors[REST, name])
            if noise is not None:
                root.add_module(NOISE, noise.to(next(root.parameters()).device))
            keep_buffers(root, {name: tensor for (kind, name), tensor in file.tensors.items() if kind == START})
        attach_objects(root, file.attached)

    return take_over


class File(NamedTuple):
    """One member of `posterior.safetensors`: tensors by (kind or attribute, name), and each posterior's prior."""

    method: Method
    priors: dict[str, dict[str, Any]]
    tensors: dict[tuple[str, str], Tensor]
    partial: bool
    attached: dict[str, Any]

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one posterior beside its mean, by attribute."""
        return {kind: t for (kind, n), t in self.tensors.items() if n == name and kind not in (MEAN, *OF_MODEL)}

    def posterior(self, name: str, param: Tensor) -> Posterior:
        """Build the posterior of one parameter, as it was when it was saved but for its tensors.

        Raises:
            ValueError: Its settings or tensors are none that a posterior can have.
        """
        about, state = self.priors[name], self.state(name)
        row, results = about["fixed_row"], about["results"]
        if is_sharded(param):
            param = self.tensors[MEAN, name].to(param.dtype)
        if row is not None and not 0 <= row < len(param):
            raise ValueError(f"fixed_row {row} of {len(param)}")
        if CENTER not in state:
            raise ValueError(f"{CENTER} is missing")
        prior = Prior(state[CENTER].to(param.device), about["prior_sig"], about["is_bias"], "prior_sig" in results)
        posterior = self.method.posterior(param, prior, fixed_row=row)
        posterior.check_state(state)
        posterior.check_results(results)
        for attribute, value in results.items():
            setattr(posterior, attribute, value)
        posterior.prior_sig = prior.sig
        return posterior


def members_of(model: nn.Module) -> dict[str, tuple[nn.Module, Scope]]:
    """Return the models that go into one file, by member: one alone, or those of a mixture by their numbers."""
    check_module(model)
    mixture = mixture_in(model)
    if mixture is None:
        return {ALONE: root_of(model)}
    return {str(i): root_of(member) for i, member in enumerate(mixture.members)}


def posterior_tensors(root: nn.Module, scope: Scope) -> dict[str, Tensor]:
    """Return everything that `load` needs."""
    means = {id(p.original) for p in scope.posteriors}
    out = {f"{REST}:{name}": t for name, t in plain_tensors(root) if id(t) not in means}
    for posterior in scope.posteriors:
        out[f"{MEAN}:{posterior.name}"] = posterior.original
        out.update({f"{attribute}:{posterior.name}": t for attribute, t in posterior.state().items()})
    now = dict(plain_tensors(root))
    moved = {
        name: tensor for name, tensor in kept_buffers(root).items() if not torch.equal(tensor.to(now[name]), now[name])
    }
    out.update({f"{START}:{name}": tensor for name, tensor in moved.items()})
    out.update({f"{ATTACHED}:{name}": tensor for name, tensor in attached_state(root)[0].items()})
    return {key: t if not is_sharded(t) else whole(t).requires_grad_(t.requires_grad) for key, t in out.items()}


def mean_tensors(root: nn.Module, scope: Scope) -> dict[str, Tensor]:
    """Return the posterior mean and all the rest under plain names, tied weights once."""
    means = {id(p.original): p for p in scope.posteriors}
    return {
        means[id(t)].name if id(t) in means else name: whole(means[id(t)].mean if id(t) in means else t)
        for name, t in plain_tensors(root)
        if not name.startswith(f"{NOISE}.")
    }


def contents(
    members: Mapping[str, tuple[nn.Module, Scope]], *, frozen: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata of a file.

    Args:
        members: Bayesified models with their scopes, by member; one alone is the member "".
        frozen: Whether to keep what is neither Bayesian nor trained.
    """
    tensors: dict[str, Tensor] = {}
    models: dict[str, dict[str, Any]] = {}
    written: dict[tuple[str, int, torch.Size], str] = {}
    for member, (root, scope) in members.items():
        shared: dict[str, str] = {}
        for key, tensor in posterior_tensors(root, scope).items():
            if frozen or not key.startswith((f"{REST}:", f"{START}:")) or tensor.requires_grad:
                owner = written.setdefault((key, tensor.data_ptr(), tensor.shape), member)
                if owner == member or not tensor.numel():
                    tensors[f"{member}/{key}" if member else key] = tensor
                else:
                    shared[key] = owner
        more = {"partial": not frozen, "shared": shared, ATTACHED: attached_state(root)[1]}
        models[member] = {**described(scope), **more}
    return tensors, {"format": FORMAT, "models": json.dumps(models)}


def described(scope: Scope) -> dict[str, Any]:
    """Describe the method and each posterior's prior."""
    priors = {
        p.name: {"prior_sig": p.prior_sig, "is_bias": p.is_bias, "fixed_row": p.fixed_row, "results": p.found()}
        for p in scope.posteriors
    }
    return {"method": scope.method.name, "options": asdict(scope.method), "priors": priors}


def read(path: Path) -> dict[str, File]:
    """Read and understand a posterior file, by member.

    Raises:
        CheckpointError: It is missing, damaged, of another kind or newer than this version of bayesify.
    """

    def no_number(text: str) -> NoReturn:
        raise ValueError(f"{text} is no number")

    tensors, about = fileformat.read(path)
    try:
        models = json.loads(about["models"], parse_constant=no_number)
        parts: dict[str, dict[tuple[str, str], Tensor]] = {member: {} for member in models}
        for key, tensor in tensors.items():
            where, _, name = key.partition(":")
            member, _, kind = where.rpartition("/")
            parts[member][kind, name] = tensor
        for member, about_member in models.items():
            for key, owner in about_member["shared"].items():
                kind, _, name = key.partition(":")
                parts[member][kind, name] = tensors[f"{owner}/{key}"]
        return {member: _member(path, models[member], part) for member, part in parts.items()}
    except CheckpointError:
        raise
    except (AttributeError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def _member(path: Path, about: dict[str, Any], tensors: dict[tuple[str, str], Tensor]) -> File:
    """Understand one member of a file."""
    if about["method"] not in REGISTRY:
        raise CheckpointError(
            f"{path} holds a posterior of method {about['method']!r}, known are {sorted(REGISTRY)}; "
            "import the module that defines the method first"
        )
    method = resolve(about["method"], None, about["options"])
    for name, prior in about["priors"].items():
        _check_prior(name, prior)
    for kind, name in tensors:
        if kind not in OF_MODEL and name not in about["priors"]:
            raise ValueError(f"{kind}:{name} belongs to no posterior")
    mine = {name: tensor for (kind, name), tensor in tensors.items() if kind == ATTACHED}
    return File(
        method, about["priors"], tensors, about["partial"] is True, attached_objects(mine, about.get(ATTACHED, {}))
    )


def _check_prior(name: str, about: dict[str, Any]) -> None:
    """Raise unless a posterior's description is one that `described` can give."""
    sig, row = about["prior_sig"], about["fixed_row"]
    if not (isinstance(sig, float) and 0 < sig < math.inf):
        raise ValueError(f"prior_sig of {name!r} is {sig!r}")
    if not (row is None or (isinstance(row, int) and not isinstance(row, bool))):
        raise ValueError(f"fixed_row of {name!r} is {row!r}")
    for field, kind in (("is_bias", bool), ("results", dict)):
        if not isinstance(about[field], kind):
            raise ValueError(f"{field} of {name!r} is {about[field]!r}")


def _fitting(
    path: Path, file: File, root: nn.Module, params: dict[str, Tensor], noise: GaussianNoise | None
) -> tuple[dict[str, Posterior], dict[str, Tensor]]:
    """Check that a file fits a model, name by name.

    Returns:
        The file's posteriors by name, and the model's tensors that are not Bayesian.

    Raises:
        CheckpointError: It does not.
    """
    bayesian = {id(t) for t in params.values()}
    rest = {name: t for name, t in plain_tensors(root) if id(t) not in bayesian}
    rest |= {} if noise is None else {f"{NOISE}.{name}": t for name, t in plain_tensors(noise)}
    _check_names(path, "Bayesian parameters", set(file.priors), set(params))
    saved_rest = {n for kind, n in file.tensors if kind == REST}
    if file.partial:
        rest = {name: t for name, t in rest.items() if name in saved_rest}
    _check_names(path, "other tensors", saved_rest, set(rest))
    buffers = {n: rest[n] for kind, n in file.tensors if kind == START and n in rest}
    if unknown := {n for kind, n in file.tensors if kind == START} - buffers.keys():
        raise damaged(path, f"{min(unknown)!r} is no buffer")
    for kind, group in ((MEAN, params), (REST, rest), (START, buffers)):
        for name, tensor in group.items():
            saved = file.tensors.get((kind, name))
            if saved is None or saved.is_floating_point() != tensor.is_floating_point():
                what = "missing" if saved is None else f"of dtype {saved.dtype}"
                raise damaged(path, f"the {kind} of {name!r} is {what}")
            if saved.shape != tensor.shape:
                raise CheckpointError(
                    f"{name!r} has shape {tuple(saved.shape)} in {path}, {tuple(tensor.shape)} in the model; "
                    "build the model as it was when it was saved"
                )
    built = {}
    for name, param in params.items():
        try:
            built[name] = file.posterior(name, param)
        except (ValueError, TypeError) as error:
            raise damaged(path, f"{name!r}: {error}") from error
    return built, rest


def _check_names(path: Path, what: str, saved: set[str], present: set[str]) -> None:
    """Raise if the names in the file and in the model differ."""
    if saved != present:
        only = {"the file": sorted(saved - present)[:3], "the model": sorted(present - saved)[:3]}
        raise CheckpointError(
            f"{path} does not fit the model: {what} differ, "
            + ", ".join(f"only in {place}: {names}" for place, names in only.items() if names)
            + "; build the model as it was when it was saved"
        )
