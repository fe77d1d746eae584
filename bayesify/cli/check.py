"""What this computer's engines compute, and what a training step costs: for a bug report, or before a long training.

Every engine is compared with the formulas in float64; steps are compared with plain SGD's, interleaved in one run.
"""

import inspect
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from bayesify.core.method import collected, gaussian
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
VECTORS = ("g", "m", "m0", "center", "theta", "v", "x", "average")  # arguments of formulas
POSITIVE = ("h", "scatter", "std", "rho")  # vectors too
NUMBERS = {"precision": 25.0, "strength": 6e4, "ratio": 2.0, "mu": 0.9, "start": 1.0, "warm": 0.5}  # others are 0.01
SIZE, START, SEED = 20_011, 4_097, (1 << 63) - 12345
AGREES = 10.0  # eps, of the larger of an element and the tensor's typical size: rounding, not a mistake
METHODS = ("vi", "mc_dropout", "vanilla", "sgld", "ivon")
REPEATS = 7
HOST = ("_unsafe_view", "is_same_size", "promote_types", "_record_function")  # operations that start nothing


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
    kinds = [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()]
    try:
        place = torch.device(device or next(iter(kinds), "cpu"))
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"there is no device {device!r} here; devices: {['cpu', *kinds]}") from error
    engines = [_engine(name, place) for name in tqdm(("torch", "numba", "triton"), "engines", disable=not progress)]
    cases = [(model, method) for model in MODELS for method in METHODS]
    steps = [_step(model, method, place) for model, method in tqdm(cases, "steps", disable=not progress)]
    return {"engines": engines, "steps": steps, "verdict": verdict(engines, steps, place)}


def verdict(engines: list[dict[str, Any]], steps: list[dict[str, Any]], place: torch.device) -> str:
    """Return what was found in one line."""
    used = {e["engine"]: e for e in engines if e["available"]}
    wrong = [name for name, e in used.items() if e["words_differ"] or not e["max_eps"] <= AGREES]
    if wrong:
        return f"WRONG NUMBERS from {', '.join(wrong)} on {place}: set BAYESIFY_ENGINE=torch, and report this output"
    if (engine := dispatch.chosen(place.type)) not in used:
        return f"right but slow on {place}: {engine} is not available, so torch's operations do its work"
    eps, ratio = max(e["max_eps"] for e in used.values()), max(s["ratio"] for s in steps)
    return f"ok on {place}: {', '.join(used)} agree within {eps:.1f} eps; steps take up to {ratio:.1f} x SGD's"


def shown(found: dict[str, Any]) -> str:
    """Return tables of what was found."""
    lines = [f"torch {torch.__version__}, {torch.get_num_threads()} threads", "engine  words differ  max error (eps)"]
    for e in found["engines"]:
        numbers = f"{e['words_differ']:12}  {e['max_eps']:15.1f}"
        lines.append(f"{e['engine']:7} {numbers if e['available'] else 'not available: ' + e['why']}")
    lines.append("model  method      engine  x SGD  launches  syncs  peak MB")
    for s in found["steps"]:
        peak = "-" if s["peak_bytes"] is None else f"{s['peak_bytes'] / 1e6:.0f}"
        row = f"{s['model']:6} {s['method']:11} {s['engine']:7} {s['ratio']:5.2f}"
        lines.append(f"{row}  {s['launches']:8}  {s['syncs']:5}  {peak:>7}")
    return "\n".join([*lines, found["verdict"]])


# -- engines -----------------------------------------------------------------------------------------------------------


def _engine(name: str, place: torch.device) -> dict[str, Any]:
    """Compare an engine with the formulas in float64."""
    found = {"engine": name, "available": False, "why": _missing(name, place), "words_differ": 0, "max_eps": 0.0}
    if found["why"]:
        return found
    with mock.patch.dict(os.environ, BAYESIFY_ENGINE=name):
        stream = Stream(SEED, 7, (SIZE,), device=place, start=START)
        out = torch.empty(SIZE, dtype=torch.int32, device=place)
        dispatch.run(dispatch.as_word, stream, (), (out,))
        wanted = dispatch.by_torch(dispatch.as_word, stream._replace(device="cpu"), (), torch.float32)[0]
        worst = max(_error(formula, stream, place) for formula in FORMULAS)
    return found | {"available": True, "words_differ": int((out.cpu() != wanted).sum()), "max_eps": round(worst, 2)}


def _missing(name: str, place: torch.device) -> str:
    """Return why an engine cannot be used on a device."""
    if name == "torch":
        return ""
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if (name == "numba") != (place.type == "cpu") and not interpreted:
        return f"it does not serve the device {place.type!r}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = dispatch.ready(name)
    return "" if found else str(caught[0].message) if caught else "it failed at its first use"


def _error(formula: Callable[..., Any], stream: Stream, place: torch.device) -> float:
    """Return the largest error of a formula, in eps of the larger of an element and the tensor's typical size."""
    generator, inputs = torch.Generator().manual_seed(0), list[Any]()
    for name in list(inspect.signature(formula).parameters)[bool(noise_of(formula)) :]:
        if name in (*VECTORS, *POSITIVE):
            x = torch.randn(SIZE, generator=generator)
            inputs.append(x.abs() + 0.1 if name in POSITIVE else x)
        else:
            inputs.append(NUMBERS.get(name, 0.01))
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
    steps = training(MODELS[model], None, place), training(MODELS[model], method, place)
    best, counts = [math.inf, math.inf], []
    for _ in range(REPEATS):
        for i, step in enumerate(steps):
            begun = time.perf_counter()
            step()
            if place.type != "cpu":
                getattr(torch, place.type).synchronize()
            best[i] = min(best[i], time.perf_counter() - begun)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in steps:
        with Counting() as count:
            step()
        counts.append(count)
    engine = dispatch.chosen(place.type)
    return {
        "model": model,
        "method": method,
        "engine": engine if engine == "torch" or dispatch.ready(engine) else "torch",
        "ratio": round(best[1] / best[0], 3),
        "launches": counts[1].launches - counts[0].launches,
        "syncs": counts[1].syncs - counts[0].syncs,
        "peak_bytes": torch.cuda.max_memory_allocated() if place.type == "cuda" else None,
    }


def training(make: Callable[[], Any], method: str | None, place: torch.device) -> Callable[[], None]:
    """Return a training step of a new classifier that has been made twice, when everything is compiled."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = (found.to(place) for found in make())
    y = torch.arange(len(x), device=place) % 10
    if method is not None:
        bayesify(model, method, include=[n for n, p in model.named_parameters() if p.requires_grad])
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
    """Counts what starts work on a device, our own kernels and custom operations too, and what waits for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = self.syncs = 0
        engines = [sys.modules[path] for path in dispatch.MODULES.values() if path in sys.modules]
        self.calls = [(e, way, vars(e)[way]) for e in engines for way in ("run", "run_all") if way in vars(e)]

    def __enter__(self) -> "Counting":
        for engine, way, call in self.calls:
            setattr(engine, way, self._counted(call))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for engine, way, call in self.calls:
            setattr(engine, way, call)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.launched(args)
            return call(*args)

        return counted

    def launched(self, given: Any) -> None:
        """Count a launch on some tensors, wherever they are in what is given."""
        self.launches += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = function(*args, **(kwargs or {})), function.__name__
        waits = "local_scalar" in name or "nonzero" in name
        moves = name.startswith("_to_copy") and str((kwargs or {}).get("device")) == "cpu"
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.syncs += bool((waits or moves) and any(t.device.type != "cpu" for t in given))
        views = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        if not (waits or views or "empty" in name or name.startswith(HOST)):
            self.launched((given, found))
        return found
