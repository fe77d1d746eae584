"""A small Bayesian network, and what the tests compare: its thetas and its gradients."""

import torch
from cases import MLP, tensor
from torch import Tensor, nn

from bayesify import bayesify, named_posteriors, sample

X = tensor(5, 4).double()


def mlp(**options) -> nn.Module:
    torch.manual_seed(0)
    return bayesify(MLP().double(), init_sig=0.3, **options)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert found
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def thetas(model: nn.Module, seed: int) -> list[Tensor]:
    with sample(model, seed=seed), torch.no_grad():
        return [q(q.original).clone() for _, q in named_posteriors(model)]


def all_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def by_data_attribute(parameters: list[Tensor]) -> None:
    """Write to parameters without a trace that autograd counts."""
    for p in parameters:
        p.data.mul_(1.5)


def by_vector(parameters: list[Tensor]) -> None:
    """Write to parameters as torch's own helper does."""
    for factor in (2.0, 0.75):  # the second vector may lie where the weights lay at first
        vector = factor * nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(vector, parameters)
