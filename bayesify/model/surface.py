"""How a bayesified model meets the tools around it: its class's name, pickling, assignment, state dicts, folders.

`wrap` puts all of this on, `unbayesify` takes it off again.
"""

from typing import Any

from torch import nn

from bayesify.model import folders
from bayesify.model.stored import check_state_dict


def put_on(model: nn.Module) -> None:
    """Let a bayesified model refuse the state dicts that are not its own, and write folders that others can read."""
    folders.put_on(model)
    model.register_load_state_dict_pre_hook(check_state_dict)  # type: ignore[no-untyped-call]


def take_off(model: nn.Module) -> None:
    """Undo `put_on`."""
    folders.take_off(model)
    hooks: dict[int, Any] = model._load_state_dict_pre_hooks
    for key in [k for k, hook in hooks.items() if getattr(hook, "hook", None) is check_state_dict]:
        del hooks[key]


def adapt_class(module: nn.Module) -> None:
    """Let the class that torch derives for a parametrized module go by the name of its own: libraries look it up."""
    derived: Any = type(module)
    parent = derived.__bases__[0]
    for attribute in ("__module__", "__qualname__", "__name__"):
        setattr(derived, attribute, getattr(parent, attribute))

    def assign(self: nn.Module, name: str, value: Any) -> None:
        _refuse_to_assign(self, name)
        parent.__setattr__(self, name, value)

    derived.__setattr__ = assign
    derived.__getstate__ = _refuse_to_pickle


def _refuse_to_pickle(module: nn.Module) -> Any:
    """Say how a bayesified model is kept, in the place of torch's own refusal."""
    raise RuntimeError(
        "a bayesified model cannot be pickled, nor copied without its parameters: this is only supported through "
        "state_dict(), bayesify.save and load, and copy.deepcopy"
    )


def _refuse_to_assign(module: nn.Module, name: str) -> None:
    """Say how a weight is written that is drawn when it is read."""
    if name in module.__dict__.get("_modules", {}).get("parametrizations", ()):
        raise AttributeError(
            f"{name!r} of a bayesified {type(module).__name__} is drawn when it is read and cannot be assigned; write "
            f"to its mean, `with torch.no_grad(): module.parametrizations.{name}.original.copy_(value)`, or assign it "
            "between unbayesify(model) and bayesify(model, ...)"
        )
