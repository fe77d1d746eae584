"""What four lines add to a trained network, in a few seconds, on the handwritten digits that come with scikit-learn.

The network is trained as usual on 200 digits. Its last layer then gets a Laplace posterior, whose scale is chosen on
200 others, which also set the alarm; the rest are for the comparison, and random images are out of distribution.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bayesify.core.checkpoint import save
from bayesify.core.wrap import bayesify
from bayesify.methods.laplace.fit import fit_laplace
from bayesify.prediction.novelty import fit_novelty
from bayesify.prediction.predict import predict
from bayesify.prediction.predictive import Predictive
from bayesify.quality import metrics, plots

EPOCHS = 150


def digits(seed: int) -> list[TensorDataset]:
    """Return 200 digits to train on, 200 to tune with and the other 1397."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the demonstration needs scikit-learn's digits: pip install 'bayesify[examples]'") from error
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return [TensorDataset(x[part], y[part]) for part in (slice(200), slice(200, 400), slice(400, None))]


def trained(data: TensorDataset, seed: int) -> nn.Sequential:
    """Train a plain network."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    for _ in range(EPOCHS):
        for x, y in DataLoader(data, 32, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval()


def run(out: Path, seed: int) -> None:
    """Train, make the last layer Bayesian, compare, and write a picture, a report and a checkpoint into a folder."""
    train, validation, test = digits(seed)
    noise = torch.rand(500, 64, generator=torch.Generator().manual_seed(seed))
    model = trained(train, seed)

    def asked() -> tuple[Predictive, Predictive]:
        return predict(model, DataLoader(test, 500)), predict(model, noise)

    found = {"as trained": asked()}
    bayesify(model, "la", include="4.*")
    fit_laplace(model, DataLoader(train, 100), structure="kron", tune=DataLoader(validation, 100))
    fit_novelty(model, DataLoader(train, 100), held_out=DataLoader(validation, 100))
    found["four lines later"] = asked()

    print(f"{len(train)} digits to train on, {len(test)} to test; {len(noise)} random images as a trap\n")
    print(f"{'':18}{'error':>8}{'NLL':>9}{'ECE':>8}{'sure of digits':>17}{'sure of noise':>15}{'OOD AUROC':>11}")
    for name, (seen, unseen) in found.items():
        s, auroc = seen.scores, metrics.auroc(seen.entropy, unseen.entropy)
        sure = f"{seen.confidence.mean():>17.1%}{unseen.confidence.mean():>15.1%}"
        print(f"{name:18}{s['error']:>8.1%}{s['nll']:>9.4f}{s['ece']:>8.1%}{sure}{auroc:>11.3f}")
    seen, unseen = found["four lines later"]
    alarms = f"{unseen.alarm().float().mean():.1%} of the noise, and {seen.alarm().float().mean():.1%} of the digits"
    print(f"\nan alarm with a false-alarm rate of 5% flags {alarms}")
    save(model, out)
    print(f"\nwrote {out / 'posterior.safetensors'}: try `bayesify inspect {out}`")
    try:
        (before, before_ood), (after, after_ood) = found.values()
        picture = out / "before_after.svg"
        plots.before_after(before, after, ood=(before_ood, after_ood)).savefig(picture)
        page = plots.report(after, out / "report.html", ood=after_ood, title="Digits")
        print(f"wrote {picture} and {page}")
    except ImportError as error:
        print(f"no report: {error}")
