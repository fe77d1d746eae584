"""Set other libraries beside bayesify: the same model, batch and optimizer, in one interleaved run.

`make bench-peers` runs this file. It makes an environment of its own in .venv-peers, so that the peers' requirements do
not touch the project's, and writes docs/results/peers.json.
"""

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-peers"
PEERS = ["bayesian-torch", "torchbayesian", "posteriors", "laplace-torch", "asdfghjkl", "torchopt"]
RESULTS = ROOT / "docs" / "results" / "peers.json"


def install():
    """Make the environment, once."""
    python = VENV / "bin" / "python"
    stamp = VENV / ".installed"
    if not stamp.exists():
        venv.create(VENV, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "torch", "torchvision", "-e", str(ROOT)], check=True)
        for peer in PEERS:
            done = subprocess.run([python, "-m", "pip", "install", "--quiet", peer], check=False)
            print(peer, "installed" if done.returncode == 0 else "cannot be installed")
        stamp.touch()
    return python


def vi_bayesian_torch(work):
    """bayesian-torch: layers are replaced by Bayesian ones."""
    import torch
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    model = work.model()
    dnn_to_bnn(
        model,
        {
            "prior_mu": 0.0,
            "prior_sigma": 1.0,
            "posterior_mu_init": 0.0,
            "posterior_rho_init": -7.0,
            "type": "Reparameterization",
            "moped_enable": False,
            "moped_delta": 0.5,
        },
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    return loss_step(model, optimizer, work, lambda: get_kl_loss(model))


def vi_torchbayesian(work):
    """torchbayesian: every parameter is parametrized."""
    import torch
    from torchbayesian import bnn

    model = bnn.BayesianModule(work.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    return loss_step(model, optimizer, work, model.kl_divergence)


def vi_posteriors(work):
    """posteriors: a functional transform with torchopt's SGD."""
    import posteriors
    import torchopt
    from torch import func
    from torch.nn import functional as F

    model, (x, y) = work.model(), work.data()

    def log_posterior(params, batch):
        output = func.functional_call(model, params, batch[0])
        value = -F.cross_entropy(output, batch[1])
        return value + posteriors.diag_normal_log_prob(params) / 60_000, output

    optimizer = torchopt.sgd(lr=1e-3, momentum=0.5)
    transform = posteriors.vi.diag.build(log_posterior, optimizer, temperature=1 / 60_000, init_log_sds=-7.0)
    state = [transform.init(dict(model.named_parameters()))]

    def step():
        state[0], _ = transform.update(state[0], (x, y))

    return step


def loss_step(model, optimizer, work, kl):
    """Return a closure that does one step on the mean loss plus KL/N."""
    from torch.nn import functional as F

    x, y = work.data()

    def step():
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + kl() / 60_000).backward()
        optimizer.step()

    return step


def laplace_torch(backend):
    """laplace-torch: diagonal empirical Fisher with one of its backends."""

    def build(work):
        import laplace
        from torch.utils.data import DataLoader, TensorDataset

        model, (x, y) = work.model().eval(), work.data()
        loader = DataLoader(TensorDataset(x, y), batch_size=work.batch)
        curvature = {"asdl": laplace.curvature.AsdlEF, "curvlinops": laplace.curvature.CurvlinopsEF}[backend]
        return lambda: laplace.DiagLaplace(model, "classification", backend=curvature).fit(loader)

    return build


def ours_laplace(work):
    """bayesify's fit on the same batch."""
    from bayesify import bayesify, fit_laplace

    model = bayesify(work.model(), "la")
    return lambda: fit_laplace(model, [work.data()])


def plain_pass(work):
    """One forward and backward pass, what a Laplace fit is compared with."""
    from torch.nn import functional as F

    model, (x, y) = work.model().eval(), work.data()
    return lambda: F.cross_entropy(model(x), y).backward()


def measure(rounds):
    """Measure whatever runs, and write down why the rest does not."""
    from tests.benchmarks.timing import interleave
    from tests.benchmarks.workloads import MLP, Workload, bayesian_step, plain_step

    groups = {
        "VI training step over plain SGD": (
            plain_step,
            {
                "bayesify": lambda w: bayesian_step(w, "vi"),
                "bayesian-torch": vi_bayesian_torch,
                "torchbayesian": vi_torchbayesian,
                "posteriors": vi_posteriors,
            },
        ),
        "Laplace fit over a plain pass": (
            plain_pass,
            {
                "bayesify": ours_laplace,
                "laplace-torch (asdl)": laplace_torch("asdl"),
                "laplace-torch (curvlinops)": laplace_torch("curvlinops"),
            },
        ),
    }
    results = {}
    for group, (base, builders) in groups.items():
        for work in (MLP, Workload("vit_b_32", 8, 10)):
            steps, failed = {"plain": base(work)}, {}
            for name, build in builders.items():
                try:
                    step = build(work)
                    step()
                    steps[name] = step
                except Exception as error:  # a peer that fails is a result
                    failed[name] = f"fails: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
            times = interleave(steps, rounds)
            ratios = {name: times[name].over(times["plain"]) for name in steps if name != "plain"}
            results[f"{group}, {work}"] = ratios | failed
            print(f"{group}, {work}", json.dumps(ratios | failed, indent=1))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure in this environment, without setting one up")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    if args.measure:
        sys.path.insert(0, str(ROOT))
        measure(args.rounds)
    else:
        command = [install(), __file__, "--measure", "--rounds", str(args.rounds)]
        subprocess.run(command, check=True, cwd=ROOT)
