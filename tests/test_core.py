"""Wrapping and unwrapping: what is refused, what comes back, and what users do to a wrapped model."""

import copy
import socket
import warnings

import pytest
import torch
from cases import MLP, Bare, Tied, tensor, tokens
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, parametrize

from bayesify import bayesify, mean, named_posteriors, penalty, predict, sample, samples, save, unbayesify
from bayesify.model.steps import PATIENCE

X = tensor(5, 4)


def fingerprint(model: nn.Module) -> list:
    """Return what a refused call must leave alone."""
    return [
        (
            name,
            id(m),
            type(m),
            list(m._parameters.keys()),
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
            sorted(vars(m)),
        )
        for name, m in model.named_modules()
    ] + [(name, p.data_ptr() if p.is_leaf and not is_lazy(p) else 0) for name, p in model.named_parameters()]


# -- refusals ----------------------------------------------------------------------------------------------------------


class Keys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.keys = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))


class Twice(nn.Module):
    """A good layer, and then a bad one."""

    def __init__(self, bad: nn.Module) -> None:
        super().__init__()
        self.good, self.bad = nn.Linear(3, 3), bad


def compiled_in_place() -> nn.Module:
    model = nn.Linear(3, 3)
    model.compile()
    return model


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear})


def distributed() -> nn.Module:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(3, 3)
    return wrapped


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.jit.script(nn.Linear(3, 3))


BAD_MODULES = {
    "ddp": (distributed, "is wrapped in DistributedDataParallel; call bayesify first"),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(3, 3)), "is wrapped in DataParallel"),
    "compiled": (lambda: torch.compile(nn.Linear(3, 3)), "is compiled; call bayesify on the plain model"),
    "compiled in place": (compiled_in_place, "is compiled; call bayesify on the plain model"),
    "scripted": (scripted, "is scripted, and TorchScript has no parametrizations"),
    "quantized": (quantized, "is a quantized module"),
    "lazy": (lambda: nn.LazyLinear(3), "is not initialized yet .a lazy module.; run one forward pass first"),
    "sparse": (lambda: nn.Embedding(4, 3, sparse=True), "has sparse gradients.*set sparse=False.*exclude="),
    "sparse bag": (lambda: nn.EmbeddingBag(4, 3, sparse=True), "has sparse gradients"),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), "is on the meta device; load the weights first"),
    "reserved name": (Keys, r"torch cannot parametrize a parameter that is called 'keys'.*exclude="),
    "bayesified": (lambda: bayesify(nn.Linear(3, 3)), "is bayesified already; call unbayesify"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", BAD_MODULES)
def test_what_cannot_be_wrapped_is_refused_untouched(kind: str, inside: bool):
    make, message = BAD_MODULES[kind]
    model = Twice(make()) if inside else make()
    before, rng = fingerprint(model), torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        bayesify(model)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), rng)


def test_not_a_module():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got dict"):
        bayesify({})


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match=r"no parameter is left to become Bayesian .the model has no parameters"):
        bayesify(nn.ReLU())
    with pytest.raises(ValueError, match=r"no parameter is left .*frozen.*requires_grad_\(True\)"):
        bayesify(MLP().requires_grad_(False))


@pytest.mark.parametrize("kind", ["sparse", "reserved name", "meta"])
def test_what_is_excluded_is_not_refused(kind: str):
    model = Twice(BAD_MODULES[kind][0]())
    bayesify(model, include="good.*")
    assert [n for n, _ in named_posteriors(model)] == ["good.weight", "good.bias"]


@pytest.mark.parametrize(
    "call",
    [mean, sample, lambda m: samples(m, 2), lambda m: penalty(m, 3), unbayesify],
    ids=["mean", "sample", "samples", "penalty", "unbayesify"],
)
def test_functions_refuse_a_plain_model(call):
    with pytest.raises(ValueError, match=r"MLP has no posteriors; call bayesify\(model, ...\) first"):
        call(MLP())
    assert list(named_posteriors(MLP())) == []


@pytest.mark.parametrize("seed", [1.5, "1", True])
def test_bad_seeds(seed):
    model = bayesify(MLP())
    with pytest.raises(TypeError, match="seed must be an integer or None"):
        sample(model, seed=seed)
    with pytest.raises(TypeError, match="seed must be an integer or None"):
        samples(model, 2, seed=seed)


@pytest.mark.parametrize("n", [-1, 1.5, True, None])
def test_bad_counts(n):
    with pytest.raises(ValueError, match="n must be an integer >= 0"):
        samples(bayesify(MLP()), n)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int):
    model = bayesify(MLP(), init_sig=0.3)
    with sample(model, seed=seed):
        assert torch.equal(model(X), model(X))


# -- back again --------------------------------------------------------------------------------------------------------


def test_unbayesify_to_a_sample():
    model = bayesify(Tied(), init_sig=0.3).eval()
    ids, before = tokens(2, 5, vocabulary=11), None
    torch.manual_seed(3)
    with sample(model):
        before = model(ids)
    torch.manual_seed(3)
    original = model.embed.parametrizations.weight.original
    unbayesify(model, to="sample")
    assert torch.equal(model(ids), before)
    assert model.embed.weight is original
    assert model.head.weight is original


def test_unbayesify_bakes_the_expected_mean():
    model = bayesify(MLP(), "mc_dropout", p_drop=0.4, prior_mean="zero", mean="expected").eval()
    output = model(X)
    assert torch.equal(unbayesify(model)(X), output)


@pytest.mark.parametrize("to", ["mode", None])
def test_unbayesify_refuses_other_targets(to):
    model = bayesify(MLP())
    with pytest.raises(ValueError, match="to must be 'mean' or 'sample'"):
        unbayesify(model, to=to)
    assert dict(named_posteriors(model))


def test_a_parametrization_on_top_is_removed_first():
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = bayesify(MLP())
    parametrize.register_parametrization(model.inp, "weight", Double(), unsafe=True)
    with pytest.raises(ValueError, match=r"inp.weight|Linear.weight has a parametrization that was registered after"):
        unbayesify(model)
    assert len(dict(named_posteriors(model))) == 7


def test_a_part_is_not_unwrapped_alone():
    model = bayesify(MLP())
    with pytest.raises(ValueError, match=r"this .*Linear is a part of the bayesified model; unbayesify the whole"):
        unbayesify(model.inp)


def test_own_hooks_and_their_order_survive():
    model, calls = MLP(), []
    for i in range(2):
        model.register_forward_hook(lambda m, a, o, i=i: calls.append(i))
        model.register_forward_pre_hook(lambda m, a, i=i: calls.append(-i - 1))
    bayesify(model)
    late = model.register_forward_hook(lambda m, a, o: calls.append("late"))
    model(X)
    assert calls == [-1, -2, 0, 1, "late"]
    unbayesify(model)
    calls.clear()
    model(X)
    assert calls == [-1, -2, 0, 1, "late"]
    late.remove()
    assert len(model._forward_hooks) == 2


def test_modules_go_by_the_name_of_their_class():
    layer = nn.Linear(3, 2)
    bayesify(layer)
    assert type(layer) is not nn.Linear
    assert isinstance(layer, nn.Linear)
    assert (type(layer).__name__, str(type(layer))) == ("Linear", str(nn.Linear))


def test_wrapping_again_after_unwrapping():
    model = bayesify(unbayesify(bayesify(MLP(), "vi")), "mc_dropout", prior_mean="zero")
    assert not torch.equal(model(X), model(X))
    unbayesify(model)
    assert type(model.inp) is nn.Linear


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_normalized_weights_stay_normalized(norm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = norm(nn.Linear(4, 3)).eval()
    twin = copy.deepcopy(model)
    kind, output = type(model), model(X)
    bayesify(model, init_sig=0.3)
    assert torch.equal(twin(X), output), "a copy shares the class, and must not notice"
    assert torch.equal(model(X), output)
    assert not torch.equal(model.train()(X), model(X))
    unbayesify(model)
    assert type(model) is kind
    if norm is parametrizations.weight_norm:  # the others move their buffers in training
        assert torch.equal(copy.deepcopy(model).eval()(X), output)


def test_parameters_in_lists_dictionaries_and_several_modules():
    model = bayesify(Bare(), init_sig=0.3)
    assert [n for n, _ in named_posteriors(model)] == [
        "scales.0", "scales.1", "shifts.a", "first.weight", "first.bias", "other.weight",
    ]  # fmt: skip
    seen = []
    model.other.register_forward_pre_hook(lambda m, a: seen.append((m.bias, model.first.bias, model.again.bias)))
    model(X).sum().backward()
    assert seen[0][0] is seen[0][1]
    assert seen[0][0] is seen[0][2]
    assert all(q.rho.grad is not None for _, q in named_posteriors(model))


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
        self.model = bayesify(MLP(), init_sig=0.3)

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
    model = bayesify(MLP(), init_sig=0.3)
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


# -- modules that were replaced ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "then",
    [
        lambda m: m(X),
        lambda m: nn.Sequential(m)(X),
        lambda m: penalty(m, 10),
        lambda m: predict(m, X, samples=2),
        mean,
        lambda m: samples(nn.Sequential(m), 2),
    ],
)
@pytest.mark.parametrize("used", [False, True])
def test_a_replaced_module_is_noticed_once(then, used):
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2))))
    if used:
        model(X)
    model[1] = nn.Sequential(nn.Linear(3, 5))
    with pytest.warns(UserWarning, match=r"'1.0.weight' was made Bayesian, and its module is no longer") as warned:
        then(model)
    assert len(warned) == 1
    then(model)
    unbayesify(model)
    assert [n for n, _ in named_posteriors(bayesify(model))] == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    then(model)


def test_the_warning_of_a_replaced_module_points_at_the_forward():
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    model[1] = nn.Linear(3, 5)
    with pytest.warns(UserWarning, match="no longer in the model") as warned:
        model(X)
    assert warned[0].filename == __file__


def test_a_module_that_moved_is_not_taken_for_replaced():
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    model(X)
    model[0] = nn.Sequential(model[0], nn.Tanh())  # as a wrapper for checkpointing does
    model(X)
    copied = copy.deepcopy(model)
    model[0] = nn.Linear(4, 3)
    copied(X)
    with pytest.warns(UserWarning, match="'0.weight' was made Bayesian"):
        model(X)


def test_one_end_of_a_tied_weight_that_was_replaced_is_noticed():
    model = bayesify(Tied())
    model.head = nn.Linear(4, 11)
    with pytest.warns(UserWarning, match="is no longer in the model"):
        penalty(model, 10)


def test_parts_and_wrappers_are_not_taken_for_replacements():
    model = bayesify(MLP())
    penalty(model.inp, 10)
    penalty(nn.Sequential(model), 10)
    other = copy.deepcopy(model.inp)
    penalty(other, 10)


def test_a_model_with_a_replaced_module_is_not_saved(tmp_path):
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    model[1] = nn.Linear(3, 5)
    with pytest.raises(ValueError, match=r"'1.weight' was made Bayesian.*Replace modules first: unbayesify\(model\)"):
        save(model, tmp_path)
    assert not list(tmp_path.iterdir())


# -- the forgotten penalty ---------------------------------------------------------------------------------------------


def train(model: nn.Module, steps: int, *, with_penalty: bool, forwards: int = 1, fused: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum(model(X).square().mean() for _ in range(forwards))
        (loss + penalty(model, 10) if with_penalty else loss).backward()
        optimizer.step()


@pytest.mark.parametrize("method", ["vi", "mc_dropout", "vanilla"])
def test_training_long_without_the_penalty_warns_once(method: str):
    model = bayesify(MLP(), method)
    train(model, PATIENCE, with_penalty=False, fused=method == "vi")
    with pytest.warns(UserWarning, match=r"training steps without the prior: add bayesify.penalty\(model, num_data\)"):
        train(model, 2, with_penalty=False)
    train(model, 2 * PATIENCE, with_penalty=False)


def test_no_warning_with_the_penalty_evaluation_or_many_forwards_per_step():
    model = bayesify(MLP())
    train(model, 1, with_penalty=True)
    train(model, PATIENCE + 5, with_penalty=False)
    other = bayesify(MLP())
    for _ in range(PATIENCE + 5):
        other(X)
    train(other, 3, with_penalty=False, forwards=PATIENCE)
    train(bayesify(MLP(), "vanilla", wd=0), PATIENCE + 5, with_penalty=False)


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


def test_unbayesify_refuses_parameters_that_were_parametrized_later():
    class Twice(nn.Module):
        def forward(self, x):
            return 2 * x

    model = bayesify(nn.Linear(4, 2), include="weight")
    parametrize.register_parametrization(model, "bias", Twice())
    with pytest.raises(ValueError, match="bias was parametrized after bayesify"):
        unbayesify(model)
    parametrize.remove_parametrizations(model, "bias")
    assert type(unbayesify(model)) is nn.Linear


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


def test_arguments_in_the_wrong_place():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        bayesify("vi", nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        penalty([1], 3)
    with pytest.raises(ValueError, match=r"got \[1, 2\]; pass len\(...\) of it, 2"):
        penalty(bayesify(nn.Linear(2, 2)), [1, 2])


@pytest.mark.parametrize(("method", "hint"), [("VI", "vi"), ("laplace", "la"), ("Dropout", "mc_dropout")])
def test_hints_at_methods(method, hint):
    with pytest.raises(ValueError, match=f"unknown method '{method}', did you mean '{hint}'?"):
        bayesify(nn.Linear(2, 2), method)
    with pytest.raises(ValueError, match=r"did you mean 'prior_sig'\?"):
        bayesify(nn.Linear(2, 2), prior_sigma=0.1)
