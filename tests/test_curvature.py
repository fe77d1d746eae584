"""Squared per-example gradients against a loop over the examples, for every way that a parameter can be used."""

import warnings

import pytest
import torch
from curvature_cases import CASES, CLASSES, Lambda, case, param
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bayesify.methods.laplace import curvature, graphs, parts, rules
from bayesify.methods.laplace.curvature import SquaredGradients


def one_by_one(params, run, count):
    """The truth: a forward and a backward pass for every example alone."""
    totals = {}
    for n in range(count):
        found = torch.autograd.grad(run(slice(n, n + 1)).sum(), list(params.values()), allow_unused=True)
        for name, grad in zip(params, found, strict=True):
            if grad is not None:
                totals[name] = totals.get(name, 0) + grad**2
    return totals


def batched(params, run, count, size, few=3):
    squares = SquaredGradients(params)
    for start in range(0, count, size):
        stop = min(start + size, count)
        output = run(slice(start, stop))
        squares.add(output, [torch.ones_like(output)], lambda s=start: run(slice(s, s + few)))
    return squares.totals


def assert_exact(found, exact, rtol=1e-9):
    assert found.keys() == exact.keys()
    for name, total in exact.items():
        # What is zero but for rounding (a key's bias) has no relative error.
        torch.testing.assert_close(found[name], total, rtol=rtol, atol=rtol * float(total.max()) + 1e-25)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 4, 6])
def test_every_use_is_exact(name, size):
    params, run = case(name)
    assert_exact(batched(params, run, 6, size), one_by_one(params, run, 6))


@pytest.mark.parametrize("name", CASES)
def test_small_chunks_and_trials_on_the_whole_batch_give_the_same(name, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK", 5)
    params, run = case(name)
    assert_exact(batched(params, run, 6, 6, few=6), one_by_one(params, run, 6))


@pytest.mark.parametrize("make", [nn.EmbeddingBag, nn.Bilinear])
def test_what_has_no_rule_takes_the_slow_path_with_one_warning(make):
    torch.manual_seed(0)
    if make is nn.EmbeddingBag:
        model, x = nn.Sequential(nn.EmbeddingBag(11, 4), nn.Linear(4, CLASSES)), torch.randint(11, (6, 5))
    else:
        model = Lambda(lambda m, x: m.b(m.a(x, x)), a=nn.Bilinear(7, 7, 4), b=nn.Linear(4, CLASSES))
        x = torch.randn(6, 7).double()
    model = model.double()
    params = dict(model.named_parameters())

    def run(s):
        return F.cross_entropy(model(x[s]), torch.zeros(len(x[s]), dtype=torch.long), reduction="none")

    with pytest.warns(UserWarning, match="backward pass per example") as caught:
        found = batched(params, run, 6, 2)
    assert len(caught) == 1
    assert_exact(found, one_by_one(params, run, 6))


def test_the_float32_lstm_is_exact_too():
    params, run = case("lstm")
    for weight in params.values():
        weight.data = weight.data.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = batched(params, run, 6, 3)
    assert_exact(found, one_by_one(params, run, 6), rtol=1e-4)


@pytest.mark.parametrize("wrong", [1.01, -1.0, 0.0])
def test_a_wrong_rule_is_found_out(monkeypatch, wrong):
    right = rules.RULES["Addmm", 0]

    def broken(use, grad, layout, batch):
        return right(use, grad * wrong, layout, batch)

    monkeypatch.setitem(rules.RULES, ("Addmm", 0), broken)
    params, run = case("mlp")
    with pytest.warns(UserWarning, match="no batched rule for 1 parameters"):
        found = batched(params, run, 6, 6)
    assert_exact(found, one_by_one(params, run, 6))


def test_examples_that_see_each_other_are_not_taken_apart():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, CLASSES)).double()
    x = torch.randn(6, 7).double()
    params = dict(model.named_parameters())
    output = F.cross_entropy(model(x), torch.zeros(6, dtype=torch.long), reduction="none")
    squares = SquaredGradients(params)
    with pytest.warns(UserWarning, match="backward pass per example"):
        squares.add(output, [torch.ones_like(output)], lambda: None)
    exact = dict.fromkeys(params, 0)
    for loss in output:
        grads = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
        exact = {name: exact[name] + g**2 for name, g in zip(params, grads, strict=True)}
    assert_exact(squares.totals, exact)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("length", [4, 5, 7])
def test_one_place_of_a_sequence_is_enough_to_tell_whose_it_is(inner, length):
    """Only the first token counts, so that most rows have no gradient, and layouts may look alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    x = torch.randn(9, 7, 3).double()
    labels = torch.randint(CLASSES, (9,))
    lengths = iter((length, 7, 4, 7, 4, 5, 5))
    squares = SquaredGradients(dict(model.named_parameters()))
    exact = {}

    def run(s, t):
        if inner:
            return F.cross_entropy(model(x[s, :t].transpose(0, 1))[t - 1 if t < 7 else 0], labels[s], reduction="none")
        return F.cross_entropy(model(x[s, :t])[:, t - 1 if t < 7 else 0], labels[s], reduction="none")

    for start, stop in ((0, 3), (3, 5), (5, 9)):
        t = next(lengths)
        output = run(slice(start, stop), t)
        squares.add(output, [torch.ones_like(output)], lambda s=start, t=t: run(slice(s, s + 2), t))
        part = one_by_one(
            dict(model.named_parameters()), lambda s, a=start, t=t: run(slice(a + s.start, a + s.stop), t), stop - start
        )
        exact = {name: exact.get(name, 0) + total for name, total in part.items()}
    assert_exact(squares.totals, exact)


def test_a_batch_without_gradients_settles_nothing():
    params, run = case("time first")
    squares = SquaredGradients(params)
    dead = run(slice(0, 3)) * 0
    squares.add(dead, [torch.ones_like(dead)], lambda: None)
    assert all((total == 0).all() for total in squares.totals.values())
    output = run(slice(0, 6)) * 1
    squares.add(output, [torch.ones_like(output)], lambda: None)
    assert_exact(squares.totals, one_by_one(params, run, 6))


def test_a_rule_that_a_trial_could_not_check_is_checked_later(monkeypatch):
    right = rules.RULES["Addmm", 0]
    monkeypatch.setitem(rules.RULES, ("Addmm", 0), lambda use, grad, *rest: right(use, grad * 1.01, *rest))
    params, run = case("mlp")
    squares = SquaredGradients(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dead = run(slice(0, 3)) * 0
        squares.add(dead, [torch.ones_like(dead)], lambda: None)
    output = run(slice(0, 6)) * 1
    with pytest.warns(UserWarning, match="no batched rule for 1 parameters"):
        squares.add(output, [torch.ones_like(output)], lambda: None)
    assert_exact(squares.totals, one_by_one(params, run, 6))


def test_gradients_that_stay_zero_cost_one_pass_per_batch(monkeypatch):
    """As below a head whose weights are zero."""
    params, run = case("time first")
    squares = SquaredGradients(params)
    passes = []
    original = graphs.grads
    monkeypatch.setattr(graphs, "grads", lambda *a: passes.append(1) or original(*a))
    counts = []
    for _ in range(3):
        dead = run(slice(0, 3)) * 0
        squares.add(dead, [torch.ones_like(dead)], lambda: None)
        counts.append(len(passes))
    assert counts[2] - counts[1] == counts[1] - counts[0] == 1


def test_other_graphs_get_plans_of_their_own():
    torch.manual_seed(0)
    a, b = nn.Linear(7, CLASSES).double(), nn.Linear(7, CLASSES).double()
    x = torch.randn(8, 7).double()
    labels = torch.randint(CLASSES, (8,))

    def run(s):
        out = a(x[s]) if s.start < 4 else a(x[s]) * b(x[s]).tanh()
        return F.cross_entropy(out, labels[s], reduction="none")

    params = {"a": a.weight, "b": b.weight, "c": param(2)}
    found = batched(params, run, 8, 4, few=2)
    assert_exact(found, one_by_one(params, run, 8))
    assert "c" not in found


def test_several_seeds_are_summed():
    torch.manual_seed(0)
    model, x = nn.Linear(7, CLASSES).double(), torch.randn(5, 7).double()
    squares = SquaredGradients(dict(model.named_parameters()))
    seeds = [torch.randn(5, CLASSES).double() for _ in range(4)]
    squares.add(model(x), seeds, lambda: model(x[:3]))
    square = sum(seed**2 for seed in seeds)
    torch.testing.assert_close(squares.totals["weight"], square.T @ x**2)
    torch.testing.assert_close(squares.totals["bias"], square.sum(0))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_half_precision_is_as_exact_as_its_gradients(weights):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, CLASSES))
    model = model.to(weights)
    x, labels = torch.randn(6, 7).to(weights), torch.randint(CLASSES, (6,))
    params = dict(model.named_parameters())

    def run(s):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x[s]).float(), labels[s], reduction="none")

    found = batched(params, run, 6, 6)
    assert all(total.dtype == torch.float32 for total in found.values())
    exact = {name: total.float() for name, total in one_by_one(params, run, 6).items()}
    assert_exact(found, exact, rtol=0.05)


def checkpointed(x, reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    labels = torch.arange(len(x)) % CLASSES

    def run(s):
        h = checkpoint(model[:4], x[s], use_reentrant=reentrant)
        return F.cross_entropy(model[4](h), labels[s], reduction="none")

    return dict(model.named_parameters()), run


def test_checkpointing_is_exact_or_refused():
    x = torch.randn(6, 7, dtype=torch.float64)
    params, run = checkpointed(x, reentrant=False)
    with pytest.warns(UserWarning, match="backward pass per example"):
        found = batched(params, run, 6, 3)
    assert_exact(found, one_by_one(params, run, 6))
    params, run = checkpointed(x.requires_grad_(), reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        batched(params, run, 6, 3)


def test_layouts_take_the_examples_apart():
    tensor = torch.arange(24).view(2, 12)
    for inner, expected in ((False, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]), (True, [0, 1, 2] * 4)):
        layout = parts.Layout(1, inner)
        owners = layout.owners(12, 3)
        assert owners.tolist() == expected
        for n in range(3):
            assert torch.equal(layout.split(tensor, 3)[n], tensor[:, owners == n])
    with pytest.raises(parts.NoRuleError):
        parts.Layout(0, False).split(tensor, 3)


def test_a_plan_is_made_once_per_kind_of_graph(monkeypatch):
    params, run = case("mlp")
    calls = []
    original = curvature.try_weights
    monkeypatch.setattr(curvature, "try_weights", lambda *a: calls.append(1) or original(*a))
    batched(params, run, 6, 2)
    assert len(calls) == 1
