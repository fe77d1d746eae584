"""Accelerate on two processes: the example trains every method, and all ranks end with one posterior."""

import os
import runpy
import sys
from pathlib import Path

import pytest
import ranks
import torch
from ranks import posterior_of

from bayesify import load, named_posteriors

EXAMPLES = Path(__file__).parent.parent / "examples"
METHODS = ["vi", "mc_dropout", "sgld", "la", "ivon", "vanilla"]


def on_every_rank(folder: str) -> None:
    """What each process runs."""
    found = {}
    for method in METHODS:
        sys.argv = ["with_accelerate.py", method, str(Path(folder) / method)]
        names = runpy.run_path(str(EXAMPLES / "with_accelerate.py"))
        found[method] = {"posterior": posterior_of(names["model"]), "predictions": names["out"].log_probs}
    torch.save(found, Path(folder) / f"{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[Path, list[dict]]:
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("accelerate")
    return folder, ranks.gather(__file__, "on_every_rank", folder)


@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_have_one_posterior_and_all_predictions(found, method: str):
    folder, (one, two) = found
    assert one[method]["predictions"].shape == (512, 2)
    assert torch.equal(one[method]["predictions"], two[method]["predictions"])
    own, other = (rank[method]["posterior"] for rank in (one, two))
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    saved = posterior_of(load(plain, folder / method))
    for name, value in saved.items():
        assert torch.equal(value, own[f"module.{name}"])
    moved = max(float((p.mean - p.prior_mean).abs().max()) for _, p in named_posteriors(plain))
    assert moved > 0.05
