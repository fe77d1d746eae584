"""One coherent theta: within a forward, across recomputations, blocks, threads, copies and processes."""

import copy
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
from cases import BY_NAME, MLP, Tied, tensor, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bayesify import bayesify, mean, named_posteriors, penalty, sample, samples, unbayesify
from bayesify import noise as noises

X = tensor(5, 4).double()
KINDS = pytest.mark.parametrize("reentrant", [False, True])


def mlp(**options) -> nn.Module:
    torch.manual_seed(0)
    return bayesify(MLP().double(), init_sig=0.3, **options)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert found
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def thetas(model: nn.Module, seed: int) -> list[Tensor]:
    with sample(model, seed=seed), torch.no_grad():
        return [q(q.original).clone() for _, q in named_posteriors(model)]


def all_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


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
    from bayesify.draws import Draw, Mode
    from bayesify.scopes import override

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


def test_a_part_in_eval_mode_reads_the_mean():
    model = mlp()
    model.inp.eval()
    assert torch.equal(model.inp(X), model.inp(X))
    assert not torch.equal(model(X), model(X))


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
    from bayesify import draws, prior_term
    from bayesify.posteriors import make_noise

    class Sampled:
        @staticmethod
        def apply(posterior, seed, noise, value, *tensors):
            return posterior.theta(tensors[0], make_noise([posterior], seed)[posterior]), None

    class Penalty:
        @staticmethod
        def apply(value, terms, *tensors):
            return sum(t.posterior.energy(t.posterior.original, t.scale) for t in terms)

    patch.setattr(draws, "Sampled", Sampled)
    patch.setattr(prior_term, "Penalty", Penalty)


# -- activation checkpointing ------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Blocks under checkpointing, with dropout and one block that is used twice."""

    def __init__(self, mode: str = "none", reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(4))
        self.mode, self.reentrant = mode, reentrant

    def run(self, function, x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def chain(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[0]]:
            x = self.run(block, x) if self.mode in ("blocks", "nested") else block(x)
        return x

    def scaled(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.scaled, x) if self.mode == "blocks" else self.scaled(x)
        return self.run(self.chain, x) if self.mode in ("chain", "nested") else self.chain(x)


def deep(mode: str, reentrant: bool, method: str) -> Deep:
    torch.manual_seed(0)
    model = Deep(mode, reentrant).double()
    return bayesify(model, method, prior_mean="zero", **({"init_sig": 0.3} if method == "vi" else {"p_drop": 0.3}))


def call(model: nn.Module, x: Tensor, reentrant: bool, whole: bool) -> Tensor:
    return checkpoint(model, x, use_reentrant=reentrant) if whole else model(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # inside no_grad, for nothing
@KINDS
@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("mode", ["blocks", "chain", "nested", "whole", "whole+blocks"])
def test_checkpointing_changes_no_gradient(mode: str, forwards: int, method: str, reentrant: bool):
    whole, inner = mode.startswith("whole"), mode.removeprefix("whole").removeprefix("+") or "none"
    found = []
    for checkpointed in (False, True):
        model = deep(inner if checkpointed else "none", reentrant, method)
        torch.manual_seed(5)
        inputs = [((1 + i) * X).requires_grad_() for i in range(forwards)]
        loss = sum(call(model, x, reentrant, whole and checkpointed).square().sum() for x in inputs)
        (loss + penalty(model, 10)).backward()
        found.append(gradients(model) | {f"x{i}": x.grad for i, x in enumerate(inputs)})
    assert_same_gradients(found[1], found[0])


@KINDS
def test_two_models_forwards_in_one_checkpoint(reentrant: bool):
    found = []
    for checkpointed in (False, True):
        model = deep("none", reentrant, "vi")
        torch.manual_seed(5)

        def twice(x: Tensor, model: nn.Module = model) -> Tensor:
            return model(model(x)) * model.blocks[1](x)

        x = X.clone().requires_grad_()
        (checkpoint(twice, x, use_reentrant=reentrant) if checkpointed else twice(x)).sum().backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@KINDS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("block", ["left", "inside", "mean"])
def test_checkpointing_under_a_pinned_theta(block: str, whole: bool, training: bool, reentrant: bool):
    """The backward pass may come after the block, inside it, or inside another one."""
    found = []
    for checkpointed in (False, True):
        model = deep("blocks" if checkpointed and not whole else "none", reentrant, "vi").train(training)
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0
        x = X.clone().requires_grad_()
        with sample(model, seed=3):
            one = call(model, x, reentrant, whole and checkpointed).square().sum()
            if block == "inside":
                one.backward()
        with sample(model, seed=4), torch.no_grad():
            model(x)
        if block == "left":
            one.backward()
        elif block == "mean":
            with mean(model):
                one.backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0])


@KINDS
def test_checkpointing_and_evaluation_before_the_backward(reentrant: bool):
    found = []
    for checkpointed in (False, True):
        model = deep("none", reentrant, "vi")
        torch.manual_seed(5)
        x = X.clone().requires_grad_()
        output = call(model, x, reentrant, checkpointed)
        with torch.no_grad(), sample(model, seed=1):
            model(x)
        with mean(model):
            output.square().sum().backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0])


@KINDS
def test_a_whole_forward_without_its_random_state_is_refused(reentrant: bool):
    model = deep("none", reentrant, "vi")
    x = X.clone().requires_grad_()
    loss = checkpoint(model, x, use_reentrant=reentrant, preserve_rng_state=False).sum()
    torch.rand(3)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"cannot be told which forward it repeats.*preserve_rng_state=True"):
        loss.backward()
    if reentrant:
        assert torch.equal(torch.get_rng_state(), state)


def test_a_block_inside_a_backward_pass_wins():
    model = mlp()
    seen = []

    def look(grad: Tensor) -> None:
        with mean(model), torch.no_grad():
            seen.append(model(X))

    output = model(X)
    output.register_hook(look)
    output.sum().backward()
    with mean(model):
        assert torch.equal(seen[0], model(X))


def test_recomputation_in_another_thread_finds_its_own_forward():
    """Threads number their autograd nodes apart, so the numbers of their forwards overlap."""
    found: dict[str, list] = {"plain": [], "blocks": []}
    for mode, results in found.items():
        model = deep(mode, False, "vi")
        for block in model.modules():
            if isinstance(block, nn.Dropout):
                block.p = 0.0

        def work(model: nn.Module = model, results: list = results) -> None:
            torch.manual_seed(7)
            x = X.clone().requires_grad_()
            model(x).square().sum().backward()
            results.append(x.grad)

        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    for plain, recomputed in zip(found["plain"], found["blocks"], strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-10, atol=1e-10)


@KINDS
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_hf_gradient_checkpointing(name: str, reentrant: bool):
    found = []
    for checkpointed in (False, True):
        model = bayesify(BY_NAME[name].build().double().train(), init_sig=0.1)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        torch.manual_seed(3)
        loss = sum(BY_NAME[name].output(model).square().mean() for _ in range(2))
        (loss + penalty(model, 10)).backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0])


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_forward_leaves_nothing_behind(error: type[BaseException]):
    model = mlp()
    armed = [True]

    def interrupt(module: nn.Module, args: tuple) -> None:
        if armed[0]:
            raise error

    model.norm.register_forward_pre_hook(interrupt)
    caught = []
    for _ in range(2):
        with pytest.raises(error) as info:
            model(X)
        caught.append(info)  # a debugger keeps the traceback
    armed[0] = False
    assert not torch.equal(model.inp.weight, model.inp.weight)
    assert not torch.equal(model(X), model(X))
    with mean(model):
        assert torch.equal(model.inp(X), model.inp(X))


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_mean_effect_and_restoration():
    model = mlp()
    with mean(model):
        inside = model(X)
        assert torch.equal(inside, model(X))
        assert model.inp.weight is model.inp.parametrizations.weight.original
    assert not torch.equal(model(X), model(X))
    assert torch.equal(model.eval()(X), inside)


@pytest.mark.parametrize("training", [True, False])
def test_sample_effect_and_restoration(training: bool):
    model = mlp().train(training)
    with sample(model, seed=3):
        one = model(X)
        assert torch.equal(one, model(X))
    with sample(model, seed=4):
        assert not torch.equal(one, model(X))
    with sample(model, seed=3):
        assert torch.equal(one, model(X))
    assert torch.equal(model(X), model(X)) is not training


@pytest.mark.parametrize("block", [mean, lambda m: sample(m, seed=1), lambda m: sample(m)])
def test_blocks_restore_after_an_exception(block):
    model = mlp()
    with pytest.raises(KeyError), block(model):
        raise KeyError
    assert not torch.equal(model(X), model(X))


def test_blocks_nest():
    model = mlp()
    with sample(model, seed=1):
        one = model(X)
        with mean(model):
            middle = model(X)
            with sample(model, seed=2):
                two = model(X)
            assert torch.equal(model(X), middle)
        assert torch.equal(model(X), one)
    assert len({float(v.detach().sum()) for v in (one, two, middle)}) == 3


def test_sample_without_a_seed_follows_the_global_generator():
    model = mlp()
    found = []
    for _ in range(2):
        torch.manual_seed(11)
        with sample(model):
            found.append(model(X))
    with sample(model):
        found.append(model(X))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_samples_are_the_same_draws_whatever_is_run():
    model = mlp()
    first = [model(X) for _ in samples(model, 3, seed=5)]
    second = []
    for i in samples(model, 3, seed=5):
        torch.rand(i + 1)
        model.inp(X[:1])
        second.append(torch.cat([model(X[:2]), model(X[2:])]))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    assert len({float(v.detach().sum()) for v in first}) == 3
    longer = [model(X) for _ in samples(model, 4, seed=5)]
    assert all_equal(first, longer[:3])


def test_samples_restore_at_the_end_on_break_and_on_exception():
    model = mlp()
    for _ in samples(model, 2):
        assert torch.equal(model(X), model(X))
    assert not torch.equal(model(X), model(X))
    for _ in samples(model, 2):
        break
    assert not torch.equal(model(X), model(X))
    try:
        for _ in samples(model, 2):
            raise KeyError
    except KeyError:
        pass
    assert not torch.equal(model(X), model(X))
    assert list(samples(model, 0)) == []


def test_a_pinned_theta_follows_the_parameters():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sample(model, seed=3):
        before = model(X)
        model(X).square().sum().backward()
        optimizer.step()
        after = model(X)
        copied = copy.deepcopy(model)
    assert not torch.equal(before, after)
    with sample(copied, seed=3):
        assert torch.equal(after, copied(X))


def test_a_pinned_theta_follows_functional_calls():
    model = mlp()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with sample(model, seed=3):
        found = [
            torch.func.functional_call(model, {n: (1 + i) * p for n, p in parameters.items()}, (X,)) for i in range(3)
        ]
    assert len({float(f.detach().sum()) for f in found}) == 3


def test_two_models_in_one_block_have_noise_of_their_own():
    pair = nn.ModuleList([bayesify(nn.Linear(4, 4), prior_mean="zero", init_sig=0.3) for _ in range(2)])
    with sample(pair, seed=1):
        left, right = ((m.weight - m.parametrizations.weight.original).detach() for m in pair)
    assert (left - right).abs().min() > 1e-6
    with sample(pair[0], seed=1):  # the first is the same as alone
        assert torch.equal((pair[0].weight - pair[0].parametrizations.weight.original).detach(), left)


def test_each_forward_of_a_pinned_theta_has_its_own_backward():
    model = mlp()
    found = []
    with sample(model, seed=3):
        for _ in range(2):
            model.zero_grad()
            model(X).square().sum().backward()
            found.append(gradients(model))
        with torch.no_grad():
            value = model(X)
        with torch.inference_mode():
            assert torch.equal(model(X), value)
        model.zero_grad()
        model(X).square().sum().backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0])
    assert_same_gradients(found[2], found[0])


def test_inference_mode_first():
    model = bayesify(nn.Linear(600, 600), init_sig=0.1)
    x = tensor(1, 600)
    with sample(model, seed=3):
        with torch.inference_mode():
            one = model(x).clone()
        two = model(x)
    assert torch.equal(one, two)
    two.sum().backward()


def test_unread_posteriors_are_drawn_once_per_block(monkeypatch: pytest.MonkeyPatch):
    model = mlp()
    model.unused = nn.Linear(4, 4).double()
    unbayesify(model)
    bayesify(model)
    drawn = []
    kind = type(model.unused.parametrizations.weight[0])
    fill = kind.fill_noise
    monkeypatch.setattr(kind, "fill_noise", lambda self, *args: (drawn.append(self.name), fill(self, *args)))
    with sample(model, seed=1):
        for _ in range(3):
            model(X)
    assert sorted(drawn) == sorted(name for name, _ in named_posteriors(model))


# -- threads, copies, processes ----------------------------------------------------------------------------------------


def test_theta_does_not_depend_on_threads_or_history():
    model = bayesify(nn.Sequential(nn.Linear(700, 800), nn.Linear(800, 500)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = thetas(model, 3)
        model(torch.ones(1, 700))
        torch.set_num_threads(2)
        two = thetas(model, 3)
        with sample(model, seed=3), torch.no_grad():
            backwards = [q(q.original) for _, q in reversed(list(named_posteriors(model)))]
    finally:
        torch.set_num_threads(threads)
    assert all_equal(one, two)
    assert all_equal(one, backwards[::-1])


def test_concurrent_forwards_do_not_share_a_frame():
    """One thread rests inside a forward while another runs its own."""
    model = bayesify(MLP(), init_sig=0.3)
    inside, go = threading.Event(), threading.Event()
    weights: dict[str, list[Tensor]] = {"slow": [], "fast": []}

    def watch(module: nn.Module, args: tuple) -> None:
        name = threading.current_thread().name
        weights[name].append(model.inp.weight.detach())
        if name == "slow":
            inside.set()
            go.wait(10)
            weights[name].append(model.inp.weight.detach())

    model.norm.register_forward_pre_hook(watch)
    slow = threading.Thread(target=lambda: model(tensor(5, 4)), name="slow")
    slow.start()
    inside.wait(10)
    fast = threading.Thread(target=lambda: model(tensor(5, 4)), name="fast")
    fast.start()
    fast.join()
    go.set()
    slow.join()
    assert torch.equal(*weights["slow"])
    assert not torch.equal(weights["slow"][0], weights["fast"][0])


def test_a_deep_copy_is_independent():
    model = mlp()
    model(X)
    other = copy.deepcopy(model)
    with mean(model):
        assert not torch.equal(other(X), other(X))
        assert torch.equal(model(X), model(X))
    assert all_equal(thetas(model, 3), thetas(other, 3))
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    assert not all_equal(thetas(model, 3), thetas(other, 3))
    shared = {id(t) for t in (*model.parameters(), *model.buffers(), *model.modules())}
    assert not shared & {id(t) for t in (*other.parameters(), *other.buffers(), *other.modules())}


@pytest.mark.parametrize("which", [0, 1])
def test_unbayesify_either_copy(which: int):
    model = bayesify(Tied(), init_sig=0.3)
    both = [model, copy.deepcopy(model)]
    ids = tokens(2, 5, vocabulary=11)
    plain = unbayesify(both.pop(which))
    assert type(plain) is Tied
    assert type(plain.head) is nn.Linear
    assert plain.head.weight is plain.embed.weight
    (still,) = both
    assert not torch.equal(still(ids), still(ids))
    assert torch.equal(still.eval()(ids), plain(ids))
    unbayesify(still)
    assert still.head.weight is still.embed.weight


def test_a_moved_rnn_can_be_copied():
    model = bayesify(nn.LSTM(4, 5)).double()
    other = copy.deepcopy(model)
    with mean(model), mean(other):
        assert torch.equal(model(X)[0], other(X)[0])


def test_a_copied_submodule_draws_for_itself():
    model = mlp()
    part = copy.deepcopy(model.inp)
    assert not torch.equal(part(X), part(X))
    with mean(model):
        assert not torch.equal(part(X), part(X))
    with pytest.raises(ValueError, match="is a part of the bayesified model; unbayesify the whole"):
        unbayesify(part)


def test_a_forked_worker_draws_too():
    model = bayesify(nn.Linear(600, 600))
    x = tensor(1, 600)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with sample(model, seed=3), torch.no_grad():
            here = model(x)  # the noise threads of this process exist now

        class Data(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return 2

            def __getitem__(self, i: int) -> Tensor:
                with pytest.MonkeyPatch.context() as patch, sample(model, seed=3), torch.no_grad():
                    patch.setattr(torch, "get_num_threads", lambda: 2)  # for the noise alone: OpenMP fears forks
                    return model(x)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
            loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork", timeout=60)
            found = list(loader)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(f[0], here) for f in found)


def test_ranks_draw_apart(monkeypatch: pytest.MonkeyPatch):
    model = mlp()
    found = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        torch.manual_seed(1)
        found.append(model(X))
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


def test_manual_seed_reproduces_a_training_run():
    found = []
    for _ in range(2):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            (model(X).square().sum() + penalty(model, 10)).backward()
            optimizer.step()
        found.append(list(model.parameters()))
    assert all_equal(*found)


def test_caches_of_eval_mode_do_not_outlive_a_draw():
    """LeViT keeps its attention biases between forwards in eval mode."""
    case = BY_NAME["levit"]
    model = case.build()
    with torch.no_grad():
        plain = case.output(model)
        bayesify(model, init_sig=0.1)
        with sample(model, seed=1):
            one = case.output(model)
        assert torch.equal(case.output(model), plain), "the mean after a draw"
        with sample(model, seed=1):
            assert torch.equal(case.output(model), one), "a draw after the mean"
        unbayesify(model, to="sample")
        baked = case.output(model)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        for module in model.modules():
            if hasattr(module, "attention_bias_cache"):
                module.attention_bias_cache = {}
        assert torch.equal(case.output(model), baked), "a baked draw"


def test_functional_calls_have_the_gradients_of_what_they_were_given():
    model = mlp()
    given = {n: (1.1 * p).detach().requires_grad_() for n, p in model.named_parameters()}
    torch.manual_seed(3)
    found = torch.autograd.grad(torch.func.functional_call(model, given, X).sum(), list(given.values()))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(given[name])
    torch.manual_seed(3)
    other(X).sum().backward()
    wanted = dict(other.named_parameters())
    for name, grad in zip(given, found, strict=True):
        torch.testing.assert_close(grad, wanted[name].grad)


def test_the_penalty_after_a_functional_call_is_of_the_model():
    model = mlp()
    given = {n: (1.1 * p).detach().requires_grad_() for n, p in model.named_parameters()}
    torch.func.functional_call(model, given, X)
    penalty(model, 10).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad is None for p in given.values())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_forward_mode_derivatives_pass_through_a_sample():
    model = mlp().eval()
    with sample(model, seed=0), torch.autograd.forward_ad.dual_level(), torch.no_grad():
        first = next(model.parameters())
        name = next(n for n, _ in model.named_parameters())
        dual = torch.autograd.forward_ad.make_dual(first.detach(), torch.ones_like(first))
        out = torch.func.functional_call(model, {name: dual}, X)
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None


def test_threads_have_blocks_of_their_own():
    model, seen = mlp(), {}
    with sample(model, seed=1):
        wanted = model(X)

    def work(other_is_in, done):
        with sample(model, seed=1):
            other_is_in.wait(5)
            seen["thread"] = model(X)
            done.set()

    other_is_in, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(other_is_in, done))
    thread.start()
    with mean(model):
        other_is_in.set()
        assert done.wait(5)
        middle = model(X)
    thread.join()
    torch.testing.assert_close(seen["thread"], wanted)
    with mean(model):
        torch.testing.assert_close(middle, model(X))


def test_a_penalty_in_eval_mode_warns_once():
    model = mlp().eval()
    with pytest.warns(UserWarning, match=r"eval mode.*call model.train\(\)"):
        penalty(model, 10)
    penalty(model, 10)
    other = mlp().eval()
    with torch.no_grad():
        penalty(other, 10)
    with mean(other):
        penalty(other, 10)
