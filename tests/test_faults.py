"""One of two processes dies: the other ends with an error in time, and a restart goes on as if nothing had been."""

import os
import time
from datetime import timedelta
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from ranks import build, optimizer_of, posterior_of, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bayesify import bayesify, load, save

LAST, KEPT, DEADLY = 10, 4, 6
TIMEOUT = 60  # seconds that a process waits for the others


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return bayesify(ranks.Net(), "vi", prior_sig=0.3, init_sig=0.05) if kind == "own draws" else build(kind)


def train(kind: str, folder: Path, *, begin: int = 0, die: bool = False) -> dict:
    """Train from a step to the last, with a checkpoint on the way; every rank has draws of its own."""
    model = model_of(kind)
    wrapped = DistributedDataParallel(model).train()
    torch.manual_seed(7 + ranks.rank())
    optimizer = optimizer_of(wrapped, kind)
    own = folder / f"{kind} {ranks.rank()}.pt"
    if begin:
        load(model, folder / kind)
        state = torch.load(own)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generator"])
    for number in range(begin, LAST):
        if number == KEPT and not begin:
            if ranks.rank() == 0:
                save(model, folder / kind)
            torch.save({"optimizer": optimizer.state_dict(), "generator": torch.get_rng_state()}, own)
            dist.barrier()
        if number == DEADLY and die and ranks.rank() == 1:
            os._exit(9)
        step(wrapped, optimizer, number)
    return posterior_of(model)


def dies(folder: str) -> None:
    """What each process runs at first."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    train("own draws", Path(folder), die=True)


def goes_on(folder: str) -> None:
    """What each process runs after that."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    found = {}
    for kind in ("own draws", "sgld", "ivon"):
        place = Path(folder) / "at once"
        place.mkdir(exist_ok=True)
        found[kind] = [train(kind, place)]
        found[kind] += [train(kind, Path(folder) if kind == "own draws" else place, begin=KEPT)]
    torch.save(found, Path(folder) / f"{ranks.rank()}.pt")
    dist.destroy_process_group()


def test_a_restart_after_a_death_goes_on_exactly(tmp_path):
    start = time.monotonic()
    codes = ranks.run(__file__, "dies", tmp_path)
    assert codes[1] == 9
    assert codes[0] not in (0, None)
    assert time.monotonic() - start < 8 * TIMEOUT  # a busy machine starts slowly
    for rank in ranks.gather(__file__, "goes_on", tmp_path):
        for kind, (at_once, resumed) in rank.items():
            for name, value in at_once.items():
                assert torch.equal(value, resumed[name]), (kind, name)
