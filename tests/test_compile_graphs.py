"""Compiled models: one graph for all draws, blocks inside and around it, and classes that share one."""

import copy

import pytest
import torch
from compilers import COMPILED, DRAWING, MLP, Stack, X, assert_close, gradients, made
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from bayesify import IVON, bayesify, fit_laplace, mean, mix, named_posteriors, penalty, sample, unbayesify

pytestmark = COMPILED


# -- one graph ---------------------------------------------------------------------------------------------------------


def test_one_graph_for_all_draws_and_all_steps():
    counter = CompileCounterWithBackend("eager")
    model = bayesify(nn.Sequential(nn.Linear(4, 3)), "ivon")
    optimizer = IVON(model, 0.1, num_data=10)
    compiled, seen = torch.compile(model, backend=counter, fullgraph=True), set()
    for _ in range(4):
        optimizer.zero_grad()
        loss = compiled(X).square().mean()
        torch.testing.assert_close(loss, model(X).square().mean())  # one theta per step
        loss.backward()
        optimizer.step()
        seen.add(float(loss.detach()))
    assert (len(seen), counter.frame_count) == (4, 1)
    for seed in range(4):
        with sample(model, seed=seed):
            seen.add(float(compiled(X).square().mean().detach()))
    assert (len(seen), counter.frame_count) == (8, 2)


def test_two_forwards_in_one_graph_are_two_draws():
    model = bayesify(MLP(), "vi", init_sig=0.1)
    compiled = torch.compile(lambda: (model(X), model(X)), backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    first, second = compiled()
    torch.manual_seed(1)
    assert_close(first, model(X))
    assert_close(second, model(X))
    assert not torch.allclose(first, second)


class Tied(nn.Module):
    """One weight read at two places, and once more without a gradient."""

    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out.weight = self.inp.weight

    def forward(self, x):
        with torch.no_grad():
            size = self.inp.weight.square().mean()
        return self.out(torch.tanh(self.inp(x))) / (1 + size)


def counted(graphs: CompileCounterWithBackend, what: str) -> int:
    """How often an operation of ours is in the graphs."""
    return sum(f"bayesify.{what}" in str(node.target) for graph in graphs.graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("method", DRAWING)
def test_a_theta_is_drawn_once_and_the_penalty_is_one_operation(method):
    torch.manual_seed(0)
    model = bayesify(Tied(), method, prior_mean="zero", prior_sig=0.3)
    graphs = CompileCounterWithBackend("aot_eager")

    def loss():
        return model(X).square().mean() + penalty(model, 50)

    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    for found, exact in zip(gradients(model, compiled), gradients(model, loss), strict=True):
        assert_close(found, exact)
    # the weight with and without a gradient, and two biases
    assert (counted(graphs, "draw"), counted(graphs, "penalty"), counted(graphs, "noise")) == (4, 1, 0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model: penalty(model, 50) + model(X).square().mean(),
        lambda model: model(X).square().mean() + penalty(model, 50) + 0.5 * penalty(model, 20),
        lambda model: model(X).square().mean() + (model(X) + 1).square().mean() * penalty(model, 50),
        lambda model: penalty(model, 50),
        lambda model: model(X).square().mean() + penalty(model.inp, 50),
    ],
    ids=["penalty first", "two penalties", "two forwards", "penalty alone", "of a part"],
)
def test_wherever_the_penalty_stands_its_gradient_is_that_of_eager_mode(loss):
    torch.manual_seed(0)
    model = bayesify(MLP(), "vi", prior_sig=0.3, init_sig=0.1)
    compiled = torch.compile(lambda: loss(model), backend="aot_eager", fullgraph=True)
    for _ in range(2):  # what one call leaves behind must not matter to the next
        for found, exact in zip(gradients(model, compiled), gradients(model, lambda: loss(model)), strict=True):
            assert_close(found, exact)


def test_model_and_penalty_in_graphs_of_their_own():
    torch.manual_seed(0)
    model = bayesify(MLP(), "vi", prior_sig=0.3, init_sig=0.1)
    run = torch.compile(lambda: model(X).square().mean(), backend="aot_eager", fullgraph=True)
    pull = torch.compile(lambda: penalty(model, 50), backend="aot_eager", fullgraph=True)
    exact = gradients(model, lambda: model(X).square().mean() + penalty(model, 50))
    for mixed in (lambda: run() + pull(), lambda: run() + penalty(model, 50), lambda: pull() + run()):
        for found, expected in zip(gradients(model, mixed), exact, strict=True):
            assert_close(found, expected)


def test_functional_transforms_inside_compiled_code_take_plain_operations():
    model = bayesify(MLP(), "vi", init_sig=0.1)
    weights = dict(model.named_parameters())

    def slopes(weights):
        return torch.func.grad(lambda w: torch.func.functional_call(model, w, (X,)).square().mean())(weights)

    with sample(model, seed=1):
        exact, found = slopes(weights), torch.compile(slopes, backend="eager")(weights)
    for name, grad in exact.items():
        assert_close(found[name], grad)


@pytest.mark.parametrize("method", ["vi", "mc_dropout", "la"])
def test_blocks_inside_compiled_code_hold_there_and_nowhere_else(method):
    model, x = made("mlp", method)
    model.train()

    def inside(seed):
        before = model(x)
        with mean(model):
            middle = model(x)
            with sample(model, seed=seed):
                first = model(x), model(x)
            again = model(x)
        with sample(model):
            last = model(x)
        return before, middle, *first, again, last, model(x)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(inside, backend=counter, fullgraph=True)
    for seed in (3, 4, 5):
        torch.manual_seed(seed)
        found, state = compiled(seed), torch.get_rng_state()
        torch.manual_seed(seed)
        for one, exact in zip(found, inside(seed), strict=True):
            assert_close(one, exact)
        assert torch.equal(state, torch.get_rng_state())
        assert torch.equal(found[2], found[3])
        assert not torch.equal(found[2], found[5])
    assert counter.frame_count <= 2  # torch makes the second seed a symbol
    torch.manual_seed(1)
    drawn = model(x)
    torch.manual_seed(1)
    assert_close(model(x), drawn)


def test_a_block_inside_compiled_code_wins_over_the_one_around_it():
    model = bayesify(MLP(), "vi", init_sig=0.1)

    def inside():
        with mean(model):
            return model(X)

    with sample(model, seed=1):
        assert_close(torch.compile(inside, backend="eager", fullgraph=True)(), inside())


@pytest.mark.filterwarnings("ignore")  # torch's notes on graph breaks
def test_a_block_with_a_break_inside_is_left_to_eager_mode():
    model = bayesify(MLP(), "vi", init_sig=0.1)

    def inside():
        with mean(model):
            first = model(X)
            torch._dynamo.graph_break()
            return first + model(X)

    assert_close(torch.compile(inside, backend="eager")(), inside())
    assert not torch.equal(model(X), model(X))


@pytest.mark.filterwarnings("ignore")
def test_a_mixture_picks_its_member_in_compiled_code_too():
    members = [bayesify(MLP(), "vi", init_sig=0.1) for _ in range(2)]
    both = mix(members).eval()

    def inside(seed):
        with sample(both, seed=seed):
            return both(X)

    compiled = torch.compile(inside, backend="eager")
    for seed in range(4):
        assert_close(compiled(seed), inside(seed))


def test_weight_and_bias_of_a_kronecker_factored_layer_share_their_noise_in_a_graph():
    torch.manual_seed(0)
    model = bayesify(MLP(), "la", prior_sig=0.3)
    fit_laplace(model, [(X, torch.arange(5) % 3)], structure="kron")
    assert {q.partner for _, q in named_posteriors(model)} == {"", "inp.weight", "out.weight"}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in (1, 2):
        with sample(model, seed=seed):
            assert_close(compiled(X), model(X))
            with torch.no_grad():
                assert_close(torch.export.export(model, (X,)).module()(X), model(X))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's, for plain models too
@pytest.mark.parametrize("method", ["plain", "vi", "mc_dropout", "ivon"])
def test_equal_blocks_share_one_graph_and_the_theta_of_their_model(method):
    model = Stack() if method == "plain" else bayesify(Stack(), method, prior_mean="zero", prior_sig=0.3)
    expected = None
    if method != "plain":
        with sample(model, seed=2):
            expected = model(X)
    counter = CompileCounterWithBackend("eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    model(X), model(X)
    assert counter.frame_count == 1
    if method != "plain":
        torch.manual_seed(4)
        found = model(X)
        for block in model.blocks:
            block._compiled_call_impl = None
        torch.manual_seed(4)
        assert_close(found, model(X))
        with sample(model, seed=2):
            assert_close(model(X), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_block_is_recomputed_with_the_theta_of_its_forward():
    model = bayesify(Stack(), "vi", init_sig=0.1)

    def loss():
        first, second = model(X), model(X)
        return first.square().mean() + second.mean()

    exact = gradients(model, loss)
    model.saves = True
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for found, expected in zip(gradients(model, loss), exact, strict=True):
        assert_close(found, expected)
    with mean(model):
        lost = model(X).square().mean()
    with pytest.raises(RuntimeError, match="block open until backward"):
        lost.backward()


def test_a_checkpointed_compiled_model_is_recomputed_with_its_own_draw():
    model = bayesify(MLP(), "vi", init_sig=0.1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def loss(run):
        return sum(checkpoint(run, X, use_reentrant=False).square().mean() for _ in range(2))

    exact = gradients(model, lambda: loss(model))
    for found, expected in zip(gradients(model, lambda: loss(compiled)), exact, strict=True):
        assert_close(found, expected)


def test_more_models_than_the_compiler_keeps_variants_of_a_function():
    for width in range(1, 10):
        forward = eval("lambda self, x: self.out(torch.tanh(self.inp(x)))", {"torch": torch})  # code of its own
        model = type(f"Net{width}", (MLP,), {"forward": forward})()
        compiled = torch.compile(bayesify(model, "vi"), backend="eager", fullgraph=True)
        assert not torch.equal(compiled(X), compiled(X))
        assert_close(compiled.eval()(X), model(X))


def test_a_failed_forward_leaves_nothing_behind():
    model = bayesify(MLP(), "vi", init_sig=0.1)
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        compiled(X[:, :3])
    assert len({float(run(X).detach().sum()) for run in (model, compiled, model.inp, model.inp)}) == 4


def test_a_copy_compiles_on_its_own():
    model = bayesify(MLP(), "vi", init_sig=0.1)
    torch.compile(model, backend="eager", fullgraph=True)(X)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.inp.parametrizations.weight.original.add_(1)
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    for seed in (1, 2):
        with sample(twin, seed=seed), mean(model):
            assert_close(compiled(X), twin(X))


# -- classes -----------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def test_modules_of_one_kind_share_a_class_that_nobody_can_change():
    model = bayesify(Stack(), include="*weight")
    first, second = model.blocks[0].lin, model.blocks[1].lin
    assert type(first) is type(second)
    assert type(first) is not type(bayesify(nn.Linear(4, 4)))
    with pytest.raises(AttributeError, match="'weight' of a bayesified Linear cannot be removed on its own"):
        parametrize.remove_parametrizations(first, "weight")
    unbayesify(model)
    assert {type(block.lin) for block in model.blocks} == {nn.Linear}


def test_a_later_parametrization_of_one_module_leaves_the_others_alone():
    model = bayesify(Stack(), include="*weight").eval()
    first, second = model.blocks[0].lin, model.blocks[1].lin
    before, bias = second(X), first.bias.detach().clone()
    parametrize.register_parametrization(first, "bias", Twice())
    assert torch.equal(first.bias, 2 * bias)
    assert torch.equal(second(X), before)
    parametrize.remove_parametrizations(first, "bias", leave_parametrized=False)
    unbayesify(model)
    assert type(first) is nn.Linear
