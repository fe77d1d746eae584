"""Score given text with the posterior: how probable an answer is, and which of its tokens the model is unsure of."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.core.ranks import is_whole
from bayesify.prediction.predictive import entropy_of

from .evaluation import PinnedSamples, default_samples
from .generation import evaluating


@dataclass(frozen=True, eq=False)
class Scored:
    """What `score` returns, for S samples, B sequences and T answer tokens.

    Attributes:
        token_log_prob: Log-probability of each answer token given what precedes it, (S, B, T); 0 where it is ignored.
        entropy: Entropy of the averaged distribution at each token (total uncertainty), (B, T); NaN where ignored.
        mutual_information: Its epistemic part, on which the samples disagree, (B, T); NaN where ignored.
    """

    token_log_prob: Tensor
    entropy: Tensor
    mutual_information: Tensor

    @property
    def log_prob(self) -> Tensor:
        """Log-probability of each whole answer under each sample, (S, B)."""
        return self.token_log_prob.sum(-1)

    @property
    def mean_log_prob(self) -> Tensor:
        """Log of the answer's probability averaged over the samples, log 1/S sum_s p_s(answer), (B,)."""
        return torch.logsumexp(self.log_prob, 0) - math.log(len(self.log_prob))

    def __repr__(self) -> str:
        count, rows, longest = self.token_log_prob.shape
        return (
            f"Scored({rows} answers, up to {longest} tokens, {count} samples, "
            f"log prob {float(self.mean_log_prob.mean()):.4f})"
        )


def score(
    model: Any,
    prompt_ids: Tensor,
    answer_ids: Tensor,
    *,
    samples: int | None = None,
    seed: int | None = None,
    prompt_mask: Tensor | None = None,
) -> Scored:
    """Score answers that came from anywhere: another model, a person, a list of choices.

    Each sample costs one forward pass over prompts and answers together.

    Args:
        model: A bayesified causal language model, also under PEFT, or a mixture of such models.
        prompt_ids: The prompts' tokens, (B, P), with padding on the left.
        answer_ids: The answers' tokens, (B, T); negative ones, such as -100, are padding on the right and do not count.
        samples: How many posterior samples; 0 is the posterior mean, None is what the method takes by default.
        seed: Which samples; None takes one number from torch's global generator.
        prompt_mask: 1 for the prompt's tokens and 0 for its padding, (B, P); None counts every token.

    Returns:
        The log-probabilities and the uncertainty of every answer token.

    Raises:
        ValueError: The tokens are not two-dimensional integers of one batch size, or an argument is out of range.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from bayesify import bayesify
        >>> from bayesify.integrations.huggingface import score
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)
        >>> model = bayesify(GPT2LMHeadModel(config), "vi")
        >>> score(model, torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]]), samples=3, seed=0).log_prob.shape
        torch.Size([3, 1])
    """
    _check(prompt_ids, answer_ids, prompt_mask)
    if samples is not None and (not is_whole(samples) or samples < 0):
        raise ValueError(f"samples must be an integer >= 0, or None, got {samples!r}")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError("score is for causal language models; an encoder-decoder's loss scores its labels")
    counts = answer_ids >= 0
    seen = torch.ones_like(prompt_ids) if prompt_mask is None else prompt_mask.to(prompt_ids)
    mask = torch.cat([seen, counts.to(seen)], 1)
    tokens = answer_ids.clamp_min(0)
    batch = {"input_ids": torch.cat([prompt_ids, tokens], 1), "attention_mask": mask, "use_cache": False}
    if prompt_mask is not None:
        batch["position_ids"] = (mask.long().cumsum(1) - 1).clamp_min(0)
    each, entropies, total = [], torch.zeros(()), None
    thetas = PinnedSamples(model, default_samples(model) if samples is None else samples, seed)
    with evaluating(model), torch.no_grad():
        for _ in thetas:
            logits = model(**batch).logits[:, prompt_ids.shape[1] - 1 : -1].float()
            log_probs = F.log_softmax(logits, -1)
            found = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            each.append(torch.where(counts, found, torch.zeros_like(found)))
            entropies = entropies.to(logits) + entropy_of(log_probs)
            total = log_probs if total is None else torch.logaddexp(total, log_probs)
    assert total is not None  # there is at least the mean
    entropy = entropy_of(total - math.log(len(each)))
    information = (entropy - entropies / len(each)).clamp_min(0)
    return Scored(
        token_log_prob=torch.stack(each),
        entropy=entropy.masked_fill(~counts, torch.nan),
        mutual_information=information.masked_fill(~counts, torch.nan),
    )


def semantic_entropy(answers: Sequence[Sequence[str]], same: Callable[[str, str], bool]) -> Tensor:
    """Return the entropy of the meanings among each question's sampled answers.

    Answers that mean the same form a cluster: each joins the first cluster whose first answer `same` accepts it for.
    With the clusters' shares p_c the entropy is -sum_c p_c log p_c (Kuhn et al. 2023, with equal weights).

    Args:
        answers: The sampled texts of each question, as `Generations.decode` returns them.
        same: Whether two texts mean the same: equality after normalization, or an entailment model both ways.

    Returns:
        One entropy per question, in nats: 0 where all answers agree.

    Raises:
        ValueError: A question has no answers.

    Example:
        >>> found = semantic_entropy([["Paris", "paris"], ["Rome", "Oslo"]], lambda a, b: a.lower() == b.lower())
        >>> [round(x, 4) for x in found.tolist()]
        [0.0, 0.6931]
    """
    found = []
    for number, texts in enumerate(answers):
        if not texts:
            raise ValueError(f"question {number} has no answers; generate with samples >= 1")
        clusters: list[list[str]] = []
        for text in texts:
            own = next((cluster for cluster in clusters if same(cluster[0], text)), None)
            clusters.append([text]) if own is None else own.append(text)
        shares = [len(cluster) / len(texts) for cluster in clusters]
        found.append(max(0.0, -sum(p * math.log(p) for p in shares)))
    return torch.tensor(found)


def _check(prompt_ids: Any, answer_ids: Any, prompt_mask: Any) -> None:
    """Raise unless these are tokens of one batch."""
    for name, ids in (("prompt_ids", prompt_ids), ("answer_ids", answer_ids)):
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.shape[1]:
            got = f"shape {tuple(ids.shape)}, {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"{name} must be integers of shape (batch, length), got {got}; use return_tensors='pt'")
    if len(prompt_ids) != len(answer_ids):
        raise ValueError(f"there are {len(prompt_ids)} prompts and {len(answer_ids)} answers; repeat the prompts")
    if prompt_mask is not None and prompt_mask.shape != prompt_ids.shape:
        raise ValueError(f"prompt_mask must be of shape {tuple(prompt_ids.shape)}, got {tuple(prompt_mask.shape)}")
