"""Look into a saved posterior without the model that it belongs to.

`posterior.safetensors` describes each posterior whole, so that its spread can be computed from the file alone.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from bayesify.core.checkpoint import MEAN, POSTERIOR_FILE, REST, File, read
from bayesify.core.posterior import Posterior
from bayesify.core.summary import Row, Summary, described_row


@dataclass(frozen=True)
class Spread:
    """How wide one posterior is, beside the size of its mean.

    Attributes:
        name: The parameter's plain name.
        relative: sqrt(mean of std^2) / sqrt(mean of m^2) over its elements; infinite where the mean is zero.
    """

    name: str
    relative: float


@dataclass(frozen=True)
class Inspection:
    """What one member of a file holds; print it.

    Attributes:
        path: The file.
        member: Its name among the members of a mixture; empty in a file of one.
        size: The file's size in bytes.
        summary: Every tensor, as `summary(model)` lists them.
        spreads: One per Bayesian tensor, the widest first.
        prior_sigs: The smallest and the largest scale of a prior.
    """

    path: Path
    member: str
    size: int
    summary: Summary
    spreads: tuple[Spread, ...]
    prior_sigs: tuple[float, float]

    def __str__(self) -> str:
        bayesian = [r for r in self.summary.rows if r.posterior]
        others = [r for r in self.summary.rows if not r.posterior]
        low, high = self.prior_sigs
        member = f", member {self.member!r}" if self.member else ""
        lines = [
            f"file:      {self.path}{member} ({self.size / 2**20:,.2f} MiB, checksum right)",
            f"method:    {self.summary.method}",
            f"Bayesian:  {_count(bayesian)}; the posteriors keep {self.summary.extra_bytes / 2**20:,.2f} MiB "
            "beside the means",
            f"others:    {_count(others)}",
            f"prior_sig: {low:.3g}" + (f" to {high:.3g}" if high > low else ""),
        ]
        if self.spreads[0].relative == 0:
            lines.append("spread:    none: a method without one, or not fitted yet")
        else:
            ends = {"largest": self.spreads[0], "smallest": self.spreads[-1]}
            lines += [f"spread:    {end} {s.relative:.3g} of the mean's size, in {s.name}" for end, s in ends.items()]
        return "\n".join(lines)

    __repr__ = __str__


def inspect_file(dir: "str | os.PathLike[str]") -> list[Inspection]:  # noqa: A002
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
        ...     inspect_file(folder)[0].prior_sigs
        (0.1, 0.1)
    """
    path = Path(dir) if Path(dir).name == POSTERIOR_FILE else Path(dir) / POSTERIOR_FILE
    members = read(path)
    return [_inspection(path, member, file) for member, file in members.items()]


def stored_posteriors(file: File) -> Iterator[Posterior]:
    """Yield the posteriors of a file with their means and all their state."""
    for name in file.priors:
        home = nn.Module()
        param = nn.Parameter(file.tensors[MEAN, name], requires_grad=False)
        home.register_parameter("theta", param)
        posterior = file.posterior(name, param)
        posterior.attach(name, home, "theta", _Itself())
        posterior.load_state(file.state(name))
        yield posterior


class _Itself:
    """Reads of a posterior that belongs to no model give its mean."""

    def __init__(self) -> None:
        self.told: set[str] = set()
        self.penalized = True

    def read(self, posterior: Posterior, original: Tensor) -> Tensor:
        return posterior.mean_theta(original)


def _inspection(path: Path, member: str, file: File) -> Inspection:
    """Describe one member."""
    rows, spreads, extra, sigs = [], [], 0, []
    for posterior in stored_posteriors(file):
        rows.append(described_row(posterior.name, posterior))
        spreads.append(Spread(posterior.name, _relative(posterior.std, posterior.mean)))
        extra += sum(t.nbytes for t in posterior.state().values())
        sigs.append(posterior.prior_sig)
    for (kind, name), tensor in file.tensors.items():
        if kind == REST:
            rows.append(Row(name, tuple(tensor.shape), "", "-", "stored as it is", tensor.numel()))
    spreads.sort(key=lambda s: -s.relative)
    summary = Summary(repr(file.method), tuple(rows), extra)
    return Inspection(path, member, path.stat().st_size, summary, tuple(spreads), (min(sigs), max(sigs)))


def _relative(std: Tensor, mean: Tensor) -> float:
    """Return sqrt(mean std^2) / sqrt(mean m^2), 0 for a point."""
    spread, size = (float(t.double().square().mean().sqrt()) for t in (std, mean))
    return spread / size if size else float("inf") if spread else 0.0


def _count(rows: list[Row]) -> str:
    return f"{sum(r.count for r in rows):,} numbers in {len(rows)} tensor{'s' * (len(rows) != 1)}"
