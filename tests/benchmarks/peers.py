"""Set other libraries beside bayesify: the same model, batch and optimizer, side by side.

`make bench-peers` runs this file. It makes an environment of its own in .venv-peers, so that the peers' requirements do
not touch the project's, measures each model in a process of its own, and writes docs/results/peers.json and the page.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-peers"
PEERS = ["bayesian-torch", "torchbayesian", "posteriors", "laplace-torch", "asdfghjkl", "torchopt"]
RESULTS = ROOT / "docs" / "results" / "peers.json"
MODELS = {"mlp": 128, "vit_b_32": 8}  # with their batches
NUM_DATA = 60_000
BATCHES = 4  # of a Laplace fit
LEFT_OUT = {("vit_b_32", "laplace-torch (curvlinops)"): "not measured: minutes a batch"}
LONG = 60  # seconds; what takes longer is measured once, and not in turn with the others


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


def vi_reference(work):
    """The paper's own way in plain torch: a network for m, one for rho, and theta written into a third before a pass.

    The network's gradient is m's; times eps * sigmoid(rho) it is rho's; the KL's are added in closed form.
    """
    import torch
    from torch.nn import functional as F

    net, (x, y) = work.model(), work.data()
    thetas, sig = list(net.parameters()), 0.1
    priors = [p.detach().clone() for p in thetas]
    means = [p.clone().requires_grad_() for p in priors]
    rhos = [torch.full_like(p, -7.0).requires_grad_() for p in priors]
    optimizer = torch.optim.SGD([*means, *rhos], lr=1e-3, momentum=0.5)

    def step():
        noise = [torch.randn_like(m) for m in means]
        with torch.no_grad():
            for theta, m, rho, eps in zip(thetas, means, rhos, noise, strict=True):
                theta.copy_(m + eps * F.softplus(rho))
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for theta, m, rho, eps, prior in zip(thetas, means, rhos, noise, priors, strict=True):
                s = F.softplus(rho)
                m.grad = theta.grad + (m - prior) / (sig**2 * NUM_DATA)
                rho.grad = (theta.grad * eps + (s / sig**2 - 1 / s) / NUM_DATA) * torch.sigmoid(rho)
        optimizer.step()

    return step


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
        return value + posteriors.diag_normal_log_prob(params) / NUM_DATA, output

    optimizer = torchopt.sgd(lr=1e-3, momentum=0.5)
    transform = posteriors.vi.diag.build(log_posterior, optimizer, temperature=1 / NUM_DATA, init_log_sds=-7.0)
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
        (F.cross_entropy(model(x), y) + kl() / NUM_DATA).backward()
        optimizer.step()

    return step


def laplace_torch(backend):
    """laplace-torch: the diagonal empirical Fisher with one of its backends, without looking for a prior's scale."""

    def build(work):
        import laplace
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        model, (x, y) = work.model().eval(), work.data()
        data = TensorDataset(torch.cat([x] * BATCHES), torch.cat([y] * BATCHES))
        loader = DataLoader(data, batch_size=work.batch)
        curvature = {"asdl": laplace.curvature.AsdlEF, "curvlinops": laplace.curvature.CurvlinopsEF}[backend]
        return lambda: laplace.DiagLaplace(model, "classification", backend=curvature).fit(loader)

    return build


def ours_laplace(work):
    """bayesify's fit on the same batches, with the prior's scale that it looks for."""
    from bayesify import bayesify, fit_laplace

    model, batches = bayesify(work.model(), "la"), [work.data()] * BATCHES
    return lambda: fit_laplace(model, batches)


def plain_pass(work):
    """A forward and backward pass of the same batches, what a Laplace fit is compared with."""
    from torch.nn import functional as F

    model, (x, y) = work.model().eval(), work.data()

    def step():
        for _ in range(BATCHES):
            F.cross_entropy(model(x), y).backward()

    return step


def groups():
    """Return by group what a step is compared with, and the libraries' steps."""
    from tests.benchmarks.workloads import bayesian_step, plain_step

    return {
        "VI training step over plain SGD": (
            plain_step,
            {
                "bayesify": lambda work: bayesian_step(work, "vi", prior_sig=0.1),
                "the paper's way, by hand": vi_reference,
                "bayesian-torch": vi_bayesian_torch,
                "torchbayesian": vi_torchbayesian,
                "posteriors": vi_posteriors,
            },
        ),
        "Laplace fit over a plain pass": (
            plain_pass,
            {
                "bayesify, with the prior's scale": ours_laplace,
                "laplace-torch (asdl)": laplace_torch("asdl"),
                "laplace-torch (curvlinops)": laplace_torch("curvlinops"),
            },
        ),
    }


def measure(model, rounds):
    """Measure whatever runs on one model; return ratios by group, and why the rest does not run."""
    from tests.benchmarks.timing import interleave
    from tests.benchmarks.workloads import Workload

    work, results = Workload(model, MODELS[model], rounds), {}
    for group, (base, builders) in groups().items():
        steps, once, failed = {"plain": base(work)}, {}, {}
        for name, build in builders.items():
            if (model, name) in LEFT_OUT:
                failed[name] = LEFT_OUT[model, name]
                continue
            try:
                step = build(work)
                taken = interleave({name: step}, 1)[name]
            except Exception as error:  # a peer that fails is a result
                failed[name] = f"fails: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
                continue
            if taken.wall > LONG:
                once[name] = taken
            else:
                steps[name] = step
        times = {**interleave(steps, rounds), **once}
        ratios = {name: times[name].over(times["plain"]) for name in builders if name in times}
        rounded = {name: {k: round(v, 3) for k, v in ratio.items()} for name, ratio in ratios.items()}
        results[f"{group}, {work}"] = rounded | failed
    return results


def run(rounds):
    """Measure every model in a process of its own, and write the results and the page."""
    found = {}
    for model in MODELS:
        command = [install(), __file__, "--measure", model, "--rounds", str(rounds)]
        done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout)
        found |= json.loads(done.stdout)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    sys.path.insert(0, str(ROOT))
    from tests.benchmarks import pages

    pages.PAGE.write_text(pages.page(json.loads(pages.RESULTS.read_text())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", choices=list(MODELS), help="measure one model in this environment, and print JSON")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    if args.measure:
        sys.path.insert(0, str(ROOT))
        with contextlib.redirect_stdout(sys.stderr):  # where a peer prints
            measured = measure(args.measure, args.rounds)
        print(json.dumps(measured, indent=1))
    else:
        run(args.rounds)
