"""Every method trains alike on every engine: 20 steps and a prediction; Triton's kernels run in its interpreter."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import IVON, SGLD, bayesify, named_posteriors, param_groups, penalty, predict

METHODS = ("vi", "mc_dropout", "vanilla", "sgld", "ivon")  # "la" and "swag" train as "sgld" without noise
WORDS, LABELS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 1]), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def trained(method: str) -> list[torch.Tensor]:
    """Return means, standard deviations and a prediction after 20 steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 5, padding_idx=0), nn.Linear(5, 3))
    model = bayesify(net, method, **({"thin": 2} if method == "sgld" else {}))
    optimizers = {"ivon": lambda: IVON(model, 0.1, num_data=20), "sgld": lambda: SGLD(model, 0.05, num_data=20)}
    make = optimizers.get(method, lambda: torch.optim.SGD(param_groups(model, 0.05), momentum=0.9))
    optimizer = make()
    for _ in range(20):
        optimizer.zero_grad()
        (F.cross_entropy(model(WORDS), LABELS) + penalty(model, 20)).backward()
        optimizer.step()
    samples = 3 if method in ("vi", "mc_dropout", "sgld", "ivon") else 0
    found = [t.detach() for _, q in named_posteriors(model) for t in (q.mean, q.std)]
    return [*found, predict(model, WORDS, samples, seed=0).probs]


@pytest.fixture(scope="module")
def by_triton(tmp_path_factory):
    """Train in a process of its own, since Triton asks for its interpreter once."""
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("triton") / "found.pt"
    env = {**os.environ, "TRITON_INTERPRET": "1", "BAYESIFY_ENGINE": "triton"}
    subprocess.run([sys.executable, __file__, str(path)], check=True, env=env, capture_output=True, timeout=300)
    return torch.load(path)


@pytest.mark.parametrize("method", METHODS)
def test_engines_train_alike(method, by_triton, monkeypatch):
    by_loops = trained(method)
    monkeypatch.setenv("BAYESIFY_ENGINE", "torch")
    for other in (trained(method), by_triton[method]):
        for a, b in zip(by_loops, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    torch.save({method: trained(method) for method in METHODS}, sys.argv[1])
