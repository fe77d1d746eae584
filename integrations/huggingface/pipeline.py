"""Hugging Face's pipelines with uncertainty: the scores of the posterior's average, and how much of them is doubt."""

import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from bayesify.core.mixture import Mixture
from bayesify.core.ranks import is_whole
from bayesify.core.scopes import scopes_of
from bayesify.prediction.novelty import Watch
from bayesify.prediction.predict import predict
from bayesify.prediction.predictive import entropy_of

from .evaluation import Average, PinnedSamples, default_samples
from .hub import from_pretrained

TASKS = {  # Hugging Face's class, and what turns its inputs into tensors
    "text-classification": ("TextClassificationPipeline", "tokenizer"),
    "sentiment-analysis": ("TextClassificationPipeline", "tokenizer"),
    "image-classification": ("ImageClassificationPipeline", "image_processor"),
    "audio-classification": ("AudioClassificationPipeline", "feature_extractor"),
}


@dataclass
class Averaged(ModelOutput):
    """What the samples say together: log-probabilities in the place of logits, and two measures of doubt."""

    logits: Tensor | None = None
    entropy: Tensor | None = None
    mutual_information: Tensor | None = None
    novelty_pvalue: Tensor | None = None


def pipeline(
    task: str,
    model: Any,
    *,
    samples: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Build Hugging Face's pipeline for a Bayesian classifier; every result says how sure the posterior is.

    A result has, beside its label and the averaged score, `entropy` (all of the doubt about this input, in nats) and
    `mutual_information` (the part of it that the samples disagree about); of a model with `fit_novelty` also
    `novelty_pvalue`, the share of known inputs that are at least as strange. The samples are drawn once, at the first
    input: make another pipeline where the model has been trained on. A single label is a yes or no, as in Hugging
    Face's own.

    Args:
        task: "text-classification", "image-classification" or "audio-classification".
        model: A bayesified model or a mixture, or the folder or hub id of one.
        samples: How many posterior samples; 0 is the posterior mean. None takes the best way that the posterior has, as
            `predict` does: the closed form of a last layer, else the method's `nst` samples.
        seed: Which samples.
        **options: For `transformers.pipeline`, such as `tokenizer`, `image_processor`, `device` or `top_k`; a folder's
            own tokenizer or processor is found.

    Returns:
        The pipeline.

    Raises:
        ValueError: The task is another, the model has no posterior or is a regression, or `samples` is out of range.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
        >>> from bayesify import bayesify
        >>> from bayesify.integrations.huggingface import pipeline
        >>> words = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "fine", "film"])}
        >>> small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=7)
        >>> model = bayesify(BertForSequenceClassification(BertConfig(**small)), "vi")
        >>> classify = pipeline("text-classification", model, tokenizer=BertTokenizer(vocab=words), device="cpu")
        >>> sorted(classify("a fine film")[0])
        ['entropy', 'label', 'mutual_information', 'score']
    """
    if task not in TASKS:
        raise ValueError(
            f"task must be one of {sorted(TASKS)}, got {task!r}; for texts use generate, for others predict(model, ...)"
        )
    if samples is not None and (not is_whole(samples) or samples < 0):
        raise ValueError(f"samples must be an integer >= 0, or None for the method's nst, got {samples!r}")
    (name, reader), whole = TASKS[task], model
    if not isinstance(model, nn.Module):
        options.setdefault(reader, os.fspath(model))
        whole = from_pretrained(model)
    scopes = scopes_of(whole)
    if getattr(getattr(whole, "config", None), "problem_type", None) == "regression":
        raise ValueError(
            "a pipeline gives the scores of classes, and the model's problem_type is 'regression'; use "
            "predict(model, inputs, task='regression')"
        )
    cls = type(f"Bayesian{name}", (_Uncertain, getattr(transformers, name)), {})
    first = whole.members[0] if isinstance(whole, Mixture) else whole
    made: Any = transformers.pipeline(task, model=first, pipeline_class=cls, **options)  # type: ignore[call-overload]
    made.whole = whole.to(made.device).eval()
    made.thetas = PinnedSamples(made.whole, default_samples(made.whole) if samples is None else samples, seed)
    made.seed = seed
    made.exact = samples is None and any(scope.method.closed_form(scope) is not None for scope in scopes)
    return made


class _Uncertain:
    """Put before a classification pipeline: it runs all the samples, and its results say what they disagree about."""

    whole: nn.Module
    thetas: PinnedSamples
    seed: int
    exact: bool  # whether a closed form takes the place of samples
    model: Any

    def _forward(self, model_inputs: Any) -> Averaged:
        """Average the posterior's outputs on a batch, and judge how strange its inputs are."""
        found, watch = self._averaged(model_inputs), Watch.of(self.whole)
        found.novelty_pvalue = None if watch is None else watch.pvalues(dict(model_inputs))
        return found

    def _averaged(self, model_inputs: Any) -> Averaged:
        """Average the posterior's outputs on a batch."""
        config = self.model.config
        several = config.problem_type == "multi_label_classification" or config.num_labels == 1
        if self.exact and not several:
            found = predict(self.whole, dict(model_inputs), seed=self.seed, keep_samples=False)
            return Averaged(found.log_probs.float(), found.entropy, found.mutual_information)
        average, own = Average("labels" if several else "classes"), self.model
        entropies: list[Tensor] = []
        for i in self.thetas:
            self.model = self.whole.member(i) if isinstance(self.whole, Mixture) else self.whole
            try:
                logits = super()._forward(dict(model_inputs)).logits  # type: ignore[misc]
            finally:
                self.model = own
            average.add(logits)
            if several:
                entropies.append(_binary_entropy(logits.float().sigmoid()))
        output: Tensor = average.result()
        if several:
            total = _binary_entropy(output.sigmoid())
            return Averaged(output, total, (total - torch.stack(entropies).mean(0)).clamp_min(0))
        return Averaged(output, entropy_of(output), average.mutual_information(output))

    def postprocess(self, model_outputs: Any, **options: Any) -> Any:
        """Add the measures of doubt to every result."""
        found: Any = super().postprocess(model_outputs, **options)  # type: ignore[misc]
        names = ("entropy", "mutual_information", "novelty_pvalue")
        doubt = {name: float(model_outputs[name][0]) for name in names if model_outputs.get(name) is not None}
        return {**found, **doubt} if isinstance(found, dict) else [{**one, **doubt} for one in found]


def _binary_entropy(probs: Tensor) -> Tensor:
    """Return the entropy of independent labels, summed over them."""
    terms: Tensor = torch.special.xlogy(probs, probs) + torch.special.xlogy(1 - probs, 1 - probs)
    return -terms.sum(-1)
