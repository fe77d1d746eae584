"""Two processes: what must be the same on every rank is, and what must differ does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import MLP, tensor
from torch import nn

from bayesify import SGLD, bayesify, penalty, predict, sample, samples

RANKS = 2
X = tensor(5, 4)


def start(method: str, **options) -> nn.Module:
    torch.manual_seed(0)
    model = bayesify(MLP(), method, **options)
    torch.manual_seed(100 + int(os.environ["RANK"]))  # as in a script that seeds nothing
    return model


def unseeded() -> dict:
    """Draws without a seed: shared by the ranks, except those of training."""
    model = start("vi", init_sig=0.3)
    found = {"predict": predict(model, X, samples=3).logits}
    with sample(model), torch.no_grad():
        found["sample"] = model(X)
    with torch.no_grad():
        found["samples"] = torch.stack([model(X) for _ in samples(model, 2)])
        found["training"] = model(X)
    return found


def chain(inside: bool) -> dict:
    """Twenty steps of a chain that is given the model inside of DDP, or before there is one."""
    model = start("sgld", thin=1)
    sampler = None if inside else SGLD(model, 0.01, num_data=10)
    wrapped = nn.parallel.DistributedDataParallel(model)
    sampler = sampler or SGLD(wrapped.module, 0.01, num_data=10)
    for _ in range(20):
        sampler.zero_grad()
        (wrapped(X).square().mean() + penalty(wrapped, 10)).backward()
        sampler.step()
    return dict(model.state_dict())


WORK = {"unseeded": unseeded, "inner": lambda: chain(True), "before": lambda: chain(False)}


def on_every_rank(folder: str) -> None:
    """What each process runs."""
    torch.distributed.init_process_group("gloo")
    found = {name: work() for name, work in WORK.items()}
    torch.save(found, Path(folder) / f"{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", f"import test_distributed as t; t.on_every_rank({str(folder)!r})"],
            cwd=Path(__file__).parent,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("what", ["predict", "sample", "samples"])
def test_draws_without_a_seed_are_the_same_on_all_ranks(found: list[dict], what: str):
    assert torch.equal(*(rank["unseeded"][what] for rank in found))


def test_training_draws_differ_by_rank(found: list[dict]):
    assert not torch.equal(*(rank["unseeded"]["training"] for rank in found))


@pytest.mark.parametrize("built", ["inner", "before"])
def test_chains_of_replicas_move_alike(found: list[dict], built: str):
    one, two = (rank[built] for rank in found)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
