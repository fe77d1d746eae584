"""Does the model know what it does not know? Train on some digits, ask about others, and compare scores that tell.

    python examples/ood.py [--unknown 8 9] [--epochs 60] [--members 5] [--seed 0] [--out ood]

The network learns eight of the ten digits that come with scikit-learn; the other two look much like them, and random
images do not. AUROC is the probability that an unknown image gets the higher score, FPR95 the share of known ones that
are flagged where 95 % of the unknown are. Writes histograms into --out.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from bayesify import bayesify, fit_laplace, metrics, mix, plots, predict


def data(unknown, seed):
    """Return known digits for training, tuning and testing, and the unknown ones."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    strange = torch.isin(y, torch.tensor(unknown))
    classes = torch.tensor([k for k in range(10) if k not in unknown])
    known_x, known_y = x[~strange], torch.searchsorted(classes, y[~strange])
    cuts = (slice(500), slice(500, 700), slice(700, None))
    return [TensorDataset(known_x[c], known_y[c]) for c in cuts], x[strange]


def train(dataset, classes, epochs, seed):
    """Train a plain network, as anybody would."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in tqdm(range(epochs), desc=f"member {seed}", unit="epoch"):
        for x, y in DataLoader(dataset, 32, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def scores_of(model, inputs, fit, fit_labels):
    """Return every score of some inputs; higher is stranger."""
    out = predict(model, inputs)
    found = {"entropy": out.entropy, "mutual information": out.mutual_information}
    if isinstance(model, nn.Sequential):  # a mixture has several bodies
        found["energy"] = metrics.energy(out.logits)
        with torch.no_grad():
            known, features = model[:-1](fit), model[:-1](inputs)
        found["distance of features"] = metrics.feature_distance(known, fit_labels, features)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unknown", type=int, nargs="+", default=[8, 9], choices=range(10), help="digits to leave out")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--members", type=int, default=5, help="of the mixture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("ood"))
    args = parser.parse_args()
    (fit, tune, test), strange = data(args.unknown, args.seed)
    noise = torch.rand(500, 64, generator=torch.Generator().manual_seed(args.seed))
    classes = 10 - len(set(args.unknown))
    members = [train(fit, classes, args.epochs, args.seed + i) for i in range(args.members)]
    inputs, (fit_x, fit_y) = test.tensors[0], fit.tensors

    args.out.mkdir(parents=True, exist_ok=True)
    print(f"\n{'':14}{'score':24}{'unknown digits':>20}{'random images':>20}")
    for name in ("plain", "last layer", "mixture"):
        if name == "last layer":
            for model in members:
                bayesify(model, "la", include="4.*")
                fit_laplace(model, DataLoader(fit, 100), structure="kron", tune=DataLoader(tune, 100))
        model = mix(members) if name == "mixture" else members[0]
        inside, *outside = (scores_of(model, some, fit_x, fit_y) for some in (inputs, strange, noise))
        for score, values in inside.items():
            if name == "plain" and score == "mutual information":
                continue  # one model has nothing to disagree with
            cells = [f"{metrics.auroc(values, o[score]):.3f} / {metrics.fpr95(values, o[score]):.3f}" for o in outside]
            print(f"{name:14}{score:24}{cells[0]:>20}{cells[1]:>20}")
        names = ("known digits", "unknown digits")
        figure = plots.uncertainty_histogram(inside["entropy"], outside[0]["entropy"], names=names, title=name)
        figure.savefig(args.out / f"{name.replace(' ', '_')}.svg")
    print(f"(AUROC / FPR95); see the histograms in {args.out}")


if __name__ == "__main__":
    main()
