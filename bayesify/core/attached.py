"""What is saved with a model beside its posterior: objects that other parts of the package keep as its attributes."""

from typing import Any

from torch import Tensor, nn

classes: dict[str, Any] = {}
"""By attribute, a class with `state_dict()`, of tensors and what JSON can hold, and `from_state_dict(state)`."""


def taken(root: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of what is attached to a model, by "attribute.name", and all the rest by attribute."""
    tensors, rest = dict[str, Tensor](), dict[str, Any]()
    for attribute, kind in classes.items():
        if isinstance(found := root.__dict__.get(attribute), kind):
            state = found.state_dict()
            tensors |= {f"{attribute}.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
            rest[attribute] = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    return tensors, rest


def made(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """Return the objects that `taken` took apart, by attribute.

    Raises:
        KeyError, TypeError, ValueError: Something is missing, unknown or out of range.
    """
    own = {a: {n.removeprefix(f"{a}."): t for n, t in tensors.items() if n.startswith(f"{a}.")} for a in rest}
    if unknown := tensors.keys() - {f"{a}.{name}" for a, state in own.items() for name in state}:
        raise ValueError(f"{sorted(unknown)[0]} belongs to nothing")
    return {
        attribute: classes[attribute].from_state_dict({**state, **own[attribute]}) for attribute, state in rest.items()
    }


def put(root: nn.Module, objects: dict[str, Any]) -> None:
    """Attach these objects to a model, in the place of what it has."""
    for attribute in classes:
        root.__dict__.pop(attribute, None)
    root.__dict__.update(objects)
