"""Activation checkpointing: a recomputation sees the theta of the forward that it repeats."""

import threading

import pytest
import torch
from cases import BY_NAME
from thetas import X, assert_same_gradients, gradients, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bayesify import bayesify, mean, penalty, sample
from bayesify.core.modes import REMEMBERED_THREADS

KINDS = pytest.mark.parametrize("reentrant", [False, True])


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
    with pytest.raises(RuntimeError, match=r"cannot be matched to a forward pass.*preserve_rng_state=True"):
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


def in_thread(function) -> None:
    """Run a function in a thread of its own, from the beginning of that thread's node numbers."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@KINDS
def test_a_forward_that_cannot_be_told_from_another_threads_is_refused(reentrant: bool):
    """Both threads have nodes of the same numbers."""
    model = deep("blocks", reentrant, "vi")
    kept: list[Tensor] = []

    def forwards() -> None:
        kept.append(model(X.clone().requires_grad_()).square().sum())

    in_thread(forwards)

    def elsewhere() -> None:
        for _ in range(20):
            forwards()
        kept[0].backward()

    with pytest.raises(RuntimeError, match=r"forwards of several threads may be meant; run the forwards"):
        in_thread(elsewhere)


def test_dead_threads_make_room():
    model = deep("none", False, "vi")
    for _ in range(REMEMBERED_THREADS + 5):
        in_thread(lambda: model(X))
    assert len(model._bayesify_scope._past.threads) == REMEMBERED_THREADS


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
