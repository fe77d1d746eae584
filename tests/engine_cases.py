"""Formulas with arguments on which all engines must agree, and what an engine makes of them.

`python engine_cases.py FILE` writes the results of the engine that the environment names: Triton's interpreter needs a
process of its own.
"""

import sys
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from bayesify.engine import dispatch, generator
from bayesify.engine.noise import Stream, name_key

DOUBLE = ("draw softplus", "pull softplus, tensor", "terms softplus, tensor", "functions")
SEED = (1 << 63) - 12345
SIZES = [(1, 0), (4095, 0), (4096, 0), (4097, 0), (8191, 0), (8192, 0), (8193, 0)]
FULL = [(1, 0), (4097, 0)]  # all formulas; at other sizes one of each kind
EVERYWHERE = ("draw softplus", "mask", "terms softplus, number")
SHARDS = [(1, 8191), (4097, 4095), (3000, (1 << 45) + 77)]


class Case(NamedTuple):
    """A call of `dispatch.run`, or of `dispatch.total` where there are no outputs.

    `places` are the inputs that are overwritten; `size` is the formula with every term positive, whose rounding is what
    an engine may be off by.
    """

    formula: object
    inputs: tuple
    size: object
    places: tuple = ()
    sums: bool = False
    p_drop: float = 0.0


def draw(std):
    def draw(eps, m, rho):
        return m + eps * std(rho)

    return draw


def pull(std, slope):
    def pull(eps, g, m, rho, m0, kappa, precision):
        s = std(rho)
        return g + kappa * precision * (m - m0), (g * eps + kappa * precision * s - kappa / s) * slope(rho, s)

    return pull


def pull_size(std, slope, eps, g, m, rho, m0, kappa, precision):
    s = std(rho)
    spread = (g.abs() * abs(eps) + kappa * precision * s + kappa / s) * slope(rho, s)
    return g.abs() + kappa * precision * (m.abs() + abs(m0)), spread


def terms(std, log_std):
    def terms(m, rho, m0):
        s = std(rho)
        return (m - m0) ** 2, s * s, log_std(rho, s)

    return terms


def clamp(rho):
    return torch.where(rho < 1e-8, 1e-8 + (rho - rho.detach()), rho)


def slope_softplus(rho, s):
    return torch.sigmoid(rho)


def slope_exp(rho, s):
    return s


def slope_clamp(rho, s):
    return 1.0


def log_s(rho, s):
    return torch.log(s)


def log_is_rho(rho, s):
    return rho


LINKS = {
    "softplus": (F.softplus, slope_softplus, log_s),
    "exp": (torch.exp, slope_exp, log_is_rho),
    "clamp": (clamp, slope_clamp, log_s),
}
DRAWS = {name: draw(std) for name, (std, _, _) in LINKS.items()}
PULLS = {name: pull(std, slope) for name, (std, slope, _) in LINKS.items()}
TERMS = {name: terms(std, log) for name, (std, _, log) in LINKS.items()}


def choice(keep, m, m0):
    return torch.where(keep, m, m0)


def masked_pull(keep, g, m, m0, factor):
    return torch.where(keep, g, 0.0) + factor * (m - m0)


def momentum(eps, theta, v, g, lr, size, mu):
    v = mu * v - lr * g + size * eps
    return theta + v, v


def momentum_size(eps, theta, v, g, lr, size, mu):
    v = mu * v.abs() + lr * g.abs() + size * eps.abs()
    return theta.abs() + v, v


def welford(x, average, scatter, rate, keep, add):
    away = x - average
    return average + rate * away, keep * scatter + add * away**2


def observe(eps, g, h, strength, delta):
    each = g * torch.rsqrt(strength * (h + delta))
    return each * eps, each * each


def functions(x):
    return torch.exp(x), torch.sigmoid(x), torch.clamp(x, min=-1.0, max=5.0), torch.log(abs(x)), -x


def cases(n: int) -> dict[str, Case]:
    """Return the cases of one size."""
    g = torch.Generator().manual_seed(n)
    m, v, grad, c = (torch.randn(n, generator=g) for _ in range(4))
    rho, h, scatter = torch.randn(n, generator=g) * 2 - 4, torch.rand(n, generator=g) * 100, torch.rand(n, generator=g)
    found = {}
    for link, (std, slope, _) in LINKS.items():
        r = rho if link != "clamp" else rho.abs() - 0.5
        size = partial(lambda std, eps, m, rho: m.abs() + eps.abs() * std(rho), std)
        found[f"draw {link}"] = Case(DRAWS[link], (m, r), size)
        centers = {"number": 0.25, "tensor": c} | ({"0-dim": torch.tensor(0.25)} if link == "softplus" else {})
        for kind, center in centers.items():
            inputs = (grad, m, r, center, 1e-2, 25.0)
            found[f"pull {link}, {kind}"] = Case(PULLS[link], inputs, partial(pull_size, std, slope))
            found[f"terms {link}, {kind}"] = Case(TERMS[link], (m, r, center), None, sums=True)
    found["mask"] = Case(choice, (m, c), lambda keep, m, m0: m.abs() + m0.abs(), p_drop=0.1)
    found["mask, number"] = Case(choice, (m, 0.5), lambda keep, m, m0: m.abs() + 1, p_drop=0.1)
    size = lambda keep, g, m, m0, f: g.abs() + f * (m.abs() + m0.abs())  # noqa: E731
    found["masked pull"] = Case(masked_pull, (grad, m, c, 0.01), size, p_drop=0.3)
    found["momentum"] = Case(momentum, (m, v, grad, 1e-2, 3e-3, 0.9), momentum_size, places=(0, 1))
    size = lambda x, a, s, r, k, q: (x.abs() + a.abs(), k * s + q * (x.abs() + a.abs()) ** 2)  # noqa: E731
    found["welford"] = Case(welford, (m, v, scatter, 0.1, 0.9, 0.09), size, places=(1, 2))
    found["sums with noise"] = Case(observe, (grad, h, 6e4, 1e-3), None, sums=True)
    size = lambda x: (x.exp(), x.sigmoid(), x.abs() + 1, 1 + x.abs().log().abs(), x.abs())  # noqa: E731
    found["functions"] = Case(functions, (m * 3,), size)
    return found


def made(case: Case, stream: Stream, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return what an engine makes of a case."""
    vectors = [x.dim() and x.is_floating_point() if isinstance(x, torch.Tensor) else False for x in case.inputs]
    inputs = [x.to(dtype, copy=True) if v else x for x, v in zip(case.inputs, vectors, strict=True)]
    if case.sums:
        return list(dispatch.total(case.formula, inputs, stream, p_drop=case.p_drop))
    outputs = [inputs[p] for p in case.places]
    if not outputs:
        first = next(x for x, v in zip(inputs, vectors, strict=True) if v)
        outputs = [torch.empty_like(first) for _ in exact(case, stream)]
    dispatch.run(case.formula, stream, inputs, outputs, p_drop=case.p_drop)
    return outputs


def double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def exact(case: Case, stream: Stream) -> tuple[torch.Tensor, ...]:
    """Return what a case is in float64, by torch's operations."""
    inputs = [double(x) for x in case.inputs]
    found = dispatch.by_torch(case.formula, stream, inputs, torch.float64, case.p_drop)
    return tuple(x.sum() for x in found) if case.sums else found


def sizes(case: Case, stream: Stream) -> tuple[torch.Tensor, ...]:
    """Return the size of the terms whose rounding counts."""
    inputs = [double(x) for x in case.inputs]
    if case.sums:
        found = dispatch.by_torch(case.formula, stream, inputs, torch.float64, case.p_drop)
        return tuple(x.abs().sum() for x in found)
    kind = dispatch.noise_of(case.formula)
    noise = [] if kind is None else [generator.tensor(kind, stream, torch.float64, case.p_drop)]
    noise = [x.abs() + 1 if kind == "eps" else x for x in noise]
    return dispatch.several(case.size(*noise, *inputs))


def stream_of(n: int, start: int) -> Stream:
    return Stream(SEED, name_key("blocks.0.weight"), (n,), torch.float32, "cpu", start)


def results() -> dict:
    """Return all that an engine makes: the cases, the words, and a group of tensors in one launch."""
    found = {}
    for n, start in SIZES + SHARDS:
        found["words", n, start] = [stream_of(n, start).words()]
        for name, case in cases(n).items():
            if (n, start) not in FULL and name not in EVERYWHERE:
                continue
            found[name, n, start] = made(case, stream_of(n, start))
            if n == 4097 and start == 0 and name in DOUBLE:
                found[f"{name}, float64", n, start] = made(case, stream_of(n, start), torch.float64)
    places = [(7, 0), (4500, 0), (4096, 3), (1, 9)]
    streams = [Stream(99, name_key(f"w{i}"), (n,), start=start) for i, (n, start) in enumerate(places)]
    inputs = [cases(n)["draw softplus"].inputs for n, _ in places]
    for turn in range(2):
        outputs = [torch.empty_like(m) for m, _ in inputs]
        jobs = [dispatch.Job(DRAWS["softplus"], *x, (y,)) for *x, y in zip(streams, inputs, outputs, strict=True)]
        dispatch.run_all(jobs)
        streams = [s._replace(seed=100) for s in streams]
        found["many", turn] = outputs
    for y, s, x in zip(outputs, streams, inputs, strict=True):
        alone = torch.empty_like(y)
        dispatch.run(DRAWS["softplus"], s, x, (alone,))
        found["many, alone", y.numel()] = [y, alone]
    jobs = [dispatch.Job(TERMS["exp" if i == 1 else "softplus"], None, (*x, 0.5)) for i, x in enumerate(inputs)]
    found["many sums"] = [dispatch.run_all(jobs)]
    found["many sums, alone"] = [torch.stack([dispatch.total(j.formula, j.inputs) for j in jobs])]
    return found


if __name__ == "__main__":
    torch.save(results(), sys.argv[1])
