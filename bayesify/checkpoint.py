"""Save a posterior and load it again, exactly.

`posterior.safetensors` holds everything and is all that `load` reads; it is replaced by one atomic rename, so that a
crash leaves the old one. `model.safetensors` is a copy of the mean for people without bayesify.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bayesify.core import check_module, check_wrappable, not_bayesian, wrap
from bayesify.methods.base import REGISTRY, Method, resolve
from bayesify.posteriors import Posterior, Prior
from bayesify.scopes import Scope
from bayesify.selection import candidates

M = TypeVar("M", bound=nn.Module)

POSTERIOR_FILE = "posterior.safetensors"
MEAN_FILE = "model.safetensors"
FORMAT = "bayesify"
VERSION = 1
MEAN, REST = "mean", "rest"
CENTER = "prior_center"
PARTIAL = "partial"  # metadata of a file without the tensors that are not trained


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not belong to the model."""


def save(model: nn.Module, dir: "str | os.PathLike[str]") -> None:  # noqa: A002
    """Save a bayesified model into a folder, which is made if it does not exist.

    Args:
        model: A bayesified model, or a module that contains exactly one.
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
    root, scope = root_of(model)
    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        (_write(folder, POSTERIOR_FILE, posterior_tensors(root, scope), metadata(scope)), POSTERIOR_FILE),
        (_write(folder, MEAN_FILE, mean_tensors(root, scope), {"format": "pt"}), MEAN_FILE),
    ]
    for temporary, name in written:
        os.replace(temporary, folder / name)


def save_posterior(model: nn.Module, dir: "str | os.PathLike[str]", *, frozen: bool = True) -> None:  # noqa: A002
    """Save what `load` needs, without the copy of the mean.

    Args:
        model: A bayesified model, or a module that contains exactly one.
        dir: The folder; gets `posterior.safetensors`.
        frozen: Whether to keep parameters that are neither Bayesian nor trained, and buffers. Without them `load`
            takes those of the model that it is given, such as the base model under an adapter.
    """
    root, scope = root_of(model)
    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = posterior_tensors(root, scope)
    if not frozen:
        tensors = {n: t for n, t in tensors.items() if not n.startswith(f"{REST}:") or t.requires_grad}
    about = {**metadata(scope), **({} if frozen else {PARTIAL: "true"})}
    os.replace(_write(folder, POSTERIOR_FILE, tensors, about), folder / POSTERIOR_FILE)


def load(model: M, dir: "str | os.PathLike[str]") -> M:  # noqa: A002
    """Load what `save` wrote, into a plain model of the same architecture or an already bayesified one.

    A bayesified model keeps its parameters' identity, so that optimizers stay valid; it takes over the options of the
    file. A failed call leaves the model as it was.

    Args:
        model: The model; a plain one is bayesified.
        dir: The folder, or the file `posterior.safetensors` in it.

    Returns:
        The same model.

    Raises:
        CheckpointError: The file is missing, damaged, of another kind, method, version or architecture.
    """
    check_module(model)
    path = Path(dir) if Path(dir).name == POSTERIOR_FILE else Path(dir) / POSTERIOR_FILE
    file = read(path)
    if any(isinstance(m, Posterior) for m in model.modules()):
        root, scope = root_of(model)
        if scope.method.name != file.method.name:
            raise CheckpointError(
                f"{path} holds a posterior of method {file.method.name!r}, the model is bayesified with "
                f"{scope.method.name!r}; load into a plain model, or unbayesify(model) first"
            )
        rest = _checked_rest(path, file, root, {p.name: p.original for p in scope.posteriors})
        for posterior in scope.posteriors:
            posterior.configure_like(file.posterior(posterior.name, posterior.original))
        scope.method = file.method
    else:
        check_wrappable(model)
        found = {c.name: c for c in candidates(model) if c.name in file.priors}
        rest = _checked_rest(path, file, model, {n: c.param for n, c in found.items()})
        scope = wrap(model, file.method, [(found[n], file.posterior(n, found[n].param)) for n in file.priors])
    with torch.no_grad():
        for posterior in scope.posteriors:
            posterior.original.copy_(file.tensors[MEAN, posterior.name])
            posterior.load_state(file.state(posterior.name))
        for name, tensor in rest.items():
            tensor.copy_(file.tensors[REST, name])
    return model


class File(NamedTuple):
    """What `posterior.safetensors` holds: tensors by (kind or attribute, name), and each posterior's prior."""

    method: Method
    priors: dict[str, dict[str, Any]]
    tensors: dict[tuple[str, str], Tensor]
    partial: bool

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one posterior beside its mean, by attribute."""
        return {kind: t for (kind, n), t in self.tensors.items() if n == name and kind not in (MEAN, REST)}

    def posterior(self, name: str, param: Tensor) -> Posterior:
        """Build the posterior of one parameter, as it was when it was saved but for its tensors."""
        about = self.priors[name]
        prior = Prior(self.tensors[CENTER, name].to(param.device), about["prior_sig"], about["is_bias"])
        return self.method.posterior(param, prior, fixed_row=about["fixed_row"])


def root_of(model: nn.Module) -> tuple[nn.Module, Scope]:
    """Return the one bayesified model inside a module, and its scope."""
    check_module(model)
    roots = [m for m in model.modules() if "_bayesify_scope" in m.__dict__]
    if not roots:
        raise not_bayesian(model)
    if len(roots) > 1:
        raise ValueError(f"{len(roots)} parts of the model were bayesified on their own; save and load each by itself")
    return roots[0], roots[0]._bayesify_scope  # type: ignore[return-value]


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


def posterior_tensors(root: nn.Module, scope: Scope) -> dict[str, Tensor]:
    """Return everything that `load` needs."""
    means = {id(p.original) for p in scope.posteriors}
    out = {f"{REST}:{name}": t for name, t in plain_tensors(root) if id(t) not in means}
    for posterior in scope.posteriors:
        out[f"{MEAN}:{posterior.name}"] = posterior.original
        out.update({f"{attribute}:{posterior.name}": t for attribute, t in posterior.state().items()})
    return out


def mean_tensors(root: nn.Module, scope: Scope) -> dict[str, Tensor]:
    """Return the posterior mean and all the rest under plain names, tied weights once."""
    means = {id(p.original): p for p in scope.posteriors}
    return {
        means[id(t)].name if id(t) in means else name: means[id(t)].mean if id(t) in means else t
        for name, t in plain_tensors(root)
    }


def metadata(scope: Scope) -> dict[str, str]:
    """Describe the method and each posterior's prior."""
    priors = {
        p.name: {"prior_sig": p.prior_sig, "is_bias": p.is_bias, "fixed_row": p.fixed_row} for p in scope.posteriors
    }
    return {
        "format": FORMAT,
        "version": str(VERSION),
        "method": scope.method.name,
        "options": json.dumps(asdict(scope.method)),
        "priors": json.dumps(priors),
    }


def _write(folder: Path, name: str, tensors: dict[str, Tensor], about: dict[str, str]) -> Path:
    """Write a file under a temporary name, down to the disk."""
    temporary = folder / f".{name}.{os.getpid()}"
    try:
        save_file(_own_copies(tensors), temporary, metadata=about)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _own_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors, none of which shares its memory with another."""
    out: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        shares = tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in taken
        out[name] = tensor.clone() if shares else tensor
        taken.add(out[name].data_ptr())
    return out


def read(path: Path) -> File:
    """Read and understand a posterior file.

    Raises:
        CheckpointError: It is missing, damaged, of another kind or newer than this version of bayesify.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no {path}; give the folder that bayesify.save wrote")
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise CheckpointError(f"{path} was not written by bayesify.save; load it with safetensors instead")
            if int(about["version"]) > VERSION:
                raise CheckpointError(
                    f"{path} has format version {about['version']}, this bayesify reads up to {VERSION}; upgrade it"
                )
            tensors = {_split(key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if about["method"] not in REGISTRY:
            raise CheckpointError(
                f"{path} holds a posterior of method {about['method']!r}, known are {sorted(REGISTRY)}; "
                "import the module that defines the method first"
            )
        method = resolve(about["method"], None, json.loads(about["options"]))
        return File(method, json.loads(about["priors"]), tensors, PARTIAL in about)
    except CheckpointError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); save the model again, or use another copy") from error


def _split(key: str) -> tuple[str, str]:
    kind, _, name = key.partition(":")
    return kind, name


def _checked_rest(path: Path, file: File, root: nn.Module, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Check that a file fits a model, name by name, and return the model's tensors that are not Bayesian."""
    bayesian = {id(t) for t in params.values()}
    rest = {name: t for name, t in plain_tensors(root) if id(t) not in bayesian}
    _check_names(path, "Bayesian parameters", set(file.priors), set(params))
    saved_rest = {n for kind, n in file.tensors if kind == REST}
    if file.partial:
        rest = {name: t for name, t in rest.items() if name in saved_rest}
    _check_names(path, "other tensors", saved_rest, set(rest))
    for name, param in params.items():
        _check_posterior(path, file, name, param)
    for kind, group in ((MEAN, params), (REST, rest)):
        for name, tensor in group.items():
            if (saved := file.tensors[kind, name]).shape != tensor.shape:
                raise CheckpointError(
                    f"{name!r} has shape {tuple(saved.shape)} in {path}, {tuple(tensor.shape)} in the model; "
                    "build the model as it was when it was saved"
                )
    return rest


def _check_posterior(path: Path, file: File, name: str, param: Tensor) -> None:
    """Raise if a file does not hold all that makes one posterior, in the shapes that it must have."""
    damaged = CheckpointError(f"{path} is damaged ({name!r} is not whole); save the model again, or use another copy")
    if (MEAN, name) not in file.tensors or (CENTER, name) not in file.tensors:
        raise damaged
    shape = file.tensors[MEAN, name].shape
    if shape != param.shape:
        return  # another architecture, which is told of elsewhere
    try:
        needed = file.posterior(name, param).state()
    except KeyError as error:
        raise damaged from error
    saved = file.state(name)
    if needed.keys() - saved.keys() or any(t.dim() and t.shape != shape for t in saved.values()):
        raise damaged


def _check_names(path: Path, what: str, saved: set[str], present: set[str]) -> None:
    """Raise if the names in the file and in the model differ."""
    if saved != present:
        only = {"the file": sorted(saved - present)[:3], "the model": sorted(present - saved)[:3]}
        raise CheckpointError(
            f"{path} does not fit the model: {what} differ, "
            + ", ".join(f"only in {place}: {names}" for place, names in only.items() if names)
            + "; build the model as it was when it was saved"
        )
