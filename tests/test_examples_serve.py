"""The server: every request gets its own answer, bad input gets one line, and nothing is lost."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from torch import nn

from bayesify import bayesify, deploy, fit_laplace, fit_novelty
from examples.serve import Server

CLIENTS = 64


def refused(*request):
    """Return (status, error) of a request that fails."""
    with pytest.raises(HTTPError) as caught:
        post(*request)
    with caught.value as reply:
        return reply.code, json.load(reply)["error"]


@pytest.fixture(scope="module")
def deployed():
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), "la", include="2.*", prior_sig=1.0)
    x = torch.randn(30, 4)
    fit_laplace(model, [(x, torch.arange(30) % 3)], structure="kron")
    fit_novelty(model, x, held_out=torch.randn(60, 4))
    return deploy(model, threshold=0.4, false_alarms=0.1)


@pytest.fixture(scope="module")
def address(deployed):
    found = Server(deployed.exported(torch.randn(5, 4)), 0, held_out=54)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def post(address, content, path="/predict"):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with urlopen(Request(address + path, body), timeout=30) as reply:
        return json.load(reply)


def test_many_clients_get_their_own_answers(deployed, address):
    torch.manual_seed(1)
    batches = [torch.randn(1 + i % 3, 4) for i in range(2 * CLIENTS)]
    times = []

    def ask(x):
        begin = time.monotonic()
        answers = post(address, {"inputs": x.tolist()})["answers"]
        times.append(time.monotonic() - begin)
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(ask, batches))
    for x, answers in zip(batches, found, strict=True):
        expected = deployed(x)
        assert torch.allclose(torch.tensor([a["probs"] for a in answers]), expected["probs"], atol=1e-5)
        assert [a["prediction"] for a in answers] == expected["prediction"].tolist()
        assert [a["answer"] for a in answers] == expected["answer"].tolist()
    with urlopen(address + "/health", timeout=30) as reply:
        health = json.load(reply)
    assert health["status"] == "ok"
    assert health["rows"] >= sum(map(len, batches))
    assert health["answered"] < health["rows"]
    assert health["drift"] is False
    assert len(times) == len(batches)
    for _ in range(20):  # far from what is known
        post(address, {"inputs": (9 + torch.randn(2, 4)).tolist()})
    with urlopen(address + "/health", timeout=30) as reply:
        assert json.load(reply)["drift"] is True


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"inputs": [[1.0, 2.0]]}, "of shape (rows, 4), got (1, 2)"),
        ({"inputs": []}, "of shape"),
        ({"inputs": [[1.0, 2.0, 3.0, "x"]]}, "must be"),
        ({"inputs": [[1.0, 2.0, 3.0, float("nan")]]}, "finite"),
        ({"rows": [[1.0]]}, "inputs"),
        (b"not json", "Expecting value"),
    ],
)
def test_bad_input_gets_one_line(address, content, why):
    code, error = refused(address, content)
    assert code == 400
    assert why in error or "number" in error
    assert "\n" not in error


def test_other_pages_do_not_exist(address):
    assert refused(address, {}, "/other")[0] == 404


def test_a_failing_model_answers_with_an_error(deployed):
    class Failing:
        example_inputs = ((torch.randn(2, 4),), {})

        def module(self):
            def fail(x):
                raise RuntimeError("no memory")

            return fail

    found = Server(Failing(), 0)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    code, error = refused(f"http://127.0.0.1:{found.server_port}", {"inputs": [[0.0] * 4]})
    assert code == 500
    assert "no memory" in error
    found.shutdown()
    found.server_close()
