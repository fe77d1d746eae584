"""What a posterior stores beside the mean: one table of tensors for state dicts and files.

A rho is a spread only together with its link, and moments belong to one method. So every posterior puts its settings
into the state dict, as bytes in a tensor, and refuses a state with other settings.

Tensors that no gradient moves are plain attributes, neither parameters nor buffers: DistributedDataParallel would send
buffers of the weights' size to every process at every forward.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bayesify.core.distributed import Layout, copy_whole, follow, part
from bayesify.core.prior import LOW_PRECISION, state_dtype

EXTRA = "_extra_state"  # torch's own key for what get_extra_state returns
CENTER = "prior_center"
PAGE = 512  # bytes; distributed checkpoints load in place, so that lengths must not depend on the numbers
PARTS = ("settings", "results", "options", "held")  # of the extra state


class StateDictError(ValueError, RuntimeError):
    """A state dict that does not belong to the bayesified model."""


class Stored(nn.Module):
    """A module that stores its settings with its tensors; the base of every posterior."""

    settings: ClassVar[tuple[str, ...]] = ("prior_sig", "flat", "fixed_row")  # a stored state must agree with them
    results: ClassVar[tuple[str, ...]] = ()  # the attributes that a fit finds; a model takes over those of a state
    kept: ClassVar[dict[str, str]] = {CENTER: "same"}
    """The tensors beside parameters and buffers, None while there is none, with their forms: "same" is
    of the parameter's shape or a constant, "stack" (k, *shape) for k up to `most`, "count" an integer, "free" any."""
    most: int = 0
    calibration: float = 1.0  # the factor on the spread that `calibrate` found
    relative: bool = False  # whether prior_sig follows from the weights that the model had: then it is taken over too
    layout: Layout | None = None  # which rows this process holds of a sharded posterior; None where it is whole

    name: str
    shape: torch.Size
    reader: Any
    prior_center: Tensor
    _shards: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        for name in self.kept:
            setattr(self, name, None)

    # -- tensors -----------------------------------------------------------------------------------------------

    def held(self) -> dict[str, Tensor]:
        """Return the `kept` tensors that there are."""
        return {name: tensor for name in self.kept if (tensor := getattr(self, name)) is not None}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps beside the mean, by attribute name."""
        own = {**self._parameters, **self._buffers, **self.held()}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise a ValueError unless these are the tensors of `state()`; `load` asks before it changes anything."""
        own = self.state()
        if missing := own.keys() - state.keys():
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        if unknown := state.keys() - own.keys() - self._buffers.keys() - self.kept.keys():
            raise ValueError(f"{', '.join(sorted(unknown))} is nothing that a {type(self).__name__} has")
        for name, tensor in state.items():
            form = self.kept.get(name)
            shape = self.shape if form or name not in own else own[name].shape
            found = tensor.shape[1:] if form == "stack" else tensor.shape
            if form not in ("count", "free") and found != shape and (form is None or tensor.dim()):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the parameter {tuple(self.shape)}")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over the tensors of `state()`, keeping the identity of parameters."""
        with torch.no_grad():
            for name, tensor in state.items():
                if name in self._parameters:
                    copy_whole(getattr(self, name), tensor)
                elif name in self._buffers:
                    setattr(self, name, tensor.to(self.prior_center.device, copy=True))
        self._take(state)

    def _take(self, state: Mapping[str, Tensor | None]) -> None:
        """Take over kept tensors; those that are missing are forgotten."""
        center = self.prior_center
        for name in self.kept:
            tensor = state.get(name)
            setattr(self, name, None if tensor is None else tensor.detach().to(center.device, copy=True))
        self.prior_center = self.prior_center.to(center.dtype)
        if self.reader is not None:
            self.reader.penalized = True  # nothing is known of the training
            follow([self])
        self._look_at_center()
        self.after_load()

    def _look_at_center(self) -> None:
        """Note the prior mean where it is a constant: a look at the tensor would wait for an accelerator."""
        self.constant = None if self.prior_center.dim() else float(self.prior_center)

    def after_load(self) -> None:
        """Hook for subclasses, called after a state was loaded."""

    def forget(self) -> None:
        """Forget all kept tensors but the prior mean."""
        for name in self.kept.keys() - {CENTER}:
            setattr(self, name, None)

    def configure_like(self, other: "Stored") -> None:
        """Take over the settings of another posterior of the same parameter, but none of its tensors."""
        own = {"reader", "name", "key", "training", "layout", "start", *self.kept}
        self.__dict__.update({k: v for k, v in vars(other).items() if not k.startswith("_") and k not in own})

    def like_mean(self) -> tuple[str, ...]:
        """Return the names of the kept tensors with an element for each of the parameter's, which are cut like it."""
        return tuple(name for name, form in self.kept.items() if form in ("same", "stack"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast: the prior mean follows the parameter, the posterior's own state never goes below float32."""

        def moved(tensor: Tensor) -> Tensor:
            after = fn(tensor)
            return tensor.to(after.device, torch.float32) if after.dtype in LOW_PRECISION else after

        center = fn(self.prior_center)
        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in self.held().items():
            setattr(self, name, moved(tensor))
        self.prior_center = center
        return self

    # -- state dicts -------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Add the kept tensors to a state dict."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        tensors = self.held() if self.layout is None else self._with_room(self.layout)
        destination.update({prefix + name: tensor for name, tensor in tensors.items()})

    def _with_room(self, layout: Layout) -> dict[str, Tensor]:
        """Return the kept tensors of a sharded model, and room for those to come, which a distributed load needs."""
        out, blank = self.held(), self.blank()
        for name, form in self.kept.items():
            if form == "stack":
                rows = blank.new_zeros((self.most, *blank.shape))
                if name in out:
                    rows[: len(out[name])] = part(out[name])
                out[name] = layout.joined(rows)
            elif form == "count":
                out.setdefault(name, blank.new_zeros((), dtype=torch.int64))
            elif form == "same" and name not in out:
                out[name] = layout.joined(blank.clone())
        return out

    def blank(self) -> Tensor:
        """Return zeros as a kept tensor of the parameter's shape has them, on this process's rows."""
        original = part(self._shards["original"])
        return torch.zeros_like(original, dtype=state_dtype(original), requires_grad=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take over the kept tensors of a state dict; those that it lacks, or has room for only, are forgotten."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        _, strict, missing, unexpected, errors = args
        unexpected[:] = [key for key in unexpected if key.removeprefix(prefix) not in self.kept]
        state = {name: state_dict[prefix + name] for name in self.kept if prefix + name in state_dict}
        if CENTER not in state:
            if strict:
                missing.append(prefix + CENTER)
        elif state[CENTER].shape != self.prior_center.shape:
            errors.append(
                f"size mismatch for {prefix}{CENTER}: the shape in the state dict is {tuple(state[CENTER].shape)}, "
                f"that in the model {tuple(self.prior_center.shape)}"
            )
        else:
            rows = decoded(state_dict[prefix + EXTRA])["held"] if prefix + EXTRA in state_dict else {}
            state = {name: tensor for name, tensor in state.items() if rows.get(name) != 0}
            self._take({n: t[: rows.get(n)] if self.kept[n] == "stack" else t for n, t in state.items()})

    # -- settings and results ----------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return method and settings, which JSON can hold."""
        method, taken = getattr(self.reader, "method", None), self.taken_over()
        own = {name: getattr(self, name) for name in self.settings if name not in taken}
        return {"method": getattr(method, "name", ""), **own}

    def taken_over(self) -> tuple[str, ...]:
        """Return the names of the attributes that a stored state brings along."""
        return (*self.results, "calibration", *(("prior_sig",) if self.relative else ()))

    def found(self) -> dict[str, Any]:
        """Return the results that there are, which JSON can hold."""
        return {name: getattr(self, name) for name in self.taken_over()}

    def get_extra_state(self) -> Tensor:
        """Return settings and results for a state dict, whose values are tensors: libraries clone and save them."""
        method, held = getattr(self.reader, "method", None), self.held()
        options = {name: getattr(method, name) for name in getattr(method, "fitted", ())}
        rows = {n: 0 if n not in held else len(held[n]) if form == "stack" else 1 for n, form in self.kept.items()}
        return encoded(dict(zip(PARTS, (self.described(), self.found(), options, rows), strict=True)))

    def set_extra_state(self, state: Any) -> None:
        """Take over the results of a state dict, if its settings are the posterior's own; else a StateDictError."""
        results, options = self.checked_extra_state(state)
        for name, value in results.items():
            setattr(self, name, value)
        if options:
            self.reader.method = replace(self.reader.method, **options)

    def checked_extra_state(self, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the results and options of a state dict, if its settings are the posterior's own."""
        about, own = decoded(state), self.described()
        theirs, results = about["settings"], about["results"]
        if differ := [k for k in {**own, **theirs} if own.get(k) != theirs.get(k) and k not in results]:
            here, there = (", ".join(f"{k}={d.get(k)!r}" for k in differ) for d in (own, theirs))
            raise StateDictError(
                f"the state dict holds {self.name!r} with {there}, the model has {here}; call bayesify with the same "
                "settings before load_state_dict, or keep models with bayesify.save and load, which restore settings"
            )
        results = {name: value for name, value in results.items() if name in self.taken_over()}
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in about["options"].items()}
        return results, options

    def __prepare_scriptable__(self) -> nn.Module:
        """Say why torch.jit.script has to fail; torch asks here before it looks at hooks."""
        raise TypeError(
            "torch.jit.script cannot compile a bayesified model, whose weights are drawn when they are read; call "
            "unbayesify(model) first (to='mean' or 'sample'), or use torch.compile"
        )


def encoded(about: dict[str, Any]) -> Tensor:
    """Return JSON as a tensor of bytes, filled up with blanks."""
    text = json.dumps(about).encode()
    return torch.frombuffer(bytearray(text.ljust(-(-len(text) // PAGE) * PAGE)), dtype=torch.uint8)


def decoded(state: Any) -> dict[str, Any]:
    """Read what `encoded` wrote; a StateDictError if it is something else."""
    try:
        about = json.loads(bytes(state.cpu().tolist()))
        return {part: dict(about[part]) for part in PARTS}
    except (AttributeError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise StateDictError(
            f"the state dict's {EXTRA} is not what a posterior wrote ({error!r}); it is damaged, or of another library"
        ) from error


def check_state_dict(root: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse the state dict of a plain model, or of other settings, before torch copies any of it; a hook."""
    scope: Any = root._bayesify_scope
    paths = {id(module): path for path, module in root.named_modules()}
    for site in scope.sites:
        path = prefix + (f"{paths[id(site.module)]}." if paths.get(id(site.module)) else "")
        plain, wrapped = path + site.attribute, f"{path}parametrizations.{site.attribute}.original"
        if plain in state_dict and wrapped not in state_dict:
            raise StateDictError(
                f"this is the state dict of a plain model: it has {plain!r}, a bayesified model {wrapped!r}; load it "
                "before bayesify(model), or unbayesify(model), load it and bayesify again (what bayesify.save or its "
                "Hugging Face integration wrote beside it is read by bayesify.load)"
            )
    for posterior in scope.posteriors:
        key = f"{prefix}{paths.get(id(posterior), '')}.{EXTRA}"
        if key in state_dict:
            posterior.checked_extra_state(state_dict[key])


@contextmanager
def holding(posterior: Any, learned: Sequence[Tensor]) -> Iterator[None]:
    """Give a posterior the tensors of its forward, which torch.func.functional_call has taken away again since."""
    own = posterior.learnable()
    if all(a is b for a, b in zip(own, learned, strict=True)):
        yield
        return
    put = {id(a): b for a, b in zip(own, learned, strict=True)}
    kept = dict(posterior._parameters)
    posterior._parameters.update({n: put.get(id(p), p) for n, p in kept.items()})
    try:
        yield
    finally:
        posterior._parameters.update(kept)
