"""Scores that are high for what the model does not know, and how well they tell it apart."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.quality.arrays import Array, ArrayT, like, to_double, to_labels, to_logits, to_probs, to_scores


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


def feature_distance(train: Array, labels: Array, features: ArrayT, *, relative: bool = True) -> ArrayT:
    """Distance of features to those of the training set; high is out of distribution.

    min_c (z - mu_c)^T W^-1 (z - mu_c), the squared Mahalanobis distance to the nearest class, with the means of the
    classes and their pooled covariance; `relative` subtracts (z - mu)^T V^-1 (z - mu), with the mean and covariance of
    all features, so that directions in which every example varies do not count. Covariances get 1e-6 of their mean
    variance on the diagonal.

    Args:
        train: What the model makes of training inputs before its last layer, shape (M, D).
        labels: Their classes, shape (M,).
        features: The features to judge, shape (N, D).
        relative: Whether to subtract the distance to all of the training set.

    Returns:
        Shape (N,), of the type of `features`.

    Example:
        >>> train = torch.tensor([[0.0, 0.0], [0.2, 0.1], [4.0, 4.0], [4.1, 3.8]])
        >>> near, far = feature_distance(train, torch.tensor([0, 0, 1, 1]), torch.tensor([[0.1, 0.0], [4.0, 0.0]]))
        >>> bool(far > near)
        True
    """
    known, new = to_double(train, "train"), to_double(features, "features")
    if known.dim() != 2 or new.dim() != 2 or known.shape[1] != new.shape[1]:
        raise ValueError(
            f"train and features must have shapes (M, D) and (N, D), got {tuple(known.shape)} and {tuple(new.shape)}; "
            "flatten what the last layer takes"
        )
    classes = torch.unique(to_labels(labels, len(known), 1 + int(torch.as_tensor(labels).max())), return_inverse=True)[
        1
    ]
    means = torch.stack([known[classes == c].mean(0) for c in range(int(classes.max()) + 1)])
    distance = _mahalanobis(new, means, known - means[classes]).amin(1)
    if relative:
        mean = known.mean(0, keepdim=True)
        distance = distance - _mahalanobis(new, mean, known - mean).squeeze(1)
    return like(distance, features)


def _mahalanobis(features: Tensor, means: Tensor, residuals: Tensor) -> Tensor:
    """Return squared distances (N, C) to the means under the covariance of the residuals."""
    covariance = residuals.T @ residuals / len(residuals)
    covariance.diagonal().add_(1e-6 * float(covariance.diagonal().mean()) + 1e-300)
    factor = torch.linalg.cholesky(covariance)
    white = [torch.linalg.solve_triangular(factor, v.T, upper=False).T for v in (features, means)]
    return torch.cdist(white[0], white[1], compute_mode="donot_use_mm_for_euclid_dist").square()
