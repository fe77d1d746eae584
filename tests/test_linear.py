"""Linear readings: f(x, m) + J(x) (theta - m) against Jacobians by brute force, for any architecture and method."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bayesify as package
from bayesify import bayesify, fit_laplace, mix, named_posteriors, penalty, predict, samples
from bayesify.methods.swag import collect

torch.manual_seed(0)


class Take(nn.Module):
    """Calls a model and makes two outputs per example of what it returns."""

    def __init__(self, body, features):
        super().__init__()
        self.body, self.head = body, nn.Linear(features, 2)

    def forward(self, x):
        found = self.body(x)
        found = found[0] if isinstance(found, tuple) else found
        return self.head(found.flatten(2).mean(1) if found.dim() > 2 else found)


class Tied(nn.Module):
    """One matrix at both ends."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x[:, :2]


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x)[0]


def batch_norm():
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    with torch.no_grad():
        net(torch.randn(20, 1, 3, 3) + 1)
    return net


FLAT, PICTURE, SERIES = (5, 3), (5, 1, 3, 3), (5, 4, 3)
NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), FLAT),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.SiLU(), nn.Flatten(), nn.Linear(12, 2)), PICTURE),
    "batch_norm": (batch_norm, PICTURE),
    "group_norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(16, 2)),
        PICTURE,
    ),
    "layer_norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)), FLAT),
    "lstm": (lambda: Take(nn.LSTM(3, 4, batch_first=True), 4), SERIES),
    "gru": (lambda: Take(nn.GRU(3, 4, batch_first=True), 4), SERIES),
    "attention": (lambda: Take(nn.Sequential(nn.Linear(3, 4), Attending()), 4), SERIES),
    "transformer": (
        lambda: Take(nn.Sequential(nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)), 4),
        SERIES,
    ),
    "embedding": (lambda: Take(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh()), 4), None),
    "tied": (Tied, FLAT),
    "residual": (Residual, FLAT),
}


def inputs_of(shape):
    generator = torch.Generator().manual_seed(1)
    if shape is None:
        return torch.randint(7, (5, 4), generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def net_of(name):
    torch.manual_seed(2)
    return NETS[name][0]().double().eval()


def jacobian(model, x):
    """Return the output in mean mode, and its derivative in every posterior's mean by one backward pass per output."""
    params = [p.original for _, p in named_posteriors(model)]
    with package.mean(model):
        output = model(x)
    rows = [torch.autograd.grad(value, params, retain_graph=True, materialize_grads=True) for value in output.flatten()]
    return output.detach(), [torch.stack(column).flatten(1) for column in zip(*rows, strict=True)]


def by_hand(model, x, count, seed):
    output, slopes = jacobian(model, x)
    found = []
    for _ in samples(model, count, seed):
        shift = torch.zeros_like(output).flatten()
        for j, (name, posterior) in zip(slopes, named_posteriors(model), strict=True):
            path, _, attribute = name.rpartition(".")
            theta = getattr(model.get_submodule(path), attribute).detach()
            shift += j @ (theta - posterior.mean).flatten()
        found.append(output + shift.view_as(output))
    return torch.stack(found)


@pytest.mark.parametrize("name", NETS)
def test_a_linear_reading_is_that_of_brute_force_jacobians(name):
    model, x = bayesify(net_of(name), "vi", prior_sig=1.0, init_sig=0.3), inputs_of(NETS[name][1])
    found = predict(model, x, samples=3, seed=3, task="regression", linear=True)
    expected = by_hand(model, x, 3, 3)
    torch.testing.assert_close(found.outputs, expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found.outputs, predict(model, x, samples=3, seed=3, task="regression").outputs)


@pytest.mark.parametrize("name", [name for name in NETS if name not in ("lstm", "gru")])  # which vmap does not take
def test_the_closed_form_is_j_sigma_j(name):
    model, x = bayesify(net_of(name), "vi", prior_sig=1.0, init_sig=0.3), inputs_of(NETS[name][1])
    found = predict(model, x, task="regression", linear=True)
    output, slopes = jacobian(model, x)
    variance = sum(
        j.square() @ p.std.flatten().square() for j, (_, p) in zip(slopes, named_posteriors(model), strict=True)
    )
    assert found.closed_form and found.num_samples == 0
    torch.testing.assert_close(found.mean, output, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.epistemic, variance.view_as(output).sqrt(), rtol=1e-9, atol=1e-9)


def fitted(net, x, y, **options):
    """Return a model of method "la" after a few steps of training and a fit."""
    model = bayesify(net, "la", prior_mean="zero", prior_sig=1.0)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        ((model(x) - y).square().sum(1).mean() / 0.1 + penalty(model, len(x))).backward()
        optimizer.step()
    return fit_laplace(model, [(x, y)], likelihood="regression", **options)


def noisy():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    return x, torch.sin(x) + 0.2 * torch.randn(40, 2, generator=generator, dtype=torch.float64)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def posterior_of(kind):
    """Return a trained posterior of a method."""
    x, y = noisy()
    if kind.startswith("la"):
        return fitted(small_net(), x, y, structure=kind[3:], curvature="ggn")
    options = {"sgld": {"burnin": 5, "thin": 1}, "mc_dropout": {"p_drop": 0.3}}.get(kind, {})
    model = bayesify(small_net(), kind, prior_sig=1.0, **options)
    own = {"sgld": package.SGLD, "ivon": package.IVON}.get(kind)
    optimizer = own(model, 0.01, num_data=40) if own else torch.optim.SGD(model.parameters(), 0.01)
    for step in range(30):
        optimizer.zero_grad()
        ((model(x) - y).square().mean() + penalty(model, 40)).backward()
        optimizer.step()
        if kind == "swag" and step % 5 == 0:
            collect(model)
    return model.eval()


@pytest.mark.parametrize("kind", ["vi", "la_diag", "la_kron", "sgld", "swag", "ivon", "mc_dropout"])
def test_any_posterior_is_read_linearly(kind):
    model, (x, _) = posterior_of(kind), noisy()
    found = predict(model, x[:6], samples=4, seed=5, task="regression", linear=True)
    torch.testing.assert_close(found.outputs, by_hand(model, x[:6], 4, 5), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["la_diag", "la_kron"])
def test_the_closed_form_is_the_moments_of_many_draws(kind):
    """Also of a layer's weight and bias together, and with the factor of `calibrate`."""
    model, (x, _) = posterior_of(kind), noisy()
    for _, posterior in named_posteriors(model):
        posterior.calibration = 0.7
    exact = predict(model, x[:4])
    drawn = predict(model, x[:4], samples=4000, seed=1)
    assert exact.closed_form and not drawn.closed_form and drawn.num_samples == 4000
    off = (drawn.epistemic / exact.epistemic).log().abs()
    assert float(off.max()) < 4 / math.sqrt(2 * 4000)  # the standard error of a logarithmic standard deviation
    assert float(exact.epistemic.min()) > 0


def test_a_laplace_regression_is_read_linearly_and_others_are_not():
    model, (x, y) = posterior_of("la_kron"), noisy()
    out = predict(model, [(x, y)])
    assert type(out).__name__ == "RegressionPredictive" and out.closed_form and float(out.aleatoric.min()) > 0
    sampled = predict(model, x, samples=3, seed=0, linear=False)
    assert not torch.allclose(sampled.outputs, predict(model, x, samples=3, seed=0).outputs)
    vi = posterior_of("vi")
    plain = predict(vi, x, samples=3, seed=0, task="regression")
    torch.testing.assert_close(
        plain.outputs, predict(vi, x, samples=3, seed=0, task="regression", linear=False).outputs
    )
    assert plain.num_samples == 3


def test_a_last_layer_is_linear_already():
    x, y = noisy()
    model = fitted(small_net(), x, y, structure="kron", include="2.*")
    exact, again = predict(model, x), predict(model, x, linear=True)
    torch.testing.assert_close(exact.epistemic, again.epistemic)
    drawn = predict(model, x, samples=5, seed=0, linear=True)
    torch.testing.assert_close(drawn.outputs, predict(model, x, samples=5, seed=0, linear=False).outputs)


def test_mixtures_are_read_member_by_member():
    members = [posterior_of("la_kron"), posterior_of("la_diag")]
    x, _ = noisy()
    found = predict(mix(members), x)
    parts = [predict(member, x) for member in members]
    assert found.closed_form
    torch.testing.assert_close(found.mean, (parts[0].mean + parts[1].mean) / 2)


def test_one_pass_over_data_that_can_be_read_once():
    model, (x, y) = posterior_of("la_kron"), noisy()
    whole = predict(model, [(x, y)])
    once = predict(model, iter([(x[:15], y[:15]), (x[15:], y[15:])]))
    torch.testing.assert_close(once.epistemic, whole.epistemic)
    torch.testing.assert_close(once.labels, y)
    kept = predict(model, iter([x[:15], x[15:]]), samples=3, seed=0)
    torch.testing.assert_close(kept.outputs, predict(model, x, samples=3, seed=0).outputs)


def test_classifiers_may_be_read_linearly():
    model = bayesify(small_net(), "vi", prior_sig=1.0, init_sig=0.3)
    x, _ = noisy()
    out = predict(model, x, samples=3, seed=5, linear=True)
    torch.testing.assert_close(out.logits, by_hand(model, x, 3, 5), rtol=1e-9, atol=1e-9)


class TwiceOnly(torch.autograd.Function):
    """A square without a rule for forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Never(TwiceOnly):
    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no derivative here")


class Squared(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(3, 2).double(), function

    def forward(self, x):
        return self.function.apply(self.layer(x))


def test_what_has_no_forward_derivative_is_differentiated_twice_backward():
    model, x = bayesify(Squared(TwiceOnly), "vi", prior_sig=1.0, init_sig=0.3), inputs_of(FLAT)
    found = predict(model, x, samples=3, seed=5, task="regression", linear=True)
    torch.testing.assert_close(found.outputs, by_hand(model, x, 3, 5), rtol=1e-9, atol=1e-9)


def test_float32_lstms_and_attention_have_a_derivative():
    for name in ("lstm", "gru", "transformer"):
        model = bayesify(net_of(name).float(), "vi", prior_sig=1.0, init_sig=0.1)
        x = inputs_of(SERIES).float()
        found = predict(model, x, samples=2, seed=5, task="regression", linear=True)
        torch.testing.assert_close(found.outputs, by_hand(model, x, 2, 5), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_read_linearly_says_so():
    model, x = bayesify(Squared(Never), "vi", prior_sig=1.0, init_sig=0.3), inputs_of(FLAT)
    with pytest.raises(ValueError, match="linear=False"):
        predict(model, x, samples=3, task="regression", linear=True)
    with pytest.raises(ValueError, match="linear must be"):
        predict(model, x, linear="yes")
    with pytest.raises(ValueError, match="leave out update_bn"):
        predict(model, x, samples=3, linear=True, update_bn=[x])
    wrapped = nn.Sequential(mix([posterior_of("vi"), posterior_of("vi")]))
    with pytest.raises(ValueError, match="mixture itself"):
        predict(wrapped, noisy()[0], samples=4, task="regression", linear=True)


def test_the_model_is_as_before():
    model, (x, _) = posterior_of("la_kron"), noisy()
    model.train()
    state = torch.get_rng_state()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    predict(model, x)
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
