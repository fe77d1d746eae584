"""The columns of the table, of one prediction."""

import time

import torch

from bayesify import metrics

COVERAGES = [c / 20 for c in range(1, 21)]
RESAMPLED = 200
ROUNDS = 5  # of timing a prediction that takes one pass
DIGITS = 6


def scored(predict, parts, cost):
    """Return all scores of one way to predict.

    Args:
        predict: A function of batches.
        parts: A `tasks.Scored`.
        cost: Of the prediction, over a plain one's.
    """
    known, shifted, ood = (predict(part.batches()) for part in (parts.known, parts.shifted, parts.ood))
    levels = torch.cat([level for _, level in parts.shifted._replace(y=parts.levels).batches()])
    probs, labels = known.probs, known.labels
    wrong = known.prediction != labels
    out = {
        "nll": metrics.nll(probs, labels),
        "error": metrics.error(probs, labels),
        "brier": metrics.brier(probs, labels),
        "ece": metrics.ece(probs, labels),
        "ece_interval": ece_interval(probs, labels),
        "ece_debiased": metrics.reliability(probs, labels).ece_debiased,
        "errors_auroc": own_errors(known.confidence, wrong),
        "ood_entropy": metrics.auroc(known.entropy, ood.entropy),
        "ood_mi": None,
        "shift_nll": metrics.nll(shifted.probs, shifted.labels),
        "shift_levels": [metrics.nll(shifted.probs[levels == k], shifted.labels[levels == k]) for k in range(1, 6)],
        "risk": risks(probs, labels),
        "cost": cost,
    }
    if known.num_samples > 1 or known.closed_form:
        out["ood_mi"] = metrics.auroc(known.mutual_information, ood.mutual_information)
    return rounded(out)


def rounded(value):
    """Return numbers with six digits, so that files are short."""
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{float(value):.{DIGITS}g}") if isinstance(value, float | torch.Tensor) else value


def own_errors(confidence, wrong):
    """Return how well confidence tells wrong answers from right ones; None where all are of one kind."""
    return metrics.auroc(-confidence[~wrong], -confidence[wrong]) if wrong.any() and not wrong.all() else None


def ece_interval(probs, labels):
    """Return the 2.5 and 97.5 % quantiles of the ECE over resampled items."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(RESAMPLED):
        rows = torch.randint(len(labels), (len(labels),), generator=generator)
        found.append(metrics.ece(probs[rows], labels[rows]))
    return [float(q) for q in torch.tensor(found).quantile(torch.tensor([0.025, 0.975]))]


def risks(probs, labels):
    """Return the error of the most confident 5 %, 10 %, ... of the items."""
    curve = metrics.risk_coverage(probs, labels).risk
    return [float(curve[max(1, round(c * len(curve))) - 1]) for c in COVERAGES]


def cost(predict, plain, batches, one_pass):
    """Return the processor time of a prediction over that of a plain model's, each the least of some rounds.

    Args:
        predict: A function of batches.
        plain: The same for a plain model.
        batches: The data.
        one_pass: Whether the prediction takes about as long as the plain one, and needs care.
    """
    times = {"predict": [], "plain": []}
    for _ in range(ROUNDS if one_pass else 2):
        for run, spent in zip((plain, predict), (times["plain"], times["predict"]), strict=True):
            begin = time.process_time()
            run(batches)
            spent.append(time.process_time() - begin)
    return min(times["predict"]) / min(times["plain"])
