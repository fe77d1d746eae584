"""Compiled loops: the numbers of plain torch operations, on any number of threads, in any process."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from bayesify import SGLD, bayesify, named_posteriors, penalty
from bayesify.engine import elements, fusion
from bayesify.engine.noise import Stream

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
    for name in ("run", "run_plain", "total"):
        loop = getattr(fusion, name)
        monkeypatch.setattr(fusion, name, lambda *a, loop=loop, **k: ran.append(loop) or loop(*a, **k))
    found = gradients(method, options, prior_mean, padding, dtype)
    assert ran
    ran.clear()
    monkeypatch.setattr(fusion, "fused", lambda *tensors: False)
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
    monkeypatch.setattr(fusion, "fused", lambda *tensors: False)
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


def of_elements(function, x: torch.Tensor) -> torch.Tensor:
    """Run a function of one element over a tensor."""
    out = torch.empty_like(x)
    assert fusion.ready()
    fusion.run_plain(function, (x,), (out,))
    return out


def exp_element(i, noise, ins, outs, par):
    outs[0][i] = elements.exp(ins[0][i])


def softplus_element(i, noise, ins, outs, par):
    outs[0][i] = elements.softplus(ins[0][i])


def sigmoid_element(i, noise, ins, outs, par):
    outs[0][i] = elements.sigmoid(ins[0][i])


def log_element(i, noise, ins, outs, par):
    outs[0][i] = elements.log(ins[0][i])


@pytest.mark.parametrize(
    ("function", "exact", "least", "most"),
    [
        (exp_element, torch.exp, -87, 88),
        (softplus_element, lambda x: torch.logaddexp(x, torch.zeros_like(x)), -80, 80),
        (sigmoid_element, torch.sigmoid, -80, 80),
    ],
)
def test_functions_of_one_element(function, exact, least, most):
    x = torch.linspace(least, most, 20_001)
    torch.testing.assert_close(of_elements(function, x).double(), exact(x.double()), rtol=4e-7, atol=0)
    torch.testing.assert_close(of_elements(function, x.double()), exact(x.double()), rtol=1e-14, atol=1e-300)
    assert of_elements(function, torch.full((5,), torch.nan)).isnan().all()


def test_the_logarithm_of_one_element():
    x = torch.logspace(-37, 38, 20_001)
    torch.testing.assert_close(of_elements(log_element, x).double(), x.double().log(), rtol=3e-7, atol=1e-7)
    torch.testing.assert_close(of_elements(log_element, x.double()), x.double().log(), rtol=1e-14, atol=1e-15)


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


def test_without_numba_torch_does_it_and_says_so_once(monkeypatch):
    wanted = Stream(1, 2, (5000,)).normal()
    monkeypatch.setattr(fusion, "_state", {"kernels": None, "missing": False, "threads": False})
    monkeypatch.setitem(sys.modules, "bayesify.engine.kernels", None)
    monkeypatch.delattr("bayesify.engine.kernels", raising=False)
    with pytest.warns(UserWarning, match="numba cannot be imported"):
        found = Stream(1, 2, (5000,)).normal()
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    Stream(1, 2, (5000,)).normal()  # a second warning would be an error here


def test_machine_code_is_found_again_by_another_process(tmp_path):
    """That of formulas made by formulas too, on one thread and on several."""
    script = """
import torch
from bayesify import bayesify, penalty
from bayesify.engine import kernels
from bayesify.engine.noise import Stream
compiled = []
compile = kernels._compile
kernels._compile = lambda *a, **k: compiled.append(compile(*a, **k)) or compiled[-1]
torch.set_num_threads(2)
model = bayesify(torch.nn.Linear(3, 2), prior_sig=0.1)
(model(torch.ones(1, 3)).sum() + penalty(model, 10)).backward()
Stream(1, 2, (200_000,)).normal()
print(*(sum(sum(getattr(c.stats, what).values()) for c in compiled) for what in ("cache_hits", "cache_misses")))
"""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True) for _ in range(2)]
    (hits, misses), again = (r.stdout.decode().split() for r in runs)
    assert hits == "0" and int(misses) == 4  # draw, gradient and sums; several threads
    assert again == [misses, "0"]


def test_machine_code_of_other_sources_is_not_taken(tmp_path):
    """The tag of a formula follows the files of the functions that it is made of."""
    from bayesify.engine import kernels

    source = tmp_path / "parts.py"
    source.write_text("def twice(x):\n    return x + x\n")
    space: dict = {}
    exec(compile(source.read_text(), str(source), "exec"), space)
    twice = space["twice"]

    def formula(i, noise, ins, outs, par):
        outs[0][i] = twice(ins[0][i])

    before = kernels._tag(formula)
    assert kernels._tag(formula) == before
    source.write_text("def twice(x):\n    return 2 * x\n")
    assert kernels._tag(formula) != before


def test_every_loop_has_files_of_its_own():
    """Numba numbers the files of one name without a lock: processes that start together would read each other's."""
    import numpy as np

    from bayesify.engine import kernels
    from bayesify.methods.vi import LINKS

    kinds = [(link.formulas.draw, dtype) for link in LINKS.values() for dtype in (np.float32, np.float64)]
    loops = [kernels.noisy("normal", *kind) for kind in kinds]
    loops += [kernels.noisy("mask", LINKS["exp"].formulas.draw, np.float32)]
    names = [loop._cache._impl.filename_base for pair in loops for loop in pair]
    assert len(set(names)) == len(names)


def test_machine_code_of_two_processes_does_not_answer_for_each_other(tmp_path):
    """Two processes leave a formula each on disk; a third loads both, and each must be itself."""
    script = """
import sys
import torch
from bayesify.engine import fusion
from bayesify.engine.noise import Stream
from bayesify.methods.vi import LINKS
from bayesify.core.moments import _add_noise

formulas = {"vi": LINKS["softplus"].formulas.draw, "la": _add_noise}
for name in sys.argv[1:]:
    ins, out = (torch.zeros(4), torch.full((4,), 0.1)), torch.empty(4)
    fusion.run(formulas[name], Stream(1, 2, (4,)), ins, (out,))
    print(round(out[0].item(), 4))
"""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def run(*names):
        command = [sys.executable, "-c", script, *names]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()

    (vi,), (la,) = run("vi"), run("la")
    assert float(vi) == pytest.approx(float(la) * math.log1p(math.exp(0.1)) / 0.1, rel=1e-2)
    assert run("vi", "la") == [vi, la]


def test_where_names_cannot_be_its_own_nothing_is_kept(monkeypatch):
    from numba.core.bytecode import FunctionIdentity

    from bayesify.engine.naming import name_alone

    monkeypatch.setattr(FunctionIdentity, "_unique_ids", iter(range(9)))
    assert not name_alone()
    assert next(FunctionIdentity._unique_ids) == 0
