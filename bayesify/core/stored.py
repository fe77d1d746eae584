"""What goes with a posterior's tensors wherever they are stored: settings that say what they mean, and checks.

A rho is a spread only together with its link, and moments belong to one method. So every posterior puts its settings
into the state dict, as bytes in a tensor, and refuses the state of a posterior that is another kind of thing.

Tensors that no gradient moves are plain attributes, neither parameters nor buffers: DistributedDataParallel would send
buffers of the weights' size to every process at every forward.
"""

import json
import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

LOW_PRECISION = (torch.float16, torch.bfloat16)
EXTRA = "_extra_state"  # torch's own key for what get_extra_state returns
CENTER = "prior_center"
PAGE = 256  # bytes; distributed checkpoints load in place, so that lengths must not depend on the numbers
LEAST = {"calibration": 0.0}  # of results that need not be positive


class StateDictError(ValueError, RuntimeError):
    """A state dict that does not belong to the bayesified model."""


class Stored(nn.Module):
    """A module that stores its settings with its tensors; the base of every posterior."""

    settings: ClassVar[tuple[str, ...]] = ("prior_sig", "flat", "fixed_row")
    """The attributes without which the tensors mean something else; a stored state must agree with them."""
    results: ClassVar[tuple[str, ...]] = ()
    """The attributes that a fit may find; a model takes over those that it did."""
    kept: ClassVar[tuple[str, ...]] = (CENTER,)
    """The tensors of the state beside parameters and buffers, by attribute; None where there is none yet."""
    calibration: float = 1.0
    """The factor on the spread that `calibrate` found."""
    relative: bool = False
    """Whether prior_sig follows from the weights that the model had: then it is taken over too."""

    name: str
    shape: torch.Size
    reader: Any

    def __init__(self) -> None:
        super().__init__()
        for name in self.kept:
            setattr(self, name, None)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps beside the mean, by attribute name."""
        held = (*self._parameters.items(), *self._buffers.items(), *self.held().items())
        return {name: tensor for name, tensor in held if tensor is not None}

    def held(self) -> dict[str, Tensor]:
        """Return the `kept` tensors that there are."""
        return {name: tensor for name in self.kept if (tensor := getattr(self, name)) is not None}

    # -- state dicts -------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Add the kept tensors to a state dict."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: tensor for name, tensor in self.stored().items()})

    def stored(self) -> dict[str, Tensor]:
        """Return the kept tensors for a state dict."""
        return self.held()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        about: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Take over the kept tensors of a state dict; those that it lacks are forgotten, but for the prior mean."""
        super()._load_from_state_dict(state_dict, prefix, about, strict, missing, unexpected, errors)
        unexpected[:] = [key for key in unexpected if key not in {prefix + name for name in self.kept}]
        if not any(key.startswith(prefix) for key in state_dict):
            if strict:
                missing.append(prefix + CENTER)
            return
        for name in self.kept:
            if (tensor := state_dict.get(prefix + name)) is not None:
                self._take(name, tensor, prefix, errors)
            elif name != CENTER:
                setattr(self, name, None)
            elif strict:
                missing.append(prefix + name)

    def _take(self, name: str, tensor: Tensor, prefix: str, errors: list[str]) -> None:
        """Take over one kept tensor, in the memory of the old one where it has the same shape."""
        own: Tensor | None = getattr(self, name)
        alike = own is not None and own.shape == tensor.shape
        if own is not None and alike and hasattr(own, "device_mesh") == hasattr(tensor, "device_mesh"):
            with torch.no_grad():
                own.copy_(tensor)
        elif name == CENTER and not alike and own is not None:
            errors.append(
                f"size mismatch for {prefix}{name}: the shape in the state dict is {tuple(tensor.shape)}, that in the "
                f"model {tuple(own.shape)}"
            )
        else:
            device = getattr(self, CENTER).device
            setattr(self, name, tensor.detach().to(device, copy=True))

    # -- settings in state dicts -------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return method and settings, which JSON can hold."""
        method = getattr(getattr(self.reader, "method", None), "name", "")
        taken = self.taken_over()
        return {"method": method, **{name: getattr(self, name) for name in self.settings if name not in taken}}

    def taken_over(self) -> tuple[str, ...]:
        """Return the names of the attributes that a stored state brings along."""
        return (*self.results, "calibration", *(("prior_sig",) if self.relative else ()))

    def found(self) -> dict[str, Any]:
        """Return the results that there are, which JSON can hold."""
        return {name: getattr(self, name) for name in self.taken_over()}

    def check_results(self, results: dict[str, Any]) -> None:
        """Raise unless `found` can have returned these, each of the kind of the attribute's default.

        That is a text, a whole number, or a positive one, for which None says that it is not known yet; a factor on the
        spread may be 0.

        Raises:
            ValueError: One is unknown, of another kind or out of range.
        """
        if unknown := results.keys() - set(self.taken_over()):
            raise ValueError(f"{', '.join(sorted(unknown))} is nothing that a fit finds")
        for name, value in results.items():
            default = getattr(type(self), name, 1.0)
            if isinstance(default, str):
                fits = isinstance(value, str)
            elif isinstance(default, int):
                fits = type(value) is int and value >= 0
            else:
                least = LEAST.get(name, math.nextafter(0.0, 1.0))
                fits = type(value) in (int, float) and least <= value < math.inf
            if not fits and (value is not None or default is not None):
                raise ValueError(f"{name} is {value!r}")

    def get_extra_state(self) -> Tensor:
        """Return settings and results for a state dict, whose values are tensors: libraries clone and save them."""
        method = getattr(self.reader, "method", None)
        options = {name: getattr(method, name) for name in getattr(method, "fitted", ())}
        return encoded({"settings": self.described(), "results": self.found(), "options": options})

    def set_extra_state(self, state: Any) -> None:
        """Take over the results of a state dict, if its settings are the posterior's own.

        Raises:
            StateDictError: They are not.
        """
        about = self.checked_extra_state(state)
        for name, value in about["results"].items():
            setattr(self, name, value)
        if about["options"]:
            self.reader.method = replace(self.reader.method, **about["options"])

    def checked_extra_state(self, state: Any) -> dict[str, Any]:
        """Return what `get_extra_state` put into a state dict, if its settings are the posterior's own."""
        about, own = decoded(state), self.described()
        theirs = about["settings"]
        if differ := [k for k in {**own, **theirs} if own.get(k) != theirs.get(k) and k not in about["results"]]:
            here, there = (", ".join(f"{k}={d.get(k)!r}" for k in differ) for d in (own, theirs))
            raise StateDictError(
                f"the state dict holds {self.name!r} with {there}, the model has {here}; call bayesify with the same "
                "settings before load_state_dict, or keep models with bayesify.save and load, which restore settings"
            )
        results = {name: value for name, value in about["results"].items() if name in self.taken_over()}
        method: Any = getattr(self.reader, "method", None)
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in about["options"].items()}
        try:
            self.check_results(results)
            if unknown := options.keys() - set(getattr(method, "fitted", ())):
                raise ValueError(f"{', '.join(sorted(unknown))} is nothing that a fit finds")
            if options:
                replace(method, **options)  # which checks the values
        except (ValueError, TypeError) as error:
            raise StateDictError(f"the state dict's {self.name!r} is damaged: {error}; use another copy") from error
        return {**about, "results": results, "options": options}

    def __prepare_scriptable__(self) -> nn.Module:
        """Say why torch.jit.script has to fail; torch asks here before it looks at hooks."""
        raise TypeError(
            "torch.jit.script cannot compile a bayesified model, whose weights are drawn when they are read; call "
            "unbayesify(model) first (to='mean' or 'sample'), or use torch.compile"
        )

    # -- tensors in files --------------------------------------------------------------------------------------

    def check_state(self, state: dict[str, Tensor]) -> None:
        """Raise unless these tensors can be the state of this posterior; `load` asks before it changes anything.

        Args:
            state: Tensors by attribute name, as `state()` returned them.

        Raises:
            ValueError: One is missing, unknown, misshapen, of the wrong type or out of range.
        """
        own = self.state().keys()
        if missing := own - state.keys():
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        if unknown := state.keys() - own - self._parameters.keys() - self._buffers.keys() - set(self.kept):
            raise ValueError(f"{', '.join(sorted(unknown))} is nothing that a {type(self).__name__} has")
        for name, tensor in state.items():
            self.check_tensor(name, tensor)

    def check_tensor(self, name: str, tensor: Tensor) -> None:
        """Raise a ValueError unless one tensor of a stored state can be the attribute of that name.

        By default it is finite, of the parameter's shape and in float32 at least; the prior mean may be a constant, and
        in the parameter's own precision.
        """
        center = name == CENTER
        if tensor.shape != self.shape and not (center and tensor.dim() == 0):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the parameter {tuple(self.shape)}")
        if not tensor.is_floating_point() or (tensor.dtype in LOW_PRECISION and not center):
            raise ValueError(f"{name} is of dtype {tensor.dtype}")
        # A sum is quick, and finite only if every element is; large elements may still add up to infinity.
        if not (math.isfinite(tensor.sum()) or bool(tensor.isfinite().all())):
            raise ValueError(f"{name} is not finite")


def encoded(about: dict[str, Any]) -> Tensor:
    """Return JSON as a tensor of bytes, filled up with blanks."""
    text = json.dumps(about).encode()
    return torch.frombuffer(bytearray(text.ljust(-(-len(text) // PAGE) * PAGE)), dtype=torch.uint8)


def decoded(state: Any) -> dict[str, Any]:
    """Read what `encoded` wrote.

    Raises:
        StateDictError: It is something else.
    """
    try:
        about = json.loads(bytes(state.cpu().tolist()))
        return {part: dict(about[part]) for part in ("settings", "results", "options")}
    except (AttributeError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise StateDictError(
            f"the state dict's {EXTRA} is not what a posterior wrote ({error!r}); it is damaged, or of another library"
        ) from error


def check_state_dict(root: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse a state dict before torch copies any of it; a hook on the bayesified model.

    Raises:
        StateDictError: It is a plain model's, or its posteriors have other settings than the model's.
    """
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


ATTACHABLE: dict[str, Any] = {}
"""By attribute, a class with `state_dict()`, of tensors and what JSON can hold, and `from_state_dict(state)`."""


def attached_state(root: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of what is attached to a model, by "attribute.name", and all the rest by attribute."""
    tensors, rest = dict[str, Tensor](), dict[str, Any]()
    for attribute, kind in ATTACHABLE.items():
        if isinstance(found := root.__dict__.get(attribute), kind):
            state = found.state_dict()
            tensors |= {f"{attribute}.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
            rest[attribute] = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    return tensors, rest


def attached_objects(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """Return the objects that `attached_state` took apart, by attribute.

    Raises:
        KeyError, TypeError, ValueError: Something is missing, unknown or out of range.
    """
    own = {a: {n.removeprefix(f"{a}."): t for n, t in tensors.items() if n.startswith(f"{a}.")} for a in rest}
    if unknown := tensors.keys() - {f"{a}.{name}" for a, state in own.items() for name in state}:
        raise ValueError(f"{sorted(unknown)[0]} belongs to nothing")
    return {
        attribute: ATTACHABLE[attribute].from_state_dict({**state, **own[attribute]})
        for attribute, state in rest.items()
    }


def attach_objects(root: nn.Module, objects: dict[str, Any]) -> None:
    """Attach these objects to a model, in the place of what it has."""
    for attribute in ATTACHABLE:
        root.__dict__.pop(attribute, None)
    root.__dict__.update(objects)
