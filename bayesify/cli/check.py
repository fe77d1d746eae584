"""What this computer's engines compute, and what a training step costs: for a bug report, or before a long training.

Every engine is compared with the formulas in float64; steps are compared with plain SGD's, interleaved in one run.
"""

import importlib.util
import inspect
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from bayesify.core.moments import collected, gaussian
from bayesify.core.penalty import penalty
from bayesify.core.prior import pulled, squares
from bayesify.core.wrap import bayesify
from bayesify.engine import dispatch
from bayesify.engine.noise import Stream
from bayesify.engine.writing import noise_of
from bayesify.methods import ivon, mc_dropout, sgld, vi

FORMULAS = [
    *(getattr(link, name) for link in vi.LINKS.values() for name in ("draw", "pull", "energy", "terms", "natural")),
    *(mc_dropout.choice, mc_dropout.masked, gaussian, collected, squares, pulled),
    *(sgld.descend, sgld.glide, sgld.kicked, sgld.kicked_glide),
    *(ivon.draw, ivon.terms, ivon.observe, ivon.drift, ivon.move, ivon.newton),
]
NUMBERS = {"precision": 25.0, "strength": 6e4, "ratio": 2.0, "mu": 0.9, "clip": 5.0, "start": 1.0, "warm": 0.5}
SMALL = 0.01  # of every other number
POSITIVE = ("h", "scatter", "std", "rho")
SIZE, START, SEED = 20_011, 4_097, (1 << 63) - 12345
AGREES = 10.0  # eps, of the larger of an element and the tensor's typical size: rounding, not a mistake
METHODS = ("vi", "mc_dropout", "vanilla", "sgld", "ivon")
REPEATS = 7


def run(device: str | None = None, *, as_json: bool = False) -> None:
    """Check the engines and the steps on a device, and print what was found.

    Args:
        device: Such as "cpu" or "cuda"; None is CUDA or XPU where there is one, else the CPU.
        as_json: Whether to print one JSON object instead of a table.
    """
    found = check(device, progress=not as_json)
    print(json.dumps(found) if as_json else shown(found))


def check(device: str | None = None, *, progress: bool = False) -> dict[str, Any]:
    """Return engines, steps and verdict.

    Raises:
        ValueError: There is no such device here.
    """
    place = _device(device)
    engines = [_engine(name, place) for name in tqdm(("torch", "numba", "triton"), "engines", disable=not progress)]
    cases = [(model, method) for model in MODELS for method in METHODS]
    steps = [_step(model, method, place) for model, method in tqdm(cases, "steps", disable=not progress)]
    return {"engines": engines, "steps": steps, "verdict": verdict(engines, steps, place)}


def _device(name: str | None) -> torch.device:
    kinds = [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()]
    try:
        place = torch.device(name or next(iter(kinds), "cpu"))
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"there is no device {name!r} here; devices: {['cpu', *kinds]}") from error
    return place


def verdict(engines: list[dict[str, Any]], steps: list[dict[str, Any]], place: torch.device) -> str:
    """Return what was found in one line."""
    used = [e for e in engines if e["available"]]
    wrong = [e["engine"] for e in used if e["words_differ"] or not e["max_eps"] <= AGREES]
    if wrong:
        return f"WRONG NUMBERS from {', '.join(wrong)} on {place}: set BAYESIFY_ENGINE=torch, and report this output"
    engine = dispatch.chosen(place.type)
    if engine != "torch" and engine not in {e["engine"] for e in used}:
        return f"right but slow on {place}: {engine} is not available, so torch's operations do its work"
    ratio = max(s["ratio"] for s in steps)
    eps = max(e["max_eps"] for e in used)
    names = ", ".join(e["engine"] for e in used)
    return f"ok on {place}: {names} agree within {eps:.1f} eps; steps take up to {ratio:.1f} x SGD's"


def shown(found: dict[str, Any]) -> str:
    """Return tables of what was found."""
    lines = [
        f"torch {torch.__version__}, {torch.get_num_threads()} threads",
        "engine  words differ  largest error (eps)",
    ]
    for e in found["engines"]:
        lines.append(
            f"{e['engine']:7} {e['words_differ']:12}  {e['max_eps']:19.1f}"
            if e["available"]
            else f"{e['engine']:7} not available: {e['why']}"
        )
    lines.append("model  method      engine  x SGD  launches  syncs  peak MB")
    for s in found["steps"]:
        peak = "-" if s["peak_bytes"] is None else f"{s['peak_bytes'] / 1e6:.0f}"
        row = f"{s['model']:6} {s['method']:11} {s['engine']:7} {s['ratio']:5.2f}"
        lines.append(f"{row}  {s['launches']:8}  {s['syncs']:5}  {peak}")
    return "\n".join([*lines, found["verdict"]])


# -- engines -----------------------------------------------------------------------------------------------------------


def _engine(name: str, place: torch.device) -> dict[str, Any]:
    """Compare an engine with the formulas in float64."""
    why = _missing(name, place)
    if why:
        return {"engine": name, "available": False, "why": why, "words_differ": 0, "max_eps": 0.0}
    differ, worst = 0, 0.0
    with _forced(name):
        stream = Stream(SEED, 7, (SIZE,), device=place, start=START)
        out = torch.empty(SIZE, dtype=torch.int32, device=place)
        dispatch.run(dispatch.as_word, stream, (), (out,))
        wanted = dispatch.by_torch(dispatch.as_word, stream._replace(device="cpu"), (), torch.float32)[0]
        differ = int((out.cpu() != wanted).sum())
        for formula in FORMULAS:
            worst = max(worst, _error(formula, stream, place))
    return {"engine": name, "available": True, "why": "", "words_differ": differ, "max_eps": round(worst, 2)}


def _missing(name: str, place: torch.device) -> str:
    """Return why an engine cannot be used on a device."""
    if name == "torch":
        return ""
    if importlib.util.find_spec(name) is None:
        return f"{name} is not installed"
    if (name == "numba") != (place.type == "cpu") and not (
        name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    ):
        return f"it does not serve the device {place.type!r}"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = dispatch.ready(name)
    return "" if found is not None else str(said[0].message) if said else "it failed at its first use"


@contextmanager
def _forced(name: str) -> Iterator[None]:
    before = os.environ.get("BAYESIFY_ENGINE")
    os.environ["BAYESIFY_ENGINE"] = name
    try:
        yield
    finally:
        del os.environ["BAYESIFY_ENGINE"]
        if before is not None:
            os.environ["BAYESIFY_ENGINE"] = before


def _error(formula: Callable[..., Any], stream: Stream, place: torch.device) -> float:
    """Return the largest error of a formula, in eps of the larger of an element and the tensor's typical size."""
    generator, noise = torch.Generator().manual_seed(0), noise_of(formula)
    inputs: list[Any] = []
    for name in list(inspect.signature(formula).parameters)[bool(noise) :]:
        if name in ("lr", "size", "fresh", "delta", "pull", "rate", "factor", "scale", "keep", "add", *NUMBERS) or (
            name in ("first", "second", "third")
        ):
            inputs.append(NUMBERS.get(name, SMALL))
        else:
            x = torch.randn(SIZE, generator=generator)
            inputs.append(x.abs() + 0.1 if name in POSITIVE else x)
    here = stream._replace(device="cpu", dtype=torch.float64)
    wide = [x.double() if isinstance(x, Tensor) else x for x in inputs]
    exact = dispatch.by_torch(formula, here, wide, torch.float64, 0.1)
    outs = [torch.empty(SIZE, device=place) for _ in exact]
    dispatch.run(formula, stream, [x.to(place) if isinstance(x, Tensor) else x for x in inputs], outs, p_drop=0.1)
    errors = [
        (out.cpu().double() - e).abs() / torch.maximum(e.abs(), e.square().mean().sqrt())
        for out, e in zip(outs, exact, strict=True)
    ]
    return max(float(e.nan_to_num(nan=math.inf).max()) for e in errors) / torch.finfo(torch.float32).eps


# -- steps -------------------------------------------------------------------------------------------------------------


def _vit() -> tuple[nn.Module, Tensor]:
    """Return a small vision transformer on patches, and a batch."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(192, 128), nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(16 * 128, 10))
    return model, torch.randn(16, 16, 192)


class _Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(256, 256).requires_grad_(False)
        self.down, self.up = nn.Linear(256, 8, bias=False), nn.Linear(8, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the corrected output."""
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def _lora() -> tuple[nn.Module, Tensor]:
    """Return twelve adapted layers and a batch."""
    return nn.Sequential(*(_Adapted() for _ in range(12)), nn.Linear(256, 10)), torch.randn(64, 256)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"vit": _vit, "lora": _lora}


def _step(model: str, method: str, place: torch.device) -> dict[str, Any]:
    """Compare a method's training step with plain SGD's."""
    plain, ours = _training(model, None, place), _training(model, method, place)
    best = [math.inf, math.inf]
    for _ in range(REPEATS):
        for i, step in enumerate((plain, ours)):
            begun = time.perf_counter()
            step()
            if place.type != "cpu":
                getattr(torch, place.type).synchronize()
            best[i] = min(best[i], time.perf_counter() - begun)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    counts = []
    for step in (plain, ours):
        with counting() as count:
            step()
        counts.append(count)
    return {
        "model": model,
        "method": method,
        "engine": dispatch.chosen(place.type) if place.type == "cpu" or dispatch.ready("triton") else "torch",
        "ratio": round(best[1] / best[0], 3),
        "launches": counts[1].launches - counts[0].launches,
        "syncs": counts[1].syncs - counts[0].syncs,
        "peak_bytes": torch.cuda.max_memory_allocated() if place.type == "cuda" else None,
    }


def _training(name: str, method: str | None, place: torch.device) -> Callable[[], None]:
    """Return a training step that has been made twice, when everything is compiled."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = MODELS[name]()
        model, x, y = model.to(place), x.to(place), torch.randint(10, (len(x),)).to(place)
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        if method is not None:
            bayesify(model, method, include=trained)
        kinds: dict[str | None, Any] = {"sgld": sgld.SGLDOptimizer, "ivon": ivon.IVONOptimizer}
        if method in kinds:
            optimizer = kinds[method](model, lr=1e-3, num_data=1000)
        else:
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if method is not None:
            loss = loss + penalty(model, num_data=1000)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with torch.random.fork_rng():
        for _ in range(2):
            step()
    return step


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that start work on a device, custom ones too, and those that wait for it."""

    FREE = ("view", "reshape", "detach", "t.", "transpose", "permute", "expand", "empty", "slice", "select", "alias",
            "unbind", "split", "unsqueeze", "squeeze", "as_strided", "is_same_size")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = self.syncs = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = function(*args, **(kwargs or {})), function.__name__
        waits = "local_scalar" in name or "nonzero" in name
        moves = name.startswith("_to_copy") and str((kwargs or {}).get("device")) == "cpu"
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.syncs += bool((waits or moves) and any(t.device.type != "cpu" for t in given))
        self.launches += not waits and not any(name.startswith(free) or f"_{free}" in name for free in self.FREE)
        return found


@contextmanager
def counting() -> Iterator[Counting]:
    """Count operations, and launches of our own kernels."""
    found: list[Any] = [dispatch.ready(name) for name in ("numba", "triton") if name in dispatch.in_use()]
    mode = Counting()
    before = [(engine, engine.launch) for engine in found if engine is not None]

    def wrapped(launch: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            mode.launches += 1
            return launch(*args, **kwargs)

        return count

    try:
        for engine, launch in before:
            engine.launch = wrapped(launch)
        with mode:
            yield mode
    finally:
        for engine, launch in before:
            engine.launch = launch
