"""One coherent theta: within a forward, in its backward passes, and after an interruption."""

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import BY_NAME, MLP, tensor
from thetas import X, assert_same_gradients, gradients, mlp
from torch import Tensor, nn

from bayesify import SGLD, bayesify, mean, named_posteriors, penalty, sample, unbayesify
from bayesify.engine import noise as noises

# -- within one forward ------------------------------------------------------------------------------------------------


class Reads(nn.Module):
    """Keeps what it reads: a tied weight at both ends, one of them twice, with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen = [self.first.weight]
        self.seen += [self.first.weight, self.second.weight, self.first.weight]
        return self.second(self.first(x))


def test_reads_of_one_forward_agree_and_keep_gradients():
    model = bayesify(Reads())
    model(tensor(2, 4)).sum().backward()
    without, *others = model.seen
    assert all(torch.equal(without, other) for other in others)
    assert not without.requires_grad
    assert all(other.requires_grad for other in others)
    assert not torch.equal(without, model.first.parametrizations.weight.original)
    first = model.seen
    model(tensor(2, 4))
    assert not torch.equal(first[0], model.seen[0])


def test_inference_then_gradients_in_one_forward():
    class Net(Reads):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                before = self.first.weight.clone()
            assert torch.equal(before, self.first.weight)
            return super().forward(x)

    bayesify(Net())(tensor(2, 4)).sum().backward()


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_rnn_reads_one_theta_per_forward(name: str):
    case = BY_NAME[name]
    model = bayesify(case.build().train(), init_sig=0.3)
    with sample(model, seed=1):
        pinned = case.output(model)
        weights = {n: q(q.original).detach() for n, q in named_posteriors(model)}
    plain = case.build()
    plain.load_state_dict(weights)
    torch.testing.assert_close(pinned, case.output(plain))
    case.output(model).sum().backward()
    assert all(q.rho.grad is not None for _, q in named_posteriors(model))
    mean_output = case.output(model.eval())
    unbayesify(model)
    assert torch.equal(case.output(model), mean_output)


def test_multihead_attention_reads_one_theta():
    model = bayesify(nn.MultiheadAttention(8, 2, batch_first=True).double(), init_sig=0.3)
    query, key = tensor(2, 3, 8).double(), tensor(2, 5, 8).double()
    seed_state = torch.get_rng_state()
    out = model(query, key, key + 1)[0]
    torch.set_rng_state(seed_state)
    frozen = copy.deepcopy(model)
    with sample_of_next_forward(frozen) as theta:
        plain = nn.MultiheadAttention(8, 2, batch_first=True).double()
        plain.load_state_dict(theta)
    torch.testing.assert_close(out, plain(query, key, key + 1)[0])


@contextmanager
def sample_of_next_forward(model: nn.Module):
    """Give the thetas that a forward from the present random state reads."""
    seed = noises.global_seed()
    from bayesify.core.modes import Mode, override
    from bayesify.core.sampling import Draw

    (scope,) = {id(q.reader): q.reader for _, q in named_posteriors(model)}.values()
    with override([scope], Mode(draw=Draw(seed, pinned=True))):
        yield {name: q(q.original).detach() for name, q in named_posteriors(model)}


def test_submodules_and_bare_reads_outside_the_root_sample():
    model = mlp()
    assert not torch.equal(model.inp(X), model.inp(X))
    assert not torch.equal(model.inp.weight, model.inp.weight)
    assert not torch.equal(model.token, model.token)
    model.eval()
    assert model.inp.weight is model.inp.parametrizations.weight.original
    assert model.token is model.parametrizations.token.original
    assert torch.equal(model.inp(X), model.inp(X))


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_a_part_in_eval_mode_samples_while_its_model_trains(method: str):
    model = bayesify(MLP().double(), method, prior_mean="zero")
    model.inp.eval()
    assert not torch.equal(model.inp(X), model.inp(X))
    model.eval().inp.train()
    assert torch.equal(model.inp(X), model.inp(X))


def test_a_frozen_normalization_learns_its_spread_from_the_data_too():
    """BatchNorm in eval mode inside a training model: the gradient of rho is that of the loss and of the prior."""
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double(), init_sig=0.3, natural=False)
    model[1].eval()
    rho = model[1].parametrizations.weight[0].rho
    (by_prior,) = torch.autograd.grad(penalty(model, 10), rho)
    (model(X).square().sum() + penalty(model, 10)).backward()
    assert (rho.grad - by_prior).abs().min() > 1e-3
    assert int(model[1].num_batches_tracked) == 0


def test_a_chain_trains_at_its_own_state_whatever_a_part_is_set_to():
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double(), "sgld", thin=1)
    model[1].eval()
    chain = SGLD(model, lr=0.1, num_data=5)
    for _ in range(3):
        chain.zero_grad()
        (model(X).square().mean() + penalty(model, 5)).backward()
        chain.step()
    posterior = dict(named_posteriors(model))["1.weight"]
    assert not torch.equal(posterior.mean, posterior.original)
    read = []
    model[1].register_forward_pre_hook(lambda m, args: read.append(m.weight))
    model(X)
    assert torch.equal(read[0], posterior.original)


def test_two_models_and_a_wrapper_around_them():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = bayesify(nn.Linear(4, 4)), bayesify(nn.Linear(4, 4), "mc_dropout")

        def forward(self, x: Tensor) -> Tensor:
            return self.right(self.left(x))

    pair, x = Pair(), tensor(2, 4)
    assert not torch.equal(pair(x), pair(x))
    with mean(pair):
        assert torch.equal(pair(x), pair(x))
    with sample(pair, seed=1):
        both = pair(x)
    with sample(pair, seed=1):
        assert torch.equal(both, pair(x))
    with mean(pair.left):
        assert torch.equal(pair.left(x), pair.left(x))
    assert [name for name, _ in named_posteriors(pair)] == ["left.weight", "left.bias", "right.weight", "right.bias"]
    (pair(x).sum() + penalty(pair, 10)).backward()
    unbayesify(pair)
    assert type(pair.left) is nn.Linear
    assert type(pair.right) is nn.Linear


# -- backward passes ---------------------------------------------------------------------------------------------------


def test_two_forwards_before_one_backward_keep_their_thetas():
    model = mlp()
    one, two = model(X), model(2 * X)
    apart = []
    for output in (one, two):
        model.zero_grad()
        output.square().sum().backward(retain_graph=True)
        apart.append(gradients(model))
    model.zero_grad()
    (one.square().sum() + two.square().sum()).backward()
    assert_same_gradients(gradients(model), {k: apart[0][k] + apart[1][k] for k in apart[0]})


def test_a_retained_graph_gives_the_same_gradients_twice():
    model = mlp()
    loss = model(X).square().sum() + penalty(model, 10)
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert_same_gradients(gradients(model), {name: 2 * g for name, g in once.items()})


def test_a_step_between_forward_and_backward_is_refused():
    model = mlp()
    loss = model(X).sum()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(RuntimeError, match=r"modified between the forward pass and its backward pass; call optimizer"):
        loss.backward()


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_double_backward(method: str):
    torch.manual_seed(0)
    model = bayesify(nn.Linear(3, 2).double(), method, prior_mean="zero", prior_sig=0.7)
    tensors = [p for p in model.parameters() if p.requires_grad]
    x = tensor(4, 3).double()

    def second_order(output: Tensor, wanted: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(output.pow(3).sum() + penalty(model, 10), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), wanted)

    torch.manual_seed(1)
    found = second_order(model(x), tensors)
    with pytest.MonkeyPatch.context() as patch:
        by_autograd_alone(patch)
        torch.manual_seed(1)
        wanted = second_order(model(x), tensors)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def by_autograd_alone(patch: pytest.MonkeyPatch) -> None:
    """Replace the library's own autograd nodes by plain differentiable operations."""
    from bayesify.core import penalty as prior_term
    from bayesify.core.sampling import Draw

    def theta(self: Draw, posterior: Any, original: Tensor, nodes: Any = None) -> Tensor:
        return posterior.theta(original, posterior.noise_of(self.seed))

    class Penalty:
        @staticmethod
        def apply(terms, *tensors):
            return sum(p.energy(p.original, terms.scale) for p in terms.posteriors)

    patch.setattr(Draw, "theta", theta)
    patch.setattr(prior_term, "Penalty", Penalty)


class Teacher(nn.Module):
    """Reads its own mean in a block inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = self.inner(x)
        with mean(self):
            teacher = self.inner(x)
        return before, teacher, self.inner(x)


def test_a_block_inside_a_forward_holds_there_and_the_forward_goes_on():
    model = bayesify(Teacher(), init_sig=0.3)
    before, teacher, after = model(tensor(2, 4))
    assert torch.equal(before, after)
    assert not torch.equal(before, teacher)
    with mean(model):
        assert torch.equal(model.inner(tensor(2, 4)), teacher)


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["root", "part"])
def test_an_interrupted_forward_leaves_nothing_behind(error: type[BaseException], place: str):
    model = mlp()
    armed = [True]

    def interrupt(module: nn.Module, args: tuple) -> None:
        if armed[0]:
            secret = "a local variable"  # noqa: F841
            raise error

    (model if place == "root" else model.norm).register_forward_pre_hook(interrupt)
    caught = []
    for _ in range(2):
        with pytest.raises(error) as info:
            model(X)
        caught.append(info)  # a debugger keeps the traceback
    armed[0] = False
    with mean(model):
        assert torch.equal(model.inp(X), model.inp(X))
    if error is KeyboardInterrupt:
        model(X)  # a forward of the root always starts anew; torch calls no hooks where an interrupt ends one
    assert not torch.equal(model.inp(X), model.inp(X))
    assert not torch.equal(model.inp.weight, model.inp.weight)
    assert not torch.equal(model(X), model(X))
    with mean(model):
        assert torch.equal(model.inp(X), model.inp(X))
    for info in caught:  # and can still look into it
        frame = info.tb
        while frame.tb_next is not None:
            frame = frame.tb_next
        assert frame.tb_frame.f_locals["secret"]
