"""Options and their errors, and a method that is written outside the package."""

import math
from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar

import pytest
import torch
from cases import MLP, tensor
from torch import Tensor, nn
from torch.distributions import Laplace

from bayesify import bayesify, mean, methods, named_posteriors, penalty, sample, unbayesify
from bayesify.core.method import REGISTRY, Method
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior, state_dtype

X = tensor(5, 4)


@pytest.mark.parametrize(
    ("method", "readable", "papers"),
    [
        ("vi", {"num_samples": 7, "kl_weight": 0.5}, {"nst": 7, "kld": 0.5}),
        ("sgld", {"data_multiplier": 2.0, "noise_scale": 0.3}, {"Ninflate": 2.0, "nd": 0.3}),
    ],
)
def test_options_have_a_readable_name_and_the_papers(method, readable, papers):
    stored = [bayesify(MLP(), method, **own)._bayesify_scope.method for own in (readable, papers)]
    cls = type(stored[0])
    assert stored[0] == stored[1]
    assert cls(**readable) == cls(**papers)
    assert {name: getattr(stored[0], name) for name in readable} == readable
    assert bayesify(MLP(), cls(), **readable)._bayesify_scope.method == stored[0]
    name, own = next(iter(readable)), next(iter(papers))
    for make in (cls, lambda **options: bayesify(MLP(), method, **options)):
        with pytest.raises(ValueError, match=f"'{name}' and '{own}' are one option, got both"):
            make(**{own: papers[own], name: readable[name]})
    with pytest.raises(ValueError, match=r"unknown option 'num_sample'.*did you mean 'num_samples'\?"):
        bayesify(MLP(), method, num_sample=3)
    with pytest.raises(AttributeError, match="no attribute 'kl_factor'"):
        stored[0].kl_factor  # noqa: B018
    if method == "vi":
        with pytest.raises(ValueError, match="unknown option 'noise_scale'"):
            bayesify(MLP(), method, noise_scale=1.0)


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [
        ("via", {}, ValueError, r"unknown method 'via', did you mean 'vi'\?; methods: \['ensemble', 'ivon', 'la'"),
        ("nothing like it", {}, ValueError, r"unknown method 'nothing like it'; methods: \["),
        (3, {}, TypeError, r"method must be a name \[.*\] or an object of bayesify.methods, got 3"),
        (methods.VI, {}, TypeError, r"method must be a name .* or an object of bayesify.methods"),
        ("vi", {"p_drop": 0.1}, ValueError, r"unknown option 'p_drop' for method 'vi'; options: \['bias', "),
        ("vi", {"init_sigma": 0.1}, ValueError, r"unknown option 'init_sigma'.*did you mean 'init_sig'\?"),
        (
            "vi",
            {"bias": "ignore"},
            ValueError,
            r"bias must be one of \['informative', 'uninformative'\] for 'vi', got 'ignore'",
        ),
        (
            "mc_dropout",
            {"bias": "informative"},
            ValueError,
            r"bias must be one of \['spikymix', 'gaussian', 'ignore'\]",
        ),
        ("vanilla", {"bias": "spikymix"}, ValueError, r"bias must be one of \['penalty', 'ignore'\]"),
        ("vi", {"link": "relu"}, ValueError, r"link must be one of \['softplus', 'exp', 'clamp'\], got 'relu'"),
        ("vi", {"init_sig": 0}, ValueError, "init_sig must be a finite number > 0, got 0"),
        ("vi", {"init_sig": -1.0}, ValueError, "init_sig must be a finite number > 0, got -1.0"),
        ("vi", {"init_sig": "small"}, TypeError, "init_sig must be a number, got 'small'"),
        ("vi", {"kld": -1}, ValueError, "kld must be a finite number >= 0, got -1"),
        ("vi", {"kld": math.inf}, ValueError, "kld must be a finite number >= 0, got inf"),
        ("vi", {"kld": True}, TypeError, "kld must be a number, got True"),
        ("vi", {"nst": -1}, ValueError, "nst must be an integer >= 0, got -1"),
        ("vi", {"nst": 2.5}, ValueError, "nst must be an integer >= 0, got 2.5"),
        ("mc_dropout", {"p_drop": 1}, ValueError, r"p_drop must be in \[0, 1\), got 1"),
        ("mc_dropout", {"p_drop": 1.5}, ValueError, r"p_drop must be in \[0, 1\), got 1.5"),
        ("mc_dropout", {"p_drop": -0.1}, ValueError, "p_drop must be a finite number >= 0, got -0.1"),
        ("mc_dropout", {"p_drop": math.nan}, ValueError, "p_drop must be a finite number >= 0, got nan"),
        ("mc_dropout", {"kld": -1}, ValueError, "kld must be a finite number >= 0"),
        ("mc_dropout", {"mean": "mode"}, ValueError, r"mean must be one of \['kept', 'expected'\], got 'mode'"),
        ("vanilla", {"wd": -1}, ValueError, "wd must be a finite number >= 0, got -1"),
        (methods.VI(), {"p_drop": 0.1}, ValueError, "unknown option 'p_drop' for method 'vi'"),
        (methods.VI(), {"link": "relu"}, ValueError, "link must be one of"),
    ],
)
def test_bad_options(method, options: dict, error: type[Exception], message: str):
    model = MLP()
    before = [(n, id(p)) for n, p in model.named_parameters()]
    with pytest.raises(error, match=message):
        bayesify(model, method, **options)
    assert type(model) is MLP
    assert [(n, id(p)) for n, p in model.named_parameters()] == before


def test_a_method_object_is_the_same_as_its_name_and_options():
    torch.manual_seed(0)
    outputs = []
    plain = MLP().state_dict()
    for method, options in [
        ("vi", {"link": "exp", "init_sig": 0.3, "bias": "uninformative"}),
        (methods.VI(link="exp", init_sig=0.3, bias="uninformative"), {}),
        (methods.VI(link="exp", bias="uninformative"), {"init_sig": 0.3}),
        (methods.VI(link="exp", init_sig=0.3), {"bias": "uninformative"}),
    ]:
        model = MLP()
        model.load_state_dict(plain)
        bayesify(model, method, **options)
        with sample(model, seed=1):
            outputs.append(torch.stack([model(X).sum(), penalty(model, 10)]).detach())
    assert all(torch.equal(outputs[0], other) for other in outputs)


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_options_are_frozen_and_have_a_bias_treatment(method: str):
    options = REGISTRY[method]()
    assert options.bias == options.bias_treatments[0]
    with pytest.raises(FrozenInstanceError):
        options.bias = "other"


def test_no_dropout_and_no_penalty_are_allowed():
    model = bayesify(MLP(), "mc_dropout", p_drop=0, prior_mean="zero")
    assert torch.equal(model(X), model(X))
    plain = bayesify(MLP(), "vanilla", wd=0, prior_mean="zero")
    assert float(penalty(plain, 10)) == 0
    free = bayesify(MLP(), "vi", kld=0, prior_mean="zero")
    term = penalty(free, 10)
    assert float(term.detach()) == 0
    (free(X).sum() + term).backward()


def test_a_flat_model_has_a_penalty_without_gradient():
    model = bayesify(nn.Linear(4, 3), "vi", include="bias", bias="uninformative")
    term = penalty(model, 10)
    assert float(term) == 0
    (model(X).sum() + term).backward()
    assert model.parametrizations.bias.original.grad is not None
    assert model.parametrizations.bias[0].rho.grad is not None, "an uninformative bias still trains"


@pytest.mark.parametrize("method", ["vanilla", "mc_dropout", "vi"])
def test_no_spread_trains_like_the_plain_model_with_l2(method: str):
    """VI with s -> 0, MC-dropout with p = 0, and vanilla: SGD on the loss plus L2 towards the prior mean."""
    torch.manual_seed(0)
    plain, sig, num_data = MLP().double(), 0.5, 20
    options = {
        "vi": {"link": "exp", "init_sig": 1e-30},
        "mc_dropout": {"p_drop": 0.0},
        "vanilla": {"wd": 1 / (sig**2 * num_data)},
    }
    model = MLP().double()
    model.load_state_dict(plain.state_dict())
    if method == "vi":
        with pytest.warns(UserWarning, match="rounding step"):
            bayesify(model, method, prior_sig=sig, **options[method])
    else:
        bayesify(model, method, prior_sig=sig, **options[method])
    center = [p.detach().clone() for p in plain.parameters()]
    means = [q.original for _, q in named_posteriors(model)]
    for p in (p for _, q in named_posteriors(model) for p in q.learnable()):
        p.requires_grad_(False)
    x, y = X.double(), tensor(5, 3).double()
    optimizers = [torch.optim.SGD(ps, lr=0.05, momentum=0.9) for ps in (list(plain.parameters()), means)]
    for _ in range(50):
        l2 = sum((p - c).square().sum() for p, c in zip(plain.parameters(), center, strict=True)) / (
            2 * sig**2 * num_data
        )
        losses = [
            nn.functional.mse_loss(plain(x), y) + l2,
            nn.functional.mse_loss(model(x), y) + penalty(model, num_data),
        ]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert any((p - c).abs().max() > 0.1 for p, c in zip(plain.parameters(), center, strict=True)), (
        "nothing was trained"
    )
    for p, m in zip(plain.parameters(), means, strict=True):
        torch.testing.assert_close(m, p, rtol=0, atol=1e-6)


# -- a fourth method, from outside the package: theta and energy are all it takes --------------------------------------


@dataclass(frozen=True, kw_only=True)
class Heavy(Method):
    """A Laplace posterior of fixed scale, with a Laplace prior."""

    name: ClassVar[str] = "test_heavy"
    bias_treatments: ClassVar[tuple[str, ...]] = ("as_weights",)

    spread: float = 0.1
    bias: str = "as_weights"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("spread", above=0)

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        return HeavyPosterior(param, prior, self.spread, fixed_row)

    def scale(self, num_data: float) -> float:
        return 1 / num_data


class HeavyPosterior(Posterior):
    def __init__(self, param: Tensor, prior: Prior, scale: float, fixed_row: int | None) -> None:
        super().__init__(param, prior, fixed_row=fixed_row)
        self.log_scale = nn.Parameter(torch.full_like(param, math.log(scale), dtype=state_dtype(param)))

    def learnable(self) -> tuple[nn.Parameter, ...]:
        return (self.log_scale,)

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        uniform = 2 * torch.special.ndtr(noise) - 1
        return mean - self.log_scale.exp() * uniform.sign() * torch.log1p(-uniform.abs())

    def energy(self, mean: Tensor, scale: float) -> Tensor:
        away = (mean - self.prior_center).abs().double() / self.prior_sig
        b = self.log_scale.double().exp() / self.prior_sig
        return scale * (away + b * torch.exp(-away / b) - b.log() - 1).sum()


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch):
    """Know the outside method by its name in this file only."""
    monkeypatch.setitem(REGISTRY, "test_heavy", Heavy)


REGISTRY.pop("test_heavy")


def test_a_method_from_outside_the_package():
    torch.manual_seed(0)
    model = MLP().double()
    x = X.double()
    output = model.eval()(x)
    assert bayesify(model, "test_heavy", spread=0.2, prior_sig=0.5) is model
    assert torch.equal(model(x), output)
    with pytest.raises(ValueError, match="spread must be a finite number > 0"):
        bayesify(MLP(), Heavy(spread=-1))

    q = dict(named_posteriors(model))["inp.weight"]
    posterior, prior = Laplace(q.original, q.log_scale.exp()), Laplace(q.prior_mean, 0.5)
    with torch.no_grad():
        q.original.add_(0.3)
    exact = torch.distributions.kl_divergence(posterior, prior).sum() / 10
    grads = torch.autograd.grad(exact, [q.original, q.log_scale])
    (model.train()(x).sum() * 0 + penalty(model, 10)).backward()
    torch.testing.assert_close(q.original.grad, grads[0])
    torch.testing.assert_close(q.log_scale.grad, grads[1])

    draws = []
    for seed in range(300):
        with sample(model, seed=seed), torch.no_grad():
            draws.append(model.inp.weight.clone())
    deviations = torch.stack(draws) - q.mean
    assert deviations.abs().mean() == pytest.approx(0.2, rel=4 / math.sqrt(deviations.numel()))
    assert not torch.equal(model(x), model(x))
    with mean(model):
        assert torch.equal(model(x), model(x))
    assert type(unbayesify(model)) is MLP


def test_an_unfinished_method_says_what_is_missing():
    class Unfinished(Method):
        name: ClassVar[str] = "test_unfinished"
        bias_treatments: ClassVar[tuple[str, ...]] = ("any",)

    REGISTRY.pop("test_unfinished")
    with pytest.raises(NotImplementedError):
        bayesify(MLP(), Unfinished(bias="any"))
    with pytest.raises(NotImplementedError):
        Unfinished(bias="any").scale(3)


@pytest.mark.parametrize("method", ["la", "sgld", "vanilla"])
def test_the_penalty_folds_into_the_gradient_of_a_point(method):
    """After a forward the prior's gradient is added where the parameter's own arrives; before one, it takes its way."""
    torch.manual_seed(0)
    model = bayesify(torch.nn.Linear(3, 2).double(), method, prior_sig=0.5).train()
    with torch.no_grad():
        model.parametrizations.weight.original.add_(0.3)
    x = torch.randn(5, 3).double()
    grads = []
    for penalty_first in (True, False):
        model.zero_grad()
        if penalty_first:
            penalty(model, num_data=7).backward()
            model(x).square().sum().backward()
        else:
            (model(x).square().sum() + penalty(model, num_data=7)).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
    assert model.parametrizations.weight.original.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own, on the first use
@pytest.mark.parametrize("method", ["la", "sgld", "vanilla"])
def test_a_point_has_forward_mode_derivatives(method):
    torch.manual_seed(0)
    model = bayesify(torch.nn.Linear(3, 2).double(), method).train()
    x, tangent = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    with torch.autograd.forward_ad.dual_level():
        out = model(torch.autograd.forward_ad.make_dual(x, tangent))
        found = torch.autograd.forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(found, tangent @ model.weight.T)
