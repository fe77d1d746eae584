"""Label the most informative digits: `active.select` with and without diversity, beside random choice.

    python examples/active_learning.py [--seeds 10]

Twenty labels at first, then twenty at a time up to a hundred; the error is that on the other half of the digits,
printed as its mean over the seeds with paired differences.
"""

import argparse
import statistics

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from bayesify import active, bayesify, penalty, predict

FIRST, ROUND, LAST = 20, 20, 100
CHOICES = ("diverse", "bald", "random")


def train(x, y, seed, steps):
    """Train a network with MC-dropout on the labels that there are."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    model = bayesify(network, "mc_dropout", prior_mean="zero", prior_sig=1.0, p_drop=0.2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + penalty(model, num_data=len(x))).backward()
        optimizer.step()
    return model


def run(choice, seed, steps):
    """Return the error after the last round."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    pool, test = slice(0, len(x) // 2), slice(len(x) // 2, None)
    px, py = x[pool], y[pool]
    known = torch.arange(FIRST)
    while True:
        model = train(px[known], py[known], seed, steps)
        if len(known) >= LAST:
            return predict(model, [(x[test], y[test])], samples=20, seed=0).scores["error"]
        rest = torch.ones(len(px), dtype=torch.bool)
        rest[known] = False
        left = rest.nonzero().flatten()
        if choice == "random":
            chosen = torch.randperm(len(left), generator=torch.Generator().manual_seed(seed))[:ROUND]
        else:
            out = predict(model, px[left], samples=20, seed=0)
            chosen = active.select(out, ROUND, diverse=choice == "diverse")
        known = torch.cat([known, left[chosen]])


def difference(first, second):
    """Return the mean paired difference and its standard error."""
    values = [a - b for a, b in zip(first, second, strict=True)]
    return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5


def main():
    """Compare the choices over seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    args = parser.parse_args()
    errors = {choice: [run(choice, seed, args.steps) for seed in range(args.seeds)] for choice in CHOICES}
    for choice, values in errors.items():
        print(f"{choice:>8}: error {statistics.mean(values):.4f} after {LAST} labels")
    for other in CHOICES[1:]:
        mean, error = difference(errors["diverse"], errors[other])
        print(f"diverse minus {other}: {mean:+.4f} ± {error:.4f}")


if __name__ == "__main__":
    main()
