"""Run a function of a test file on several processes (gloo, on this machine), and what such tests train."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import MLP
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify import IVON, SGLD, Cycles, bayesify, fit_laplace, named_posteriors, param_groups, penalty, predict

RANKS = 2
NUM_DATA = 64
STEPS = 20


def run(file: str, function: str, *arguments: Any, timeout: float = 500) -> list[int]:
    """Call `function(*arguments)` of a test file on every rank, and return the exit codes with what went wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    code = f"import {Path(file).stem} as t; t.{function}({', '.join(map(repr, map(str, arguments)))})"
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=Path(__file__).parent,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for error in errors:
        print(error, file=sys.stderr)
    return [process.returncode for process in processes]


def gather(file: str, function: str, folder: Path) -> list[dict]:
    """Run a function that saves what it found as `<rank>.pt`, and return everybody's.

    Where gloo's threads abort a process ("terminate called without an active exception"), in a folder that was empty,
    it runs once more: that is torch's, and rare.
    """
    was_empty = not any(folder.iterdir())
    codes = run(file, function, folder)
    if was_empty and -signal.SIGABRT in codes:
        shutil.rmtree(folder)
        folder.mkdir()
        codes = run(file, function, folder)
    assert codes == [0] * RANKS
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# -- what is trained ---------------------------------------------------------------------------------------------------

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "vi": ("vi", {"same_draw": True}),
    "vi, absolute": ("vi", {"same_draw": True, "prior_sig": 0.3, "link": "exp", "init_sig": 0.05}),
    "mc_dropout": ("mc_dropout", {"same_draw": True, "p_drop": 0.2}),
    "sgld": ("sgld", {"prior_sig": 0.5, "thin": 3}),
    "la": ("la", {"prior_sig": 0.5}),
    "swag": ("swag", {"rank": 3}),
    "ensemble": ("ensemble", {}),
    "ivon": ("ivon", {}),
    "vanilla": ("vanilla", {}),
}


class Net(MLP):
    """An MLP with an embedding, whose padding row is fixed, and sizes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__(width=13)
        self.embed = nn.Embedding(7, 4, padding_idx=2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.embed(x[:, 0].abs().mul(3).long().clamp(max=6)))


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()


def share(*tensors: Tensor) -> tuple[Tensor, ...]:
    """This rank's part of a batch."""
    return tuple(t[rank() :: world()] for t in tensors) if world() > 1 else tensors


def build(kind: str) -> nn.Module:
    method, options = METHODS[kind]
    return bayesify(Net(), method, **options)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgld":
        return SGLD(model, 0.02, num_data=NUM_DATA, momentum=0.5)
    if kind == "ivon":
        return IVON(model, 0.1, num_data=NUM_DATA)
    optimizer = torch.optim.SGD(param_groups(model, 0.1), momentum=0.5)
    if kind == "ensemble":
        optimizer.cycles = Cycles(optimizer, model, steps=STEPS, seed=1)  # type: ignore[attr-defined]
    if kind == "swag":
        optimizer.cycles = Cycles(optimizer, model, steps=STEPS, start=0, cycles=STEPS // 4)  # type: ignore[attr-defined]
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    x, y = share(*data(number))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y) + penalty(model, NUM_DATA)
    loss.backward()
    optimizer.step()
    if hasattr(optimizer, "cycles"):
        optimizer.cycles.step()
    return loss.detach()


def train(model: nn.Module, kind: str, steps: int = STEPS) -> torch.optim.Optimizer:
    model.train()
    optimizer = optimizer_of(model, kind)
    for number in range(steps):
        step(model, optimizer, number)
    if kind == "la":
        fit_laplace(model, [share(*data(n)) for n in range(4)], same_data=False)
    return optimizer


def whole(tensor: Tensor) -> Tensor:
    """A tensor that all ranks can compare."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def posterior_of(model: nn.Module) -> dict[str, Tensor]:
    out = {}
    for name, posterior in named_posteriors(model):
        out[f"{name}.mean"], out[f"{name}.std"] = whole(posterior.mean), whole(posterior.std)
    return out


def results(model: nn.Module, kind: str) -> dict[str, Any]:
    """What is compared with one process: the posterior and its predictions."""
    return {
        "posterior": posterior_of(model),
        "predictions": predict(model, data(100)[0], samples=0 if kind == "vanilla" else 2, seed=3).logits,
        "penalty": whole(penalty(model, NUM_DATA)),
    }


def assert_close(first, second, tolerance=1e-6) -> None:
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)
