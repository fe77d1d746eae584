"""Posteriors against float64 oracles: closed forms, extreme scales, moments, padding rows, low precision."""

import math

import pytest
import torch
from cases import tensor
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from variants import LINK_FUNCTIONS, SIG, VARIANTS, N

from bayesify import bayesify, mean, penalty, sample
from bayesify.core.method import REGISTRY
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior
from bayesify.core.sampling import autograd_energy_pull, autograd_pullback
from bayesify.methods.vi import LINKS

# -- closed forms and the generic way ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:s = .* rounding step:UserWarning")
@pytest.mark.parametrize("fixed_row", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_pullback_is_what_autograd_says(method: str, options: dict, dtype: torch.dtype, fixed_row: int | None):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(4, 3).to(dtype))
    q = REGISTRY[method](**options).posterior(param, Prior(torch.randn(4, 3).to(dtype), SIG), fixed_row=fixed_row)
    q.attach("weight", holder(param), "weight", None)
    grad, coef = torch.randn(4, 3).to(dtype), 0.3
    pairs = [(lambda: q.pullback(param, 1, grad), autograd_pullback(q, param, 1, grad, create_graph=False))]
    for pull in (0.0, 0.2):
        wanted = autograd_energy_pull(q, param, coef, pull)
        pairs.append((lambda pull=pull: q.energy_pull(param, coef, pull), wanted))
    for find, wanted in pairs:
        with torch.no_grad():
            found = find()
        for f, w in zip(found, wanted, strict=True):
            if w is None:
                assert f is None or not f.any()
            else:
                assert f.dtype == w.dtype
                tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
                torch.testing.assert_close(f, w, rtol=tolerance, atol=tolerance)


def holder(param: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = param
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3_000_001,), (3,)])
def test_the_value_is_accurate(shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    model = holder(nn.Parameter(torch.randn(shape, dtype=dtype)))
    bayesify(model, prior_mean="zero", prior_sig=0.3, init_sig=0.02)
    q = model.parametrizations.weight[0]
    exact = kl_divergence(Normal(q.mean.double(), q.std.double()), Normal(q.prior_mean.double(), 0.3)).sum() / N
    torch.testing.assert_close(penalty(model, N).double(), exact, rtol=3e-7, atol=0)


# -- extremes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", list(LINKS))
@pytest.mark.parametrize("num_data", [10, 1e30])
@pytest.mark.parametrize("prior_sig", [1e-20, 1e-30, 1e-5, 1e10, 1e20])
@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
@pytest.mark.filterwarnings("ignore:s = .* rounding step:UserWarning")
def test_extreme_scales_are_finite_where_the_exact_value_is(method: str, prior_sig: float, num_data: float, link: str):
    options = {"link": link} if method == "vi" else {}
    torch.manual_seed(0)
    model = bayesify(nn.Linear(3, 2), method, prior_sig=prior_sig, **options)
    deviation = min(prior_sig, 1.0)
    with torch.no_grad():
        model.parametrizations.bias.original.fill_(0)
        model.parametrizations.bias[0].prior_center.fill_(-deviation)  # m - theta0 is exact in float32
    (model(tensor(4, 3)).sum() * 0 + penalty(model, num_data)).backward()
    for q in (model.parametrizations.weight[0], model.parametrizations.bias[0]):
        away = q.original.detach().double() - q.prior_mean.double()
        keep = 1.0 if method == "vi" else 0.9
        exact = {"m": away / prior_sig / prior_sig * keep / num_data}
        if method == "vi":
            rho = q.rho.detach().double()
            s = LINK_FUNCTIONS[link](rho)
            slope = {"softplus": torch.sigmoid(rho), "exp": s, "clamp": torch.ones_like(s)}[link]
            exact["rho"] = (s / prior_sig**2 * slope - slope / s) / num_data
        found = {"m": q.original.grad, "rho": getattr(q, "rho", q.original).grad}
        for name, value in exact.items():
            representable = value.abs() < 3e38
            normal = representable & ((value.abs() > 1e-36) | (value == 0))
            assert torch.isfinite(found[name][representable]).all(), name
            torch.testing.assert_close(found[name].double()[normal], value[normal], rtol=1e-4, atol=0)


@pytest.mark.parametrize("prior_sig", [1e-20, 1e-30])
@pytest.mark.parametrize("link", ["softplus", "exp"])
@pytest.mark.filterwarnings("ignore:s = .* rounding step:UserWarning")
def test_tiny_scales_start_and_cost_what_they_should(prior_sig: float, link: str):
    model = bayesify(nn.Linear(3, 2), prior_sig=prior_sig, link=link)
    q = model.parametrizations.weight[0]
    torch.testing.assert_close(q.std, torch.full((2, 3), prior_sig / 10), rtol=1e-4, atol=0)
    per_element = math.log(10) - 0.5 + 0.005
    assert float(penalty(model, 10).detach()) == pytest.approx(8 * per_element / 10, rel=1e-5)


@pytest.mark.parametrize("link", list(LINKS))
@pytest.mark.parametrize("init_sig", [1e-8, 1e-4, 1.0, 30.0])
@pytest.mark.filterwarnings("ignore:s = .* rounding step:UserWarning")
def test_s_starts_at_init_sig(link: str, init_sig: float):
    model = bayesify(nn.Linear(3, 2).double(), link=link, init_sig=init_sig)
    torch.testing.assert_close(
        model.parametrizations.weight[0].std, torch.full((2, 3), init_sig, dtype=torch.double), rtol=1e-12, atol=0
    )


def test_init_sig_follows_the_prior():
    model = bayesify(nn.Linear(3, 2).double(), prior_sig={"weight": 1e-4, "bias": 5.0})
    assert float(model.parametrizations.weight[0].std[0, 0]) == pytest.approx(1e-5)
    assert float(model.parametrizations.bias[0].std[0]) == pytest.approx(1e-3)


@pytest.mark.parametrize("rho", [-1.0, 0.0, 1e-8])
def test_the_clamped_link_passes_the_gradient_of_s_below_its_floor(rho: float):
    """Also where the hand-written gradients are not used: twice differentiated, or by torch.func."""
    model = bayesify(nn.Linear(3, 2).double(), link="clamp", prior_sig=0.1, prior_mean="zero")
    q = model.parametrizations.weight[0]
    with torch.no_grad():
        q.rho.fill_(rho)
    assert float(q.std.max()) == 1e-8
    exact = torch.full_like(q.rho, (1e-8 / 0.1**2 - 1e8) / 10)
    for graph in (False, True):
        (found,) = torch.autograd.grad(penalty(model, 10), [q.rho], create_graph=graph)
        torch.testing.assert_close(found.detach(), exact)


def test_the_clamped_link_can_move_from_its_floor():
    model = bayesify(nn.Linear(3, 2).double(), link="clamp", prior_sig=1e-9, prior_mean="zero")
    q = model.parametrizations.weight[0]
    assert float(q.std.max()) == 1e-8
    penalty(model, 10).backward()
    assert q.rho.grad.all()


# -- moments of theta --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_samples_have_the_posteriors_mean_and_std(method: str):
    options = {"init_sig": 0.3} if method == "vi" else {"p_drop": 0.2}
    model = bayesify(nn.Linear(40, 30), method, prior_mean="zero", **options)
    q = model.parametrizations.weight[0]
    draws = []
    with torch.no_grad():
        for seed in range(400):
            with sample(model, seed=seed):
                draws.append(model.weight.clone())
    z = (torch.stack(draws) - (q.mean if method == "vi" else 0.8 * q.mean)) / q.std
    count = z.numel()
    assert abs(float(z.mean())) < 4 / math.sqrt(count)
    kurtosis = 3 if method == "vi" else (1 - 3 * 0.16) / 0.16
    assert abs(float(z.square().mean()) - 1) < 4 * math.sqrt((kurtosis - 1) / count)


def test_mc_dropout_mixes_with_the_prior_mean():
    torch.manual_seed(0)
    other = nn.Linear(40, 30)
    model = bayesify(nn.Linear(40, 30), "mc_dropout", p_drop=0.3, prior_mean=other, bias="gaussian")
    m, theta0 = model.parametrizations.weight.original.detach(), other.weight.detach()
    with torch.no_grad(), sample(model, seed=1):
        theta, bias = model.weight.clone(), model.bias
    assert ((theta == m) | (theta == theta0)).all()
    assert 0.2 < (theta == theta0).float().mean() < 0.4
    assert bias is model.parametrizations.bias.original


def test_mc_dropout_expected_mean():
    torch.manual_seed(0)
    other = nn.Linear(4, 3)
    model = bayesify(nn.Linear(4, 3), "mc_dropout", p_drop=0.3, prior_mean=other, mean="expected").eval()
    m = model.parametrizations.weight.original
    torch.testing.assert_close(model.weight, 0.7 * m + 0.3 * other.weight)
    torch.testing.assert_close(model.parametrizations.weight[0].mean, 0.7 * m.detach() + 0.3 * other.weight.detach())
    model(tensor(2, 4)).sum().backward()
    torch.testing.assert_close(m.grad[0], 0.7 * tensor(2, 4).sum(0))
    with mean(model.train()):
        torch.testing.assert_close(model.bias, 0.7 * model.parametrizations.bias.original + 0.3 * other.bias)


# -- the padding row ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_padding_row_has_no_noise(kind: type, method: str):
    model = bayesify(kind(5, 4, padding_idx=3), method, prior_mean="zero", prior_sig=1.0)
    original = model.parametrizations.weight.original
    with torch.no_grad():
        original[3] = 7.0
        others = [i for i in range(5) if i != 3]
        assert torch.equal(model.weight[3], original[3])
        changed = model.weight[others] != original[others]
    assert changed.any()
    q = model.parametrizations.weight[0]
    assert not q.std[3].any()
    assert q.std[others].all()
    term = penalty(model, 1)
    if method == "vi":
        rows = kl_divergence(Normal(q.mean, q.std.clamp(min=1e-30)), Normal(0.0, 1.0)).sum(1)
        torch.testing.assert_close(term, rows[others].sum() + q.mean[3].square().sum() / 2)
        term.backward()
        assert not q.rho.grad[3].any()
        assert q.rho.grad[others].all()
    with mean(model):
        assert model.weight is original


def test_mc_dropout_expected_keeps_the_padding_row():
    model = bayesify(nn.Embedding(5, 4, padding_idx=3), "mc_dropout", prior_mean="zero", mean="expected").eval()
    with torch.no_grad():
        model.parametrizations.weight.original[3] = 7.0
    assert (model.weight[3] == 7).all()
    torch.testing.assert_close(model.weight[0], 0.9 * model.parametrizations.weight.original[0])


# -- low precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast_after", [True, False])
@pytest.mark.parametrize("method", ["vi", "mc_dropout", "vanilla"])
def test_low_precision_weights_keep_a_precise_posterior(method: str, cast_after: bool, dtype: torch.dtype):
    options = {"init_sig": 0.1} if method == "vi" else {"mean": "expected"} if method == "mc_dropout" else {}
    plain = nn.Linear(4, 3)
    plain = bayesify(plain, method, **options).to(dtype) if cast_after else bayesify(plain.to(dtype), method, **options)
    state = {name: p.dtype for name, p in plain.named_parameters()}
    for name, found in state.items():
        assert found == (torch.float32 if name.endswith("rho") else dtype)
    x = tensor(2, 4).to(dtype)
    output = plain(x)
    assert output.dtype == dtype
    (output.float().square().mean() + penalty(plain, 10)).backward()
    for p in plain.parameters():
        assert p.grad.dtype == p.dtype
        assert torch.isfinite(p.grad).all()
    with mean(plain):
        assert plain(x).dtype == dtype
    if method == "vi":
        rho = plain.parametrizations.weight[0].rho
        torch.testing.assert_close(F.softplus(rho), torch.full((3, 4), 0.1), rtol=1e-5, atol=0)


def test_drowned_noise_warns_before_anything_changes():
    model = nn.Linear(4, 3).bfloat16()
    nn.init.ones_(model.weight)
    with pytest.warns(
        UserWarning, match=r"s = 0.001 is under a quarter of the rounding step of torch.bfloat16 weights"
    ):
        bayesify(model, include="weight", prior_sig=1.0)
    bayesify(nn.Linear(4, 3).bfloat16(), init_sig=0.1)
    bayesify(nn.LayerNorm(4))


class Half(Posterior):
    """A posterior with nothing but theta and energy: everything else is generic."""

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        return mean + 0.5 * noise

    def energy(self, mean: Tensor, scale: float) -> Tensor:
        return scale * mean.double().abs().sum()


def test_generic_defaults():
    param = nn.Parameter(torch.ones(3))
    q = Half(param, Prior(torch.zeros(3), 1.0))
    q.attach("weight", holder(param), "weight", None)
    assert torch.equal(q(param), param)
    assert torch.equal(q.mean, param.detach())
    assert torch.equal(q.std, torch.zeros(3))
    (grad,), (pull,) = q.pullback(param, 1, torch.full((3,), 2.0)), q.energy_pull(param, 3.0, 0.5)
    assert torch.equal(q.draw(param, 1), param + 0.5 * q.noise_of(1))
    assert torch.equal(grad, torch.full((3,), 2.0))
    assert torch.equal(pull, torch.full((3,), 3.5))
    with pytest.raises(NotImplementedError):
        Posterior(param, Prior(torch.zeros(3), 1.0)).theta(param, param)
    with pytest.raises(NotImplementedError):
        Posterior(param, Prior(torch.zeros(3), 1.0)).energy(param, 1.0)
