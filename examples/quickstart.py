"""Train every method on the embedded digits and compare how honest their uncertainty is.

    python examples/quickstart.py [--epochs 150] [--seed 0] [--out demo]

Writes a reliability picture and an HTML report of the best method into the output folder.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from bayesify import SGLD, bayesify, fit_laplace, metrics, param_groups, penalty, plots, predict

LR, BATCH = 0.2, 32
METHODS = {
    "vanilla": {},
    "vi": {"prior_sig": 0.3, "init_sig": 0.02, "kld": 0.02, "nst": 20},
    "mc_dropout": {"prior_sig": 1.0, "p_drop": 0.1, "kld": 0.1, "nst": 20},
    "sgld": {"prior_sig": 1.0, "thin": 5, "Ninflate": 100, "nst": 20},
    "la": {"prior_sig": 5.0, "nst": 20},
}


def digits(seed):
    """Split the 1797 digits for training, validation and test; few training digits leave room for doubt."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return [TensorDataset(x[part], y[part]) for part in (slice(200), slice(200, 400), slice(400, None))]


def train(method, options, data, validation, epochs, seed):
    """Train one method from the same start as the others."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    loader = DataLoader(data, BATCH, shuffle=True)
    if method == "sgld":
        options = options | {"burnin": epochs * len(loader) // 2}
    bayesify(model, method, prior_mean="zero", **options)
    groups = param_groups(model, LR)
    optimizer = SGLD(model, groups, num_data=len(data)) if method == "sgld" else torch.optim.SGD(groups, momentum=0.5)
    for _ in tqdm(range(epochs), desc=f"{method:>10}", unit="epoch"):
        for x, y in loader:
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + penalty(model, num_data=len(data))).backward()
            optimizer.step()
    if method == "la":
        fit_laplace(model, DataLoader(data, BATCH), tune=DataLoader(validation, 200))
    return model


def main():
    """Train, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    args = parser.parse_args()
    train_set, validation_set, test_set = digits(args.seed)
    test = DataLoader(test_set, 500)
    noise = torch.rand(500, 64, generator=torch.Generator().manual_seed(args.seed))  # not digits at all

    print(f"{len(train_set)} training digits, {len(test_set)} test digits, random images as out-of-distribution\n")
    predictions, unknown = {}, {}
    for method, options in METHODS.items():
        model = train(method, options, train_set, validation_set, args.epochs, args.seed)
        predictions[method] = predict(model, test, seed=args.seed)
        unknown[method] = predict(model, noise, seed=args.seed)

    columns = ("error %", "NLL", "ECE %", "Brier", "AUROC of random images")
    print(f"\n{'':12}" + "".join(f"{name:>{max(len(name), 7) + 2}}" for name in columns))
    for method, out in predictions.items():
        row = (
            f"{100 * metrics.error(out.probs, out.labels):.2f}",
            f"{out.scores['nll']:.4f}",
            f"{100 * metrics.ece(out.probs, out.labels):.2f}",
            f"{metrics.brier(out.probs, out.labels):.4f}",
            f"{metrics.auroc(out.entropy, unknown[method].entropy):.4f}",
        )
        print(f"{method:12}" + "".join(f"{v:>{max(len(c), 7) + 2}}" for c, v in zip(columns, row, strict=True)))

    best = min(predictions, key=lambda method: predictions[method].scores["nll"])
    args.out.mkdir(parents=True, exist_ok=True)
    picture, page = args.out / "reliability.png", args.out / "report.html"
    figure = plots.reliability_diagram(predictions[best].probs, predictions[best].labels, title=best)
    figure.savefig(picture, dpi=150)
    plots.report(predictions[best], page, ood=unknown[best], title=f"Digits, {best}")
    print(f"\nlowest NLL: {best}; see {picture} and {page}")


if __name__ == "__main__":
    main()
