"""Squared per-example gradients against a loop over the examples, for every way that a parameter can be used."""

import warnings

import pytest
import torch
from curvature_cases import CASES, CLASSES, Lambda, case
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bayesify.methods.laplace import curvature as curvatures
from bayesify.methods.laplace import rules
from bayesify.methods.laplace.curvature import Curvature


def one_by_one(params, run, count):
    """The truth: a forward and a backward pass for every example alone."""
    totals = {}
    for n in range(count):
        found = torch.autograd.grad(run(slice(n, n + 1)).sum(), list(params.values()), allow_unused=True)
        for name, grad in zip(params, found, strict=True):
            if grad is not None:
                totals[name] = totals.get(name, 0) + grad**2
    return totals


def batched(model, run, count, size):
    found = Curvature(model, dict(model.named_parameters()))
    for start in range(0, count, size):
        part = slice(start, min(start + size, count))
        add(found, lambda s=part: run(s), part.stop - part.start)
    return found.squares


def add(found, run, count, seeds=None):
    output = found.recorder.forward(run, count)
    found.add(output, [torch.ones_like(output)] if seeds is None else seeds)


def assert_exact(found, exact, rtol=1e-9):
    assert found.keys() == exact.keys()
    for name, total in exact.items():
        # What is zero but for rounding (a key's bias) has no relative error.
        torch.testing.assert_close(found[name], total, rtol=rtol, atol=rtol * float(total.max()) + 1e-25)


SLOW = ("bare parameters", "tied ends", "a table that a network makes", "einsum and repeat", "weight of two parameters")
"""Weights that are used outside the layers that hold them."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 4, 6])
def test_every_use_is_exact(name, size):
    model, params, run = case(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name in (*SLOW, "conv over frames") else "error")
        found = batched(model, run, 6, size)
    assert_exact(found, one_by_one(params, run, 6))


@pytest.mark.parametrize("name", CASES)
def test_small_chunks_give_the_same(name, monkeypatch):
    monkeypatch.setattr(rules, "BLOCK", 5)
    model, params, run = case(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name in SLOW else "error")
        found = batched(model, run, 6, 6)
    assert_exact(found, one_by_one(params, run, 6))


@pytest.mark.parametrize("name", SLOW)
def test_what_has_no_rule_takes_the_slow_path_with_one_warning(name):
    model, params, run = case(name)
    with pytest.warns(UserWarning, match="backward pass per example") as caught:
        found = batched(model, run, 6, 2)
    assert len(caught) == 1
    assert_exact(found, one_by_one(params, run, 6))


class Counted(nn.Module):
    """Count how often a module runs."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.sizes = inner, []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.inner(x)


@pytest.mark.parametrize("inner", [lambda: nn.Bilinear(7, 7, 4), lambda: nn.LSTM(7, 4, batch_first=True)])
def test_a_layer_without_a_rule_runs_again_for_each_example_and_the_model_does_not(inner):
    torch.manual_seed(0)
    made = inner()
    part = Lambda(lambda m, x: m.a(x, x) if isinstance(m.a, nn.Bilinear) else m.a(x)[0], a=made)
    rest = Counted(nn.Linear(7, 7))
    model = nn.Sequential(rest, part, nn.Linear(4, CLASSES)).double()
    x, labels = torch.randn(6, 5, 7).double(), torch.randint(CLASSES, (6,))

    def run(s):
        return F.cross_entropy(model(x[s]).mean(1), labels[s], reduction="none")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = batched(model, run, 6, 6)
    assert rest.sizes == [6]
    assert_exact(found, one_by_one(dict(model.named_parameters()), run, 6))


def test_the_float32_lstm_is_exact_too():
    model, params, run = case("lstm")
    for weight in params.values():
        weight.data = weight.data.float()
    assert_exact(batched(model, run, 6, 3), one_by_one(params, run, 6), rtol=1e-4)


@pytest.mark.parametrize("wrong", [1.01, -1.0, 0.0])
def test_a_wrong_rule_is_found_out(monkeypatch, wrong):
    right = rules._sum_to
    monkeypatch.setattr(rules, "_sum_to", lambda values, shape: right(values, shape) * wrong)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)).double()
    x = torch.randn(6, 7).double()

    def run(s):
        return F.cross_entropy(model(x[s]), torch.zeros(len(x[s]), dtype=torch.long), reduction="none")

    with pytest.warns(UserWarning, match="no batched rule for 2 parameters"):
        found = batched(model, run, 6, 6)
    assert_exact(found, one_by_one(dict(model.named_parameters()), run, 6))


# -- examples that are not rows ------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Unpadded tokens of several examples, one after the other, which are summed by example; or a graph's nodes."""

    def __init__(self, neighbours=False):
        super().__init__()
        self.table, self.hidden = nn.Embedding(11, 6), nn.Linear(6, 5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, CLASSES)
        self.neighbours = neighbours

    def forward(self, ids, owners, count):
        h = torch.tanh(self.norm(self.hidden(self.table(ids))))
        if self.neighbours:  # messages between the nodes of one graph
            h = (owners[:, None] == owners).to(h.dtype) @ h
        return self.head(h.new_zeros(count, h.shape[1]).index_add(0, owners, h))


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("lengths", [((2, 2, 2), (3, 1, 2)), ((1, 2, 3), (1, 3, 2)), ((1, 1, 1), (2, 1, 0))])
def test_ragged_examples_are_exact_whatever_the_batches_before(neighbours, lengths):
    """Batches with equal numbers of rows, whose rows belong to the examples in other ways."""
    torch.manual_seed(0)
    model = Pooled(neighbours).double()
    params = dict(model.named_parameters())
    found, exact = Curvature(model, params), {}
    for own in lengths:
        ids, labels = torch.randint(11, (sum(own),)), torch.randint(CLASSES, (len(own),))
        owners = torch.repeat_interleave(torch.arange(len(own)), torch.tensor(own))

        def run(ids=ids, owners=owners, labels=labels):
            return F.cross_entropy(model(ids, owners, len(labels)), labels, reduction="none")

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            add(found, run, len(own))
        for n in range(len(own)):
            grads = torch.autograd.grad(run()[n], list(params.values()))
            exact = {k: exact.get(k, 0) + g**2 for k, g in zip(params, grads, strict=True)}
    assert_exact(found.squares, exact)


def test_a_square_batch_of_sequences_with_time_first_is_not_taken_for_examples_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    x, labels = torch.randn(5, 5, 3).double(), torch.randint(CLASSES, (5,))

    def run(s):
        return F.cross_entropy(model(x[s].transpose(0, 1)).mean(0), labels[s], reduction="none")

    with pytest.warns(UserWarning, match="backward pass per example"):
        found = batched(model, run, 5, 5)
    assert_exact(found, one_by_one(dict(model.named_parameters()), run, 5))


def test_a_weight_that_is_also_used_outside_its_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    x, labels = torch.randn(6, 7).double(), torch.randint(CLASSES, (6,))

    def run(s):
        out = model(x[s]) + 0.01 * F.linear(x[s], model[0].weight)[:, :CLASSES]
        return F.cross_entropy(out, labels[s], reduction="none")

    with pytest.warns(UserWarning, match="no batched rule for 1 parameters"):
        found = batched(model, run, 6, 6)
    assert_exact(found, one_by_one(dict(model.named_parameters()), run, 6))


class Counting(nn.Module):
    """A model that would notice if what its examples share were spread over them."""

    def __init__(self):
        super().__init__()
        self.table, self.places, self.head = nn.Embedding(11, 6), nn.Embedding(5, 6), nn.Linear(6, CLASSES)

    def forward(self, ids):
        h = self.places(torch.arange(5)[None])
        return self.head((self.table(ids) + h.sum(0)).mean(1))


def test_spreading_what_is_shared_is_seen_where_it_changes_the_outputs():
    torch.manual_seed(0)
    model = Counting().double()
    x, labels = torch.randint(11, (6, 5)), torch.randint(CLASSES, (6,))

    def run(s):
        return F.cross_entropy(model(x[s]), labels[s], reduction="none")

    with pytest.warns(UserWarning, match="no batched rule for 1 parameters"):
        found = batched(model, run, 6, 3)
    assert_exact(found, one_by_one(dict(model.named_parameters()), run, 6))


def test_examples_that_see_each_other_are_not_taken_apart():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, CLASSES)).double()
    x = torch.randn(6, 7).double()
    params = dict(model.named_parameters())
    found = Curvature(model, params)
    with pytest.warns(UserWarning, match="backward pass per example"):
        add(found, lambda: F.cross_entropy(model(x), torch.zeros(6, dtype=torch.long), reduction="none"), 6)
    exact = dict.fromkeys(params, 0)
    for loss in F.cross_entropy(model(x), torch.zeros(6, dtype=torch.long), reduction="none"):
        grads = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
        exact = {name: exact[name] + g**2 for name, g in zip(params, grads, strict=True)}
    assert_exact(found.squares, exact)


def test_a_batch_without_gradients_settles_nothing():
    model, params, run = case("time first")
    found = Curvature(model, params)
    add(found, lambda: run(slice(0, 3)) * 0, 3)
    assert all((total == 0).all() for total in found.squares.values())
    add(found, lambda: run(slice(0, 6)) * 1, 6)
    assert_exact(found.squares, one_by_one(params, run, 6))


def test_a_batch_costs_one_forward_and_a_backward_per_seed_and_one_to_check(monkeypatch):
    model, params, run = case("mlp")
    passes = []
    original = curvatures._grads
    monkeypatch.setattr(curvatures, "_grads", lambda *a, **k: passes.append(1) or original(*a, **k))
    runs = []
    add(Curvature(model, params), lambda: runs.append(1) or run(slice(0, 6)), 6)
    assert (len(runs), len(passes)) == (1, 2)


def test_parameters_that_only_some_batches_use():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(7, CLASSES), "b": nn.Linear(7, CLASSES), "c": nn.Linear(2, 2)}).double()
    x, labels = torch.randn(8, 7).double(), torch.randint(CLASSES, (8,))

    def run(s):
        out = model["a"](x[s]) if s.start < 4 else model["a"](x[s]) * model["b"](x[s]).tanh()
        return F.cross_entropy(out, labels[s], reduction="none")

    found = batched(model, run, 8, 4)
    assert_exact(found, one_by_one(dict(model.named_parameters()), run, 8))
    assert "c.weight" not in found


def test_several_seeds_are_summed():
    torch.manual_seed(0)
    model, x = nn.Linear(7, CLASSES).double(), torch.randn(5, 7).double()
    found = Curvature(model, dict(model.named_parameters()))
    seeds = [torch.randn(5, CLASSES).double() for _ in range(4)]
    add(found, lambda: model(x), 5, seeds)
    square = sum(seed**2 for seed in seeds)
    torch.testing.assert_close(found.squares["weight"], square.T @ x**2)
    torch.testing.assert_close(found.squares["bias"], square.sum(0))


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

    found = batched(model, run, 6, 6)
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

    return model, dict(model.named_parameters()), run


def test_checkpointing_is_exact_or_refused():
    x = torch.randn(6, 7, dtype=torch.float64)
    model, params, run = checkpointed(x, reentrant=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = batched(model, run, 6, 3)
    assert_exact(found, one_by_one(params, run, 6))
    model, params, run = checkpointed(x.requires_grad_(), reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        batched(model, run, 6, 3)
