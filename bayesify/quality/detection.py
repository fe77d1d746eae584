"""Scores that are high for what the model does not know, and how well they tell it apart."""

from __future__ import annotations

import torch

from bayesify.quality.arrays import Array, ArrayT, like, to_double, to_labels, to_logits, to_probs, to_scores
from bayesify.quality.distances import KINDS, Moments


def auroc(scores_in: Array, scores_out: Array) -> float:
    r"""Area under the ROC curve of telling out from in by the score, higher being out.

    .. math:: \frac{1}{NM} \sum_{n, m} 1[out_m > in_n] + \tfrac12 1[out_m = in_n]

    Args:
        scores_in: Uncertainties of in-distribution examples, shape (N,).
        scores_out: Uncertainties of out-of-distribution examples, shape (M,).

    Returns:
        1 where every out-of-distribution score is higher, 0.5 for chance.

    Example:
        >>> auroc(torch.tensor([0.1, 0.4]), torch.tensor([0.4, 0.9]))
        0.875
    """
    inside, outside = to_scores(scores_in, "scores_in").sort().values, to_scores(scores_out, "scores_out")
    below, not_above = torch.searchsorted(inside, outside), torch.searchsorted(inside, outside, right=True)
    return float((below + not_above).double().mean() / (2 * len(inside)))


def fpr95(scores_in: Array, scores_out: Array) -> float:
    r"""False alarms at 95% detection: :math:`\frac{1}{N} \sum_n 1[in_n \geq t]`.

    The threshold t is the highest at which at least 95% of the out-of-distribution scores are >= t.

    Args:
        scores_in: Uncertainties of in-distribution examples, shape (N,).
        scores_out: Uncertainties of out-of-distribution examples, shape (M,).

    Returns:
        The fraction of in-distribution examples that are flagged along.

    Example:
        >>> fpr95(torch.tensor([0.1, 0.2, 0.5, 0.3]), torch.tensor([0.4, 0.9]))
        0.25
    """
    inside, outside = to_scores(scores_in, "scores_in"), to_scores(scores_out, "scores_out")
    detected = -(-95 * len(outside) // 100)  # rounded up in integers: 0.95 * n may land above a whole number
    threshold = outside.sort(descending=True).values[detected - 1]
    return float((inside >= threshold).double().mean())


def entropy(probs: ArrayT) -> ArrayT:
    r"""Entropy of each row, :math:`-\sum_k p_{nk} \log p_{nk}`, in nats.

    Args:
        probs: Probabilities, shape (N, K).

    Returns:
        Shape (N,), of the type of `probs`.

    Example:
        >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    return like(torch.special.entr(to_probs(probs, "probs", "(N, K)")).sum(-1), probs)


def mutual_information(sample_probs: ArrayT) -> ArrayT:
    r"""Mutual information of label and weights, :math:`H[\frac1S \sum_s p_s] - \frac1S \sum_s H[p_s]`, in nats.

    Args:
        sample_probs: Probabilities by posterior sample, shape (S, N, K).

    Returns:
        Shape (N,), of the type of `sample_probs`; never negative.

    Example:
        >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        tensor([0.6931])
    """
    p = to_probs(sample_probs, "sample_probs", "(S, N, K)")
    total, expected = torch.special.entr(p.mean(0)).sum(-1), torch.special.entr(p).sum(-1).mean(0)
    return like((total - expected).clamp(min=0), sample_probs)


def energy(logits: ArrayT, temperature: float = 1.0) -> ArrayT:
    """Energy of each example, -T log sum_k exp(f_k/T), averaged over posterior samples; high is out of distribution.

    Unlike the entropy it sees the size of the logits, which softmax forgets.

    Args:
        logits: Shape (N, K), or (S, N, K) with one slice per posterior sample.
        temperature: T.

    Returns:
        Shape (N,), of the type of `logits`.

    Example:
        >>> energy(torch.tensor([[10.0, 0.0], [0.0, 0.0]]))
        tensor([-10.0000,  -0.6931])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; 1.0 is customary")
    each = -temperature * torch.logsumexp(to_logits(logits) / temperature, -1)
    return like(each.mean(0), logits)


def feature_distance(train: Array, labels: Array | None, features: ArrayT, *, kind: str = "mahalanobis++") -> ArrayT:
    """Distance of features to those of the training set, all scaled to length 1; high is out of distribution.

    Args:
        train: Features of training inputs, shape (M, D), such as `active.features` returns.
        labels: Their classes, shape (M,); None where there are none.
        features: The features to judge, shape (N, D).
        kind: "mahalanobis++", min_c (z - mu_c)^T S^-1 (z - mu_c) with the class means and their pooled covariance,
            shrunk towards a multiple of I; "relative", the same minus (z - mu)^T T^-1 (z - mu) with the mean and
            covariance of all features, which suits strange inputs that are much like the known, and fails for those
            that are not; or "knn", the distance to the tenth nearest of 2,000 training features.

    Returns:
        Shape (N,), of the type of `features`.

    Raises:
        ValueError: The kind is unknown, or the shapes do not fit.

    Example:
        >>> train = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> near, far = feature_distance(train, torch.tensor([0, 0, 1, 1]), torch.tensor([[2.0, 0.1], [-1.0, -1.0]]))
        >>> bool(far > near)
        True
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {kind!r}")
    known, new = to_double(train, "train"), to_double(features, "features")
    if known.dim() != 2 or new.dim() != 2 or known.shape[1] != new.shape[1]:
        raise ValueError(
            f"train and features must have shapes (M, D) and (N, D), got {tuple(known.shape)} and {tuple(new.shape)}; "
            "flatten what the last layer takes"
        )
    moments = Moments(kind)
    moments.add(
        known, None if labels is None else to_labels(labels, len(known), 1 + int(torch.as_tensor(labels).max()))
    )
    return like(moments.reference().score(new), features)
