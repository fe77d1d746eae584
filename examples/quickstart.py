"""What it is good for, in under a minute: digits before and after, by every way that costs little.

    python examples/quickstart.py [--epochs 100] [--seed 0] [--out demo]

200 handwritten digits to train on, 200 to tune with, 1397 to test, and random images as unfamiliar inputs.
Nothing is chosen but what bayesify chooses. Writes a picture and a report into the output folder.
"""

import argparse
import copy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from bayesify import Cycles, bayesify, fit_laplace, fit_novelty, metrics, mix, param_groups, penalty, plots, predict
from bayesify.cli.demo import digits

MEMBERS = 5


def train(data, epochs, seed, method=None):
    """Train a network: as usual, or by one of bayesify's methods, which changes three lines, "ensemble" a fourth."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    if method:
        bayesify(model, method)  # 1
    optimizer = torch.optim.SGD(param_groups(model, 0.1) if method else model.parameters(), lr=0.1, momentum=0.9)  # 2
    loader = DataLoader(data, 32, shuffle=True)
    if method == "ensemble":
        schedule = Cycles(optimizer, model, steps=epochs * len(loader))
    else:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for _ in tqdm(range(epochs), desc=f"{method or 'plain'}, seed {seed}", unit="epoch"):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if method:
                loss = loss + penalty(model, num_data=len(data))  # 3
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    args = parser.parse_args()
    fit, tune, test = digits(args.seed)
    loaders = {"fit": DataLoader(fit, 100), "tune": DataLoader(tune, 200), "test": DataLoader(test, 500)}
    noise = torch.rand(500, 64, generator=torch.Generator().manual_seed(args.seed))  # not digits at all

    def ask(model):
        return predict(model, loaders["test"], seed=args.seed), predict(model, noise, seed=args.seed)

    def last_layer(model):
        bayesify(model, "la", include="4.*")
        return fit_laplace(model, loaders["fit"], structure="kron", tune=loaders["tune"])

    def tempered(model):
        temperature = metrics.fit_temperature(predict(model, loaders["tune"]))
        return [found.tempered(temperature) for found in ask(model)]

    members = [train(fit, args.epochs, args.seed + i) for i in range(MEMBERS)]
    found = {"plain": ask(members[0]), "plain + temperature": tempered(members[0])}
    alarmed = fit_novelty(last_layer(copy.deepcopy(members[0])), loaders["fit"], held_out=loaders["tune"])
    found["three lines (la)"] = ask(alarmed)
    found["vi"] = ask(train(fit, args.epochs, args.seed, "vi"))
    found["ensemble, one training"] = ask(train(fit, args.epochs, args.seed, "ensemble"))
    found["five, mixed"] = ask(mix(bayesify(copy.deepcopy(m), "vanilla") for m in members))
    found["five with three lines"] = ask(mix(last_layer(m) for m in members))

    print(f"\n{len(fit)} digits to train on, {len(test)} to test; {len(noise)} random images as a trap\n")
    print(f"{'':24}{'error':>8}{'NLL':>9}{'ECE':>8}{'noise, confidence':>19}{'OOD AUROC':>11}")
    for name, (out, strange) in found.items():
        s, auroc = out.scores, metrics.auroc(out.entropy, strange.entropy)
        print(
            f"{name:24}{s['error']:>8.1%}{s['nll']:>9.4f}{s['ece']:>8.1%}{strange.confidence.mean():>19.1%}{auroc:>11.3f}"
        )

    out, strange = found["three lines (la)"]
    false, right = (float(p.alarm().double().mean()) for p in (out, strange))
    print(
        f"\nfit_novelty: an alarm at 5 % false alarms flags {right:.1%} of the random images, {false:.1%} of the digits"
    )

    args.out.mkdir(parents=True, exist_ok=True)
    (before, before_ood), (after, after_ood) = found["plain"], found["three lines (la)"]
    picture, page = args.out / "before_after.svg", args.out / "report.html"
    plots.before_after(before, after, ood=(before_ood, after_ood)).savefig(picture)
    plots.report(after, page, ood=after_ood, title="Digits, three lines later")
    print(f"\nsee {picture} and {page}")


if __name__ == "__main__":
    main()
