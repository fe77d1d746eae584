"""Compiled loops: the numbers of plain torch operations, on any number of threads, in any process."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from bayesify import SGLD, bayesify, named_posteriors, penalty
from bayesify.engine import cpu, dispatch

METHODS = [
    ("vi", {"link": "softplus", "init_sig": 0.02}),
    ("vi", {"link": "exp", "init_sig": 0.02}),
    ("vi", {"link": "clamp", "init_sig": 0.02}),
    ("vi", {"link": "exp", "bias": "uninformative"}),
    ("mc_dropout", {"p_drop": 0.3}),
    ("vanilla", {"wd": 0.1}),
    ("sgld", {}),
]
ROWS, WIDTH = 150, 64  # no multiple of a block


def gradients(method: str, options: dict, prior_mean, padding: int | None, dtype=torch.float32) -> list[torch.Tensor]:
    """Return theta, the penalty and the gradients of an embedding under a loss with penalty."""
    torch.manual_seed(0)
    model = nn.Embedding(ROWS, WIDTH, padding_idx=padding, dtype=dtype)
    model = bayesify(model, method, prior_sig=0.3, prior_mean=prior_mean, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    torch.manual_seed(1)
    theta = model(torch.arange(ROWS))
    term = penalty(model, num_data=20)
    (theta * torch.randn(ROWS, WIDTH, dtype=dtype)).sum().add(term).backward()
    return [theta.detach(), term.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float32, 2e-5, 2e-6), (torch.float64, 1e-13, 1e-14)])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("prior_mean", [None, "zero"])
@pytest.mark.parametrize(("method", "options"), METHODS)
def test_loops_compute_what_torch_does(method, options, prior_mean, padding, dtype, rtol, atol, monkeypatch):
    ran = []
    loop = cpu.run
    monkeypatch.setattr(cpu, "run", lambda *a: ran.append(a) or loop(*a))
    found = gradients(method, options, prior_mean, padding, dtype)
    assert ran
    ran.clear()
    monkeypatch.setenv("BAYESIFY_ENGINE", "torch")
    wanted = gradients(method, options, prior_mean, padding, dtype)
    assert not ran
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, rtol=rtol, atol=atol)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_the_chain_and_its_moments_are_those_of_torch(momentum, monkeypatch):
    def chain() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = bayesify(nn.Embedding(ROWS, WIDTH, padding_idx=3), "sgld", thin=1)
        optimizer = SGLD(model, 0.05, num_data=30, momentum=momentum)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.arange(ROWS)).square().mean().backward()
            optimizer.step()
        ((_, q),) = named_posteriors(model)
        return [q.original.detach(), q.average, q.scatter]

    found = chain()
    monkeypatch.setenv("BAYESIFY_ENGINE", "torch")
    for f, w in zip(found, chain(), strict=True):
        torch.testing.assert_close(f, w, rtol=1e-5, atol=1e-6)


def test_a_step_by_a_loop_raises_the_version_of_its_parameter():
    model = bayesify(nn.Linear(100, 100), "sgld")
    optimizer = SGLD(model, 0.1, num_data=10)
    model(torch.ones(1, 100)).sum().backward()
    before = model.parametrizations.weight.original._version
    optimizer.step()
    assert model.parametrizations.weight.original._version > before


def test_the_number_of_threads_changes_no_theta():
    model = bayesify(nn.Linear(500, 500), init_sig=0.1)
    ((_, q), *_) = named_posteriors(model)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append((q.draw(q.original, 5), q.energy(q.original.detach(), 1.0)))
    finally:
        torch.set_num_threads(threads)
    for theta, energy in found[1:]:
        assert torch.equal(theta, found[0][0])
        torch.testing.assert_close(energy.detach(), found[0][1].detach(), rtol=1e-6, atol=0)


# -- functions of one element ------------------------------------------------------------------------------------------


def made(function, x: torch.Tensor) -> torch.Tensor:
    """Run a function of one element over a tensor, by a compiled loop."""
    out = torch.empty_like(x)
    dispatch.run(function, None, (x,), (out,))
    return out


@pytest.mark.parametrize(
    ("function", "exact", "least", "most"),
    [
        (torch.exp, torch.exp, -87, 88),
        (nn.functional.softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x)), -80, 80),
        (torch.sigmoid, torch.sigmoid, -80, 80),
    ],
)
def test_functions_of_one_element(function, exact, least, most):
    def formula(x):
        return function(x)

    x = torch.linspace(least, most, 20_001)
    torch.testing.assert_close(made(formula, x).double(), exact(x.double()), rtol=4e-7, atol=0)
    torch.testing.assert_close(made(formula, x.double()), exact(x.double()), rtol=1e-14, atol=1e-300)
    assert made(formula, torch.full((5,), torch.nan)).isnan().all()


def logarithm(x):
    return torch.log(x)


def test_the_logarithm_of_one_element():
    x = torch.logspace(-37, 38, 20_001)
    torch.testing.assert_close(made(logarithm, x).double(), x.double().log(), rtol=3e-7, atol=1e-7)
    torch.testing.assert_close(made(logarithm, x.double()), x.double().log(), rtol=1e-14, atol=1e-15)


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_draws_the_same():
    script = """
import os, torch
from bayesify.engine.noise import Stream
torch.set_num_threads(2)
here = Stream(1, 2, (200_000,)).normal().numpy()
child = os.fork()
if child == 0:  # torch's own operations wait for ever on threads that a child does not have
    os._exit(0 if (Stream(1, 2, (200_000,)).normal().numpy() == here).all() else 7)
_, status = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=False, timeout=60).returncode == 0


def test_numba_is_imported_by_the_first_draw():
    """Not before; and not after it, since the same draw must be the same number whenever it is made."""
    script = """
import sys, torch
from bayesify import bayesify
model = bayesify(torch.nn.Linear(3, 2))
model.eval()(torch.ones(1, 3))
assert "numba" not in sys.modules
model.train()(torch.ones(1, 3))
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_machine_code_of_two_processes_does_not_answer_for_each_other(tmp_path):
    """Two processes leave a formula each on disk; a third loads both, and each must be itself."""
    script = """
import sys
import torch
from bayesify.engine import dispatch
from bayesify.engine.noise import Stream
from bayesify.methods.vi import LINKS
from bayesify.core.method import gaussian

formulas = {"vi": LINKS["softplus"].draw, "la": gaussian}
for name in sys.argv[1:]:
    ins, out = (torch.zeros(4), torch.full((4,), 0.1)), torch.empty(4)
    dispatch.run(formulas[name], Stream(1, 2, (4,)), ins, (out,))
    print(round(out[0].item(), 4))
"""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}

    def run(*names):
        command = [sys.executable, "-c", script, *names]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()

    (vi,), (la,) = run("vi"), run("la")
    assert float(vi) == pytest.approx(float(la) * math.log1p(math.exp(0.1)) / 0.1, rel=1e-2)
    assert run("vi", "la") == [vi, la]


def test_where_names_cannot_be_its_own_nothing_is_kept(monkeypatch):
    from numba.core.bytecode import FunctionIdentity

    from bayesify.engine.cpu import name_alone

    monkeypatch.setattr(FunctionIdentity, "_unique_ids", iter(range(9)))
    assert not name_alone()
    assert next(FunctionIdentity._unique_ids) == 0
