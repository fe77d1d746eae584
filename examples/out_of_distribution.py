"""Does the model know what it does not know? Train on MNIST, then look at FashionMNIST.

    python examples/out_of_distribution.py --data_root DATA [--epochs 6] [--methods vi la] [--out docs/results]

DATA holds MNIST/raw and FashionMNIST/raw with gzipped idx files; BAYESIFY_DATA is its default. Writes ood.json, a
picture of each method's entropies, and a page with both beside the folder (--page writes only that).
"""

import argparse
import json
import os
from pathlib import Path

import torch
from mnist import network, read_idx
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from bayesify import SGLD, bayesify, fit_laplace, metrics, param_groups, penalty, plots, predict

LR, BATCH, HELD_OUT = 0.05, 128, 5000
METHODS = {
    "vanilla": {},
    "vi": {"prior_sig": 0.1, "init_sig": 0.01, "kld": 0.1},
    "mc_dropout": {"prior_sig": 1.0, "p_drop": 0.2},
    "sgld": {"prior_sig": 1.0, "Ninflate": 100, "thin": 10},
    "la": {"prior_sig": 1.0},
}
SAMPLES = 10


def load(root, name, part):
    """Read images as rows between 0 and 1, and their labels."""
    raw = Path(root) / name / "raw"
    images = read_idx(raw / f"{part}-images-idx3-ubyte.gz").flatten(1).float() / 255
    return TensorDataset(images, read_idx(raw / f"{part}-labels-idx1-ubyte.gz").long())


def train(method, options, data, validation, epochs, seed):
    """Train one method from the same start as the others."""
    torch.manual_seed(seed)
    loader = DataLoader(data, BATCH, shuffle=True, drop_last=True)
    if method == "sgld":
        options = options | {"burnin": epochs * len(loader) // 2}
    model = bayesify(network(), method, prior_mean="zero", **options)
    groups = param_groups(model, LR)
    if method == "sgld":
        optimizer = SGLD(model, groups, num_data=len(data), momentum=0.5)
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.5)
    for _ in range(epochs):
        for x, y in tqdm(loader, desc=method, leave=False):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + penalty(model, num_data=len(data))).backward()
            optimizer.step()
    if method == "la":
        fit_laplace(model, DataLoader(data, BATCH), tune=DataLoader(validation, 1000))
    return model


def page(folder):
    """Return the page of the results in a folder."""
    results = json.loads((folder / "ood.json").read_text())
    columns = list(dict.fromkeys(name for row in results.values() for name in row))
    lines = [
        "# Out of distribution",
        "",
        "The network of the MNIST experiments, trained on 55,000 digits, then shown the 10,000 test digits and the "
        "10,000 garments of FashionMNIST. AUROC and FPR95 tell how well the uncertainty tells the two apart (a garment "
        f"should be uncertain); {SAMPLES} posterior samples. Written by `python examples/out_of_distribution.py`.",
        "",
        "| | " + " | ".join(name.replace("_", " by ", 1).replace("_", " ") for name in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for method, row in results.items():
        lines.append(f"| {method} | " + " | ".join(f"{row[c]:.4f}" if c in row else "" for c in columns) + " |")
    lines += ["", *(f"![{method}]({folder.name}/ood_{method}.svg)" for method in results), ""]
    return "\n".join(lines)


def write_page(folder):
    """Write the page beside the folder of its results."""
    (folder.parent / "out_of_distribution.md").write_text(page(folder))


def main():
    """Train, predict both data sets, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_root", default=os.environ.get("BAYESIFY_DATA"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--page", action="store_true", help="write the page from the results that there are")
    args = parser.parse_args()
    if args.page:
        write_page(args.out)
        return
    if args.data_root is None:
        parser.error("give --data_root, or set BAYESIFY_DATA")

    x, y = load(args.data_root, "MNIST", "train").tensors
    data, validation = TensorDataset(x[HELD_OUT:], y[HELD_OUT:]), TensorDataset(x[:HELD_OUT], y[:HELD_OUT])
    known = DataLoader(load(args.data_root, "MNIST", "t10k"), 1000)
    unknown = DataLoader(load(args.data_root, "FashionMNIST", "t10k"), 1000)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "ood.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for method in args.methods:
        model = train(method, METHODS[method], data, validation, args.epochs, args.seed)
        count = 0 if method == "vanilla" else SAMPLES
        inside = predict(model, known, samples=count, seed=args.seed)
        outside = predict(model, unknown, samples=count, seed=args.seed)
        row = {"error": inside.scores["error"], "nll": inside.scores["nll"], "ece": inside.scores["ece"]}
        row["auroc_entropy"] = metrics.auroc(inside.entropy, outside.entropy)
        row["fpr95_entropy"] = metrics.fpr95(inside.entropy, outside.entropy)
        if count:
            row["auroc_mutual_information"] = metrics.auroc(inside.mutual_information, outside.mutual_information)
        results[method] = {name: round(value, 5) for name, value in row.items()}
        print(method, results[method])
        path.write_text(json.dumps(results, indent=1) + "\n")
        names = ("MNIST", "FashionMNIST")
        figure = plots.uncertainty_histogram(inside.entropy, outside.entropy, names=names, title=method)
        figure.savefig(args.out / f"ood_{method}.svg")
        write_page(args.out)


if __name__ == "__main__":
    main()
