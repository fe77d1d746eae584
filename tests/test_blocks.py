"""Elementwise work block by block: every element once, and the same numbers as without blocks."""

import pytest
import torch
from cases import tensor

from bayesify import bayesify, blocks, penalty, predict
from bayesify.methods.vi import CLAMP_MIN, LINKS

METHODS = [
    ("vi", {"link": "softplus"}),
    ("vi", {"link": "exp"}),
    ("vi", {"link": "clamp", "init_sig": 0.1}),
    ("mc_dropout", {"p_drop": 0.3}),
    ("vanilla", {"wd": 0.1}),
]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 30])
def test_blocks_visit_every_element_once(size: int, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)
    source, out = torch.arange(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    blocks.blocks(lambda x, y: y.add_(x + 1), source, out)
    assert torch.equal(out, source + 1)


def gradients(method, options, prior_mean):
    """Return the value of a loss with its penalty, and the gradients of all parameters."""
    torch.manual_seed(0)
    model = bayesify(torch.nn.Linear(7, 5).double(), method, prior_sig=0.3, prior_mean=prior_mean, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    torch.manual_seed(1)
    loss = model(tensor(3, 7).double()).square().sum() + penalty(model, num_data=2)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("prior_mean", [None, "zero"])
@pytest.mark.parametrize(("method", "options"), METHODS)
def test_blocks_change_no_number(method: str, options: dict, prior_mean: str | None, monkeypatch):
    whole = gradients(method, options, prior_mean)
    monkeypatch.setattr(blocks, "BLOCK", 3)
    cut = gradients(method, options, prior_mean)
    monkeypatch.setattr("bayesify.methods.vi.blockwise", lambda *_: False)
    monkeypatch.setattr("bayesify.methods.mc_dropout.blockwise", lambda *_: False)
    monkeypatch.setattr("bayesify.posteriors.blockwise", lambda *_: False)
    plain = gradients(method, options, prior_mean)
    for a, b, c in zip(whole, cut, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=0)
        torch.testing.assert_close(a, c, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("lowest", [CLAMP_MIN, 0.0, -1.0])
def test_the_clamped_link_by_blocks(lowest: float):
    """A block with an element under the floor is clamped, one without is its own s."""
    link, rho = LINKS["clamp"], torch.tensor([0.5, lowest, 0.1])
    s = link.block_std(rho, torch.empty_like(rho))
    slope = link.block_slope(rho, s, torch.empty_like(rho))
    assert torch.equal(s, link.std(rho))
    assert slope is None and torch.equal(link.slope(rho, s), torch.ones(3))


@pytest.mark.parametrize("highest", [-30.0, 0.0, 79.0, 1e4])
def test_softplus_by_blocks(highest: float):
    rho = torch.linspace(-40, highest, 1000)
    exact = torch.nn.functional.softplus(rho.double())
    found = LINKS["softplus"].block_std(rho, torch.empty_like(rho))
    torch.testing.assert_close(found.double(), exact, rtol=5e-7, atol=0)


@pytest.mark.parametrize("s", [1e-20, 1e-12, 1e-3, 1e12, 1e20])
def test_the_sum_of_logs_where_products_leave_float32(s: float):
    std = torch.full((10_003,), s)
    std[5] = 1.0
    found = LINKS["softplus"].block_log(torch.zeros_like(std), std, torch.empty_like(std))
    assert float(found) == pytest.approx(float(std.double().log().sum()), rel=1e-6)


def test_scratch_memory_of_inference_mode_serves_training(monkeypatch):
    monkeypatch.setattr("bayesify.threads._local", type("Kept", (), {})())
    model = bayesify(torch.nn.Linear(4, 2), "vi", prior_sig=0.3)
    predict(model, [torch.randn(3, 4)], samples=2)
    (model.train()(torch.randn(3, 4)).sum() + penalty(model, num_data=1)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
