"""The command line says what a saved posterior holds, and errors take one line."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import bayesify
from bayesify import fit_laplace, fit_novelty, named_posteriors, predict, save
from bayesify.cli.main import main, read_prediction
from bayesify.core.summary import inspect_file, stored_posteriors


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def fitted(method, **options):
    model = bayesify.bayesify(network(), method, **options)
    data = [(torch.randint(5, (6, 2)), torch.randint(3, (6,))) for _ in range(2)]
    if method == "sgld":
        optimizer = bayesify.SGLD(model, 0.1, num_data=12)
        for x, y in data:
            (nn.functional.cross_entropy(model(x), y) + bayesify.penalty(model, 12)).backward()
            optimizer.step()
    return fit_laplace(model, data) if method == "la" else model


CASES = [
    ("vi", {"prior_sig": 0.5, "link": "exp"}),
    ("mc_dropout", {"prior_mean": "zero"}),
    ("sgld", {"thin": 1}),
    ("la", {}),
    ("vanilla", {}),
]


@pytest.mark.parametrize(("method", "options"), CASES, ids=[c[0] for c in CASES])
def test_a_file_alone_tells_the_spread_that_the_model_has(method, options, tmp_path, capsys):
    model = fitted(method, **options)
    save(model, tmp_path)
    (found,) = inspect_file(tmp_path)
    expected = {
        n: float(p.std.double().norm() / p.mean.double().norm()) if p.mean.any() else (np.inf if p.std.any() else 0.0)
        for n, p in named_posteriors(model)
    }
    assert {s.name: s.relative for s in found.spreads} == pytest.approx(expected, rel=1e-9)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"method: {type(model._bayesify_scope.method).__name__}(" in text
    assert f"spread: {found.spreads[0].relative:.3g} of" in text or "spread: none" in text
    assert main(["inspect", str(tmp_path / "posterior.safetensors")]) == 0
    assert capsys.readouterr().out == text
    assert all(name in text for name in ("0.weight", "3.bias", "2.running_mean"))


def test_the_posteriors_of_a_file_are_the_models(tmp_path):
    from bayesify.core.checkpoint import ALONE, read

    model = fitted("vi", prior_sig=0.2)
    save(model, tmp_path)
    stored = {p.name: p for p in stored_posteriors(read(tmp_path / "posterior.safetensors")[ALONE])}
    for name, posterior in named_posteriors(model):
        torch.testing.assert_close(stored[name].std, posterior.std, rtol=0, atol=0)
        torch.testing.assert_close(stored[name].mean, posterior.mean, rtol=0, atol=0)


def test_a_posterior_without_spread_says_so(tmp_path, capsys):
    save(bayesify.bayesify(network(), "la"), tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "spread: none" in capsys.readouterr().out


def test_a_report_of_a_saved_prediction(tmp_path, capsys):
    model = fitted("vi")
    out = predict(model, [(torch.randint(5, (20, 2)), torch.randint(3, (20,)))], samples=3, seed=0)
    np.savez(tmp_path / "out.npz", **out.numpy())
    np.savez(tmp_path / "plain.npz", **predict(network(), torch.randint(5, (20, 2))).numpy())
    page = tmp_path / "page.html"
    command = ["report", str(tmp_path / "out.npz"), "--ood", str(tmp_path / "plain.npz"), "--out", str(page)]
    assert main(command) == 0
    assert str(out) in capsys.readouterr().out
    assert "Out-of-distribution detection" in page.read_text()


def test_a_report_compares_production_data_with_the_validation_set(tmp_path):
    x, y = torch.randn(200, 4), torch.randint(3, (200,))
    model = fit_novelty(nn.Linear(4, 3), [(x[:100], y[:100])], held_out=[(x[100:], y[100:])])
    for name, data in {"validation": [(x[100:], y[100:])], "window": 5 * torch.randn(50, 4) + 5}.items():
        np.savez(tmp_path / f"{name}.npz", **predict(model, data).numpy())
    files = [str(tmp_path / f"{name}.npz") for name in ("window", "validation")]
    for out in ("report.html", "report.json"):
        command = ["report", files[0], "--validation", files[1], "--threshold", "0.5", "--out", str(tmp_path / out)]
        assert main(command) == 0
    table = json.loads((tmp_path / "report.json").read_text())["Compared with the validation set"]
    assert table["Examples"] == {"Validation": 100, "Window": 50}
    assert {"Abstention rate", "Alarms", "Novelty p-value", "Drift: novelty", "Drift: entropy"} <= table.keys()
    assert table["notes"][0] in (tmp_path / "report.html").read_text()


def test_a_report_of_a_closed_form_is_that_of_the_posterior_and_not_of_its_mean(tmp_path):
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    model = bayesify.bayesify(nn.Linear(4, 3), "la")
    out = predict(fit_laplace(model, [(x, y)], structure="kron"), [(x, y)])
    np.savez(tmp_path / "out.npz", **out.numpy())
    again = read_prediction(tmp_path / "out.npz")
    torch.testing.assert_close(again.log_probs, out.log_probs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again.mutual_information, out.mutual_information, rtol=1e-9, atol=1e-12)
    assert repr(again) == repr(out) and again.method == "la" and again.closed_form
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "out.npz"), "--out", str(page)]) == 0
    assert "method la · in closed form" in page.read_text()
    assert "T\u00a0=\u00a01<" not in page.read_text() and "mean,\u00a0T\u00a0=" in page.read_text()


WRONG = [
    (["inspect", "nowhere"], "there is no nowhere/posterior.safetensors; give the folder that bayesify.save wrote"),
    (["inspect", "."], "there is no posterior.safetensors; give the folder"),
    (["report", "nothing.npz"], "there is no nothing.npz; write it with numpy.savez('nothing.npz', **out.numpy())"),
    (["report", "text.npz"], "text.npz holds no classification; write it with numpy.savez('text.npz', **out.numpy())"),
    (["report", "one.npy"], "one.npy holds no classification"),
    (["report", "other.npz"], "other.npz holds no classification"),
    (["report", "shapes.npz"], "shapes.npz holds no classification"),
]


@pytest.mark.parametrize(("command", "message"), WRONG, ids=[" ".join(c[0]) for c in WRONG])
def test_errors_take_one_line(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npz").write_text("no zip")
    np.save("one.npy", np.zeros(3))
    np.savez("other.npz", probs=np.ones((2, 2)) / 2)
    np.savez("shapes.npz", probs=np.ones((2, 2)) / 2, expected_entropy=np.ones((2, 2)))
    assert main(command) == 1
    printed = capsys.readouterr()
    assert not printed.out and printed.err.startswith("bayesify: ") and message in printed.err
    assert printed.err.count("\n") == 1 and "pickle" not in printed.err  # numpy would have it loaded unsafely


def test_a_damaged_file_is_told(tmp_path, capsys):
    save(bayesify.bayesify(network(), "vi"), tmp_path)
    path = tmp_path / "posterior.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert main(["inspect", str(tmp_path)]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_the_demonstration_shows_what_three_lines_do(tmp_path, capsys):
    pytest.importorskip("sklearn")
    assert main(["demo", "--out", str(tmp_path)]) == 0
    assert "four lines later" in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 10_000
    (found,) = inspect_file(tmp_path)
    assert [s.name for s in found.spreads] == ["4.bias", "4.weight"]


def test_python_dash_m(tmp_path):
    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "bayesify", *words], capture_output=True, text=True, check=False, cwd=tmp_path
        )

    assert run("--version").stdout == f"bayesify {bayesify.__version__}\n"
    wrong = run("inspect", "nowhere")
    assert wrong.returncode == 1 and len(wrong.stderr.splitlines()) == 1
    assert run().returncode == 2


def test_every_member_of_a_mixture_is_shown(tmp_path, capsys):
    save(bayesify.mix([fitted("vi"), fitted("mc_dropout", prior_mean="zero")]), tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "member '0'" in text and "VI(" in text and "member '1'" in text and "MCDropout(" in text
