"""Samples and penalty in autograd: their gradients come in one pass, and are the sums of both."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from variants import VARIANTS

from bayesify import bayesify, named_posteriors, param_groups, penalty, sample
from bayesify.core.penalty import Penalty

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WORDS = torch.tensor([0, 1, 2, 3, 2, 1, 0])
N = 30


def network(method: str, **options) -> nn.Module:
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), method, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


class Tied(nn.Module):
    """Reads an embedding twice, so that the padding row has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3, padding_idx=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.words(x), self.words.weight).tanh()


def words(method: str, **options) -> nn.Module:
    torch.manual_seed(0)
    return bayesify(Tied().double(), method, **options)


def grads(model: nn.Module, value: torch.Tensor, **options) -> list[torch.Tensor]:
    wanted = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(value, wanted, materialize_grads=True, **options))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return model(x).square().sum()


@pytest.mark.parametrize(("make", "x"), [(network, X), (words, WORDS)])
@pytest.mark.parametrize(("method", "options"), [*VARIANTS, ("vi", {"natural": False, "prior_sig": None})])
def test_the_gradient_of_loss_and_penalty_is_the_sum_of_both(method, options, make, x):
    options = {k: v for k, v in {"prior_sig": 0.3, **options}.items() if k != "natural" or v}
    found = []
    for together in (True, False):
        model = make(method, **options).train()
        if together:
            found.append(grads(model, 2 * loss(model, x) + 3 * penalty(model, N)))
        else:
            value = penalty(model, N)  # before any forward: a node of its own
            first = grads(model, 3 * value)
            found.append([a + b for a, b in zip(first, grads(model, 2 * loss(model, x)), strict=True)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("together", [True, False])
def test_only_relative_priors_are_pulled_where_some_are_absolute(together):
    model = network("vi", prior_sig={"0.*": 0.3}, pull=5.0).train()
    if together:
        loss(model, X)
    penalty(model, N).backward()
    kappa = model._bayesify_scope.method.scale(N)
    for name, q in named_posteriors(model):
        away = (q.original - q.prior_mean).detach() / q.prior_sig**2
        alone = torch.allclose(q.original.grad, kappa * away, rtol=1e-9, atol=0)
        assert alone == name.startswith("0.")


def given(value: torch.Tensor) -> int:
    """Return how many tensors and handles the penalty is a function of."""
    node = value.grad_fn
    while type(node).__name__ != Penalty.__name__ + "Backward":
        node = next(n for n, _ in node.next_functions if n is not None)
    return len([n for n, _ in node.next_functions if n is not None])


def test_the_penalty_comes_with_the_samples_of_the_last_forward():
    model = network("vi").train()
    assert given(penalty(model, N)) == 8  # m and rho of four tensors
    loss(model, X)
    assert given(penalty(model, N)) == 4  # a handle each
    model[0](X)
    assert given(penalty(model, N)) == 2 + 4
    with torch.no_grad():
        model(X)
    assert given(penalty(model, N)) == 8
    loss(model, X)
    model[0].parametrizations.weight.original.requires_grad_(False)
    assert given(penalty(model, N)) == 1 + 3  # the node of that weight was made before
    torch.optim.SGD(param_groups(model, lr=0.1)).step()
    loss(model, X)
    with torch.no_grad():
        model[2].parametrizations.bias.original.add_(1.0)
    assert given(penalty(model, N)) == 3 + 2


def test_backward_passes_of_loss_and_penalty_may_come_one_after_the_other():
    found = []
    for both in (True, False):
        model = network("vi", prior_sig=0.3).train()
        value, cost = loss(model, X), penalty(model, N)
        if both:
            (value + cost).backward()
        else:
            value.backward()
            cost.backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_loss_and_penalty_are_twice_differentiable_together(method):
    def squared(model: nn.Module, value: torch.Tensor) -> torch.Tensor:
        return torch.stack([g.square().sum() for g in grads(model, value, create_graph=True)]).sum()

    options = {"prior_sig": 0.3, "pull": 0.5}
    model = network(method, **options).train()
    found = grads(model, squared(model, loss(model, X) + penalty(model, N)))
    model = network(method, **options).train()
    value = penalty(model, N)
    torch.testing.assert_close(found, grads(model, squared(model, value + loss(model, X))), rtol=1e-9, atol=1e-12)


def test_two_penalties_of_one_forward_add_up():
    model = network("vi", prior_sig=0.3).train()
    loss(model, X)
    twice = grads(model, penalty(model, N) + penalty(model, 2 * N))
    once = [a + b for a, b in zip(grads(model, penalty(model, N)), grads(model, penalty(model, 2 * N)), strict=True)]
    torch.testing.assert_close(twice, once, rtol=1e-12, atol=1e-12)


def test_a_forward_under_a_pinned_sample_carries_the_penalty_too():
    model = network("vi", prior_sig=0.3)
    with sample(model, seed=3):
        value = F.mse_loss(model(X), torch.zeros(9, 3, dtype=torch.float64))
        found = grads(model, value + penalty(model, N))
    assert all(g.isfinite().all() and g.any() for g in found)
    assert [n for n, _ in named_posteriors(model)] == ["0.weight", "0.bias", "2.weight", "2.bias"]
