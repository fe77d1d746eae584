"""Say what is Bayesian in a model and what is not, and why."""

from collections import Counter
from dataclasses import dataclass

from torch import nn

from bayesify.core import named_posteriors, scopes_of
from bayesify.posteriors import Posterior

NAME_WIDTH = 60


@dataclass(frozen=True)
class Row:
    """One parameter of the plain model.

    Attributes:
        name: Its plain name.
        shape: Its shape.
        posterior: A short description of its posterior; empty where it is not Bayesian.
        prior: A short description of its prior.
        note: Ties, fixed rows, flat priors; or why it is not Bayesian.
        count: Its number of elements.
    """

    name: str
    shape: tuple[int, ...]
    posterior: str
    prior: str
    note: str
    count: int


@dataclass(frozen=True)
class Summary:
    """The parameters of a bayesified model; print it.

    Attributes:
        method: The methods in use, with their options.
        rows: One per parameter, Bayesian ones first.
        extra_bytes: What the posteriors keep beside the model's own parameters.
    """

    method: str
    rows: tuple[Row, ...]
    extra_bytes: int

    def __str__(self) -> str:
        table = [("parameter", "shape", "posterior", "prior", "note")]
        for r in self.rows:
            table.append((_short(r.name), "x".join(map(str, r.shape)) or "()", r.posterior or "-", r.prior, r.note))
        widths = [max(len(line[i]) for line in table) for i in range(5)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        lines.insert(1, "-" * max(len(line) for line in lines))
        bayesian = [r for r in self.rows if r.posterior]
        others = Counter(r.note for r in self.rows if not r.posterior)
        total, own = sum(r.count for r in self.rows), sum(r.count for r in bayesian)
        lines += [
            lines[1],
            f"method: {self.method}",
            f"Bayesian: {own:,} of {total:,} parameters ({own / total:.1%}) in {len(bayesian)} tensors; "
            f"posteriors keep {self.extra_bytes / 2**20:,.1f} MiB more",
        ]
        if others:
            lines.append("not Bayesian: " + ", ".join(f"{n} tensors ({why})" for why, n in others.most_common()))
        return "\n".join(lines)

    __repr__ = __str__


def summary(model: nn.Module) -> Summary:
    """Describe which parameters are Bayesian, with which prior and posterior, and which are not and why.

    Args:
        model: A bayesified model, or a module that contains one.

    Returns:
        An object that prints as a table.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, summary
        >>> summary(bayesify(torch.nn.Linear(3, 2), "vi", prior_sig=0.1))
        parameter  shape  posterior      prior             note
        -------------------------------------------------------
        weight     2x3    vi, std 0.001  N(theta0, 0.1^2)
        bias       2      vi, std 0.001  N(theta0, 0.1^2)  bias
        -------------------------------------------------------
        method: VI(bias='informative', nst=5, link='softplus', init_sig=None, kld=1.0)
        Bayesian: 8 of 8 parameters (100.0%) in 2 tensors; posteriors keep 0.0 MiB more
    """
    scopes = scopes_of(model)
    rows, extra, seen = [], 0, set()
    ties = Counter[Posterior](m for _, m in model.named_modules(remove_duplicate=False) if isinstance(m, Posterior))
    for name, posterior in named_posteriors(model):
        seen.add(id(posterior.original))
        seen.update(id(p) for p in posterior.learnable())
        extra += sum(t.nbytes for t in posterior.state().values())
        rows.append(_row(name, posterior, ties[posterior]))
    for name, param in model.named_parameters():
        if id(param) not in seen:
            why = "not selected" if param.requires_grad else "frozen"
            why = why if param.is_floating_point() else f"{param.dtype}".removeprefix("torch.")
            rows.append(Row(name, tuple(param.shape), "", "-", why, param.numel()))
    return Summary("; ".join(repr(s.method) for s in scopes), tuple(rows), extra)


def _row(name: str, posterior: Posterior, places: int) -> Row:
    """Describe one posterior."""
    spread = posterior.std
    std = f"std {float(spread.float().mean()):.2g}" if posterior.random else "point"
    center = f"{float(posterior.prior_center):g}" if posterior.prior_center.dim() == 0 else "theta0"
    notes = [
        "bias" if posterior.is_bias else "",
        f"tied, read in {places} places" if places > 1 else "",
        f"padding row {posterior.fixed_row} without noise" if posterior.fixed_row is not None else "",
        getattr(posterior, "note", ""),
    ]
    return Row(
        name,
        tuple(posterior.shape),
        f"{type(posterior).__name__.removesuffix('Posterior').lower()}, {std}",
        _prior(posterior, center),
        ", ".join(n for n in notes if n),
        posterior.original.numel(),
    )


def _prior(posterior: Posterior, center: str) -> str:
    """Describe the prior of one posterior; plain training has weight decay instead."""
    if posterior.flat:
        return "flat"
    return f"wd {posterior.wd:g}" if hasattr(posterior, "wd") else f"N({center}, {posterior.prior_sig:g}^2)"


def _short(name: str) -> str:
    """Keep the ends of a very long name."""
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH // 3]}...{name[-(NAME_WIDTH * 2 // 3 - 3) :]}"
