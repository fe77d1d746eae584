"""Selection by name, prior means and scales, what counts as a bias, a norm or a padding row."""

import pytest
import torch
from cases import MLP, Bare, Tied
from torch import nn

from bayesify import bayesify, named_posteriors
from bayesify.core.selection import SelectionError, candidates


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in named_posteriors(model)]


def prior_means(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: q.prior_mean for name, q in named_posteriors(model)}


ALL = ["token", "inp.weight", "inp.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ALL),
        ({"include": "out.*"}, ["out.weight", "out.bias"]),
        ({"include": ["token", "*.bias"]}, ["token", "inp.bias", "norm.bias", "out.bias"]),
        ({"exclude": "*.bias"}, ["token", "inp.weight", "norm.weight", "out.weight"]),
        ({"include": "out.*", "exclude": "*.bias"}, ["out.weight"]),
        ({"include": lambda name, p: p.dim() > 1}, ["inp.weight", "out.weight"]),
        ({"exclude": lambda name, p: "norm" in name}, [n for n in ALL if "norm" not in n]),
        ({"include": ("out.weigh[t]",)}, ["out.weight"]),
    ],
)
def test_include_and_exclude(options: dict, wanted: list[str]):
    assert names(bayesify(MLP(), **options)) == wanted


def test_frozen_and_integer_parameters_stay():
    model = MLP()
    model.inp.requires_grad_(False)
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    weight = model.inp.weight
    assert names(bayesify(model)) == [n for n in ALL if not n.startswith("inp")]
    assert model.inp.weight is weight
    assert type(model.inp) is nn.Linear


def test_ties_have_one_posterior_under_any_of_their_names():
    for pattern in ("embed.weight", "head.weight"):
        model = bayesify(Tied(), include=pattern)
        assert names(model) == ["embed.weight"]
        assert model.head.parametrizations.weight[0] is model.embed.parametrizations.weight[0]
    assert names(bayesify(Tied())) == ["embed.weight", "body.weight", "body.bias"]


def test_a_module_under_two_names_is_found_under_both():
    (weight,) = [c for c in candidates(Bare()) if "first.weight" in c.names]
    assert weight.names == ["first.weight", "again.weight"]
    assert len(weight.places) == 1
    assert names(bayesify(Bare(), include="again.*")) == ["first.weight", "first.bias"]


@pytest.mark.parametrize("argument", ["include", "exclude", "prior_sig", "prior_mean"])
def test_a_pattern_without_a_match_names_the_closest(argument: str):
    value = "outt.weight" if argument in ("include", "exclude") else {"outt.weight": 1.0}
    with pytest.raises(SelectionError, match=rf"{argument} pattern 'outt.weight' matched no parameter.*'out.weight'"):
        bayesify(MLP(), **{argument: value})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"include": 3}, TypeError, "include takes a glob pattern, several of them, or a callable"),
        ({"include": [3]}, TypeError, "include takes glob patterns such as 'encoder.*', got 3"),
        ({"include": "out.*", "exclude": "*"}, SelectionError, r"no parameter is left .*excluded, not included"),
        ({"include": lambda name, p: False}, SelectionError, r"no parameter is left .*not included"),
        ({"prior_sig": 0}, ValueError, "prior_sig of 'token' must be positive and finite, got 0"),
        ({"prior_sig": -1.0}, ValueError, "prior_sig of 'token' must be positive and finite, got -1.0"),
        ({"prior_sig": float("nan")}, ValueError, "must be positive and finite, got nan"),
        ({"prior_sig": float("inf")}, ValueError, "must be positive and finite, got inf"),
        ({"prior_sig": 1e-200}, ValueError, "must be within 1e-100 and its inverse, got 1e-200"),
        ({"prior_sig": "1"}, TypeError, "prior_sig must be None, a number, or a mapping"),
        ({"prior_sig": {"out.*": -1}}, ValueError, "prior_sig of 'out.weight' must be positive"),
        ({"prior_mean": 0.0}, TypeError, "prior_mean must be None"),
        ({"prior_mean": "one"}, TypeError, "prior_mean must be None"),
        ({"prior_mean": {"out.*": 3}}, TypeError, "prior_mean must be None"),
        ({"prior_mean": MLP(width=9)}, ValueError, r"prior mean of 'inp.weight' has shape \(9, 4\).*\(8, 4\)"),
        ({"prior_mean": nn.Linear(2, 2)}, ValueError, "Linear given as prior_mean has no 'token'"),
        ({"prior_mean": {"out.*": nn.Linear(2, 2)}}, ValueError, "Linear given as prior_mean has no 'out.weight'"),
        (
            {"prior_mean": {"token": torch.zeros(4)}},
            ValueError,
            "the state dict given as prior_mean has no 'inp.weight'",
        ),
    ],
)
def test_bad_selections_and_priors(options: dict, error: type[Exception], message: str):
    model = MLP()
    with pytest.raises(error, match=message):
        bayesify(model, **options)
    assert type(model) is MLP
    assert [n for n, _ in model.named_parameters()] == ALL


def test_a_non_finite_prior_mean_is_refused():
    model = MLP()
    with torch.no_grad():
        model.out.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"prior mean of 'out\.weight' is not finite"):
        bayesify(model)
    bayesify(model, prior_mean={"out.*": "zero"})


def test_prior_means():
    torch.manual_seed(1)
    model, other = MLP(), MLP()
    state = {n: v.clone() for n, v in other.state_dict().items()} | {"some.buffer": torch.zeros(1)}
    current = {n: p.detach().clone() for n, p in model.named_parameters()}
    given = {n: p.detach() for n, p in other.named_parameters()}
    zero = {n: torch.ones_like(p) if n == "norm.weight" else torch.zeros_like(p) for n, p in current.items()}
    mixed = {n: zero[n] if n.startswith("out") else given[n] if "bias" in n else current[n] for n in current}
    for prior_mean, wanted in [
        (None, current),
        ("zero", zero),
        (other, given),
        (state, given),
        ({"out.*": "zero", "*.bias": other}, mixed),
        ({"out.*": "zero", "*.bias": state}, mixed),
    ]:
        fresh = MLP()
        fresh.load_state_dict(current)
        found = prior_means(bayesify(fresh, prior_mean=prior_mean))
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"{name} of {prior_mean}")
        for name, q in named_posteriors(fresh):
            assert torch.equal(q.mean, current[name]), "m starts at the current weights"


def test_the_prior_mean_is_a_copy():
    model = bayesify(MLP())
    with torch.no_grad():
        model.out.parametrizations.weight.original.add_(1)
    assert not torch.equal(prior_means(model)["out.weight"], dict(named_posteriors(model))["out.weight"].mean)


def test_prior_scales_by_pattern():
    torch.manual_seed(0)
    model = bayesify(MLP(), prior_sig={"out.*": 0.5, "*.bias": 2})
    torch.manual_seed(0)
    found = {name: q.prior_sig for name, q in named_posteriors(model)}
    own = {name: float(p.detach().square().mean().sqrt()) for name, p in MLP().named_parameters()}
    exact = {n: 0.5 if n.startswith("out") else 2.0 if "bias" in n else own[n] for n in ALL}
    assert found == pytest.approx(exact)


class Act(nn.BatchNorm2d):
    pass


class RMSNorm(nn.Module):
    def __init__(self, attribute: str = "weight", value: float = 1.0) -> None:
        super().__init__()
        setattr(self, attribute, nn.Parameter(torch.full((4,), value)))


Act.__name__ = "BatchNormAct2d"


@pytest.mark.parametrize(
    ("module", "neutral"),
    [
        (nn.LayerNorm(4), 1.0),
        (nn.LayerNorm([2, 3]), 1.0),
        (nn.BatchNorm2d(4), 1.0),
        (nn.GroupNorm(2, 4), 1.0),
        (nn.InstanceNorm1d(4, affine=True), 1.0),
        (Act(4), 1.0),
        (nn.BatchNorm2d(4).apply(lambda m: nn.init.zeros_(m.weight)), 1.0),  # the last of a residual block
        (RMSNorm(), 1.0),
        (RMSNorm("gamma"), 1.0),
        (RMSNorm("scale"), 1.0),
        (RMSNorm(value=0.0), 0.0),  # multiplies by 1 + weight
        (RMSNorm("beta"), 0.0),
        (nn.Linear(4, 1), 0.0),
        (nn.PReLU(4), 0.0),
    ],
)
def test_the_neutral_prior_mean(module: nn.Module, neutral: float):
    (first, *_) = candidates(module)
    assert first.neutral == neutral


@pytest.mark.parametrize(
    ("name", "shape", "is_bias"),
    [
        ("bias", (3,), True),
        ("in_proj_bias", (3,), True),
        ("bias_hh_l0", (3,), True),
        ("bias", (3, 1), False),
        ("relative_position_bias_table", (3,), False),
        ("biased", (3,), False),
        ("weight", (3,), False),
    ],
)
def test_what_a_bias_is(name: str, shape: tuple[int, ...], is_bias: bool):
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    (found,) = candidates(module)
    assert found.is_bias is is_bias


def test_the_padding_row_is_found_through_a_tie():
    rows = {c.name: c.fixed_row for c in candidates(Tied())}
    assert rows == {"embed.weight": 2, "body.weight": None, "body.bias": None}
