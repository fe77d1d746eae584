"""DistributedDataParallel on two processes: what one process gets, on every rank; nothing large travels per forward."""

import os
from functools import cache
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from cases import MLP, tensor
from ranks import METHODS, NUM_DATA, assert_close, build, data, posterior_of, results, share, step, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bayesify import SGLD, bayesify, calibrate, load, mix, penalty, predict, sample, samples, save

pytestmark = pytest.mark.filterwarnings("ignore:no batched rule")  # of the network's bare parameter
X = tensor(5, 4)
ITEMS = 11


def start(method: str, **options) -> nn.Module:
    torch.manual_seed(0)
    model = bayesify(MLP(), method, **options)
    torch.manual_seed(100 + ranks.rank())  # as in a script that seeds nothing
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
        model = start("vi", init_sig=0.3, same_draw=True)
        found["same_draw"] = torch.stack([model(X), model(X)])
    return found


def chain(inside: bool) -> dict:
    """Twenty steps of a chain that is given the model inside of DDP, or before there is one."""
    model = start("sgld", thin=1)
    sampler = None if inside else SGLD(model, 0.01, num_data=10)
    wrapped = DistributedDataParallel(model)
    sampler = sampler or SGLD(wrapped.module, 0.01, num_data=10)
    for _ in range(20):
        sampler.zero_grad()
        (wrapped(X).square().mean() + penalty(wrapped, 10)).backward()
        sampler.step()
    return dict(model.state_dict())


def trained(kind: str) -> dict:
    """Twenty steps, from weights that differ between the ranks until DDP wraps them."""
    torch.manual_seed(ranks.rank())
    model = build(kind)
    wrapped = DistributedDataParallel(model) if ranks.world() > 1 else model
    torch.manual_seed(7 + ranks.rank())
    train(wrapped, kind)
    found = results(model, kind)
    if ranks.world() > 1:  # one that is wrapped now has moments that could be sent
        found["sent"] = max((b.numel() for b in DistributedDataParallel(model).modules_buffers), default=0)
    return found


def calibrated() -> dict:
    """A factor found on the parts of the data, with labels and without."""
    found = {}
    for name, options in {"labels": {}, "target": {"target": 0.05}}.items():
        torch.manual_seed(0)
        model = bayesify(MLP(), "vi", prior_sig=0.3, init_sig=0.1)
        calibrate(model, [share(*data(n)) for n in range(3)], progress=False, **options)
        found[name] = next(p.calibration for _, p in ranks.named_posteriors(model))
    return found


def spread_data(shuffle: bool) -> dict:
    """A prediction whose data is read in parts."""
    torch.manual_seed(0)
    model = bayesify(MLP(), "vi", prior_sig=0.3, init_sig=0.1)
    x = tensor(ITEMS, 4)
    items = TensorDataset(x, torch.arange(ITEMS) % 3)
    sampler = DistributedSampler(items, shuffle=shuffle) if ranks.world() > 1 else None
    loader = DataLoader(items, batch_size=4, sampler=sampler)
    found = {}
    for task in ("classification", "regression"):
        out = predict(model, loader, samples=3, seed=1, task=task)
        found[task] = {"outputs": out.logits if task == "classification" else out.outputs, "labels": out.labels}
    return found


def mixed() -> dict:
    """A mixture of members that were trained on both ranks."""
    members = []
    for seed, kind in enumerate(("vanilla", "vi")):
        torch.manual_seed(seed)
        model = build(kind)
        torch.manual_seed(seed)
        train(DistributedDataParallel(model) if ranks.world() > 1 else model, kind, steps=3)
        members.append(model)
    torch.manual_seed(9 + ranks.rank())
    return {"unseeded": predict(mix(members), data(100)[0], samples=4).logits}


def saved(folder: Path) -> dict:
    """Rank 0 saves while the others wait; then all save into one folder at once."""
    torch.manual_seed(0)
    model = build("sgld")
    torch.manual_seed(7)
    train(DistributedDataParallel(model) if ranks.world() > 1 else model, "sgld")
    if ranks.rank() == 0:
        save(model, folder / "by one")
    if ranks.world() > 1:
        dist.barrier()
    save(model, folder / "by all")
    if ranks.world() > 1:
        dist.barrier()
    torch.manual_seed(0)
    return {name: posterior_of(load(ranks.Net(), folder / name)) for name in ("by one", "by all")}


def work(folder: Path) -> dict:
    return {
        "unseeded": unseeded(),
        **{kind: trained(kind) for kind in METHODS},
        "calibrated": calibrated(),
        "in order": spread_data(False),
        "shuffled": spread_data(True),
        "mixed": mixed(),
        "saved": saved(folder),
    }


def on_every_rank(folder: str) -> None:
    """What each process runs."""
    dist.init_process_group("gloo")
    found = work(Path(folder)) | {"inner": chain(True), "before": chain(False)}
    torch.save(found, Path(folder) / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    return ranks.gather(__file__, "on_every_rank", tmp_path_factory.mktemp("ranks"))


@cache
def alone(what, *args) -> dict:
    return what(*args)


@pytest.mark.parametrize("what", ["predict", "sample", "samples", "same_draw"])
def test_draws_without_a_seed_are_the_same_on_all_ranks(found: list[dict], what: str):
    assert torch.equal(*(rank["unseeded"][what] for rank in found))


def test_training_draws_differ_by_rank_and_by_forward(found: list[dict]):
    assert not torch.equal(*(rank["unseeded"]["training"] for rank in found))
    assert not torch.equal(*found[0]["unseeded"]["same_draw"])


@pytest.mark.parametrize("built", ["inner", "before"])
def test_chains_of_replicas_move_alike(found: list[dict], built: str):
    one, two = (rank[built] for rank in found)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", METHODS)
def test_two_ranks_train_what_one_process_does(found: list[dict], kind: str):
    # Natural steps: each process has running sums of its own, and one process takes one pass after another.
    tolerance = 5e-3 if kind == "vi" else 1e-6
    for rank in found:
        assert_close({k: v for k, v in rank[kind].items() if k != "sent"}, alone(trained, kind), tolerance)
    assert all(torch.equal(a, found[1][kind]["posterior"][n]) for n, a in found[0][kind]["posterior"].items())


@pytest.mark.parametrize("kind", METHODS)
def test_ddp_sends_nothing_of_the_weights_size_per_forward(found: list[dict], kind: str):
    assert all(rank[kind]["sent"] <= (2 if kind == "vi" else 1) for rank in found)  # two running sums of natural steps


@pytest.mark.parametrize("how", ["labels", "target"])
def test_every_rank_finds_the_factor_of_all_the_data(found: list[dict], how: str):
    assert 0 < found[0]["calibrated"][how] == found[1]["calibrated"][how] == alone(calibrated)[how]


@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_parts_of_a_prediction_are_put_together_in_order(found: list[dict], order: str):
    for rank in found:
        assert_close(rank[order], alone(spread_data, False))


def test_a_mixture_is_the_same_on_all_ranks(found: list[dict]):
    assert torch.equal(found[0]["mixed"]["unseeded"], found[1]["mixed"]["unseeded"])
    assert_close(found[0]["mixed"], alone(mixed), 5e-3)  # natural steps, as above


def test_rank_0_may_save_alone_and_all_may_save_at_once(found: list[dict], tmp_path: Path):
    for rank in found:
        assert_close(rank["saved"], alone(saved, tmp_path))


def test_one_step_moves_the_weights_by_more_than_the_tolerance():
    """The tests above could not fail otherwise."""
    torch.manual_seed(0)
    model = build("vi")
    before = posterior_of(model)
    step(model, ranks.optimizer_of(model, "vi"), 0)
    assert max(float((v - before[n]).abs().max()) for n, v in posterior_of(model).items()) > 1e-3
    assert NUM_DATA > 1
