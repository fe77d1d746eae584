"""Folders in Hugging Face's layout: the posterior mean for everybody, the posterior beside it for bayesify.

The mean is written by the model's own `save_pretrained`, so that sharding, ties and renamed weights are its business.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi
from torch import nn
from transformers.utils.hub import cached_file

from bayesify.core.checkpoint import POSTERIOR_FILE, load, save_posterior
from bayesify.core.mixture import Mixture, mixture_in
from bayesify.core.scopes import root_of, scopes_of
from bayesify.integrations.card import write_card
from bayesify.integrations.folders import is_adapter

from ..extras import extra

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
HUB = ("token", "cache_dir", "local_files_only", "force_download")  # which every download takes


def save_pretrained(
    model: nn.Module,
    dir: "str | os.PathLike[str]",  # noqa: A002
    *,
    scores: Mapping[str, float] | None = None,
    **options: Any,
) -> None:
    """Save a bayesified Transformers or PEFT model into a folder in Hugging Face's layout.

    The same as the bayesified model's own `model.save_pretrained(dir)`, for any module that contains it.
    `AutoModelFor....from_pretrained` (or `PeftModel.from_pretrained`) loads the folder as the posterior mean, without
    bayesify. Next to an adapter the posterior holds what is trained, not the base model. A mixture's folder is read
    without bayesify as its first member. `README.md` gets a model card: method, prior, scores and how to load it.

    Args:
        model: The bayesified model, or a module that contains it (such as DDP).
        dir: The folder, which is made if it does not exist.
        scores: What the model card says of the model's quality, such as `predict(model, test).scores`; by default the
            last evaluation of `BayesTrainer`, if there was one since the last training step.
        **options: For the model's own `save_pretrained`, such as `max_shard_size`, or `push_to_hub` and `repo_id`.

    Raises:
        ValueError: The model has no posterior, or only a part of it was bayesified.
        TypeError: It is not a model of Transformers or PEFT.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from bayesify import bayesify
        >>> from bayesify.integrations.huggingface import from_pretrained, save_pretrained
        >>> small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
        >>> model = bayesify(BertForSequenceClassification(BertConfig(**small)), "vi")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(model, folder)
        ...     again = from_pretrained(folder)
    """
    if (mixture := mixture_in(model)) is not None:
        _save_mixture(mixture, dir, scores, **options)
        return
    root, _ = root_of(model)
    if not hasattr(root, "save_pretrained"):
        raise TypeError(
            f"save_pretrained is for models of Transformers and PEFT, got {type(root).__name__}; use bayesify.save"
        )
    if isinstance(model, transformers.PreTrainedModel) and root is not model:
        raise ValueError(
            f"only a part of the model ({type(root).__name__}) was bayesified, which a folder cannot say; "
            "bayesify the whole model with include=..., or use bayesify.save on the part"
        )
    root.save_pretrained(dir, scores=scores, **options)  # type: ignore[operator]


def _save_mixture(
    mixture: Mixture,
    dir: "str | os.PathLike[str]",  # noqa: A002
    scores: Mapping[str, float] | None,
    *,
    push_to_hub: bool = False,
    repo_id: str | None = None,
    **options: Any,
) -> None:
    """Write the first member's folder, and the posteriors and the card of all."""
    first = mixture.members[0]
    save_pretrained(first, dir, **options)
    save_posterior(mixture, dir, frozen=not is_adapter(first))
    write_mixture_card(mixture, dir, scores)
    if push_to_hub:
        hub = {name: options.get(name) for name in ("token", "private")}
        commit = {name: options[name] for name in ("commit_message", "revision", "create_pr") if name in options}
        api = HfApi(token=hub["token"])
        name = api.create_repo(repo_id or Path(dir).name, private=hub["private"], exist_ok=True).repo_id
        api.upload_folder(repo_id=name, folder_path=Path(dir), **commit)


def write_mixture_card(
    mixture: Mixture,
    dir: "str | os.PathLike[str]",  # noqa: A002
    scores: Mapping[str, float] | None = None,
) -> None:
    """Write the model card of a mixture."""
    if scores is not None:
        mixture.scores = dict(scores)
    first = mixture.members[0]
    library = "peft" if is_adapter(first) else "transformers"
    write_card(Path(dir), scopes_of(mixture), mixture.scores, name=type(first).__name__, library=library)


def from_pretrained(
    dir: "str | os.PathLike[str]",  # noqa: A002
    model_class: Any = None,
    *,
    base: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Load a folder (or hub id) of `save_pretrained` as the bayesified model that it was.

    Args:
        dir: The folder, or the id of a repository on the hub.
        model_class: Such as `AutoModelForSequenceClassification`; by default the class that the folder names.
        base: For adapters, the base model; by default the one that the adapter names, as `model_class`.
        **options: For the class's `from_pretrained`, such as `dtype`; and for the hub: `revision` of this repository,
            `token`, `cache_dir`, `local_files_only`, `force_download`.

    Returns:
        The model, in eval mode: merging an adapter bakes in the posterior mean.

    Raises:
        ValueError: The folder has no posterior, no configuration, or does not fit the model.
    """
    hub = {name: options.pop(name) for name in (*HUB, "revision") if name in options}
    posterior = _found(dir, POSTERIOR_FILE, hub)
    if posterior is None:
        raise ValueError(
            f"{os.fspath(dir)} has no {POSTERIOR_FILE}; give a folder of save_pretrained, or load the plain model "
            "with its own from_pretrained and call bayesify on it"
        )
    adapter = _found(dir, ADAPTER_CONFIG, hub)
    if adapter is None:
        model = (model_class or _named_class(dir, hub)).from_pretrained(dir, **options, **hub)
    else:
        with extra("peft", "peft"):
            import peft

        if base is None:
            origin = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
            common = {name: value for name, value in hub.items() if name != "revision"}
            base = (model_class or _named_class(origin, common)).from_pretrained(origin, **options, **common)
        model = peft.PeftModel.from_pretrained(base, dir, is_trainable=True, **hub)
    return load(model, posterior.parent).eval()


def _found(dir: "str | os.PathLike[str]", name: str, hub: dict[str, Any]) -> Path | None:  # noqa: A002
    """Return the path of a file of a folder, or of a repository (downloaded if need be); None where it has none."""
    try:
        found = cached_file(dir, name, _raise_exceptions_for_missing_entries=False, **hub)
    except OSError as error:
        raise ValueError(f"{os.fspath(dir)} is no folder, and no repository of the hub either: {error}") from error
    return None if found is None else Path(found)


def _named_class(dir: "str | os.PathLike[str]", hub: dict[str, Any]) -> Any:  # noqa: A002
    """Return the class that a folder's configuration names."""
    config = Path(str(cached_file(dir, CONFIG, **hub)))
    names = json.loads(config.read_text(encoding="utf-8")).get("architectures") or [None]
    found = getattr(transformers, names[0] or "", None)
    if found is None:
        raise ValueError(
            f"{config} names the class {names[0]!r}, which transformers does not have; pass model_class=, "
            "such as AutoModelForSequenceClassification"
        )
    return found
