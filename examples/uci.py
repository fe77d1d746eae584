"""Train a small network on all 20 splits of a UCI table at once, and score what it predicts.

Each split has a network of its own, one hidden layer of 50 units; their weights are stacked, so that one pass trains
them all and they never meet. Everything is chosen inside each training split: a fifth of it is held out, each setting
of a method is trained on the rest, the noise is fitted to the held-out rows, and the setting with the best held-out
likelihood is trained again, in the same way, on the whole split and predicts with that noise.
"""

import copy
import math
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

import bayesify as package
from bayesify import bayesify, fit_laplace, metrics, mix, penalty, predict, unbayesify
from bayesify.prediction.likelihoods import Regression

TABLES = ("concrete", "energy", "wine-quality-red", "yacht")
HIDDEN, BATCH, CHAIN, LR, SAMPLES = 50, 128, 500, 0.02, 100
MEMBERS = 5  # of a mixture
REGRESSOR = "BayesRegressor"
PRIORS = (1.0,)  # of the hidden layer; the outputs' is half of it
STEPS = (1000, 4000)
SETTINGS = {  # what is tried inside each training split, with each prior and each length of training
    "vanilla": [{}],
    "vi": [{"kld": 1.0}, {"kld": 0.1}],
    "mc_dropout": [{"p_drop": 0.005}, {"p_drop": 0.02}],
    "sgld": [{"Ninflate": 10.0}],
    "la": [{"scale": scale} for scale in (0.03, 0.3)],
    "mix": [{}],  # plain networks from different starting points
}


def table(name):
    """Return inputs (rows, features) and targets (rows,), and the 20 splits' test rows."""
    folder = Path(os.environ.get("BAYESIFY_DATA", "data")) / "uci" / name
    if not folder.is_dir():
        raise SystemExit(f"there is no table in {folder}; set BAYESIFY_DATA to the folder that has uci/{name}")
    values = torch.tensor(np.loadtxt(folder / "data.txt"), dtype=torch.float64)
    lines = (folder / "test_rows.txt").read_text().splitlines()
    tests = [torch.tensor([int(row) for row in line.split()]) for line in lines]
    return values[:, :-1], values[:, -1], tests


class Part:
    """The same part of every split: inputs (rows, splits, features) and targets (rows, splits)."""

    def __init__(self, x, y, rows):
        self.x = torch.stack([x[r] for r in rows], 1).float()
        self.y = torch.stack([y[r] for r in rows], 1).float()

    def times(self, count):
        """Return the part with every split several times, one set of splits after the other."""
        several = copy.copy(self)
        several.x, several.y = self.x.repeat(1, count, 1), self.y.repeat(1, count)
        return several


def parts(name):
    """Split each training split by four to one, and return fit, held-out, train and test parts."""
    x, y, tests = table(name)
    trains, fits, held = [], [], []
    for split, test in enumerate(tests):
        rest = torch.ones(len(x), dtype=torch.bool)
        rest[test] = False
        train = rest.nonzero().flatten()
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(split))]
        trains.append(train)
        held.append(order[: len(train) // 5])
        fits.append(order[len(train) // 5 :])
    return {k: Part(x, y, rows) for k, rows in {"fit": fits, "held": held, "train": trains, "test": tests}.items()}


class Nets(nn.Module):
    """One network per split, which standardizes its inputs and gives its output in the target's unit."""

    def __init__(self, part):
        super().__init__()
        _, splits, features = part.x.shape
        for name, values in (("x", part.x), ("y", part.y)):
            self.register_buffer(f"{name}_mean", values.mean(0))
            self.register_buffer(f"{name}_std", torch.where(values.std(0) > 0, values.std(0), 1.0))
        self.hidden_weight = nn.Parameter(torch.randn(splits, features, HIDDEN) / features**0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(splits, 1, HIDDEN))
        self.out_weight = nn.Parameter(torch.randn(splits, HIDDEN, 1) / HIDDEN**0.5)
        self.out_bias = nn.Parameter(torch.zeros(splits, 1, 1))

    def forward(self, x):
        """Take inputs (rows, splits, features), and return outputs (rows, splits)."""
        x = ((x - self.x_mean) / self.x_std).transpose(0, 1)
        hidden = torch.relu(x @ self.hidden_weight + self.hidden_bias)
        return (hidden @ self.out_weight + self.out_bias).squeeze(-1).T * self.y_std + self.y_mean

    def some(self, splits):
        """Return the networks of some splits."""
        found = copy.deepcopy(self)
        for held in (found._parameters, found._buffers):
            for values in held.values():
                values.data = values.data[splits].clone()
        return found

    def one(self, split):
        """Return one split's network by itself; it takes standardized inputs, and gives standardized outputs."""
        net = nn.Sequential(nn.Linear(len(self.hidden_weight[split]), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        with torch.no_grad():
            net[0].weight.copy_(self.hidden_weight[split].T)
            net[0].bias.copy_(self.hidden_bias[split, 0])
            net[2].weight.copy_(self.out_weight[split].T)
            net[2].bias.copy_(self.out_bias[split, 0])
        return net

    def rows(self, part, split):
        """Return one split's rows as its network by itself takes them."""
        x = (part.x[:, split] - self.x_mean[split]) / self.x_std[split]
        return x, ((part.y[:, split] - self.y_mean[split]) / self.y_std[split]).unsqueeze(1)


def wrapped(nets, method, prior, options):
    """Make the networks Bayesian, with a prior around zero."""
    scales = {"hidden*": prior, "out*": prior / 2}
    return bayesify(nets, method, prior_mean="zero", prior_sig=scales, **options)


def train(nets, part, noise, *, steps, method=""):
    """Minimize the Gaussian NLL of each split plus the penalty; the noise is learned where it is None.

    A split's loss is its mean over the rows, as `penalty` wants it, and the sum over splits trains each for itself.
    """
    count, splits = part.y.shape
    target = (part.y - nets.y_mean) / nets.y_std
    log_var = torch.full((splits,), -1.0) if noise is None else (noise.float() / nets.y_std.square()).log()
    learned = [log_var.requires_grad_()] if noise is None else []
    if method == "sgld":
        # Stable where lr times the largest curvature is below 2, and the curvature goes with 1/noise.
        optimizer = package.SGLD(nets, 0.01 * float(log_var.exp().min()), num_data=count)
    elif method == "ivon":
        optimizer = package.IVON(nets, 0.1, num_data=count)
    else:
        optimizer = torch.optim.Adam([{"params": nets.parameters()}, {"params": learned, "lr": 0.03}], LR)
    extra = torch.optim.Adam(learned, 0.03) if learned and method == "ivon" else None
    for step in range(steps):
        if method != "sgld":
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("first", group["lr"]) * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.zero_grad()
        rows = torch.randint(count, (min(BATCH, count),))
        squares = ((nets(part.x[rows]) - nets.y_mean) / nets.y_std - target[rows]).square().mean(0)
        ((squares * torch.exp(-log_var) + log_var).sum() / 2 + penalty(nets, count)).backward()
        optimizer.step()
        if extra is not None:
            extra.step()
            extra.zero_grad()
    return log_var.detach().exp() * nets.y_std.square()


def outputs_of(nets, on):
    """Return the outputs of each sample, (samples, rows, splits)."""
    return predict(nets, [(on.x, on.y)], samples=SAMPLES, seed=0, task="regression").outputs


class Stage:
    """Train settings on one part and predict another; MAP networks are trained once for all methods that start there.

    Args:
        part: What to train on.
        on: What to predict.
    """

    def __init__(self, part, on):
        self.part, self.on, self.maps = part, on, {}

    def outputs(self, method, setting, noise=None):
        """Train one setting of a method, and return the outputs (samples, rows, splits) for the other part."""
        prior, steps, options = setting
        if method == "mix":
            return self.mixture(prior, steps)
        if method not in ("vanilla", "sgld", "la"):
            torch.manual_seed(0)
            nets = wrapped(Nets(self.part), method, prior, options)
            train(nets, self.part, None, steps=steps, method=method)
            return outputs_of(nets, self.on)
        plain, learned = self.map(prior, steps)
        noise = learned if noise is None else noise
        if method == "vanilla":
            return plain(self.on.x).detach().unsqueeze(0)
        if method == "la":
            return self.laplace(plain, noise, options["scale"])
        nets = Nets(self.part)
        nets.load_state_dict(plain.state_dict())
        wrapped(nets, "sgld", prior, {"burnin": CHAIN // 4, "thin": 10, **options})
        train(nets, self.part, noise, steps=CHAIN, method="sgld")
        return outputs_of(nets, self.on)

    def map(self, prior, steps):
        """Return the networks at their posterior mode, and their noise."""
        if (prior, steps) not in self.maps:
            torch.manual_seed(0)
            nets = wrapped(Nets(self.part), "la", prior, {})  # until it is fitted, this is the mode
            found = train(nets, self.part, None, steps=steps)
            self.maps[prior, steps] = unbayesify(nets), found
        return self.maps[prior, steps]

    def mixture(self, prior, steps):
        """Train several networks per split, all at once, and predict with their mixture."""
        several, splits = self.part.times(MEMBERS), self.part.y.shape[1]
        torch.manual_seed(0)
        nets = wrapped(Nets(several), "la", prior, {})  # until it is fitted, this is the mode
        train(nets, several, None, steps=steps)
        unbayesify(nets)
        members = [nets.some(slice(k * splits, (k + 1) * splits)) for k in range(MEMBERS)]
        mixture = mix([bayesify(member, "vanilla") for member in members])
        return predict(mixture, [(self.on.x, self.on.y)], samples=MEMBERS, task="regression").outputs

    def laplace(self, nets, noise, scale):
        """Fit each split's network by itself, with this scale of the prior, and predict."""
        outputs = []
        for split in range(self.part.y.shape[1]):
            model = bayesify(nets.one(split), "la", prior_sig=scale)
            likelihood = Regression(float(noise[split] / nets.y_std[split] ** 2))
            fit_laplace(model, [nets.rows(self.part, split)], curvature="ggn", likelihood=likelihood)
            out = predict(model, [nets.rows(self.on, split)], samples=SAMPLES, seed=split, task="regression")
            outputs.append(out.outputs.squeeze(-1) * nets.y_std[split] + nets.y_mean[split])
        return torch.stack(outputs, -1)


def fitted_noise(outputs, on):
    """Return the noise variance of each split that explains the held-out rows best."""
    return torch.tensor([metrics.fit_noise(outputs[..., k], on.y[:, k]) for k in range(on.y.shape[1])])


def scored(outputs, noise, on):
    """Return the scores of each split."""
    stds = noise.sqrt().expand_as(outputs)
    return [score_of(outputs[..., k], stds[..., k].to(outputs), on.y[:, k]) for k in range(on.y.shape[1])]


def score_of(outputs, stds, targets):
    """Return the scores of one split, for the outputs of samples (samples, rows) and their noise."""
    prediction = outputs, stds, targets
    return {
        "rmse": float((outputs.mean(0) - targets).square().mean().sqrt()),
        "ll": -metrics.gaussian_nll(*prediction),
        "crps": metrics.crps(*prediction),
        "inside": round(metrics.interval_coverage(*prediction) * len(targets)),
        "rows": len(targets),
    }


def regressor(name):
    """Return the scores of each split's test rows by `BayesRegressor`, which chooses everything by itself."""
    from bayesify.integrations.sklearn import BayesRegressor

    x, y, tests = table(name)
    rows = []
    for split, test in enumerate(tests):
        known = torch.ones(len(x), dtype=torch.bool)
        known[test] = False
        model = BayesRegressor(random_state=split).fit(x[known].numpy(), y[known].numpy())
        mean, std = (torch.from_numpy(v) for v in model.predict(x[test].numpy(), return_std=True))
        rows.append(score_of(mean.unsqueeze(0), std.unsqueeze(0), y[test]))
        print(f"{name} {REGRESSOR} split {split}: log-likelihood {rows[-1]['ll']:.3f}", flush=True)
    return rows


def settings_of(method):
    """Return what is tried inside each training split: (prior, steps, options)."""
    return [(prior, steps, options) for prior in PRIORS for steps in STEPS for options in SETTINGS.get(method, [{}])]


def run(name, methods):
    """Return by method the scores of each split's test rows, and what was chosen for it."""
    if REGRESSOR in methods:
        return {REGRESSOR: regressor(name), **run(name, [m for m in methods if m != REGRESSOR])}
    data = parts(name)
    trial, found = Stage(data["fit"], data["held"]), {}
    for method in methods:
        for i, setting in enumerate(settings_of(method)):
            outputs = trial.outputs(method, setting)
            noise = fitted_noise(outputs, data["held"])
            lls = torch.tensor([row["ll"] for row in scored(outputs, noise, data["held"])])
            found.setdefault(method, []).append((noise, lls))
            print(f"{name} {method} {i} {setting}: held-out log-likelihood {float(lls.mean()):.3f}", flush=True)
    final, results = Stage(data["train"], data["test"]), {}
    for method in methods:
        best = torch.stack([lls for _, lls in found[method]]).argmax(0)
        rows = [None] * len(best)
        for i in sorted(set(best.tolist())):
            noise = found[method][i][0]
            scores = scored(final.outputs(method, settings_of(method)[i], noise), noise, data["test"])
            for split in (best == i).nonzero().flatten().tolist():
                rows[split] = {**scores[split], "setting": i}
        results[method] = rows
    return results
