"""Kronecker-factored Laplace: dense curvatures, draws, files, and training that goes on after the fit."""

import copy
import math

import pytest
import torch
from laplaces import batches, covariance, data, fitted, head
from torch import nn
from torch.nn import functional as F

from bayesify import bayesify, fit_laplace, load, named_posteriors, predict, sample, samples, save, summary
from bayesify.methods.laplace import curvature


def joint(model, names):
    """Return draws of several parameters, flattened and side by side, from one coherent theta each."""
    posteriors = dict(named_posteriors(model))
    rows = []
    for i in range(4000):
        with sample(model, seed=i), torch.no_grad():
            rows.append(torch.cat([posteriors[n](posteriors[n].original).flatten() for n in names]))
    return torch.stack(rows)


def dense_ggn(model, x, names):
    """Return sum_n J_n^T (diag(p_n) - p_n p_n^T) J_n of some parameters, flattened and side by side."""
    posteriors = dict(named_posteriors(model))
    params = [posteriors[n].original for n in names]
    total = 0.0
    for row in x:
        logits = model.eval()(row[None])[0]
        p = logits.softmax(0).detach()
        jacobian = torch.stack(
            [torch.cat([g.flatten() for g in torch.autograd.grad(z, params, retain_graph=True)]) for z in logits]
        )
        total = total + jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    return total


# -- the structure -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_one_example_of_one_layer_has_the_dense_gauss_newton(bias):
    x, y = data(1)
    model = fit_laplace(head(bias=bias, damping=0.1, Ninflate=2.0), [(x, y)], structure="kron", num_data=3)
    names = ("2.weight", "2.bias") if bias else ("2.weight",)
    precision = 6 * dense_ggn(model, x, names) + (1 / 0.7**2 + 0.1) * torch.eye(18 if bias else 15).double()
    torch.testing.assert_close(covariance(model, *names), torch.linalg.inv(precision), rtol=1e-9, atol=1e-12)
    spread = torch.cat([p.std.flatten() for _, p in named_posteriors(model)])
    torch.testing.assert_close(spread**2, torch.linalg.inv(precision).diagonal(), rtol=1e-9, atol=1e-12)


def test_a_layer_with_constant_curvature_has_the_dense_gauss_newton():
    """For a regression the curvature is the same for every example: A x B is exact for the last layer."""
    x, _ = data()
    model = head(2)
    y = torch.randn(30, 2, dtype=torch.float64)
    fit_laplace(model, batches(x, y), lambda o, t: (o - t).square().sum(1), structure="kron")
    with torch.no_grad():
        z = F.pad(model[1](model[0](x)), (0, 1), value=1.0)
    precision = torch.kron(2 * torch.eye(2).double(), z.T @ z) + torch.eye(12).double() / 0.7**2
    order = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 5, 11]  # weights first, then biases
    exact = torch.linalg.inv(precision)[order][:, order]
    torch.testing.assert_close(covariance(model, "2.weight", "2.bias"), exact, rtol=1e-9, atol=1e-12)


def test_a_draw_of_weight_and_bias_is_one_draw_of_their_joint_gaussian():
    model = fitted()
    exact = covariance(model, "2.weight", "2.bias")
    drawn = joint(model, ("2.weight", "2.bias"))
    posteriors = dict(named_posteriors(model))
    mean = torch.cat([posteriors[n].mean.flatten() for n in ("2.weight", "2.bias")])
    away = drawn - mean
    found = away.T @ away / len(away)
    scale = exact.diagonal().sqrt()
    error = (torch.outer(scale, scale) ** 2 + exact**2).sqrt() / math.sqrt(len(away))
    assert ((found - exact).abs() < 5 * error).all()
    assert ((away.mean(0)).abs() < 4.5 * scale / math.sqrt(len(away))).all()
    assert exact[:15, 15:].abs().max() > 0.01  # they do depend on each other


def test_inputs_outputs_and_positions_of_every_layer():
    """A sums over rows, positions included, and B is the mean over the same rows."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(2),
        nn.Linear(4, 5),
        nn.Flatten(),
        nn.Linear(15, 3),
    ).double()
    model = bayesify(net, "la", prior_sig=0.7)
    x = torch.randn(6, 2, 4, 4, dtype=torch.float64)
    y = torch.randint(3, (6,))
    fit_laplace(model, batches(x, y, 4), structure="kron")
    assert all(p.kron is not None for _, p in named_posteriors(model))
    acts, grads = {}, {}
    layers = {"0": net[0], "3": net[3], "5": net[5]}
    handles = [m.register_forward_hook(lambda m, a, o, n=n: acts.__setitem__(n, (a[0], o))) for n, m in layers.items()]
    logits = model.eval()(x)
    for handle in handles:
        handle.remove()
    p = logits.softmax(1).detach()
    for name, (a, out) in acts.items():
        rows = F.unfold(a, 3, padding=1, stride=2).mT.flatten(0, 1) if name == "0" else a.flatten(0, -2)
        rows = F.pad(rows.detach(), (0, 1), value=1.0)
        total = 0.0
        for k in range(3):
            seed = p[:, k : k + 1].sqrt() * (torch.eye(3).double()[k] - p)
            (d,) = torch.autograd.grad((logits * seed).sum(), out, retain_graph=True)
            d = d.flatten(2).mT.flatten(0, 1) if name == "0" else d.flatten(0, -2)
            total = total + d.T @ d
        grads[name] = (rows.T @ rows, total / len(rows))
    posteriors = dict(named_posteriors(model))
    for name, (a, b) in grads.items():
        kron = posteriors[f"{name}.weight"].kron
        right = torch.cat([kron.right, posteriors[f"{name}.bias"].kron.right])
        torch.testing.assert_close(right @ torch.diag(kron.right_values) @ right.T, a, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(kron.left @ torch.diag(kron.left_values) @ kron.left.T, b, rtol=1e-9, atol=1e-12)


class Odd(nn.Module):
    """A weight used twice, a weight of (inputs, outputs), a norm, and a layer that is never called itself."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.turned = nn.ParameterDict({"weight": nn.Parameter(torch.randn(4, 3)), "bias": nn.Parameter(torch.ones(3))})
        self.norm = nn.LayerNorm(4)
        self.scaled = nn.Linear(3, 3)

    def forward(self, x):
        x = self.norm(self.twice(torch.tanh(self.twice(x))))
        x = torch.addmm(self.turned["bias"], x, self.turned["weight"])
        return F.linear(x, self.scaled.weight) * self.scaled.bias


def test_what_is_not_one_linear_map_stays_diagonal():
    torch.manual_seed(0)
    model = bayesify(Odd().double(), "la", exclude="turned.*", prior_sig=1.0)
    x, y = data(12)
    with pytest.warns(UserWarning, match="no batched rule for 2 parameters"):
        fit_laplace(model, batches(x, y), structure="kron")
    kinds = {name: p.kron is not None for name, p in named_posteriors(model)}
    assert not any(kinds.values())
    diagonal = bayesify(Odd().double(), "la", exclude="turned.*", prior_sig=1.0)
    diagonal.load_state_dict(
        {k: v for k, v in model.state_dict().items() if k.endswith("original") or "turned" in k}, strict=False
    )
    with pytest.warns(UserWarning, match="no batched rule for 2 parameters"):
        fit_laplace(diagonal, batches(x, y), curvature="ggn")
    expected = dict(named_posteriors(diagonal))
    for name in kinds:
        torch.testing.assert_close(dict(named_posteriors(model))[name].std, expected[name].std)


class Turned(nn.Module):
    """GPT-2's way: a weight of (inputs, outputs)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def test_a_weight_of_inputs_by_outputs_is_the_transpose():
    torch.manual_seed(0)
    turned = bayesify(Turned().double(), "la", prior_sig=1.0)
    plain = nn.Linear(4, 3).double()
    with torch.no_grad():
        plain.weight.copy_(turned.weight.T)
        plain.bias.copy_(turned.bias)
    bayesify(plain, "la", prior_sig=1.0)
    x, y = data(12)
    for model in (turned, plain):
        fit_laplace(model, batches(x, y), structure="kron")
    a, b = dict(named_posteriors(turned)), dict(named_posteriors(plain))
    torch.testing.assert_close(a["weight"].std, b["weight"].std.T)
    torch.testing.assert_close(a["bias"].std, b["bias"].std)


def test_batches_of_any_size_give_the_same_factors():
    x, y = data()
    found = [fit_laplace(head(include=None), batches(x, y, size), structure="kron") for size in (1, 7, 30)]
    for (name, a), (_, b), (_, c) in zip(*map(named_posteriors, found), strict=True):
        assert a.kron is not None, name
        torch.testing.assert_close(a.std, b.std)
        torch.testing.assert_close(a.std, c.std)


def test_many_outputs_keep_the_diagonal_of_their_factor(monkeypatch):
    exact = fitted(classes=6)
    monkeypatch.setattr(curvature, "LARGEST_OUTPUT", 5)
    model = fitted(classes=6)
    whole, diagonal = (dict(named_posteriors(m))["2.weight"].kron for m in (exact, model))
    assert diagonal.left is None
    b = whole.left @ torch.diag(whole.left_values) @ whole.left.T
    torch.testing.assert_close(diagonal.left_values, b.diagonal())
    x, _ = data()
    assert len(predict(model, x)) == 30
    monkeypatch.setattr(curvature, "LARGEST_INPUT", 4)
    wide = dict(named_posteriors(fitted(classes=6)))
    assert wide["2.weight"].kron.right is None
    assert wide["2.bias"].kron is None


def test_a_head_of_five_thousand_classes_makes_no_large_array():
    torch.manual_seed(0)
    model = bayesify(nn.Linear(3, 5000), "la")
    x = torch.randn(20, 3)
    fit_laplace(model, [(x, torch.randint(5000, (20,)))], structure="kron")
    found = predict(model, x)
    assert found.closed_form
    assert found.probs.shape == (20, 5000)
    assert dict(named_posteriors(model))["weight"].kron.left is None


def test_a_flat_bias_is_an_error():
    x, y = data()
    with pytest.raises(ValueError, match="bias='informative'"):
        fit_laplace(bayesify(nn.Linear(4, 3).double(), "la", bias="uninformative"), batches(x, y), structure="kron")


def test_arguments_of_the_structure():
    x, y = data()
    with pytest.raises(ValueError, match=r"structure must be one of \['diag', 'kron'\]"):
        fit_laplace(head(), batches(x, y), structure="full")


# -- state ---------------------------------------------------------------------------------------------------


def test_saved_loaded_copied_and_summarized(tmp_path):
    x, y = data()
    model = fit_laplace(head(), batches(x, y), structure="kron", tune=batches(x, y))
    text = str(summary(model))
    assert "kron" in text
    assert "by validation" in text
    save(model, tmp_path)
    loaded = load(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), tmp_path)
    dicted = head()
    dicted.load_state_dict(model.state_dict())
    for other in (loaded, dicted, copy.deepcopy(model)):
        assert str(summary(other)) == text
        assert torch.equal(predict(model, x).probs, predict(other, x).probs)
        expected = predict(model, x, samples=3, seed=1).logits
        assert torch.equal(expected, predict(other, x, samples=3, seed=1).logits)


def test_a_diagonal_fit_after_a_kronecker_one_leaves_nothing_of_it(tmp_path):
    x, y = data()
    model = fit_laplace(fitted(), batches(x, y))
    fresh = fit_laplace(head(), batches(x, y))
    for (_, a), (_, b) in zip(named_posteriors(model), named_posteriors(fresh), strict=True):
        assert a.kron is None
        assert a.state().keys() == b.state().keys()
        assert torch.equal(a.std, b.std)
    assert torch.equal(predict(model, x, 3, seed=0).logits, predict(fresh, x, 3, seed=0).logits)


def test_a_failed_fit_keeps_the_factors():
    x, y = data()
    model = fitted()
    before = predict(model, x)
    with pytest.raises(ValueError, match="labels must be in"):
        fit_laplace(model, batches(x, y), tune=batches(x, y + 1))
    assert torch.equal(predict(model, x).probs, before.probs)


# -- training that goes on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_training_after_the_fit_warns_once_at_the_next_prediction(structure, recwarn, tmp_path):
    x, y = data()
    model = fitted(structure=structure)
    predict(model, x)
    copied = copy.deepcopy(model)
    save(model, tmp_path)
    loaded = load(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), tmp_path)
    for other in (copied, loaded, model):
        predict(other, x, samples=2)
        assert not recwarn
        with torch.no_grad():
            dict(named_posteriors(other))["2.weight"].original.add_(1e-6)
        with pytest.warns(
            UserWarning, match=r"1 parameters \(the first is '2.weight'\) have changed since fit_laplace"
        ):
            predict(other, x)
        recwarn.clear()  # the same mistake as moved weights without a penalty
        predict(other, x)
        assert not recwarn
        fit_laplace(other, batches(x, y), structure=structure)
        for _ in samples(other, 2):
            other(x)
        assert not recwarn


def test_weights_that_change_places_have_changed():
    model = fitted()
    weight = dict(named_posteriors(model))["2.weight"].original
    with torch.no_grad():
        weight.copy_(weight.flip(0).clone())
    with pytest.warns(UserWarning, match="have changed since fit_laplace"):
        predict(model, data()[0])


def test_another_precision_is_the_same_fit(recwarn):
    x, _ = data()
    predict(fitted().float(), x.float())
    assert not recwarn
