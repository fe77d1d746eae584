"""FSDP2 on two processes, with its default resharding: what one process gets, of state that is cut in two."""

import json
import os
import runpy
import weakref
from functools import cache
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import (
    METHODS,
    NUM_DATA,
    RANKS,
    assert_close,
    build,
    data,
    optimizer_of,
    posterior_of,
    share,
    step,
    train,
    whole,
)
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify import (
    bayesify,
    calibrate,
    fit_laplace,
    load,
    mean,
    named_posteriors,
    penalty,
    predict,
    sample,
    save,
    unbayesify,
)

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:no batched rule")  # of the network's bare parameter


def shard(model: nn.Module, **options) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (model.inp, model.out):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def held(kind: str) -> int:
    """The bytes that a process holds of all posteriors: means, spreads, prior means and moments."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    method, options = METHODS[kind]
    x = torch.randn(16, 32)
    model = bayesify(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)), method, **options).train()
    if kind == "la":
        fit_laplace(model, [(x, torch.arange(16))], same_data=True)
    if ranks.world() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = optimizer_of(model, kind)
    for _ in range(4):
        (model(x).square().mean() + penalty(model, NUM_DATA)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(optimizer, "cycles"):
            optimizer.cycles.step()
    tensors = [t for _, p in named_posteriors(model) for t in (p.original, *p.state().values())]
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)


def trained(kind: str, folder: str) -> dict:
    """Twenty steps; then predictions, a fixed theta, files."""
    torch.manual_seed(0)
    model = build(kind)
    if ranks.world() > 1:
        shard(model)
    torch.manual_seed(7 + ranks.rank())
    train(model, kind)
    found = {"posterior": posterior_of(model), "penalty": whole(penalty(model, NUM_DATA))}
    if kind != "vanilla":
        found["predictions"] = predict(model, data(100)[0], samples=2, seed=3).logits
        with sample(model, seed=3), torch.no_grad():
            found["thetas"] = {name: whole(p(p.original)) for name, p in named_posteriors(model)}
    with mean(model.train()), torch.no_grad():
        found["mean"] = model(data(100)[0])
    save(model, Path(folder) / kind)
    other = build(kind)
    if ranks.world() > 1:
        dist.barrier()
        shard(other)
    found["loaded"] = posterior_of(load(other, Path(folder) / kind))
    return found


def partly(kind: str) -> dict:
    """A model of which one layer is sharded: all processes see the same data, so that the rest stays equal as well."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    method, options = METHODS[kind]
    torch.manual_seed(0)
    model = bayesify(ranks.Net(), method, **options).train()
    if ranks.world() > 1:
        fully_shard(model.out, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = optimizer_of(model, kind)
    torch.manual_seed(7)
    for number in range(5):
        x, y = data(number)
        (F.cross_entropy(model(x), y) + penalty(model, NUM_DATA)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"posterior": posterior_of(model), "penalty": whole(penalty(model, NUM_DATA))}


def train_map(model: nn.Module) -> None:
    optimizer = optimizer_of(model.train(), "la")
    for number in range(ranks.STEPS):
        step(model, optimizer, number)


def fitted() -> dict:
    """A Laplace posterior that was fitted whole, and sharded then."""
    torch.manual_seed(0)
    model = fit_laplace(build("la"), [data(n) for n in range(4)], same_data=True)
    if ranks.world() > 1:
        shard(model)
    found = {"predictions": predict(model, data(100)[0], samples=2, seed=3).logits, "posterior": posterior_of(model)}
    calibrate(model, [share(*data(n)) for n in range(2)], progress=False)
    return found | {"factor": next(p.calibration for _, p in named_posteriors(model))}


FITS = {
    "diagonal, relative": ({}, {}),
    "ggn": ({"prior_sig": 0.5}, {"curvature": "ggn"}),
    "kron": ({"prior_sig": 0.5}, {"structure": "kron"}),
    "last layer": ({"prior_sig": 0.5}, {"structure": "kron", "include": "out*", "tune": "self"}),
    "last layer, diagonal": ({"prior_sig": 0.5}, {"include": "out*", "tune": "self"}),
}


def fits() -> dict:
    """Laplace posteriors of a sharded model; where no scale is searched for, parts may be uneven."""
    found = {}
    for name, (options, how) in FITS.items():
        torch.manual_seed(0)
        model = bayesify(ranks.Net(), "la", **options)
        batches = [data(n) for n in range(5 if options and "tune" not in how else 4)]
        if ranks.world() > 1:
            shard(model)
            batches = batches[ranks.rank() :: RANKS]
        torch.manual_seed(5)
        fit_laplace(model, batches, same_data=False, **how)
        found[name] = {
            "posterior": posterior_of(model),
            "scale": [q.fitted_sig for _, q in named_posteriors(model)],
            "predictions": predict(model, data(100)[0], seed=3).logits,
        }
        loss = F.cross_entropy(model.train()(share(*data(0))[0]), share(*data(0))[1])  # training goes on
        loss.backward()
        found[name]["gradients"] = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    return found


def own_draws() -> dict:
    """One step without same_draw: every rank has a theta of its own."""
    torch.manual_seed(0)
    model = shard(bayesify(ranks.Net(), "vi", prior_sig=0.3, init_sig=0.1))
    torch.manual_seed(3)
    return {"outputs": model(data(0)[0]).detach()}


def resumed(kind: str, folder: str) -> dict:
    """Six steps at once, and three with a distributed checkpoint after them, which a new model goes on from."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    found = []
    for stops in (False, True):
        torch.manual_seed(0)
        model = shard(build(kind))
        torch.manual_seed(7)
        optimizer = optimizer_of(model.train(), kind)
        for number in range(6):
            if stops and number == 3:
                place, generator = Path(folder) / f"dcp {kind}", torch.get_rng_state()
                kept = get_state_dict(model, optimizer)
                schedule = optimizer.cycles.state_dict() if hasattr(optimizer, "cycles") else None
                dcp.save({"model": kept[0], "optimizer": kept[1]}, checkpoint_id=place)
                torch.manual_seed(5)
                model = shard(build(kind)).train()
                optimizer = optimizer_of(model, kind)
                room = get_state_dict(model, optimizer)
                state = {"model": room[0], "optimizer": room[1]}
                dcp.load(state, checkpoint_id=place)
                options = StateDictOptions(strict=False)  # SGD without momentum has no state
                found_states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
                set_state_dict(model, optimizer, **found_states, options=options)
                if schedule is not None:
                    optimizer.cycles.load_state_dict(schedule)
                torch.set_rng_state(generator)
            step(model, optimizer, number)
        found.append(posterior_of(model))
    return {"at once": found[0], "resumed": found[1]}


def low_precision(kind: str) -> dict:
    """Steps in bfloat16, with the posterior in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    torch.manual_seed(0)
    model = build(kind)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if ranks.world() > 1:
        shard(model, mp_policy=policy)
    torch.manual_seed(7 + ranks.rank())
    if kind == "la":
        train_map(model)
    else:
        train(model, kind)
    dtypes = {str(t.dtype) for _, p in named_posteriors(model) for t in (p.original, *p.state().values()) if t.dim()}
    return {"dtypes": dtypes, "posterior": posterior_of(model)}


def errors() -> dict:
    """What cannot be done says so."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def told(work) -> str:
        try:
            work()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "nothing"

    model = shard(build("la"))
    plain = shard(ranks.Net())
    columns = bayesify(nn.Linear(4, 4), "vi")
    fully_shard(columns, mesh=init_device_mesh("cpu", (RANKS,)), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    return {
        "unbayesify": told(lambda: unbayesify(model)),
        "bayesify": told(lambda: bayesify(plain, "vi")),
        "columns": told(lambda: columns(torch.ones(2, 4))),
        "bare read": told(lambda: shard(build("vi")).train().inp.weight),
        "seeds": told(lambda: predict(shard(build("vi")), data(0)[0], samples=2, seed=ranks.rank())),
    }


def thetas_in_graph(method: str, *, remade: bool) -> list[int]:
    """How many thetas are drawn in a forward, are still there after it, and are drawn again in backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from bayesify.core.distributed import Remaking
    from bayesify.core.posterior import Posterior

    mesh = init_device_mesh("cpu", (RANKS,))
    model = bayesify(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))), method)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).train()
    drawn, drawn_of, add = [], Posterior.drawn, Remaking.add

    def noted(posterior: Posterior, original: Tensor, seed: int) -> Tensor:
        theta = drawn_of(posterior, original, seed)
        drawn.append(weakref.ref(theta))
        return theta

    Posterior.drawn = noted
    if not remade:
        Remaking.add = lambda *args: None
    try:
        out = model(torch.ones(2, 8, requires_grad=True))
        found = [len(drawn), sum(theta() is not None for theta in drawn)]
        out.sum().backward()
    finally:
        Posterior.drawn, Remaking.add = drawn_of, add
    return [*found, len(drawn) - found[0]]


def on_every_rank(folder: str) -> None:
    """What each process runs."""
    dist.init_process_group("gloo")
    found = {kind: trained(kind, folder) for kind in METHODS}
    found |= {f"held {kind}": held(kind) for kind in METHODS}
    found |= {f"partly {kind}": partly(kind) for kind in ("vi", "ivon")}
    found |= {"fitted": fitted(), "fits": fits(), "own": own_draws(), "errors": errors()}
    found |= {f"resumed {kind}": resumed(kind, folder) for kind in ("vi", "sgld", "swag", "ivon")}
    found |= {f"bfloat16 {kind}": low_precision(kind) for kind in METHODS}
    found["kept"] = {(m, r): thetas_in_graph(m, remade=r) for m in ("vi", "mc_dropout") for r in (True, False)}
    torch.save(found, Path(folder) / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    return ranks.gather(__file__, "on_every_rank", tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("alone"))
    return cache(lambda what, *args: what(*args, folder) if what is trained else what(*args))


@pytest.mark.parametrize("kind", METHODS)
def test_two_shards_train_what_one_process_does(found: list[dict], alone, kind: str):
    wanted = alone(trained, kind)
    # Natural steps: each process has running sums of its own, and one process takes one pass after another.
    tolerance = 5e-3 if kind == "vi" else 1e-6
    for rank in found:
        assert_close(rank[kind], wanted, tolerance)


@pytest.mark.parametrize("kind", ["vi", "ivon"])
def test_a_partly_sharded_model_trains_as_a_whole_one(found: list[dict], alone, kind: str):
    wanted = alone(partly, kind)
    for rank in found:
        assert_close(rank[f"partly {kind}"], wanted)


@pytest.mark.parametrize("kind", METHODS)
def test_a_process_holds_half_of_the_state(found: list[dict], alone, kind: str):
    for rank in found:
        assert rank[f"held {kind}"] <= 0.55 * alone(held, kind)


def test_a_fit_that_is_sharded_predicts_the_same(found: list[dict], alone):
    wanted = alone(fitted)
    for rank in found:
        assert_close(rank["fitted"], wanted)


@pytest.mark.parametrize("how", FITS)
def test_a_sharded_model_is_fitted_as_a_whole_one(found: list[dict], alone, how: str):
    for rank in found:
        assert_close(rank["fits"][how], alone(fits)[how], tolerance=1e-4 if how == "kron" else 1e-5)


def test_training_draws_differ_by_rank(found: list[dict]):
    assert not torch.equal(found[0]["own"]["outputs"], found[1]["own"]["outputs"])


@pytest.mark.parametrize("kind", ["vi", "sgld", "swag", "ivon"])
def test_a_distributed_checkpoint_goes_on_as_if_nothing_had_been(found: list[dict], kind: str):
    tolerance = 5e-2 if kind == "vi" else 1e-7  # of natural steps, the checkpoint holds one process's running sums
    for rank in found:
        assert_close(rank[f"resumed {kind}"]["resumed"], rank[f"resumed {kind}"]["at once"], tolerance)


@pytest.mark.parametrize("kind", METHODS)
def test_bfloat16_computes_with_a_posterior_in_float32(found: list[dict], alone, kind: str):
    exact, (one, two) = alone(trained, kind)["posterior"], (rank[f"bfloat16 {kind}"] for rank in found)
    assert one["dtypes"] == {"torch.float32"}
    assert all(torch.equal(a, two["posterior"][name]) for name, a in one["posterior"].items())
    for name, value in one["posterior"].items():
        if kind != "la" or not name.endswith(".std"):  # steps make no spread by Laplace, a fit does
            assert float((value - exact[name]).abs().max()) < 0.05, name
    assert any(bool((value != value.bfloat16()).any()) for value in one["posterior"].values())


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_a_graph_keeps_seeds_and_no_thetas(found: list[dict], method: str):
    for rank in found:
        assert rank["kept"][method, True] == [4, 0, 4]
        assert rank["kept"][method, False] == [4, 4, 0]  # the count would notice them


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unbayesify", "unbayesify it before fully_shard, or save"),
        ("bayesify", "call bayesify first, then fully_shard"),
        ("columns", "leave out fully_shard's shard_placement_fn"),
        ("bare read", "is sharded now"),
        ("seeds", "the same seed on all processes"),
    ],
)
def test_what_cannot_be_done_is_an_error(found: list[dict], what: str, message: str):
    assert all(message in rank["errors"][what] for rank in found)


def test_the_loss_is_not_flat():
    """The tests above could not fail otherwise."""
    torch.manual_seed(0)
    model = build("vi, absolute").train()
    x, y = data(0)
    with torch.no_grad():
        assert float(F.cross_entropy(model(x), y)) != float(F.cross_entropy(model(x), y))


def example(folder: str) -> None:
    """What each process runs of the page about several devices."""
    script = runpy.run_path(str(ROOT / "examples" / "bytes_per_process.py"))
    torch.save(script["measure"](), Path(folder) / f"{ranks.rank()}.pt")
    dist.barrier()  # a process that leaves early may end another one that still talks
    dist.destroy_process_group()


def test_a_process_holds_what_the_page_says(tmp_path: Path):
    said = json.loads((ROOT / "docs" / "results" / "bytes.json").read_text())
    assert ranks.gather(__file__, "example", tmp_path) == [said[str(RANKS)]] * RANKS
