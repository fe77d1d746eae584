"""A deployed module answers what `predict` answers: in eager mode, in every exported format, and without bayesify."""

import copy
import json
import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from bayesify import Cycles, bayesify, components, deploy, fit_laplace, fit_novelty, mix, penalty, predict
from bayesify.methods import noise

CLASSES = 3
FIELDS = ("probs", "prediction", "confidence", "entropy", "mutual_information")


def mlp(outputs=CLASSES):
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, outputs))


def data(count=60):
    x = torch.randn(count, 5)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def timm_cnn():
    timm = pytest.importorskip("timm")
    return timm.create_model("test_resnet", num_classes=CLASSES), "fc.*", torch.randn(6, 3, 64, 64)


def timm_vit():
    timm = pytest.importorskip("timm")
    return timm.create_model("test_vit", num_classes=CLASSES), "head.*", torch.randn(6, 3, 160, 160)


def bert():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(**small, vocab_size=40, num_labels=CLASSES)
    tokens = torch.randint(1, 40, (6, 7))
    mask = torch.ones_like(tokens)
    mask[:3, 5:] = 0
    return (
        transformers.BertForSequenceClassification(config),
        "classifier.*",
        {"input_ids": tokens, "attention_mask": mask},
    )


def plain_mlp():
    return mlp(), "2.*", torch.randn(6, 5)


MODELS = {"mlp": plain_mlp, "cnn": timm_cnn, "vit": timm_vit, "bert": bert}
SERVED = ["cnn", "vit", "bert", "regression"]


def fitted(name, structure="kron"):
    """Return a model with a fitted last layer, and a batch for it."""
    model, head, x = MODELS[name]()
    model.eval()
    bayesify(model, "la", include=head, prior_sig=1.0)
    y = torch.arange(6) % CLASSES
    fit_laplace(model, [{**x, "labels": y}] if isinstance(x, dict) else [(x, y)], structure=structure)
    return model, x


def call(module, x):
    return module(**x) if isinstance(x, dict) else module(x)


def rows(x, count):
    return {k: v[:count] for k, v in x.items()} if isinstance(x, dict) else x[:count]


def check(answers, found, atol=1e-5):
    for name in FIELDS:
        assert torch.allclose(answers[name].double(), getattr(found, name).double(), atol=atol), name


@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize("name", MODELS)
def test_a_closed_form_is_what_predict_gives(name, structure):
    model, x = fitted(name, structure)
    before = copy.deepcopy(model.state_dict())
    answers, found = call(deploy(model, threshold=0.5), x), predict(model, x)
    assert found.closed_form
    check(answers, found)
    assert torch.equal(answers["answer"], found.select(0.5))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def regression(closed=True):
    """Return a regression model whose outputs are averaged in the graph, and a batch for it."""
    x = torch.randn(6, 4, 5)
    body = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
    model = nn.Sequential(body, nn.AdaptiveAvgPool1d(16), Mean(), nn.Linear(16, 2))
    bayesify(model, "la" if closed else "vanilla", include="3.*", prior_sig=1.0)
    if closed:
        fit_laplace(model, [(x, torch.randn(6, 2))], likelihood="regression")
    else:
        noise(model, outputs=2)
    return model, x


class Mean(nn.Module):
    """The mean over places, whose name in a graph is that of a regression's field."""

    def forward(self, x):
        return x.mean(1)


def members(name):
    """Return a mixture of two models whose weights differ, and a batch for it."""
    if name == "regression":
        made = [regression(closed=False)[0] for _ in range(2)]
        return mix(made), regression()[1]
    model, _, x = MODELS[name]()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return mix(bayesify(m.eval(), "vanilla") for m in (model, other)), x


def read(path, x):
    """Return the answers of a saved file."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(x)
    if path.suffix == ".ts":
        return torch.jit.load(path)(x)
    served = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {
        i.name: t.numpy() for i, t in zip(served.get_inputs(), x.values() if isinstance(x, dict) else [x], strict=True)
    }
    names = [output.name for output in served.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, served.run(None, given)), strict=True))


@pytest.mark.parametrize("kind", ["closed form", "ensemble"])
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.filterwarnings("ignore")  # what torch's exporters and onnxscript deprecate
def test_every_file_answers_what_predict_does(name, kind, tmp_path):
    pytest.importorskip("onnxscript")
    if kind == "closed form":
        model, x = regression() if name == "regression" else known(name)
    else:
        model, x = members(name)
    deployed = deploy(model)
    for ending in (".pt2", ".onnx", ".ts"):
        path = tmp_path / f"model{ending}"
        deployed.save(path, **x) if isinstance(x, dict) else deployed.save(path, x)
        for count in (5, 1):
            answers, found = read(path, rows(x, count)), predict(model, rows(x, count))
            assert set(answers) == set(deployed.fields)
            names = ("mean", "std", "epistemic") if name == "regression" else FIELDS
            names += ("novelty_pvalue",) if found.novelty is not None else ()
            for field in names:
                value = getattr(found, field).double()
                assert torch.allclose(answers[field].double(), value, atol=1e-5), (ending, field)
            if name == "regression":
                for field, value in zip(("low", "high"), found.interval(), strict=True):
                    assert torch.allclose(answers[field].double(), value, atol=1e-5), (ending, field)


def test_a_file_says_how_it_was_made(tmp_path):
    model, x = known("mlp")
    deployed = deploy(model)
    deployed.about["data"] = "three classes"
    deployed.save(tmp_path / "model.pt2", x[:1])  # one example is enough
    found = dict.fromkeys(deployed.about, "")
    torch.export.load(tmp_path / "model.pt2", extra_files=found)
    assert {name: json.loads(text) for name, text in found.items()} == deployed.about
    assert deployed.about["novelty"] == {"layer": "2", "at": "mean", "held_out": 108}
    with pytest.raises(ValueError, match=r"must end in .pt2, .onnx or .ts, got"):
        deployed.save(tmp_path / "model.pth", x)


def test_a_deployed_module_compiles_as_one_graph(fresh_compiler):
    model, x = fitted("mlp")
    deployed = deploy(model)
    check(torch.compile(deployed, fullgraph=True, backend="aot_eager")(x), predict(model, x))


@pytest.mark.parametrize("name", MODELS)
def test_the_head_in_numpy(name, tmp_path):
    """Forty lines of numpy are all that a server needs beside the body."""
    from safetensors.numpy import load_file
    from safetensors.torch import save_file

    model, x = fitted(name)
    deployed = deploy(model)
    save_file(dict(deployed.voices[0].named_buffers()), tmp_path / "head.safetensors", metadata=deployed.metadata())
    head, layer = load_file(tmp_path / "head.safetensors"), deployed.voices[0].head.layer
    seen = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].numpy()))
    with torch.no_grad():
        call(deployed, x)
    handle.remove()
    logits = seen[0] @ layer.weight.numpy().T + layer.bias.numpy()
    q = np.square(seen[0] @ head["right"] + head["shift"]) @ head["variances"]
    centred = head["basis"] - head["basis"].mean(0)
    s2 = q @ np.square(centred).T
    z = (logits - logits.mean(1, keepdims=True)) / np.sqrt(1 + math.pi / 8 * s2)
    probs = np.exp(z - z.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    assert np.allclose(probs, predict(model, x).probs, atol=1e-5)


def test_draws_are_those_of_predict():
    x, _y = data()
    model = bayesify(mlp(), "vi", prior_sig=1.0, init_sig=0.3)
    deployed = deploy(model, samples=4, seed=7)
    check(deployed(x), predict(model, x, samples=4, seed=7))
    assert len(deployed.voices) == 4
    check(deploy(model, samples=0)(x), predict(model, x, samples=0))
    assert not torch.allclose(deployed(x)["probs"], deploy(model, samples=4, seed=8)(x)["probs"])


def test_draws_share_what_no_draw_changes():
    model = bayesify(mlp(), "vi", include="2.*", prior_sig=1.0, init_sig=0.3)
    first, second = deploy(model, samples=2).voices
    assert first.model[0].weight is second.model[0].weight
    assert first.model[2].weight is not second.model[2].weight


def test_a_distribution_baked_in_is_near_that_of_other_draws():
    x, _ = data(20)
    model = bayesify(mlp(), "vi", prior_sig=1.0, init_sig=0.2)
    each = torch.stack([predict(model, x, samples=1, seed=k).probs for k in range(200)])
    answers = deploy(model, samples=50, seed=1)(x)["probs"].double()
    error = each.std(0) * (1 / 50 + 1 / 200) ** 0.5
    assert ((answers - each.mean(0)).abs() < 4 * error).double().mean() > 0.98


def test_a_mixture_has_all_of_its_members():
    x, _ = data()
    ensemble = mix(bayesify(mlp(), "vanilla") for _ in range(3))
    check(deploy(ensemble)(x), predict(ensemble, x))
    assert len(deploy(ensemble).voices) == len(components(ensemble))


def test_an_ensemble_has_the_statistics_of_its_members():
    x, y = data()
    model = bayesify(
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)), "ensemble", members=3
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cycles = Cycles(optimizer, model, steps=12)
    for _ in range(12):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + penalty(model, len(x))).backward()
        optimizer.step()
        cycles.step()
    deployed = deploy(model)
    assert len(deployed.voices) == 3
    check(deployed(x), predict(model, x))
    check(deploy(model, samples=0)(x), predict(model, x, samples=0))
    std = predict(model, x, task="regression").epistemic
    assert torch.allclose(deploy(model, task="regression")(x)["epistemic"].double(), std, atol=1e-5)


def test_a_mixture_of_closed_forms():
    x, _ = data()
    models = [fitted("mlp")[0] for _ in range(3)]
    ensemble = mix(models)
    assert predict(ensemble, x).closed_form
    check(deploy(ensemble)(x), predict(ensemble, x))


def test_a_temperature_divides_the_logits_of_every_draw():
    x, _ = data()
    model = bayesify(mlp(), "vi", prior_sig=1.0, init_sig=0.3)
    found = predict(model, x, samples=4, seed=7)
    check(deploy(model, temperature=1.7, samples=4, seed=7)(x), found.tempered(1.7))


def test_a_plain_model_is_a_point():
    x, _ = data()
    model = mlp()
    check(deploy(model, temperature=2.0)(x), predict(model, x).tempered(2.0))


def test_thresholds_found_by_predict_hold_for_ten_thousand_inputs():
    x, y = data(10_000)
    model, _ = fitted("mlp")
    found = predict(model, [(x, y)])
    threshold = float(found.confidence.median())
    kept = deploy(model, threshold=threshold)(x)["answer"]
    assert (kept != found.select(threshold)).sum() <= 1  # the median itself, by rounding


@pytest.mark.parametrize("method", ["la", "vi"])
def test_a_regression_has_mean_and_interval(method):
    x, _ = data(40)
    y = x[:, :1] - x[:, 1:2]
    options = {"task": "regression"}
    if method == "la":
        model = bayesify(mlp(1), "la", include="2.*", prior_sig=1.0)
        fit_laplace(model, [(x, y)], likelihood="regression")
    else:
        model = bayesify(nn.Sequential(mlp(2)), "vi", prior_sig=1.0, init_sig=0.3)
        options = {"task": "heteroscedastic", "samples": 6, "seed": 2}
    answers, found = deploy(model, **options)(x), predict(model, x, **options)
    low, high = found.interval()
    expected = {"mean": found.mean, "std": found.std, "epistemic": found.epistemic, "low": low, "high": high}
    for field, value in expected.items():
        assert torch.allclose(answers[field].double(), value, atol=1e-4), field


def test_a_mixture_of_regressions_has_the_spread_of_its_members():
    x, _ = data(40)
    models = [bayesify(mlp(1), "vi", prior_sig=1.0, init_sig=0.1) for _ in range(2)]
    ensemble = mix(models)
    answers, found = (
        deploy(ensemble, task="regression", samples=6, seed=2)(x),
        predict(ensemble, x, 6, seed=2, task="regression"),
    )
    assert torch.allclose(answers["std"].double(), found.std, atol=1e-5)


def test_the_task_is_that_of_the_fit_and_no_noise_is_no_interval():
    model, _ = regression()
    assert deploy(model).fields == ["mean", "std", "epistemic", "low", "high"]
    quiet = deploy(bayesify(mlp(1), "vanilla"), task="regression")
    assert quiet.fields == list(quiet(data()[0])) == ["mean", "std", "epistemic"]


def test_multilabel():
    x, _ = data(10)
    model = bayesify(mlp(), "vi", prior_sig=1.0, init_sig=0.3)
    answers = deploy(model, task="multilabel", samples=3, seed=1)(x)
    found = predict(model, x, 3, seed=1, task="multilabel")
    for field in ("probs", "entropy", "mutual_information"):
        assert torch.allclose(answers[field].double(), getattr(found, field), atol=1e-5), field


@pytest.mark.filterwarnings("ignore")  # what torch's exporters and onnxscript deprecate
def test_files_run_without_bayesify(tmp_path):
    pytest.importorskip("onnxruntime")
    model, x = known("mlp")
    deployed = deploy(model)
    for ending in (".pt2", ".onnx", ".ts"):
        deployed.save(tmp_path / f"model{ending}", x)
    torch.save((x, deployed(x)["probs"], deployed(x)["novelty_pvalue"]), tmp_path / "expected.pt")
    script = f"""
        import sys
        sys.modules["bayesify"] = None  # an import fails
        import onnxruntime, torch
        folder = {str(tmp_path)!r}
        x, probs, pvalues = torch.load(folder + "/expected.pt")
        session = onnxruntime.InferenceSession(folder + "/model.onnx")
        answers = session.run(["probs", "novelty_pvalue"], {{session.get_inputs()[0].name: x.numpy()}})
        found = [dict(zip(("probs", "novelty_pvalue"), map(torch.from_numpy, answers)))]
        found += [torch.export.load(folder + "/model.pt2").module()(x), torch.jit.load(folder + "/model.ts")(x)]
        for one in found:
            assert torch.allclose(one["probs"], probs, atol=1e-6)
            assert torch.equal(one["novelty_pvalue"], pvalues)
        print("alike")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert run.stdout.strip() == "alike", run.stderr


def test_threads_share_a_deployed_module():
    from concurrent.futures import ThreadPoolExecutor

    model, _ = fitted("mlp")
    deployed, batches = deploy(model), [torch.randn(4, 5) for _ in range(40)]
    expected = [deployed(x)["probs"] for x in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: deployed(x)["probs"], batches))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_deployed_module_stays_in_eval_mode_and_is_plain():
    model, _x = fitted("cnn")
    deployed = deploy(model).train()
    assert not any(m.training for m in deployed.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in deployed.modules())
    assert not any(hasattr(m, "parametrizations") for m in deployed.modules())
    assert not any(p.requires_grad for p in deployed.parameters())
    assert deployed.about["methods"] == ["la"]
    assert deployed.metadata()["task"] == '"classification"'


def test_a_layer_that_is_not_the_last_is_refused():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x) * 2

    x, y = data()
    model = bayesify(Doubled(), "la", include="body.2.*", prior_sig=1.0)
    fit_laplace(model, [(x, y)])
    with pytest.raises(ValueError, match="not the model's last"):
        deploy(model)(x)
    check(deploy(model, samples=3, seed=0)(x), predict(model, x, samples=3, seed=0))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"temperature": 0.0}, "positive and finite"),
        ({"temperature": 2.0}, "no samples to divide"),
        ({"threshold": 80}, "between 0 and 1"),
        ({"samples": -1}, "samples must be"),
        ({"task": "ranking"}, "task must be one of"),
        ({"task": "regression", "threshold": 0.5}, "confidence of a classification"),
        ({"task": "regression", "temperature": 2.0}, "divides logits"),
        ({"level": 95}, "level must be"),
    ],
)
def test_mistakes(options, why):
    model, _ = fitted("mlp")
    with pytest.raises(ValueError, match=why):
        deploy(model, **options)


def test_an_unfitted_posterior_is_refused():
    with pytest.raises((ValueError, RuntimeError), match="fit_laplace"):
        deploy(bayesify(mlp(), "la", include="2.*"))


def test_training_continues_after_deploying():
    x, y = data()
    model = bayesify(mlp(), "vi", prior_sig=1.0)
    deploy(model)
    (nn.functional.cross_entropy(model(x), y) + penalty(model, len(x))).backward()
    assert all(p.grad is not None for p in model.parameters())


def known(name, at="mean"):
    """Return a model with a fitted last layer and novelty, and a batch for it."""
    model, x = fitted(name)
    many = {k: v.repeat(20, *[1] * (v.dim() - 1)) for k, v in x.items()} if isinstance(x, dict) else torch.cat([x] * 20)
    if isinstance(many, dict):
        many["input_ids"] = torch.randint(1, 40, many["input_ids"].shape)
        labelled = [{**many, "labels": torch.arange(120) % CLASSES}]
    else:
        many = many + torch.randn_like(many)
        labelled = [(many, torch.arange(120) % CLASSES)]
    return fit_novelty(model, labelled, held_out=labelled, at=at), x


@pytest.mark.parametrize("name", ["mlp", "bert"])
def test_novelty_is_that_of_predict(name):
    model, x = known(name)
    deployed = deploy(model, threshold=0.0, false_alarms=0.3)
    answers, found = call(deployed, x), predict(model, x)
    assert torch.allclose(answers["novelty"], found.novelty, rtol=1e-4)
    assert torch.allclose(answers["novelty_pvalue"], found.novelty_pvalue, atol=1e-6)
    assert torch.equal(answers["answer"], ~found.alarm(0.3))
    assert list(answers) == deployed.fields


def test_novelty_at_the_prior_has_the_statistics_of_the_start():
    x, y = data(100)
    model = bayesify(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)), "vanilla")
    with torch.no_grad():
        model.train()(3 * x + 1)  # the statistics of now
        model[0].weight.add_(0.1)
    model.eval()
    fit_novelty(model, [(x, y)], held_out=[(x + 0.1, y)], at="prior")
    assert torch.allclose(deploy(model)(x)["novelty"], predict(model, x).novelty, rtol=1e-4)


def test_novelty_of_draws_takes_a_pass_at_the_mean():
    x, y = data(100)
    model = bayesify(mlp(), "vi", prior_sig=1.0, init_sig=0.3)
    fit_novelty(model, [(x, y)], held_out=[(x + 0.1, y)])
    far = 5 * torch.randn(10, 5)
    answers, found = deploy(model, samples=3, seed=1)(far), predict(model, far, samples=3, seed=1)
    check(answers, found)
    assert torch.allclose(answers["novelty"], found.novelty, rtol=1e-4)
    assert torch.equal(answers["answer"], ~found.alarm())


def test_other_weights_have_no_novelty():
    model, _ = known("mlp")
    with torch.no_grad():
        model[0].weight.mul_(1.1)
    with pytest.warns(UserWarning, match="not those of fit_novelty"):
        assert "novelty" not in deploy(model, samples=2).fields


def test_tokens_are_answered_where_their_sequence_is_not_strange():
    x = torch.randn(60, 7, 5)
    model = fit_novelty(mlp(), x, held_out=torch.randn(60, 7, 5))
    few = torch.cat([x[:3], 50 + x[:1]])
    answers, found = deploy(model, threshold=0.4, task="tokens")(few), predict(model, few, task="tokens")
    assert torch.equal(answers["answer"], (found.confidence >= 0.4) & ~found.alarm().unsqueeze(1))


def test_alarms_need_novelty():
    with pytest.raises(ValueError, match="call fit_novelty"):
        deploy(mlp(), false_alarms=0.05)


def test_a_regression_that_is_read_linearly_is_refused():
    x, _ = data(40)
    model = bayesify(mlp(1), "la", prior_sig=1.0)
    fit_laplace(model, [(x, x[:, :1])], likelihood="regression", curvature="ggn")
    with pytest.raises(ValueError, match="linearly"):
        deploy(model, task="regression")
    mean = deploy(model, task="regression", samples=0)(x)["mean"]
    assert torch.allclose(mean.double(), predict(model, x, samples=0, task="regression").mean, atol=1e-5)
