"""Threads, copies and processes: each draws for itself, or the same where it should."""

import asyncio
import contextvars
import copy
import threading
import warnings

import pytest
import torch
from cases import BY_NAME, MLP, Tied, tensor, tokens
from thetas import X, all_equal, mlp, thetas
from torch import Tensor, nn

from bayesify import bayesify, mean, named_posteriors, penalty, sample, unbayesify


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


class WithPenalty(nn.Module):
    """A loss with its penalty, as one module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).sum() + penalty(self.model, 10)


@pytest.mark.filterwarnings("ignore:the model is in eval mode")
@pytest.mark.parametrize("method", ["vi", "mc_dropout", "sgld", "la", "vanilla"])
@pytest.mark.parametrize("training", [True, False])
def test_a_penalty_inside_a_functional_call_has_the_gradients_of_what_was_given(method: str, training: bool):
    torch.manual_seed(0)
    options = {"natural": False} if method == "vi" else {}  # natural steps learn from every backward pass
    model = WithPenalty(bayesify(MLP().double(), method, prior_mean="zero", **options)).train(training)
    given = {n: (1.1 * p).detach().requires_grad_() for n, p in model.named_parameters()}
    torch.manual_seed(3)
    loss = torch.func.functional_call(model, given, X)
    found = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(given[name])
    torch.manual_seed(3)
    model(X).backward()
    for (_, p), grad in zip(model.named_parameters(), found, strict=True):
        torch.testing.assert_close(grad, p.grad)


@pytest.mark.parametrize("method", ["vi", "mc_dropout", "sgld", "la", "vanilla"])
def test_a_step_between_penalty_and_backward_is_refused(method: str):
    model = bayesify(MLP().double(), method, prior_mean="zero")
    loss = penalty(model, 10)  # without a forward before it
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    with pytest.raises(RuntimeError, match=r"modified between penalty and its backward pass; call optimizer.step"):
        loss.backward()


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


def test_a_block_is_not_seen_by_other_threads():
    model, seen = mlp(), []
    with sample(model, seed=1):
        pinned = model(X)
        thread = threading.Thread(target=lambda: seen.extend([model(X), model(X)]))
        thread.start()
        thread.join()
    assert not torch.equal(seen[0], pinned)
    assert not torch.equal(seen[0], seen[1])


def test_coroutines_have_blocks_of_their_own():
    model = mlp()
    wanted = []
    for seed in (1, 2):
        with sample(model, seed=seed):
            wanted.append(model(X))

    async def work(seed: int) -> Tensor:
        with sample(model, seed=seed):
            await asyncio.sleep(0.01)
            return model(X)

    async def both() -> list[Tensor]:
        with mean(model):
            return await asyncio.gather(work(1), work(2), asyncio.to_thread(model, X))

    one, two, inherited = asyncio.run(both())
    assert torch.equal(one, wanted[0])
    assert torch.equal(two, wanted[1])
    with mean(model):
        assert torch.equal(inherited, model(X))


def test_a_block_that_was_left_is_over_for_the_tasks_that_it_started():
    model = mlp()
    with mean(model):
        context = contextvars.copy_context()
    assert not torch.equal(context.run(model, X), context.run(model, X))


def test_replicas_of_data_parallel_are_refused():
    """They run in threads that know nothing of the block around the code that waits for them."""
    model = mlp()
    model._is_replica = True  # as nn.Module._replicate_for_data_parallel does
    with mean(model), pytest.raises(RuntimeError, match=r"replica of nn.DataParallel.*use DistributedDataParallel"):
        model(X)


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


@pytest.mark.parametrize("nested", [True, False])
def test_pickling_is_refused_with_the_way_out(nested, tmp_path):
    model = bayesify(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match=r"cannot be pickled.*bayesify\.save and load"):
        torch.save(nn.Sequential(model) if nested else model, tmp_path / "model.pt")
    torch.save(unbayesify(model), tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False).weight, model.weight)
