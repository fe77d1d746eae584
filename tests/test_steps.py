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
@pytest.mark.parametrize("then", [lambda m: m(X), lambda m: m.inp.weight, lambda m: penalty(m, 10)])
@pytest.mark.parametrize(
    "write",
    [nn.init.zeros_, lambda w: w.data.zero_(), lambda w: w.data.copy_(w.data * 1.01), lambda w: w.data[0].zero_()],
)
def test_writing_to_a_sample_warns_once(method: str, then, write):
    model = bayesify(MLP(), method, prior_mean="zero")
    write(model.inp.weight)
    with pytest.warns(UserWarning, match=r"'inp.weight' was written to, but what was read is a sample") as warned:
        then(model)
    assert (len(warned), warned[0].filename) == (1, __file__)
    write(model.inp.weight)
    model(X)


def test_writing_to_a_moment_warns_once():
    model = bayesify(MLP(), "sgld", thin=1)
    train(model, SGLD(model, 0.01, num_data=10), steps=2)
    model.eval().inp.weight.data.zero_()
    with pytest.warns(UserWarning, match=r"'inp.weight' was written to, but .*`original`"):
        model(X)


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_reading_a_sample_does_not_warn(value, recwarn):
    model = bayesify(MLP(), "vi")
    with torch.no_grad():
        model.inp.parametrizations.weight.original.fill_(value)
    threads = torch.get_num_threads()
    for count in (threads, threads + 1):
        torch.set_num_threads(count)
        model.inp.weight.norm()
    torch.set_num_threads(threads)
    model(X)
    assert not recwarn.list


def test_writing_to_the_mean_does_not_warn(recwarn):
    model = bayesify(MLP()).eval()
    nn.init.zeros_(model.inp.weight)
    model(X)
    assert not model.inp.parametrizations.weight.original.any()
    model.train().inp.weight.sum()
    model(X)
    assert not recwarn.list


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
