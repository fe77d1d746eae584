"""Loss and penalty have the gradients of the formulas, however `penalty` is called."""

import math

import pytest
import torch
from cases import tensor
from thetas import by_data_attribute, by_vector
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from variants import LINK_FUNCTIONS, SIG, VARIANTS, N

from bayesify import bayesify, named_posteriors, penalty, sample

EXACT = {"rtol": 1e-10, "atol": 1e-10}
X, Y = tensor(6, 3).double(), tensor(6, 2).double()


def linear(method: str, options: dict, prior_mean=None) -> nn.Module:
    """Return a small model away from its prior mean, with spreads of many sizes."""
    torch.manual_seed(0)
    model = bayesify(nn.Linear(3, 2).double(), method, prior_sig=SIG, prior_mean=prior_mean, **options)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.3 * tensor(*p.shape).double().abs() * (1 + i))
    return model


class Oracle:
    """The paper's formulas on plain tensors: theta, and the penalty as printed."""

    def __init__(self, model: nn.Module, method: str, options: dict, num_data: float = N) -> None:
        self.method, self.options, self.num_data = method, options, num_data
        self.theta0 = {n: q.prior_mean.clone() for n, q in named_posteriors(model)}
        self.m = {n: q.original.detach().clone().requires_grad_() for n, q in named_posteriors(model)}
        self.rho = {n: q.rho.detach().clone().requires_grad_() for n, q in named_posteriors(model) if method == "vi"}

    def theta(self, noise: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.method == "vi":
            return {n: m + noise[n] * self.s(n) for n, m in self.m.items()}
        if self.method == "mc_dropout":
            kept = {n: noise[n].double() if n in noise else torch.ones_like(m) for n, m in self.m.items()}
            return {n: kept[n] * m + (1 - kept[n]) * self.theta0[n] for n, m in self.m.items()}
        return self.m

    def s(self, name: str) -> Tensor:
        return LINK_FUNCTIONS[self.options["link"]](self.rho[name])

    def penalty(self) -> Tensor:
        return sum(self.term(name) for name in self.m)

    def term(self, name: str) -> Tensor:
        bias = self.options["bias"] if name == "bias" else ""
        square = (self.m[name] - self.theta0[name]).square().sum()
        if bias in ("uninformative", "ignore"):
            return 0 * square
        if self.method == "vanilla":
            return self.options["wd"] / 2 * square
        kld = self.options["kld"] / self.num_data
        if self.method == "mc_dropout":
            keep = 1 - (0 if bias == "gaussian" else self.options["p_drop"])
            return kld * keep / (2 * SIG**2) * square
        return kld * kl_divergence(Normal(self.m[name], self.s(name)), Normal(self.theta0[name], SIG)).sum()


def noise_of(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return the noise of the draw that `sample(model, seed=seed)` makes."""
    from bayesify.core.ranks import draw_seeds

    found = {n: q for n, q in named_posteriors(model) if q.random}
    return {n: q.noise_of(draw_seeds(1, seed)[0]) for n, q in found.items()}


def losses(model: nn.Module, oracle: Oracle, seed: int) -> tuple[Tensor, Tensor]:
    with sample(model, seed=seed):
        found = F.mse_loss(model(X), Y)
    theta = oracle.theta(noise_of(model, seed))
    return found, F.mse_loss(F.linear(X, theta["weight"], theta["bias"]), Y)


@pytest.mark.parametrize("prior_mean", [None, "zero"])
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_loss_and_penalty_have_the_papers_gradients(method: str, options: dict, prior_mean):
    model = linear(method, options, prior_mean)
    oracle = Oracle(model, method, options)
    loss, exact_loss = losses(model, oracle, 3)
    term, exact_term = penalty(model, N), oracle.penalty()
    torch.testing.assert_close(loss, exact_loss, **EXACT)
    torch.testing.assert_close(term, exact_term, **EXACT)
    (loss + term).backward()
    (exact_loss + exact_term).backward()
    for name, q in named_posteriors(model):
        torch.testing.assert_close(q.original.grad, oracle.m[name].grad, **EXACT)
        if method == "vi":
            torch.testing.assert_close(q.rho.grad, oracle.rho[name].grad, **EXACT)


def test_the_vi_gradients_written_out():
    """m: g + (m-theta0)/(N sigma^2); s: g*eps + (s/sigma^2 - 1/s)/N, by hand on a linear loss."""
    model = linear("vi", {"link": "exp"})
    weights = tensor(2, 3).double()
    with sample(model, seed=1):
        ((model.weight * weights).sum() + penalty(model, N)).backward()
    q, eps = model.parametrizations.weight[0], noise_of(model, 1)["weight"]
    s = q.std
    by_mean = weights + (q.mean - q.prior_mean) / (N * SIG**2)
    by_s = weights * eps + (s / SIG**2 - 1 / s) / N
    torch.testing.assert_close(q.original.grad, by_mean, **EXACT)
    torch.testing.assert_close(q.rho.grad, by_s * s, **EXACT)


# -- the ways to call penalty ------------------------------------------------------------------------------------------

ORDERS = [
    "before",
    "after",
    "after backward",
    "twice",
    "alone",
    "submodule",
    "accumulated",
    "graph apart",
    "no_grad first",
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_the_penalty_has_one_gradient_however_it_is_called(method: str, options: dict, order: str):
    model = nn.Sequential(linear(method, options), nn.Tanh(), linear(method, options))  # two bayesified models
    parameters = list(model.parameters())

    def loss() -> Tensor:
        torch.manual_seed(4)
        return model[0](X).square().mean()

    wanted = [torch.zeros_like(p) for p in parameters]
    for part in (0, 2):
        oracle = Oracle(model[part], method, options)
        if oracle.penalty().requires_grad:
            oracle.penalty().backward()
        for i, p in enumerate(parameters):
            for name, q in named_posteriors(model[part]):
                if p is q.original:
                    wanted[i] += oracle.m[name].grad
                elif method == "vi" and p is q.rho and oracle.rho[name].grad is not None:
                    wanted[i] += oracle.rho[name].grad
    times_penalty, times_loss = 1, 1
    if order == "before":
        term = penalty(model, N)
        (term + loss()).backward()
    elif order in ("after", "submodule"):
        value = loss()
        (value + penalty(model, N)).backward()
    elif order == "after backward":
        loss().backward()
        penalty(model, N).backward()
    elif order == "twice":
        value = loss()
        (value + penalty(model, N) + penalty(model, N)).backward()
        times_penalty = 2
    elif order == "alone":
        value = loss()
        grads = torch.autograd.grad(penalty(model, N), parameters, allow_unused=True, materialize_grads=True)
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g
        value.backward()
    elif order == "accumulated":
        for _ in range(3):
            (loss() + penalty(model, N)).backward()
        times_penalty = times_loss = 3
    elif order == "graph apart":
        value = loss()
        term = penalty(model, N)
        value.backward()
        term.backward()
    elif order == "no_grad first":
        value = loss()
        with torch.no_grad():
            assert not penalty(model, N).requires_grad
        (value + penalty(model, N)).backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    model.zero_grad()
    loss().backward()
    for p, f, w in zip(parameters, found, wanted, strict=True):
        data = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(f, times_loss * data + times_penalty * w, **EXACT)


def test_the_penalty_after_a_step_is_of_the_new_parameters():
    model = linear("vi", {"link": "softplus"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    model.zero_grad()
    oracle = Oracle(model, "vi", {"link": "softplus", "bias": "informative", "kld": 1.0})
    penalty(model, N).backward()
    oracle.penalty().backward()
    torch.testing.assert_close(model.parametrizations.weight[0].rho.grad, oracle.rho["weight"].grad, **EXACT)


@pytest.mark.parametrize("write", [by_data_attribute, by_vector])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_the_penalty_follows_writes_that_autograd_does_not_count(method: str, options: dict, dtype: torch.dtype, write):
    model, untouched = linear(method, options).to(dtype), linear(method, options).to(dtype)
    model(X.to(dtype)).sum()  # what it has computed on the way must not be used again
    write(list(model.parameters()))
    untouched.load_state_dict(model.state_dict())
    values = [penalty(m, N) for m in (model, untouched)]
    assert values[0] == values[1]
    for value in values:
        value.backward()
    for (name, p), q in zip(model.named_parameters(), untouched.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_the_penalty_of_frozen_means():
    model = linear("vi", {"link": "softplus"})
    model.parametrizations.weight.original.requires_grad_(False)
    (model(X).sum() + penalty(model, N)).backward()
    assert model.parametrizations.weight.original.grad is None
    assert model.parametrizations.weight[0].rho.grad is not None
    model.requires_grad_(False)
    assert not penalty(model, N).requires_grad
    assert not model(X).requires_grad


@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("method", ["vanilla", "vi", "mc_dropout", "sgld", "la"])
def test_the_penalty_of_a_part_is_of_its_own_parameters_alone(method: str, after_forward: bool):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    bayesify(model, method, prior_sig=0.7, prior_mean="zero")
    if after_forward:
        model(torch.ones(2, 3, dtype=torch.float64))
    parts = [penalty(model[i], N) for i in (0, 2)]
    assert min(parts) > 0
    torch.testing.assert_close(sum(parts), penalty(model, N), **EXACT)
    parts[0].backward()
    assert all(p.grad is not None for p in model[0].parameters())
    assert all(p.grad is None or not p.grad.any() for p in model[2].parameters())


@pytest.mark.parametrize("method", ["sgld", "la"])
def test_inflated_data_counts_as_so_much_more_in_the_penalty(method: str):
    model = nn.Linear(3, 2).double()
    square = sum(p.detach().square().sum() for p in model.parameters())
    bayesify(model, method, prior_sig=0.7, prior_mean="zero", Ninflate=2.5)
    torch.testing.assert_close(penalty(model, N).detach(), square / (2 * 0.7**2) / (2.5 * N), **EXACT)


@pytest.mark.parametrize("num_data", [0, -1, math.nan, math.inf, "10", True, None])
def test_penalty_refuses_a_wrong_number_of_data(num_data):
    with pytest.raises(ValueError, match="num_data must be a positive number"):
        penalty(linear("vi", {}), num_data)
