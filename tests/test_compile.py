"""Compiled models: no graph breaks, the numbers of eager mode, and exported programs."""

import warnings

import pytest
import torch
from compilers import COMPILED, DRAWING, METHODS, MLP, MODELS, X, assert_close, gradients, made, out
from torch._dynamo.testing import CompileCounterWithBackend

from bayesify import bayesify, fit_laplace, mean, penalty, sample

pytestmark = COMPILED


# -- whole models ------------------------------------------------------------------------------------------------------


CASES = [(k, m) for k in MODELS for m in METHODS if k == "mlp" or (m != "vanilla" and (k != "sequential" or m == "vi"))]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_a_compiled_model_is_the_eager_one_in_every_mode(kind, method):
    model, x = made(kind, method)
    compiled = torch.compile(model.train(), backend="eager", fullgraph=True)

    def compare():
        torch.manual_seed(1)
        found, state = out(compiled(x)), torch.get_rng_state()
        torch.manual_seed(1)
        assert_close(found, out(model(x)))
        assert torch.equal(state, torch.get_rng_state())
        return float(found.detach().sum())

    trained = compare()
    fresh = {float(out(compiled(x)).detach().sum()) for _ in range(3)}
    assert len(fresh) == (3 if method in DRAWING else 1)
    model.eval()
    evaluated = compare()
    assert (trained == evaluated) == (method in ("la", "vanilla"))
    if method != "vanilla":
        drawn = []
        for seed in (1, 2):
            with sample(model, seed=seed):
                drawn.append(compare())
        assert len({*drawn, evaluated}) == 3
    if kind != "mlp" and method != "vi":
        return  # what is left is the same code, and compilers take their time
    model.train()
    with mean(model):
        assert compare() == pytest.approx(evaluated, rel=1e-5)


@pytest.mark.parametrize(("kind", "method"), [*(("mlp", m) for m in METHODS), ("gpt2", "vi")])
def test_loss_and_penalty_in_one_graph_have_the_gradients_of_eager_mode(kind, method):
    model, x = made(kind, method)
    counter = CompileCounterWithBackend("aot_eager")

    def loss():
        return out(model(x)).square().mean() + penalty(model, 50)

    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    for found, exact in zip(gradients(model, compiled), gradients(model, loss), strict=True):
        assert (found is None) == (exact is None)
        if exact is not None:
            assert_close(found, exact)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    torch.manual_seed(3)
    found = compiled().detach()
    torch.manual_seed(3)
    assert_close(found, loss().detach())
    assert counter.frame_count == 1


def test_inductor_trains_as_eager_mode_does():
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = bayesify(MLP(), "vi")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model=model):
            return model(X).square().mean() + penalty(model, 50)

        step = torch.compile(loss, fullgraph=True) if compiled else loss
        for _ in range(4):
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    for found, exact in zip(*results, strict=True):
        assert_close(found, exact)


# -- exported programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_and_a_pinned_sample_are_exported_in_torch_operations(method):
    model, x = made("mlp", method)
    model.eval()
    blocks = [mean(model)] if method == "vanilla" else [mean(model), sample(model, seed=3)]
    results = []
    for block in blocks:
        with block, torch.no_grad():
            results.append(model(x))
            program = torch.export.export(model, (x,))
        assert not any("bayesify" in str(node.target) for node in program.graph.nodes if node.op == "call_function")
        assert_close(program.module()(x), results[-1])
    assert len(results) == 1 or not torch.allclose(*results)


@pytest.mark.parametrize("way", ["export", "trace"])
@pytest.mark.parametrize("method", ["vi", "la"])
def test_an_export_outside_of_blocks_warns_that_it_is_the_mean(way, method):
    model = bayesify(MLP(), method, prior_sig=1.0).eval()
    if method == "la":
        fit_laplace(model, [(X, torch.zeros(len(X), dtype=torch.long))])

    def made():
        if way == "trace":
            return torch.jit.trace(model, X, check_trace=False)
        return torch.export.export(model, (X,)).module()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = made()
    assert ["bayesify.deploy(model)" in str(w.message) for w in caught].count(True) == 1
    with torch.no_grad():
        assert_close(found(X), model(X))
    with warnings.catch_warnings(record=True) as caught, mean(model):
        warnings.simplefilter("always")
        made()
    assert not any("bayesify.deploy(model)" in str(w.message) for w in caught)


def test_the_mean_is_exported_to_onnx(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = bayesify(MLP(), "vi").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(model, (X,), tmp_path / "mean.onnx", dynamo=True)
    session = runtime.InferenceSession(tmp_path / "mean.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    assert_close(torch.from_numpy(found), model(X).detach())
