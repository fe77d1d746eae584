"""A model's own `save_pretrained` and `push_to_hub` write the posterior mean under plain names, posterior and card.

A parametrized model's state dict has names that no plain model knows: a library that wrote them would load the folder
as random weights. So a bayesified model's `save_pretrained`, whichever library it is of, sees plain state dicts.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

from torch import Tensor, nn

from bayesify.core.modes import MEAN, block_of, drop_from_state_dict, override
from bayesify.core.posterior import Posterior
from bayesify.core.stored import EXTRA

SAVE, UPLOAD = "save_pretrained", "_upload_modified_files"
HUB_OPTIONS = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "max_shard_size")


def put_on(model: nn.Module) -> None:
    """Let `save_pretrained` of a bayesified model, and of its parts, write what a plain model can load."""
    for module in model.modules():
        if hasattr(type(module), SAVE):
            module.save_pretrained = MethodType(_save_pretrained, module)  # type: ignore[assignment]
        if hasattr(type(module), UPLOAD):
            setattr(module, UPLOAD, MethodType(_upload, module))

        for name, merge in MERGES.items():
            if hasattr(type(module), name):
                setattr(module, name, MethodType(merge, module))


def take_off(model: nn.Module) -> None:
    """Undo `put_on`."""
    for module in model.modules():
        for name, ours in ((SAVE, _save_pretrained), (UPLOAD, _upload), *MERGES.items()):
            if getattr(module.__dict__.get(name), "__func__", None) is ours:
                delattr(module, name)


def _at_the_mean(name: str) -> Any:
    """Return a method of PEFT's adapters that reads the weights of the block that is in force, or else the mean."""

    def merge(model: Any, *args: Any, **options: Any) -> Any:
        from bayesify.core.scopes import scopes_of  # which needs all of this folder

        with override([scope for scope in scopes_of(model) if block_of(scope) is None], MEAN):
            return getattr(type(model), name)(model, *args, **options)

    return merge


MERGES = {name: _at_the_mean(name) for name in ("merge_and_unload", "merge_adapter")}


def _save_pretrained(model: Any, save_directory: "str | os.PathLike[str]", **options: Any) -> Any:
    """Write the posterior mean by the model's own `save_pretrained`, and the posterior beside it.

    Args:
        model: The bayesified model, or a part of it, of which the mean alone is written.
        save_directory: The folder.
        **options: The library's own, and `scores`, what the model card says of its quality.
    """
    from bayesify.core.checkpoint import save_posterior  # which needs all of this folder

    push = options.pop("push_to_hub", False)  # after the posterior is there
    repository = options.pop("repo_id", Path(save_directory).name) if push else None
    if "_bayesify_scope" in model.__dict__ and (scores := options.pop("scores", None)) is not None:
        model._bayesify_scope.scores = dict(scores)
    if options.get("state_dict") is not None:
        options["state_dict"] = plain_state(model, options["state_dict"])
    with plain_state_dicts(model):
        written = type(model).save_pretrained(model, save_directory, **options)
    if "_bayesify_scope" in model.__dict__ and options.get("is_main_process", True):
        save_posterior(model, save_directory, frozen=not is_adapter(model))
        write_own_card(model, save_directory)
    if push:
        model.push_to_hub(repository, **{k: v for k, v in options.items() if k in HUB_OPTIONS})
    return written


def _upload(model: Any, folder: "str | os.PathLike[str]", *args: Any, **options: Any) -> Any:
    """Upload a folder; Transformers has put a template in the place of its card, which gets our part again."""
    if "_bayesify_scope" in model.__dict__:
        write_own_card(model, folder)
    return getattr(type(model), UPLOAD)(model, folder, *args, **options)


def write_own_card(model: Any, folder: "str | os.PathLike[str]") -> None:
    """Write the card of a bayesified model into its folder."""
    from bayesify.integrations.card import write_card  # which knows what scopes are

    scope: Any = model._bayesify_scope
    name = type(model).__name__.removeprefix("Parametrized")
    library = "peft" if is_adapter(model) else type(model).__module__.partition(".")[0]
    write_card(Path(folder), [scope], scope.scores, name=name, library=library)


def is_adapter(model: nn.Module) -> bool:
    """Return whether a model is a PEFT model, whose base is kept elsewhere."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def plain_state(model: nn.Module, state_dict: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state dict that the plain model would have at the posterior mean, ties under all their names.

    Args:
        model: A bayesified model, or a part of one.
        state_dict: What its own `state_dict()` gave, or a library that gathered it; None asks the model.
    """
    plain = dict(model.state_dict() if state_dict is None else state_dict)
    means: dict[Posterior, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        _translate(module, plain, f"{path}." if path else "", means)
    drop_from_state_dict(plain)
    return plain


@contextmanager
def plain_state_dicts(model: nn.Module, thetas: Mapping[Posterior, Tensor] | None = None) -> Iterator[None]:
    """Let `state_dict()` of a model and of each of its modules be the plain model's.

    Args:
        model: A bayesified model, or a part of one.
        thetas: The weights of some posteriors; the others, and all of them by default, are at their means.
    """
    means = dict(thetas or {})  # once, so that tied weights share their memory

    def translate(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        _translate(module, state_dict, prefix, means)
        drop_from_state_dict(state_dict)

    with ExitStack() as hooks:
        for module in model.modules():
            if _posteriors(module) or "_bayesify_scope" in module.__dict__:
                hooks.callback(module.register_state_dict_post_hook(translate).remove)  # type: ignore[no-untyped-call]
        yield


def _posteriors(module: nn.Module) -> dict[str, Posterior]:
    """Return the posteriors on a module's own parameters, by attribute."""
    lists: Any = module._modules.get("parametrizations") or {}
    return {name: kept[0] for name, kept in lists.items() if isinstance(kept[0], Posterior)}


def _translate(module: nn.Module, state_dict: dict[str, Any], prefix: str, means: dict[Posterior, Tensor]) -> None:
    """Replace a module's own posteriors in a state dict by their means."""
    for attribute, posterior in _posteriors(module).items():
        stem = f"{prefix}parametrizations.{attribute}."
        original = state_dict.pop(f"{stem}original", None)
        if original is None:
            continue  # a plain state dict already, or a part of one
        for name in (*posterior.state(), EXTRA):
            state_dict.pop(f"{stem}0.{name}", None)
        if posterior not in means:
            means[posterior] = posterior.mean_theta(original).detach()
        state_dict[prefix + attribute] = means[posterior]
