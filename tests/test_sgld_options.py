"""SGLD: groups, closures and schedulers, where the seed comes from, and options that are refused."""

import copy
import math
import warnings

import pytest
import torch
from chains import chained, linear_gaussian, run
from torch import nn
from torch.nn import functional as F

from bayesify import SGLD, bayesify, named_posteriors, param_groups


def test_groups_closures_and_schedulers():
    model, _ = chained()
    chain = SGLD(model, param_groups(model, 0.1, lr_head=0.4, head=model), num_data=40, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(chain, 0.5)
    x, y = linear_gaussian(3, 2)

    def closure():
        chain.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    first = chain.step(closure)
    scheduler.step()
    assert chain.step(closure) != first
    assert [g["lr"] for g in chain.param_groups] == [0.2]
    plain, chain = chained()
    chain.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(plain.state_dict())
    run(plain, chain, x, y, 1)
    assert all(torch.equal(before[n], t) for n, t in plain.state_dict().items() if n in before)


def test_the_seed_comes_from_torch_and_the_threads_do_not_matter():
    results = []
    for seed, threads in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(seed)
        model = bayesify(nn.Linear(600, 600), "sgld")
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        chain = SGLD(model, 0.1, num_data=10)
        weight = dict(named_posteriors(model))["weight"].original
        with torch.no_grad():
            weight.zero_()
        weight.grad = torch.zeros_like(weight)
        chain.step()
        torch.set_num_threads(before)
        results.append(weight.detach().clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"lr": -1.0}, "lr must be a positive number"),
        ({"lr": "fast"}, "lr must be a positive number"),
        ({"lr": []}, "list of groups"),
        ({"lr": [{"params": []}]}, "list of groups"),
        ({"num_data": 0}, "num_data must be a positive number"),
        ({"num_data": math.inf}, "num_data must be a positive number"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"momentum": -0.1}, r"momentum must be in \[0, 1\)"),
    ],
)
def test_bad_arguments(arguments, message):
    model = bayesify(nn.Linear(3, 2), "sgld")
    with pytest.raises(ValueError, match=message):
        SGLD(model, **{"lr": 0.1, "num_data": 10, **arguments})


def test_weight_decay_and_foreign_states_are_errors():
    model = bayesify(nn.Linear(3, 2), "sgld")
    with pytest.raises(ValueError, match="no weight_decay"):
        SGLD(model, [{"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.1}], num_data=10)
    with pytest.raises(ValueError, match="not the state of an SGLD chain"):
        SGLD(model, 0.1, num_data=10).load_state_dict(torch.optim.SGD(model.parameters()).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thin": 0}, "thin must be an integer >= 1"),
        ({"thin": 1.5}, "thin must be an integer >= 1"),
        ({"burnin": -1}, "burnin must be an integer >= 0"),
        ({"Ninflate": 0.0}, "Ninflate must be a finite number > 0"),
        ({"nd": -1.0}, "nd must be a finite number >= 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        bayesify(nn.Linear(3, 2), "sgld", **options)


def test_a_model_of_another_method_is_an_error():
    with pytest.raises(ValueError, match="this one is 'vi'"):
        SGLD(bayesify(nn.Linear(3, 2), "vi"), 0.1, num_data=10)
    with pytest.raises(ValueError, match="no posteriors"):
        SGLD(nn.Linear(3, 2), 0.1, num_data=10)


def test_low_precision_is_warned_about():
    model = bayesify(nn.Linear(3, 2).bfloat16(), "sgld", thin=1)
    with pytest.warns(UserWarning, match="round to nothing"):
        chain = SGLD(model, 0.1, num_data=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        chain.step()
    assert all(p.average.dtype == torch.float32 for _, p in named_posteriors(model))
