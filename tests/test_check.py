"""`bayesify check`: what engines compute, what steps cost, in one object and one line."""

import json
import sys

import pytest
import torch

from bayesify.cli import check as checks
from bayesify.cli.main import main
from bayesify.engine import dispatch

ENGINES = {"engine", "available", "why", "words_differ", "max_eps"}
STEPS = {"model", "method", "engine", "ratio", "launches", "syncs", "peak_bytes"}


@pytest.fixture
def small(monkeypatch):
    """Check two formulas and one step."""
    monkeypatch.setattr(checks, "FORMULAS", [checks.gaussian, checks.squares])
    monkeypatch.setattr(checks, "METHODS", ("vanilla",))
    monkeypatch.setattr(checks, "MODELS", {"lora": checks.MODELS["lora"]})


@pytest.mark.usefixtures("small")
def test_the_object_and_the_line(capsys):
    assert main(["check", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"engines", "steps", "verdict"}
    assert [e["engine"] for e in found["engines"]] == ["torch", "numba", "triton"]
    assert all(e.keys() == ENGINES for e in found["engines"]) and all(s.keys() == STEPS for s in found["steps"])
    torch_, numba, triton = found["engines"]
    assert torch_["available"] and numba["available"] and not triton["available"] and triton["why"]
    assert torch_["words_differ"] == numba["words_differ"] == 0 and 0 < numba["max_eps"] < 5
    (step,) = found["steps"]
    assert step["ratio"] > 0 and step["launches"] > 0 and step["syncs"] == 0 and step["engine"] == "numba"
    assert found["verdict"].startswith("ok on cpu: torch, numba agree")
    assert found["verdict"] in checks.shown(found) and "triton  not available" in checks.shown(found)


def test_wrong_numbers_are_the_verdict(monkeypatch):
    monkeypatch.setattr(checks, "FORMULAS", [checks.gaussian])
    run = dispatch.run

    def broken(formula, stream, inputs, outputs=(), **options):
        run(formula, stream, inputs, outputs, **options)
        for out in outputs:
            out.add_(1)

    monkeypatch.setattr(dispatch, "run", broken)
    engine = checks._engine("torch", torch.device("cpu"))
    assert engine["words_differ"] == checks.SIZE and engine["max_eps"] > 1e6
    assert "WRONG NUMBERS from torch" in checks.verdict([engine], [], torch.device("cpu"))


def test_an_engine_that_is_not_there_makes_a_slow_verdict():
    engines = [{"engine": "torch", "available": True, "why": "", "words_differ": 0, "max_eps": 1.0}]
    assert "right but slow on cpu: numba is not available" in checks.verdict(engines, [], torch.device("cpu"))


def test_a_device_that_is_not_there(capsys):
    assert main(["check", "--device", "cuda:99"]) == 1
    assert "there is no device 'cuda:99' here" in capsys.readouterr().err


def test_every_formula_has_arguments_here():
    """On the reference, all of them are finite."""
    for formula in checks.FORMULAS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BAYESIFY_ENGINE", "torch")
            stream = checks.Stream(1, 2, (checks.SIZE,))
            assert checks._error(formula, stream, torch.device("cpu")) < checks.AGREES, formula


def test_counting_sees_operations_custom_ones_and_loops(monkeypatch):
    monkeypatch.delenv("BAYESIFY_ENGINE", raising=False)
    x, out = torch.ones(8), torch.empty(8)
    dispatch.run(checks.squares, None, (x, 0.5, 1.0), (out,))
    with checks.Counting() as count:
        x.view(2, 4)
        assert count.launches == 0
        x + 1
        dispatch.run(checks.squares, None, (x, 0.5, 1.0), (out,))
        float(x.sum())
    assert count.launches == 3 and count.syncs == 0 and "torch" in sys.modules
