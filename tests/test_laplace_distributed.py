"""Laplace on two processes: the posterior of one, on every rank, or a clear error."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bayesify import bayesify, fit_laplace, named_posteriors

RANKS = 2


def rows(seed=0, count=23):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=generator)


def model_of():
    torch.manual_seed(0)
    return bayesify(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), "la", prior_sig=0.7)


def batches(x, y):
    return list(zip(x.split(5), y.split(5), strict=True))


def balanced():
    """Data whose halves have equal sizes, sums and labels, and other curvatures."""
    x = torch.eye(4, dtype=torch.float64).repeat(4, 1) * 3
    x[8:] = torch.eye(4, dtype=torch.float64)[[1, 0, 3, 2]].repeat(2, 1) * 3
    return x.view(2, 8, 4).transpose(0, 1).flatten(0, 1), torch.arange(8).repeat_interleave(2) % 3


def fits(part, wrapped=lambda model: model, same=None):
    """Return the spreads of several fits, each on `part` of the data."""
    out = {}
    options = {
        "diag": {},
        "ggn": {"curvature": "ggn"},
        "kron": {"structure": "kron"},
        "tuned": {"structure": "kron", "include": "*2.*", "tune": batches(*part(*rows(1)))},
        "sampled": {"tune": batches(*part(*rows(1)))},
        "num_data": {"num_data": 100},
    }
    for name, given in options.items():
        model = model_of()
        fit_laplace(wrapped(model), batches(*part(*rows())), same_data=same, **given)
        out[name] = {n: p.std.clone() for n, p in named_posteriors(model)}
    model = model_of()
    fit_laplace(wrapped(model), batches(*part(*balanced())), same_data=same)
    out["balanced"] = {n: p.std.clone() for n, p in named_posteriors(model)}
    model = bayesify(nn.Linear(4, 1).double(), "la", prior_sig=0.7, prior_mean="zero")
    nn.init.ones_(model.parametrizations.weight.original)
    nn.init.zeros_(model.parametrizations.bias.original)
    x, _ = part(*rows())
    fit_laplace(wrapped(model), [(x, (2 * x[:, :1]))], likelihood="regression", structure="kron", same_data=same)
    out["regression"] = {n: p.std.clone() for n, p in named_posteriors(model)}
    return out


def on_rank(folder):
    """Run on one of two ranks, on its own part of the data, and on all of it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = fits(lambda x, y: (x[rank::RANKS], y[rank::RANKS]), DistributedDataParallel, same=False)
    same = fits(lambda x, y: (x, y), same=True)
    data = TensorDataset(*balanced())
    told = {}
    for name, sampler in (("parts", DistributedSampler(data, shuffle=True, seed=3)), ("unknown", None)):
        model = model_of()
        try:
            fit_laplace(model, DataLoader(data, 3, sampler=sampler))
            told[name] = {n: p.std.clone() for n, p in named_posteriors(model)}
        except ValueError as error:
            told[name] = str(error)
    torch.save({"own": own, "same": same, "told": told}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_have_the_posterior_of_one(tmp_path):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, __file__, str(tmp_path)]
    running = [
        subprocess.Popen(command, env={**shared, "RANK": str(r), "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
        for r in range(RANKS)
    ]
    errors = [process.communicate(timeout=300)[1].decode() for process in running]
    assert [process.returncode for process in running] == [0] * RANKS, errors
    exact = fits(lambda x, y: (x, y))
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        for kind, spreads in exact.items():
            for name, std in spreads.items():
                for data in ("own", "same"):
                    torch.testing.assert_close(found[data][kind][name], std, msg=f"{data} {kind} {name}")
        for name, std in exact["balanced"].items():
            torch.testing.assert_close(found["told"]["parts"][name], std)
        assert "same_data=True" in found["told"]["unknown"]


def test_a_part_of_the_data_alone_gives_another_posterior():
    """The test above could not fail otherwise."""
    whole, half = fits(lambda x, y: (x, y)), fits(lambda x, y: (x[::2], y[::2]))
    for kind in ("diag", "ggn", "kron", "num_data", "balanced", "regression"):
        spreads = whole[kind]
        assert any(not torch.allclose(half[kind][n], std, rtol=1e-2) for n, std in spreads.items()), kind


if __name__ == "__main__":
    on_rank(sys.argv[1])
