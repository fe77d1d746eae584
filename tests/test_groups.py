import pytest
import torch
from torch import nn

from bayesify import bayesify, named_posteriors, param_groups, penalty
from bayesify.core.prior import step_size


@pytest.fixture
def model():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return nn.ModuleDict({"body": body, "fc": nn.Linear(4, 2), "fc_norm": nn.LayerNorm(4)})


def by_name(groups):
    return {g["name"]: g for g in groups}


def test_every_trainable_parameter_is_in_exactly_one_group(model):
    model.fc_norm.requires_grad_(False)
    bayesify(model, "vi", exclude="body.1.*")
    groups = param_groups(model, 0.1, head="fc", lr_head=1.0, lr_sig=0.01)
    listed = [id(p) for g in groups for p in g["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    rates = {"body": 0.1, "head": 1.0, "sig": 0.01 / step_size(26), "rest": 0.1}
    assert {n: g["lr"] for n, g in by_name(groups).items()} == rates
    posteriors = dict(named_posteriors(model))
    assert {id(p) for p in by_name(groups)["head"]["params"]} == {
        id(posteriors["fc.weight"].original),
        id(posteriors["fc.bias"].original),
    }
    assert {id(p) for p in by_name(groups)["sig"]["params"]} == {id(p.rho) for p in posteriors.values()}


def test_no_decay_on_posteriors(model):
    bayesify(model, "vi", exclude="body.1.*")
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), weight_decay=0.3)
    assert {g["name"]: g["weight_decay"] for g in optimizer.param_groups} == {"body": 0, "sig": 0, "rest": 0.3}
    before = {n: p.rho.detach().clone() for n, p in named_posteriors(model)}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(before[n], p.rho) for n, p in named_posteriors(model))


def test_head_by_module_is_not_a_substring(model):
    bayesify(model, "mc_dropout")
    head = by_name(param_groups(model, 0.1, head=model.fc, lr_head=1.0))["head"]["params"]
    assert len(head) == 2 and "sig" not in by_name(param_groups(model, 0.1))


def test_an_optimizer_takes_the_groups(model):
    bayesify(model, "vi")
    optimizer = torch.optim.SGD(param_groups(model, 0.1, lr_sig=0.2), momentum=0.9)
    penalty(model, 10).backward()
    optimizer.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2 / step_size(42)]


def test_a_spread_without_natural_steps_takes_lr_sig_as_it_is(model):
    bayesify(model, "vi", prior_sig=0.1)
    assert {n: g["lr"] for n, g in by_name(param_groups(model, 0.1, lr_sig=0.2)).items()} == {"body": 0.1, "sig": 0.2}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lr": 0.0}, ValueError, "lr must be a positive number, got 0.0"),
        ({"lr": 0.1, "lr_sig": -1}, ValueError, "lr_sig must be"),
        ({"lr": 0.1, "lr_head": 0.1}, ValueError, "lr_head needs head="),
        ({"lr": 0.1, "head": "norm"}, ValueError, r"not a module of the model.*fc_norm"),
        ({"lr": 0.1, "head": nn.Linear(1, 1)}, ValueError, "not part of the model"),
        ({"lr": 0.1, "head": 3}, TypeError, "head must be a module or its name"),
    ],
)
def test_errors(model, arguments, error, message):
    bayesify(model, "vi")
    with pytest.raises(error, match=message):
        param_groups(model, **arguments)


def test_a_plain_model(model):
    with pytest.raises(ValueError, match="call bayesify"):
        param_groups(model, 0.1)
