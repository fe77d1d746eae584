"""Active learning: which examples to label next.

`select` takes the examples whose labels would say most about the weights (BALD), and with `diverse=True` those that
say most together: the second of two alike adds little. `features` is what a model makes of examples before its last
layer: how far they are from all that was labelled (`metrics.feature_distance`).
"""

from typing import Any

import torch
from torch import Tensor

from bayesify.prediction.last_layer import features
from bayesify.prediction.regression import RegressionPredictive

__all__ = ["features", "information", "select"]

TINY = 1e-30  # smallest variance to divide by


def select(predictive: Any, k: int, diverse: bool = True, *, strange: bool = False) -> Tensor:
    """Choose the k examples to label next.

    Args:
        predictive: What `predict` returned for examples without labels, by ten samples or more.
        k: How many.
        diverse: Whether to discount what the examples chosen so far would say already: greedily, each is the one that
            adds most to 1/2 log det(I + sum_i C_i C_i^T), where C_i (S, K) is the deviation of each sample's
            probabilities from their mean p, over sqrt(S p). To second order that is the mutual information of all
            the labels and the weights. Otherwise the k of largest `information`.
        strange: Whether to prefer examples that are both uncertain and unlike the known data: the information of each
            counts 1 - p, with its `novelty_pvalue` p.

    Returns:
        Indices into the examples, (k,), the most informative first.

    Raises:
        ValueError: k is out of range, `diverse` lacks the samples' outputs, or `strange` the model's `fit_novelty`.

    Example:
        >>> import torch
        >>> from bayesify import active, bayesify, predict
        >>> model = bayesify(torch.nn.Linear(3, 2), "vi", prior_sig=1.0, init_sig=0.5)
        >>> pool = torch.tensor([[5.0, 0.0, 0.0], [5.1, 0.0, 0.0], [0.0, 4.0, 0.0]])
        >>> out = predict(model, pool, samples=50, seed=0)
        >>> sorted(active.select(out, 2).tolist()) in ([0, 2], [1, 2])
        True
    """
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= len(predictive):
        raise ValueError(f"k must be in 1..{len(predictive)}, the number of examples, got {k!r}")
    weights = torch.ones(len(predictive), dtype=torch.float64)
    if strange:
        if predictive.novelty_pvalue is None:
            raise ValueError("strange=True needs novelty; call fit_novelty(model, loader) before predict")
        weights = 1 - predictive.novelty_pvalue
    if not diverse:
        return (information(predictive) * weights).argsort(descending=True, stable=True)[:k]
    rest = deviations(predictive) * weights.sqrt().view(-1, 1, 1)
    chosen: list[int] = []
    for _ in range(k):
        gram = rest.transpose(1, 2) @ rest
        gains = torch.linalg.slogdet(torch.eye(gram.shape[-1], dtype=gram.dtype) + gram).logabsdet
        gains[chosen] = -torch.inf
        chosen.append(int(gains.argmax()))
        # What is left of every C once this one is known: A^(-1/2) C, with A = I + C_best C_best^T.
        u, s, _ = torch.linalg.svd(rest[chosen[-1]], full_matrices=False)
        rest = rest - u @ ((1 - (1 + s.square()).rsqrt()).unsqueeze(1) * (u.T @ rest))
    return torch.tensor(chosen)


def information(predictive: Any) -> Tensor:
    """Return how much the label of each example would say about the weights, (N,), in nats.

    The mutual information of a classifier, summed over the items of an example; 1/2 log(1 + epistemic^2/aleatoric^2)
    of a regression, where noise that is not known is as large as the mean epistemic variance.
    """
    if isinstance(predictive, RegressionPredictive):
        each = torch.log1p(predictive.epistemic.square() / _noise(predictive)) / 2
    else:
        each = predictive.mutual_information
    return each.flatten(1).sum(1) if each.dim() > 1 else each


def deviations(predictive: Any) -> Tensor:
    """Return C_i of every example, (N, S, outputs), so that sum C^2/2 is its information to second order."""
    regression = isinstance(predictive, RegressionPredictive)
    outputs = predictive.outputs if regression else predictive.logits
    if outputs is None or len(outputs) < 2:
        raise ValueError(
            "diverse=True compares the outputs of several samples, which this prediction has not; "
            "predict with samples=20, or pass diverse=False"
        )
    share, values = getattr(predictive, "weights", None), outputs.double()
    share = values.new_full((len(values),), 1 / len(values)) if share is None else share
    one_per_label = not regression and outputs.shape[1:] == predictive.expected_entropy.shape
    values = values if regression else values.sigmoid() if one_per_label else values.softmax(-1)
    mean = torch.einsum("s,s...->...", share, values)
    scale = _noise(predictive).expand_as(mean) if regression else mean * (1 - mean) if one_per_label else mean
    centred = (values - mean) / scale.clamp_min(TINY).sqrt()
    found: Tensor = (share.sqrt().view(-1, 1, 1) * centred.reshape(*centred.shape[:2], -1)).transpose(0, 1)
    return found


def _noise(predictive: RegressionPredictive) -> Tensor:
    """Return the variance of the noise, or the mean epistemic one where it is not known."""
    known = predictive.aleatoric.square()
    return torch.where(known > 0, known, predictive.epistemic.square().mean().clamp_min(TINY))
