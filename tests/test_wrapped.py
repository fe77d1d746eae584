"""A wrapped model under torch's own tools, and the random numbers that it takes."""

import copy
import socket

import pytest
import torch
from cases import MLP, tensor
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from bayesify import bayesify, mean, named_posteriors, penalty, sample, samples, unbayesify

X = tensor(5, 4)


# -- what users do to a wrapped model ----------------------------------------------------------------------------------


def test_assignment_does_not_bake_noise():
    model = bayesify(MLP())
    before = model.inp.parametrizations.weight.original.detach().clone()
    with pytest.raises(AttributeError, match="cannot be assigned"):
        model.inp.weight = model.inp.weight
    with pytest.raises(AttributeError, match="cannot be assigned"):
        model.inp.weight = nn.Parameter(torch.zeros(8, 4))
    assert torch.equal(model.inp.parametrizations.weight.original, before)


def test_pickling_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        torch.save(bayesify(MLP()), tmp_path / "model.pt")


@pytest.mark.parametrize("prior_mean", [None, "zero"])
def test_state_dict_round_trip(prior_mean):
    model, other = (bayesify(MLP(), init_sig=0.3, prior_mean=prior_mean) for _ in range(2))
    assert other.load_state_dict(model.state_dict()) == torch.nn.modules.module._IncompatibleKeys([], [])
    with sample(model, seed=1), sample(other, seed=1):
        assert torch.equal(model(X), other(X))
    assert torch.equal(penalty(model, 10), penalty(other, 10))


def test_functional_calls_in_mean_mode_and_function_transforms():
    model = bayesify(MLP(), init_sig=0.3)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (X,)).square().sum()

    with mean(model):
        found = torch.func.grad(loss)(parameters)
        loss(dict(model.named_parameters())).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], torch.zeros_like(p) if p.grad is None else p.grad)


class Loss(nn.Module):
    """A model with its loss and penalty, so that both see the values of a functional call."""

    def __init__(self) -> None:
        super().__init__()
        self.model = bayesify(MLP(), init_sig=0.3, natural=False)  # natural steps learn from every backward pass

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().sum() + penalty(self.model, 10)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # by torch's own rules for forward mode
def test_function_transforms_of_a_sampled_model_are_those_of_autograd():
    model = Loss()
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor = X) -> Tensor:
        return torch.func.functional_call(model, values, (x,))

    with sample(model, seed=3):
        found = torch.func.grad(loss)(parameters)
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, X.unsqueeze(1))
        value, slope = torch.func.jvp(loss, (parameters,), (parameters,))
        exact = model(X)
        exact.backward()
        terms = dict(zip(parameters, torch.autograd.grad(penalty(model, 10), list(model.parameters())), strict=True))
    torch.testing.assert_close(value, exact.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        slope, sum((p.grad * p.detach()).sum() for p in model.parameters()), rtol=1e-4, atol=1e-5
    )
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(each[name].sum(0) - (len(X) - 1) * terms[name], p.grad, rtol=1e-4, atol=1e-5)


def test_functional_calls_leave_no_trace_in_the_penalty():
    model = bayesify(MLP(), init_sig=0.3)
    before = float(penalty(model, 10).detach())
    values = {n: 2 * p.detach() for n, p in model.named_parameters()}
    torch.func.functional_call(model, values, (X,))
    assert float(penalty(model, 10).detach()) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, fused=True),
        lambda ps: torch.optim.SGD(ps, lr=0.01, foreach=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.0, fused=True),
        lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True),
    ],
)
def test_optimizers_move_mean_and_spread(make):
    model = bayesify(MLP(), prior_sig=1.0)
    optimizer = make(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        (model(X).square().mean() + penalty(model, 10)).backward()
        optimizer.step()
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    with sample(model, seed=1):
        value = model(X)
        (model(X).square().mean() + penalty(model, 10)).backward()
        optimizer.step()
        assert not torch.equal(value, model(X)), "a pinned theta follows fused updates"
    parts = [(Normal(q.mean, q.std), Normal(q.prior_mean, q.prior_sig)) for _, q in named_posteriors(model)]
    exact = sum(kl_divergence(*part).sum() for part in parts) / 10
    torch.testing.assert_close(penalty(model, 10), exact, msg="the penalty is of the present parameters")


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_autocast(method: str):
    model = bayesify(MLP(), method, prior_mean="zero")
    with torch.autocast("cpu", torch.bfloat16):
        output = model(X)
        loss = output.square().mean() + penalty(model, 10)
    assert output.dtype == torch.bfloat16
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_freezing_after_wrapping():
    model = bayesify(MLP(), init_sig=0.3).requires_grad_(False)
    assert not torch.equal(model(X), model(X))
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    with sample(model, seed=1):
        assert torch.equal(model(X), model(X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_casts_in_a_block_are_followed(dtype: torch.dtype):
    model = bayesify(MLP(), init_sig=0.3)
    with sample(model, seed=1):
        before = model(X)
        after = model.to(dtype)(X.to(dtype))
    assert after.dtype == dtype
    torch.testing.assert_close(after.float(), before, rtol=0.1, atol=0.1) if dtype != torch.float64 else None
    (model(X.to(dtype)).float().square().mean() + penalty(model, 10)).backward()


def test_a_shallow_copy_is_refused():
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        copy.copy(bayesify(MLP()))


@pytest.mark.filterwarnings("ignore")  # torch.compile's notes on graph breaks
def test_a_compiled_model_is_never_frozen():
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), init_sig=0.3)
    compiled = torch.compile(model, backend="eager")
    with mean(model):
        expected = model(X)
        torch.testing.assert_close(compiled(X), expected)
    assert len({float(compiled(X).detach().sum()) for _ in range(4)}) == 4
    with sample(compiled, seed=1):
        assert torch.equal(compiled(X), compiled(X))
        torch.testing.assert_close(compiled(X), model(X))
    (compiled(X).square().mean() + penalty(compiled, 10)).backward()
    assert all(p.grad is not None for p in model.parameters())
    torch.testing.assert_close(compiled.eval()(X), expected)


@pytest.fixture
def process_group():
    """A group of one process."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_ddp_around_a_bayesified_model():
    model = bayesify(MLP(), init_sig=0.3, natural=False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert not torch.equal(wrapped(X), wrapped(X))
    with mean(wrapped):
        assert torch.equal(wrapped(X), model(X))
    torch.manual_seed(1)
    (wrapped(X).square().mean() + penalty(wrapped, 10)).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    (model(X).square().mean() + penalty(model, 10)).backward()
    for p, f in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(p.grad, f)


@pytest.mark.usefixtures("process_group")
def test_fully_sharded_parameters():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, found = init_device_mesh("cpu", (1,)), []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = bayesify(MLP(), init_sig=0.3)
        if sharded:
            for module in (model.inp, model):
                fully_shard(module, mesh=mesh)
            with pytest.raises(RuntimeError, match=r"is sharded now: it is read outside of its module's forward"):
                model.train().inp.weight  # noqa: B018
        torch.manual_seed(1)
        loss = model(X).square().mean() + penalty(model, 10)
        loss.backward()
        found.append([loss.detach(), *(getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters())])
    for plain, sharded in zip(*found, strict=True):
        torch.testing.assert_close(plain, sharded)
    with pytest.raises(ValueError, match="is sharded over devices; call bayesify first, then fully_shard"):
        bayesify(fully_shard(nn.Linear(3, 3), mesh=mesh))


# -- no random numbers, no surprises -----------------------------------------------------------------------------------


def test_random_numbers_are_consumed_by_draws_alone():
    model, rng = bayesify(MLP()), torch.get_rng_state()
    penalty(model, 10)
    list(named_posteriors(model))
    model.eval()(X)
    copy.deepcopy(model)
    with mean(model.train()), sample(model, seed=1):
        model(X)
    for _ in samples(model, 2, seed=1):
        model(X)
    unbayesify(model)
    assert torch.equal(torch.get_rng_state(), rng)
    bayesify(model)(X)
    assert not torch.equal(torch.get_rng_state(), rng)


def test_one_number_per_forward():
    model = bayesify(MLP())
    torch.manual_seed(4)
    model(X)
    state = torch.get_rng_state()
    torch.manual_seed(4)
    torch.randint(2**62, ())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_constant_of_a_prior_follows_a_state_dict():
    class Gate(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.gate = nn.Parameter(torch.tensor(value))

        def forward(self, x):
            return x * self.gate

    source, target = bayesify(Gate(0.5), "vanilla", wd=1.0), bayesify(Gate(0.0), "vanilla", wd=1.0)
    target.load_state_dict(source.state_dict())
    penalty(target, 1).backward()
    assert [float(p.grad) for p in target.parameters()] == [0.0]


def test_a_copy_has_a_penalty_of_its_own():
    model = bayesify(nn.Linear(4, 2), init_sig=0.1)
    model(X)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    for p in twin.parameters():
        torch.autograd.graph.increment_version([p])
    rho = [q.rho.clone() for _, q in named_posteriors(twin)]
    fresh = bayesify(nn.Linear(4, 2), init_sig=0.1)
    fresh.load_state_dict(twin.state_dict())
    torch.testing.assert_close(penalty(twin, 1), penalty(fresh, 1))
    assert all(torch.equal(a, q.rho) for a, (_, q) in zip(rho, named_posteriors(twin), strict=True))
