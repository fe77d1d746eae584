"""Plain PEFT adapters drawn from a Bayesian one, for servers that know adapters and nothing of posteriors."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayesify.core.mixture import Mixture, mixture_in
from bayesify.core.ranks import is_whole
from bayesify.core.scopes import root_of, samples
from bayesify.integrations.folders import is_adapter, plain_state_dicts

from ..extras import extra


def export_adapters(
    model: nn.Module,
    k: int,
    dir: "str | os.PathLike[str]",  # noqa: A002
    *,
    seed: int | None = None,
) -> list[Path]:
    """Write k plain PEFT adapters, each one theta of a Bayesian adapter, for stock multi-adapter serving.

    Adapter i is draw i of `samples(model, k, seed)`, so that the average of the served adapters' probabilities is the
    prediction of `predict` with these samples. A mixture's members take turns. The folders are plain PEFT's.

    Args:
        model: A bayesified PEFT model, a mixture of some, or a module that contains one.
        k: How many adapters.
        dir: The folder that gets `sample-0` to `sample-{k-1}`.
        seed: Which draws; None takes one number from torch's global generator.

    Returns:
        The adapters' folders.

    Raises:
        TypeError: The model is no PEFT model.
        ValueError: k is out of range, or a weight with a spread is none that an adapter's folder holds.

    Example:
        >>> import tempfile
        >>> from peft import LoraConfig, get_peft_model
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from bayesify import bayesify
        >>> from bayesify.integrations.huggingface import export_adapters
        >>> small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
        >>> lora = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
        >>> adapted = get_peft_model(BertForSequenceClassification(BertConfig(**small)), lora)
        >>> model = bayesify(adapted, "vi", include="*lora_*", prior_mean="zero")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [one.name for one in export_adapters(model, 3, folder)]
        ['sample-0', 'sample-1', 'sample-2']
    """
    if not is_whole(k) or k < 1:
        raise ValueError(f"k must be an integer >= 1, got {k!r}")
    whole = mixture_in(model) or root_of(model)[0]
    members: list[Any] = list(whole.members) if isinstance(whole, Mixture) else [whole]
    for member in members:
        _check_adapter(member)
    folders = []
    for i in samples(whole, k, seed):
        member = members[i % len(members)]
        folder = Path(dir) / f"sample-{i}"
        with torch.no_grad():
            thetas = {p: p(p.original).detach() for p in member._bayesify_scope.posteriors}
        with plain_state_dicts(member, thetas):
            type(member).save_pretrained(member, folder)
        folders.append(folder)
    return folders


def _check_adapter(model: Any) -> None:
    """Raise unless a model is an adapter whose folder holds all that is Bayesian."""
    if not is_adapter(model):
        raise TypeError(
            f"export_adapters is for PEFT models, got {type(model).__name__}; bake a draw of another into a copy: "
            "unbayesify(copy.deepcopy(model), to='sample')"
        )
    with extra("peft", "peft"):
        from peft import get_peft_model_state_dict

    with plain_state_dicts(model):
        state = model.state_dict()
        kept = [get_peft_model_state_dict(model, state_dict=state, adapter_name=name) for name in model.peft_config]
    held = {t.data_ptr() for part in kept for t in part.values() if isinstance(t, torch.Tensor)}
    means = {name: t.data_ptr() for name, t in state.items()}
    lost = [p.name for p in model._bayesify_scope.posteriors if p.moves and means.get(p.name) not in held]
    if lost:
        raise ValueError(
            f"{lost[0]!r} and {len(lost) - 1} others have a spread, and an adapter's folder does not hold them; "
            "bayesify with include='*lora_*', or add their module to modules_to_save of the LoraConfig"
        )
