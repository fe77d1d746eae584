"""What is Bayesian in a model or in a saved file and what is not, and why."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from torch import Tensor, nn

from bayesify.core.checkpoint import File, file_in, read
from bayesify.core.posterior import Posterior
from bayesify.core.scopes import NOISE, mistakes, named_posteriors, scopes_of

NAME_WIDTH = 60
MOST_ROWS = 40
CELL = "text-align:left; padding:0.15em 0.9em 0.15em 0; font-variant-numeric:tabular-nums"


@dataclass(frozen=True)
class Row:
    """One parameter of the plain model."""

    name: str
    shape: tuple[int, ...]
    posterior: str = ""  # its kind; empty where the parameter is not Bayesian
    prior: str = "-"
    note: str = ""  # ties, fixed rows; or why it is not Bayesian
    std: float | None = None  # the mean of its standard deviation; None where it is a point
    relative: float = 0.0  # sqrt(mean of std^2) / sqrt(mean of m^2), of a posterior in a file

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Summary:
    """The parameters of a bayesified model; print it."""

    method: str  # the methods in use, with their options
    rows: tuple[Row, ...]  # one per parameter, Bayesian ones first
    extra_bytes: int  # what the posteriors keep beside the model's own parameters
    notes: tuple[str, ...] = ()  # mistakes that the model shows
    file: str = ""  # where it is saved, if it was read from there

    def table(self, *, full: bool = False) -> list[tuple[str, ...]]:
        """Return the cells: a row per parameter, or per module where there are more than `MOST_ROWS` and not `full`."""
        modules = _by_module(self.rows)
        if full or len(self.rows) <= MOST_ROWS:
            shapes = ("x".join(map(str, r.shape)) or "()" for r in self.rows)
            return [(_short(r.name), s, _kinds([r]), r.prior, r.note) for r, s in zip(self.rows, shapes, strict=True)]
        sizes = {name: (_size(r for r in rows if r.posterior), _size(rows)) for name, rows in modules.items()}
        parts = sorted(modules.items(), key=lambda part: sizes[part[0]], reverse=True)
        cells = [_described(name, rows) for name, rows in parts[:MOST_ROWS]]
        if rest := [row for _, rows in parts[MOST_ROWS:] for row in rows]:
            cells.append(_described(f"{len(parts) - MOST_ROWS} more", rest))
        return cells

    def header(self, *, full: bool = False) -> tuple[str, ...]:
        """Return the names of the columns of `table`."""
        first = ("parameter", "shape") if full or len(self.rows) <= MOST_ROWS else ("module", "parameters")
        return (*first, "posterior", "prior", "note")

    @property
    def totals(self) -> list[str]:
        """The lines below the table."""
        bayesian = [r for r in self.rows if r.posterior]
        others = Counter(r.note for r in self.rows if not r.posterior)
        total, own = _size(self.rows), _size(bayesian)
        lines = [
            f"method: {self.method}",
            f"Bayesian: {own:,} of {total:,} parameters ({own / total:.1%}) in {len(bayesian)} tensors; "
            f"posteriors keep {self.extra_bytes / 2**20:,.1f} MiB more",
        ]
        if others:
            lines.append("not Bayesian: " + ", ".join(f"{n} tensors ({why})" for why, n in others.most_common()))
        if self.file:
            known = [f"{row.relative:.3g} of the mean's size in {row.name}" for row in self.spreads if row.relative]
            none = "none: a method without one, or not fitted yet"
            lines += [f"file: {self.file}", "spread: " + (f"{known[0]}, down to {known[-1]}" if known else none)]
        return [*lines, *(f"note: {note}" for note in self.notes)]

    @property
    def spreads(self) -> list[Row]:
        """The Bayesian parameters of a file, the widest relative to its mean first."""
        return sorted((r for r in self.rows if r.posterior), key=lambda row: -row.relative)

    def text(self, *, full: bool = False) -> str:
        """Return what is printed; `full` lists every parameter, however many there are."""
        table = [self.header(full=full), *self.table(full=full)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:], rule, *self.totals])

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return html_table(self.header(), self.table(), below="\n".join(self.totals))

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
        >>> summary(bayesify(torch.nn.Linear(3, 2), "vi", prior_sig=0.1))  # doctest: +ELLIPSIS
        parameter  shape  posterior      prior             note
        -------------------------------------------------------
        weight     2x3    vi, std 0.001  N(theta0, 0.1^2)
        bias       2      vi, std 0.001  N(theta0, 0.1^2)  bias
        -------------------------------------------------------
        method: VI(bias='informative', nst=5, ..., link='softplus', init_sig=None, natural=False, kld=1.0)
        Bayesian: 8 of 8 parameters (100.0%) in 2 tensors; posteriors keep 0.0 MiB more
        note: the spread of the posterior was never trained: s is what it was at first; ...
    """
    scopes = scopes_of(model)
    posteriors = dict(named_posteriors(model))
    ties = Counter[Posterior](m for _, m in model.named_modules(remove_duplicate=False) if isinstance(m, Posterior))
    rows = [_row(name, posterior, ties[posterior]) for name, posterior in posteriors.items()]
    seen = {id(p) for posterior in posteriors.values() for p in (posterior.original, *posterior.learnable())}
    for name, param in model.named_parameters():
        if id(param) not in seen:
            why = "not selected" if param.requires_grad else "frozen"
            why = "noise of the data" if name.startswith(f"{NOISE}.") else why
            why = why if param.is_floating_point() else f"{param.dtype}".removeprefix("torch.")
            rows.append(Row(name, tuple(param.shape), note=why))
    notes = tuple(dict.fromkeys(text for scope in scopes for text in mistakes(scope).values()))
    return Summary("; ".join(repr(s.method) for s in scopes), tuple(rows), _extra_bytes(posteriors.values()), notes)


# -- cells -------------------------------------------------------------------------------------------------------------


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, above: str = "", below: str = "") -> str:
    """Return a table with a line of text above and lines below it; all of it is escaped.

    Example:
        >>> html_table(("a",), [("<1",)], above="x & y").count("&")
        2
    """

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f'<{tag} style="{CELL}">{escape(cell)}</{tag}>' for cell in cells) + "</tr>"

    head = f"<thead>{line(header, 'th')}</thead>"
    body = "".join(line(row, "td") for row in rows)
    texts = [f'<div style="white-space:pre-line">{escape(text)}</div>' if text else "" for text in (above, below)]
    return f"<div>{texts[0]}<table>{head}<tbody>{body}</tbody></table>{texts[1]}</div>"


def _row(name: str, posterior: Posterior, places: int = 1) -> Row:
    """Describe one posterior; plain training has weight decay in place of a prior."""
    center = f"{float(posterior.prior_center):g}" if posterior.prior_center.dim() == 0 else "theta0"
    prior = f"wd {posterior.wd:g}" if hasattr(posterior, "wd") else f"N({center}, {posterior.prior_sig:g}^2)"
    notes = [
        "bias" if posterior.is_bias else "",
        f"tied, read in {places} places" if places > 1 else "",
        f"padding row {posterior.fixed_row} without noise" if posterior.fixed_row is not None else "",
        getattr(posterior, "note", ""),
        "" if posterior.calibration == 1 else f"spread times {posterior.calibration:.3g}, calibrated",
    ]
    return Row(
        name,
        tuple(posterior.shape),
        type(posterior).__name__.removesuffix("Posterior").lower(),
        "flat" if posterior.flat else prior,
        ", ".join(n for n in notes if n),
        float(posterior.std.float().mean()) if posterior.random else None,
    )


def _size(rows: Iterable[Row]) -> int:
    return sum(row.count for row in rows)


def _extra_bytes(posteriors: Iterable[Posterior]) -> int:
    return sum(t.nbytes for posterior in posteriors for t in posterior.state().values())


def _kinds(rows: Sequence[Row]) -> str:
    """Describe the posteriors of some rows: their kinds, and the range of their standard deviations."""
    kinds = list(dict.fromkeys(r.posterior for r in rows if r.posterior))
    stds = [r.std for r in rows if r.posterior and r.std is not None]
    if not kinds:
        return "-"
    ends = list(dict.fromkeys(f"{value:.2g}" for value in (min(stds), max(stds)))) if stds else []
    return ", ".join([*kinds, f"std {' to '.join(ends)}" if ends else "point"])


def _by_module(rows: tuple[Row, ...]) -> dict[str, list[Row]]:
    """Group rows by module, as deep in the model as gives at most `MOST_ROWS` groups; one level at least."""
    found: dict[str, list[Row]] = {}
    for depth in range(1, max(r.name.count(".") for r in rows) + 2):
        parts: dict[str, list[Row]] = {}
        for row in rows:
            parts.setdefault(".".join(row.name.split(".")[:depth]), []).append(row)
        if found and len(parts) > MOST_ROWS:
            break
        found = parts
    return found


def _described(name: str, rows: list[Row]) -> tuple[str, ...]:
    """Describe the rows of one module in one line."""
    priors = list(dict.fromkeys(r.prior for r in rows if r.posterior)) or ["-"]
    notes = Counter(r.note for r in rows if not r.posterior)
    return (
        _short(name),
        f"{_size(rows):,} in {len(rows)}",
        _kinds(rows),
        priors[0] if len(priors) == 1 else f"{len(priors)} priors",
        ", ".join(f"{n} {why}" for why, n in notes.most_common()),
    )


def _short(name: str) -> str:
    """Keep the ends of a very long name."""
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH // 3]}...{name[-(NAME_WIDTH * 2 // 3 - 3) :]}"


# -- files -------------------------------------------------------------------------------------------------------------


def inspect_file(dir: "str | os.PathLike[str]") -> list[Summary]:  # noqa: A002
    """Describe a saved posterior from its file alone.

    Args:
        dir: The folder that `save` wrote, or the file `posterior.safetensors` in it.

    Returns:
        One object per member; a file of one model has one.

    Raises:
        CheckpointError: The file is missing, damaged, or of another kind.

    Example:
        >>> import tempfile, torch
        >>> from bayesify import bayesify, save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(bayesify(torch.nn.Linear(3, 2), "vi", prior_sig=0.1), folder)
        ...     sorted(row.name for row in inspect_file(folder)[0].spreads)
        ['bias', 'weight']
    """
    path, found = file_in(dir), []
    for member, file in read(path).items():
        posteriors = list(stored_posteriors(file))
        rows = [replace(_row(p.name, p), relative=_relative(p.std, p.mean)) for p in posteriors]
        rest = [Row(n, tuple(t.shape), note="stored as it is") for n, t in file.rest.items()]
        place = str(path) + (f", member {member!r}" if member else "")
        found.append(Summary(repr(file.method), (*rows, *rest), _extra_bytes(posteriors), file=place))
    return found


def stored_posteriors(file: File) -> Iterator[Posterior]:
    """Yield the posteriors of a file with their means and all their state."""
    for name in file.priors:
        home = nn.Module()
        param = nn.Parameter(file.means[name], requires_grad=False)
        home.register_parameter("theta", param)
        posterior = file.posterior(name, param)
        posterior.attach(name, home, "theta", None)  # no model reads it
        posterior.load_state(file.states[name])
        yield posterior


def _relative(std: Tensor, mean: Tensor) -> float:
    """Return sqrt(mean std^2) / sqrt(mean m^2), 0 for a point."""
    spread, size = (float(t.double().square().mean().sqrt()) for t in (std, mean))
    return spread / size if size else math.inf if spread else 0.0
