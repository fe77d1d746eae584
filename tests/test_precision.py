"""Precisions: autocast with a gradient scaler, weights in bfloat16 under a posterior in float32, float64."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import IVON, SGLD, bayesify, named_posteriors, param_groups, penalty, sample

METHODS = ("vi", "mc_dropout", "ivon", "la", "sgld", "vanilla")
X, Y = torch.linspace(-1, 1, 40).view(10, 4), torch.arange(10) % 3


def made(method: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    options = {} if method == "vanilla" else {"prior_sig": 0.3}
    wide = {"init_sig": 0.03} if method in ("vi", "ivon") else {}
    return bayesify(model, method, prior_mean="zero" if method == "mc_dropout" else None, **options, **wide)


def optimizer_of(model, method: str):
    if method == "ivon":
        return IVON(model, 0.05, num_data=100)
    if method == "sgld":
        return SGLD(model, 0.01, num_data=100)
    return torch.optim.SGD(param_groups(model, 0.05))


def trained(method: str, *, dtype: torch.dtype = torch.float32, cast: torch.dtype | None = None, scaled: bool = False):
    """Make five steps and return the model with the loss of each."""
    model, losses = made(method, dtype), []
    optimizer = optimizer_of(model, method)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**12)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", cast) if cast else nullcontext():
            loss = F.cross_entropy(model(X.to(dtype)).float(), Y)
        scaler.scale(loss + penalty(model, 100)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("cast", "scaled", "rtol"), [(torch.bfloat16, False, 0.02), (torch.float16, True, 0.003)])
def test_autocast_trains_as_float32_does(method, cast, scaled, rtol):
    exact, model = trained(method), trained(method, cast=cast, scaled=scaled)
    assert model[1] == pytest.approx(exact[1], rel=rtol)
    for (name, q), (_, p) in zip(named_posteriors(model[0]), named_posteriors(exact[0]), strict=True):
        assert {t.dtype for t in (q.original, *q.learnable())} == {torch.float32}, name
        moved = p.original - dict(named_posteriors(made(method)))[name].original
        away = float((q.original - p.original).detach().norm() / moved.detach().norm())
        assert away < 20 * rtol, name


@pytest.mark.parametrize("method", METHODS)
def test_a_scaled_loss_makes_the_steps_of_a_plain_one(method):
    plain, scaled = trained(method)[0], trained(method, scaled=True)[0]
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_overflows_is_left_out(method):
    model = made(method)
    optimizer = optimizer_of(model, method)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(F.cross_entropy(model(X), Y) + penalty(model, 100)).backward()
    model[0].parametrizations.bias.original.grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() < 2.0**16


@pytest.mark.parametrize("method", METHODS)
def test_weights_in_bfloat16_have_a_posterior_in_float32(method):
    said = pytest.warns(UserWarning, match="SGLD's small steps round to nothing") if method == "sgld" else nullcontext()
    with said:
        model, losses = trained(method, dtype=torch.bfloat16)
    assert losses == pytest.approx(trained(method)[1], rel=0.03)
    assert penalty(model, 100).dtype == torch.float32
    for _, q in named_posteriors(model):
        assert q.original.dtype == torch.bfloat16
        assert {t.dtype for t in q.learnable()} <= {torch.float32}
        if method in ("vi", "ivon"):
            assert q.own_std.dtype == torch.float32
            with torch.no_grad(), sample(model, seed=1):
                theta = q(q.original)
            assert theta.dtype == torch.bfloat16
            assert float((theta != q.original).float().mean()) > 0.5  # the spread does not drown


@pytest.mark.parametrize("method", METHODS)
def test_float64_is_the_same_training_in_more_digits(method):
    (double, losses), (single, rough) = trained(method, dtype=torch.float64), trained(method)
    assert losses == pytest.approx(rough, rel=1e-5)
    assert penalty(double, 100).dtype == torch.float64
    for (name, q), (_, p) in zip(named_posteriors(double), named_posteriors(single), strict=True):
        assert {t.dtype for t in (q.original, *q.learnable())} == {torch.float64}, name
        torch.testing.assert_close(q.original.float(), p.original, rtol=1e-3, atol=1e-5)
