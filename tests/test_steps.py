"""Training loops: closures, several optimizers and optimizers in optimizers give the steps of a plain loop."""

import pytest
import torch
from cases import MLP, tensor
from torch import nn

from bayesify import SGLD, bayesify, param_groups, penalty, sample

X = tensor(5, 4)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(X).square().mean() + penalty(model, 10)).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_a_pinned_theta_follows_a_fused_optimizer(cls):
    models = [bayesify(torch.nn.Linear(3, 2), "vi") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x, after = torch.ones(4, 3), []
    for model, fused in zip(models, (False, True), strict=True):
        optimizer = cls(model.parameters(), lr=0.1, weight_decay=0.0, fused=fused)
        with sample(model, seed=0):
            for _ in range(2):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            after.append(model(x))
    torch.testing.assert_close(after[0], after[1])


def test_a_chain_in_eval_mode_is_refused():
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "sgld", thin=1)
    chain = SGLD(model, 0.01, num_data=10)
    train(model, chain)
    model[1].eval()
    train(model, chain)
    model.eval()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"SGLD makes a step while the model is in eval mode.*model.train\(\)"):
        train(model, chain)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_a_write_to_a_sample_changes_nothing(method: str):
    """What is read in train mode is a draw, with memory of its own; in eval mode it is the mean itself."""
    model = bayesify(MLP(), method, prior_mean="zero")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.inp.weight.data.zero_()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    nn.init.zeros_(model.eval().inp.weight)
    assert not model.inp.parametrizations.weight.original.any()


# -- ways to make a step -----------------------------------------------------------------------------------------------


def trained(method: str, make, *, steps: int = 3) -> dict[str, torch.Tensor]:
    """Return the parameters after a few steps of what `make` returns: a function of the model and a closure."""
    torch.manual_seed(0)
    model = bayesify(MLP(), method)
    step = make(model)

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = (model(X) - 1).square().mean() + penalty(model, 10)
        loss.backward()
        return loss

    for _ in range(steps):
        step(closure)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def one(model):
    optimizer = torch.optim.SGD(param_groups(model, 0.1), lr=0.1)
    return lambda closure: (closure(), optimizer.step())


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("method", ["vi", "la"])
def test_a_closure_gives_the_step_that_its_gradients_would(method: str, by_name: bool):
    def make(model):
        optimizer = torch.optim.SGD(param_groups(model, 0.1), lr=0.1)
        return lambda closure: optimizer.step(closure=closure) if by_name else optimizer.step(closure)

    torch.testing.assert_close(trained(method, make), trained(method, one), rtol=0, atol=0)


@pytest.mark.parametrize("order", [1, -1])
def test_optimizers_for_means_and_spreads_do_what_one_does_for_both(order: int):
    def make(model):
        optimizers = [torch.optim.SGD([group], lr=0.1) for group in param_groups(model, 0.1)][::order]
        assert len(optimizers) == 2
        return lambda closure: (closure(), *(optimizer.step() for optimizer in optimizers))

    torch.testing.assert_close(trained("vi", make), trained("vi", one), rtol=0, atol=0)


def test_an_optimizer_inside_of_another_changes_nothing_more():
    class Around(torch.optim.Optimizer):
        """Leaves its steps to another optimizer, as those that look ahead or sharpen do."""

        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            if closure is not None:
                closure()
            self.inner.step()

    def make(model, *, given: bool):
        optimizer = Around(torch.optim.SGD(param_groups(model, 0.1), lr=0.1))
        return (lambda closure: optimizer.step(closure)) if given else lambda closure: (closure(), optimizer.step())

    for given in (True, False):
        found = trained("vi", lambda model, given=given: make(model, given=given))
        torch.testing.assert_close(found, trained("vi", one), rtol=0, atol=0)
