"""Generate text with the posterior: each sequence under one theta, and what the thetas think of every token.

Without a pinned draw every token of a sequence would come from another model, while the cache mixes them.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bayesify.core.mixture import Mixture
from bayesify.core.ranks import is_whole
from bayesify.core.scopes import scopes_of
from bayesify.prediction.predictive import entropy_of

from .evaluation import Average, PinnedSamples

PADDING = -1


@dataclass(frozen=True, eq=False)
class Generations:
    """What `generate` returns; S samples of B inputs, T generated tokens at most.

    Attributes:
        sequences: What the model's own `generate` gave for each sample, (S, B, L), padded on the right.
        tokens: The generated tokens alone, (S, B, T), -1 after a sequence's end.
        entropy: Entropy of the averaged distribution of each token (total uncertainty), (S, B, T), NaN after the end.
        mutual_information: Its part that the thetas disagree about (epistemic), (S, B, T), NaN after the end.
        agreement: How far two samples' sequences agree, on average over the pairs, (B,): the number of positions with
            the same token over the longer one's length; 1 for a single sample.
    """

    sequences: Tensor
    tokens: Tensor
    entropy: Tensor
    mutual_information: Tensor
    agreement: Tensor

    def decode(self, tokenizer: Any, **options: Any) -> list[list[str]]:
        """Return the generated text of each input: one string per sample.

        Args:
            tokenizer: The model's tokenizer.
            **options: For its `decode`; special tokens are left out by default.
        """
        options = {"skip_special_tokens": True, **options}
        return [
            [tokenizer.decode(row[row != PADDING].tolist(), **options) for row in self.tokens[:, b]]
            for b in range(self.tokens.shape[1])
        ]

    def __repr__(self) -> str:
        samples, inputs, longest = self.tokens.shape
        return (
            f"Generations({samples} samples of {inputs} inputs, up to {longest} tokens, "
            f"agreement {float(self.agreement.mean()):.3f}, entropy {float(self.entropy.nanmean()):.4f}, "
            f"mutual information {float(self.mutual_information.nanmean()):.4f})"
        )


def generate(model: Any, *, samples: int = 8, seed: int | None = None, **inputs: Any) -> Generations:
    """Generate once per posterior sample, and measure how sure the posterior is of every token.

    Caches, beam search, sampling and every other option of the model's own `generate` work as they do there. Several
    sequences per input (`num_return_sequences`) count as that many inputs.

    Args:
        model: A bayesified model with a `generate` method, also under PEFT, or a mixture of such models.
        samples: How many posterior samples; 0 is the posterior mean.
        seed: Which samples; None takes one number from torch's global generator.
        **inputs: The model's inputs, and options of its `generate`, such as `max_new_tokens`.

    Returns:
        The sequences with their uncertainty.

    Raises:
        ValueError: The model has no posterior or cannot generate, or the inputs are embeddings.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from bayesify import bayesify
        >>> from bayesify.integrations.huggingface import generate
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9, bos_token_id=0, eos_token_id=0)
        >>> model = bayesify(GPT2LMHeadModel(config), "vi")
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> found = generate(model, input_ids=ids, attention_mask=ids > 0, samples=2, max_new_tokens=4, pad_token_id=0)
        >>> len(found.tokens)
        2
    """
    scopes_of(model)
    mixture = model if isinstance(model, Mixture) else None
    one: Any = mixture.members[0] if mixture else model
    if not hasattr(one, "generate"):
        raise ValueError(f"{type(one).__name__} cannot generate; use a model with a language head")
    if not is_whole(samples) or samples < 0:
        raise ValueError(f"samples must be an integer >= 0, got {samples!r}")
    if "inputs_embeds" in inputs:
        raise ValueError("generate takes input_ids, got inputs_embeds: without tokens there are none to be sure of")
    plain = one.get_base_model() if hasattr(one, "get_base_model") else one
    if "inputs" in inputs:
        inputs[plain.main_input_name] = inputs.pop("inputs")
    thetas = PinnedSamples(model, samples, seed)
    with evaluating(model), torch.no_grad():
        options = {**inputs, "return_dict_in_generate": False}
        members: list[Any] = list(mixture.members) if mixture else [model]
        made = [members[i % len(members)].generate(**options) for i in thetas]
        task = Scoring(plain, inputs, made[0])
        tokens = [task.tokens(sequences) for sequences in made]
        scores = [task.score(model, thetas, s, t) for s, t in zip(made, tokens, strict=True)]
    joined = _join(tokens, PADDING)
    return Generations(
        sequences=_join(made, _pad_id(plain, inputs)),
        tokens=joined,
        entropy=_join([total for total, _ in scores], torch.nan),
        mutual_information=_join([epistemic for _, epistemic in scores], torch.nan),
        agreement=agreement(joined),
    )


class Scoring:
    """How a model reads its own sequences again: all tokens at once, given the ones before.

    Args:
        model: The model, without PEFT around it.
        inputs: What `generate` was given.
        sequences: What it returned.
    """

    def __init__(self, model: Any, inputs: dict[str, Any], sequences: Tensor) -> None:
        known = inspect.signature(model.forward).parameters
        self.inputs = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and k in known}
        self.decodes_only = not getattr(model.config, "is_encoder_decoder", False)
        prompt = self.inputs.pop("input_ids" if self.decodes_only else "decoder_input_ids", None)
        self.prompt = 1 if prompt is None else prompt.shape[1]
        first = next(iter(self.inputs.values()), prompt)
        self.repeats = 1 if first is None else max(len(sequences) // len(first), 1)
        self.takes_positions = "position_ids" in known and self.decodes_only
        end = _setting(model, inputs, "eos_token_id")
        self.ends = [] if end is None else torch.as_tensor(end).flatten().tolist()

    def tokens(self, sequences: Tensor) -> Tensor:
        """Return the generated tokens, -1 after the one that ends the sequence."""
        new = sequences[:, self.prompt :].clone()
        ended = torch.isin(new, torch.tensor(self.ends, dtype=new.dtype, device=new.device)).cumsum(1)
        before = torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], 1)
        return new.masked_fill(before > 0, PADDING)

    def score(self, model: Any, thetas: PinnedSamples, sequences: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return entropy and mutual information of each generated token over all thetas."""
        average = Average("classes")
        batch = self._batch(sequences, tokens)
        for _ in thetas:
            logits = model(**batch).logits
            average.add(logits[:, self.prompt - 1 : -1].detach())
        log_probs = average.result()
        ended = tokens == PADDING
        total, epistemic = entropy_of(log_probs), average.mutual_information(log_probs)
        return total.masked_fill(ended, torch.nan), epistemic.masked_fill(ended, torch.nan)

    def _batch(self, sequences: Tensor, tokens: Tensor) -> dict[str, Any]:
        """Return the forward's inputs that give a distribution for every generated token."""
        batch: dict[str, Any] = {k: v.repeat_interleave(self.repeats, 0) for k, v in self.inputs.items()}
        if not self.decodes_only:
            return {**batch, "decoder_input_ids": sequences}
        seen = batch.get("attention_mask", torch.ones_like(sequences[:, : self.prompt]))
        mask = torch.cat([seen, (tokens != PADDING).to(seen)], 1)
        batch = {"input_ids": sequences, "attention_mask": mask, "use_cache": False}
        if self.takes_positions:
            # Padding on the left must not count, as it does not while generating.
            batch["position_ids"] = (mask.long().cumsum(1) - 1).clamp_min(0)
        return batch


def agreement(tokens: Tensor) -> Tensor:
    """Return how far the samples agree, of tokens (S, B, T) with -1 after the end; see `Generations`."""
    pairs = list(combinations(range(len(tokens)), 2))
    if not pairs:
        return torch.ones(tokens.shape[1])
    lengths = (tokens != PADDING).sum(-1)
    total = torch.zeros(tokens.shape[1], dtype=torch.float64)
    for i, j in pairs:
        same = ((tokens[i] == tokens[j]) & (tokens[i] != PADDING)).sum(-1)
        total += (same / torch.maximum(lengths[i], lengths[j]).clamp_min(1)).cpu()
    return (total / len(pairs)).float()


def _join(rows: list[Tensor], padding: float) -> Tensor:
    """Stack (B, T) tensors of different T to (S, B, T)."""
    padded = pad_sequence([row.transpose(0, 1) for row in rows], batch_first=True, padding_value=padding)
    return padded.transpose(1, 2)


def _setting(model: Any, inputs: dict[str, Any], name: str) -> Any:
    """Return an option of `generate`: as it was given, or as the configuration has it."""
    settings = inputs.get("generation_config") or model.generation_config
    return inputs.get(name, getattr(settings, name))


def _pad_id(model: Any, inputs: dict[str, Any]) -> int:
    """Return the token that fills up sequences."""
    found = _setting(model, inputs, "pad_token_id")
    return 0 if found is None else int(found)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; the training flags are as before afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
