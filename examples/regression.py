"""Intervals for numbers: train a network, give it a posterior, and draw its epistemic and aleatoric uncertainty.

    python examples/regression.py                               # a noisy sine with a gap, where nothing is known
    python examples/regression.py --data table.csv --method vi  # of your own

A table has numbers below a header line; the last column is the target. Prints the scores on a fifth of the rows, in
units of the target's standard deviation, and writes a picture into --out.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from bayesify import bayesify, fit_laplace, metrics, penalty, plots, predict

SAMPLES = 50
OPTIONS = {"vi": {"init_sig": 0.02, "kld": 0.1}}  # on so few data the whole KL would smooth the sine away


def sine(count, seed):
    """Return x in (-2, -0.7) and (0.7, 2), and a noisy sine: nothing is known in the gap."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(count, 1, generator=generator) * 1.3 + 0.7) * torch.tensor([[-1.0], [1.0]]).repeat(count // 2, 1)
    return x, torch.sin(2 * x) + 0.1 * torch.randn(count, 1, generator=generator)


def table(path):
    """Return the columns of a file: the last one is the target."""
    values = torch.tensor(np.loadtxt(path, delimiter=",", skiprows=1), dtype=torch.float32)
    return values[:, :-1], values[:, -1:]


def standardized(values, rows):
    """Return columns with mean 0 and standard deviation 1 over some rows: those that train."""
    return (values - values[rows].mean(0)) / values[rows].std(0).clamp_min(1e-6)


def train(method, x, y, steps, seed):
    """Train a small network; the size of the noise is learned beside it."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 1))
    model = bayesify(network, method, prior_mean="zero", prior_sig=1.0, **OPTIONS.get(method, {}))
    log_var = torch.tensor(-1.0, requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), log_var], 0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in tqdm(range(steps), desc=method, unit="step"):
        optimizer.zero_grad()
        nll = ((model(x) - y).square().mean() / log_var.exp() + log_var) / 2
        (nll + penalty(model, num_data=len(x))).backward()
        optimizer.step()
        schedule.step()
    if method == "la":  # the last layer, in closed form; the noise is that of the residuals
        fit_laplace(model, [(x, y)], structure="kron", likelihood="regression", tune="marglik", include="2.*")
    return model, float(log_var.detach().exp())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a .csv file of numbers with a header; the sine if not given")
    parser.add_argument("--method", default="la", choices=("la", "vi", "mc_dropout"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("regression"))
    args = parser.parse_args()
    x, y = sine(120, args.seed) if args.data is None else table(args.data)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    test, known = order.split([len(x) // 5, len(x) - len(x) // 5])
    if args.data is not None:
        x, y = standardized(x, known), standardized(y, known)
    model, noise_var = train(args.method, x[known], y[known], args.steps, args.seed)

    def ask(data):
        out = predict(model, data, None if args.method == "la" else SAMPLES, seed=args.seed, task="regression")
        return out if float(out.aleatoric.max()) else out.with_noise(noise_var)

    out = ask([(x[test], y[test])])
    print(" ".join(f"{name} {value:.3f}" for name, value in out.scores.items()))
    print(f"std: epistemic {out.epistemic.mean():.3f}, aleatoric {out.aleatoric.mean():.3f}")
    held, fresh = out[: len(out) // 2], out[len(out) // 2 :]
    low, high = fresh.sets(metrics.conformal_quantile(held, alpha=0.2))
    print(f"conformal 80 % intervals: {(high - low).mean():.3f} wide, for any model")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.data is None:
        grid = torch.linspace(-2.5, 2.5, 201).unsqueeze(1)
        figure, name = plots.regression_band(grid, ask(grid), data=(x, y), title=args.method), "band.svg"
    else:
        figure, name = plots.calibration_curve(out), "calibration.svg"
    figure.savefig(args.out / name)
    print(f"see {args.out / name}")


if __name__ == "__main__":
    main()
