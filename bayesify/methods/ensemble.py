"""An ensemble in one training: the posterior is K particles, the weights at the ends of `Cycles`.

Pretrained weights make members cheap: each is a short trip from the prior mean. What is frozen has no copies.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.core import distributed as shards
from bayesify.core.method import NotReadyError
from bayesify.core.modes import MEMBER, Mode
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior, following, state_dtype
from bayesify.core.ranks import is_whole
from bayesify.core.wrap import bayesify, unbayesify
from bayesify.engine import noise as noises
from bayesify.methods import norm_statistics
from bayesify.methods.stages import Restarts
from bayesify.methods.vanilla import Vanilla, VanillaPosterior

DTYPES = {None: None, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Ensemble(Vanilla):
    """Options of "ensemble".

    Any optimizer trains the model with `bayesify.Cycles`, whose steps all members share. Training reads the parameter;
    a draw is a member, and `samples` and `predict` take them in turn. The statistics of normalization layers belong to
    their member.

    Attributes:
        members: K, how many particles the posterior has at most, each of the size of what is trained.
        wd: Weight decay towards the prior mean, as in "vanilla".
        mean: What mean mode reads: "first" is the first member, "soup" the average of the members' weights, which works
            for members that start from one another or share their head.
        offload: Whether members are kept on the CPU, and sent to the model's device when they are read.
        dtype: The precision in which members are kept: None is the parameter's own, or "float16", "bfloat16".
        bias: "penalty" treats biases as the weights, "ignore" leaves them out of the penalty.
        nst: Samples at prediction; None is every member once.

    Example:
        >>> import torch
        >>> from bayesify import Cycles, bayesify, components, methods
        >>> model = bayesify(torch.nn.Linear(3, 2), methods.Ensemble(members=2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> cycles = Cycles(optimizer, model, steps=6)
        >>> for _ in range(6):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(4, 3)).square().mean().backward()
        ...     optimizer.step()
        ...     cycles.step()
        >>> len(components(model))
        2
    """

    name: ClassVar[str] = "ensemble"

    members: int = 3
    mean: str = "first"
    offload: bool = False
    dtype: str | None = None
    nst: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not is_whole(self.members) or self.members < 1:
            raise ValueError(f"members must be an integer >= 1, got {self.members!r}")
        if self.nst is None:
            object.__setattr__(self, "nst", self.members)
        super().__post_init__()
        for option, known in (("mean", ("first", "soup")), ("dtype", DTYPES), ("offload", (False, True))):
            if getattr(self, option) not in known:
                raise ValueError(f"{option} must be one of {list(known)}, got {getattr(self, option)!r}")

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, without members at first."""
        flat = self.flat(prior) or self.wd == 0
        return EnsemblePosterior(
            param, prior, flat=flat, fixed_row=fixed_row, wd=self.wd, most=self.members, soup=self.mean == "soup",
            offload=self.offload, dtype=DTYPES[self.dtype],
        )  # fmt: skip

    def wrapped(self, scope: Any) -> None:
        """Let normalization layers read the statistics of the member that is in force."""
        norm_statistics.read_by_member(scope)

    def bake(self, scope: Any, mode: Mode) -> None:
        """Write the statistics of the member that a mode reads into the layers."""
        norm_statistics.write(norm_statistics.kept(scope, None if mode.mean else mode.member), scope.root)

    def default_samples(self, posteriors: Sequence[Posterior]) -> int:
        """Return how many members there are, where `nst` does not say something else."""
        count = max((p.count for p in posteriors if isinstance(p, EnsemblePosterior)), default=0)
        return min(self.nst, count) if self.nst == self.members and count else self.nst

    def check_ready(self, posteriors: Sequence[Posterior]) -> None:
        """Raise before the first member; a parameter that no optimizer moves stays a point."""
        if not any(isinstance(p, EnsemblePosterior) and p.count for p in posteriors):
            raise NotReadyError(
                "the ensemble has no member yet; train with cycles = bayesify.Cycles(optimizer, model, steps=...) and "
                "cycles.step() after every optimizer.step()"
            )

    def split(self, root: nn.Module, scope: Any) -> list[nn.Module]:
        """Return a model of method "vanilla" for every member; frozen weights are in memory once."""
        return [_member_model(root, scope, number) for number in range(self.default_samples(scope.posteriors))]


class EnsemblePosterior(VanillaPosterior):
    """K particles; the parameter while training, and before the first.

    Tensors: `members`, (k, ...), those that there are; `statistics`, (k, n), in the first posterior of a model: the
    running statistics of its normalization layers, one after the other.
    """

    kept = Posterior.kept | {"members": "stack", "statistics": "free"}
    particles = True
    draws_on_shards = True

    members: Tensor | None
    statistics: Tensor | None
    soup: bool
    offload: bool
    dtype: torch.dtype | None

    @property
    def count(self) -> int:
        """How many members there are."""
        return 0 if self.members is None else len(self.members)

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Whether there is a member."""
        return self.members is not None

    @property
    def note(self) -> str:
        """How many members there are, for `summary`."""
        return f"{self.count} of {self.most} members" if self.count else "no members yet"

    @torch.no_grad()
    def keep(self) -> None:
        """Make the parameter's present value the next member."""
        theta = self._kept(self.original.detach()).unsqueeze(0).clone(memory_format=torch.contiguous_format)
        self.members = theta if self.members is None else torch.cat([self.members, theta])

    def _kept(self, theta: Tensor) -> Tensor:
        """Return a tensor where members are kept, and in their precision."""
        return theta.to(torch.device("cpu") if self.offload else theta.device, self.dtype or theta.dtype)

    def particle(self, number: int) -> Tensor:
        """Return a member by its number, modulo how many there are."""
        assert self.members is not None
        return self.members[number % len(self.members)].to(self.original.device, self.original.dtype)

    def member_theta(self, original: Tensor, number: int) -> Tensor:
        """Return a member as a forward reads it: calibrated, and whole; the gradient passes to the parameter."""
        with torch.no_grad():
            own = shards.part_of(self)
            theta = own.calibrated(own.original, own.particle(number))
            theta = theta if self.layout is None else shards.whole(self.layout.joined(theta))
        return following(theta.to(original.dtype), original)

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return the first member, or the average of all; the parameter before there are any."""
        if self.members is None:
            return original
        members = self.members.to(original.device) if self.soup else self.members
        center = members.mean(0, dtype=state_dtype(members)) if self.soup else self.particle(0)
        return following(center.to(original.dtype), original)

    @property
    def own_std(self) -> Tensor:
        """The standard deviation of the members; 0 of a single one."""
        if self.members is None or self.count < 2:
            return super().own_std
        return self.members.float().std(0).to(self.original.device, self.original.dtype)

    def draw(self, mean: Tensor, seed: int) -> Tensor:
        """Return the member that a seed picks."""
        return self.particle(noises.mix(seed, MEMBER))

    # -- state -------------------------------------------------------------------------------------------------

    def blank(self) -> Tensor:
        """Return zeros as members are kept."""
        return self._kept(super().blank())

    def _with_room(self, layout: shards.Layout) -> dict[str, Tensor]:
        """Return the kept tensors of a sharded model with room for all members, and for their statistics."""
        out, scope = super()._with_room(layout), self.reader
        live = norm_statistics.live(scope.root) if scope.posteriors[0] is self else None
        if live is not None:
            out["statistics"] = live.new_zeros((self.most, len(live)))
            if self.statistics is not None:
                out["statistics"][: self.count] = self.statistics
        return out

    def after_load(self) -> None:
        """Keep what was loaded where members are kept, without the statistics of members to come."""
        if self.members is not None and self.layout is None:
            self.members = self._kept(self.members)
        self.statistics = None if self.statistics is None or not self.count else self.statistics[: self.count]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "EnsemblePosterior":
        """Move or cast everything but the members, which move alone, and only where they are not kept on the CPU."""
        members, self.members = self.members, None
        super()._apply(fn, recurse)
        self.members = members if members is None or self.offload else members.to(fn(members[:0]).device)
        return self


def _member_model(root: nn.Module, scope: Any, number: int) -> nn.Module:
    """Return a copy of the model with the weights and statistics of one member, of method "vanilla"."""
    names = {p.name: p for p in scope.posteriors}
    memo: dict[int, Any] = {id(t): None for p in names.values() for t in (p.members, p.statistics) if t is not None}
    memo |= {id(p): nn.Parameter(p.data, requires_grad=False) for p in root.parameters() if not p.requires_grad}
    twin = unbayesify(copy.deepcopy(root, memo))
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in names and names[name].members is not None:
                parameter.copy_(names[name].particle(number))
    norm_statistics.write(norm_statistics.kept(scope, number), twin)
    prior, about = {name: p.prior_mean for name, p in names.items()}, scope.method
    return bayesify(twin, "vanilla", wd=about.wd, bias=about.bias, prior_mean=prior, include=lambda n, _: n in names)


# -- cycles ------------------------------------------------------------------------------------------------------------


class Members(Restarts):
    """Keep the weights at the end of every cycle in the model itself, and start the next one anew."""

    def __init__(self, run: Any, **options: Any) -> None:
        super().__init__(run, **options)
        own = run.posteriors()
        self.cycles = self.most = min(p.reader.method.members for p in own)
        self._check_shared({id(p.original) for p in own})

    def _check_shared(self, own: set[int]) -> None:
        """Raise where the optimizer moves parameters of the model that all members would share."""
        moved = {id(p) for group in self.run.optimizer.param_groups for p in group["params"]}
        for name, parameter in self.run.model.named_parameters():
            if id(parameter) in moved - own and parameter.requires_grad:
                raise ValueError(
                    f"{name!r} is trained but not Bayesian, so that all members would share its last value; include it "
                    "in bayesify(model, 'ensemble'), or freeze it"
                )

    def check(self, lengths: Sequence[int]) -> None:
        """Raise where there are too many cycles."""
        if len(lengths) > self.most:
            raise ValueError(f"{len(lengths)} cycles give more than the {self.most} members; bayesify(..., members=)")

    def end(self, number: int, *, last: bool) -> None:
        """Keep a member; start anew, or after the last cycle become the posterior's mean."""
        posteriors: list[Any] = self.run.posteriors()
        again = self.restart != "first"
        for posterior in posteriors:
            with shards.on_shard(posterior) as own, torch.no_grad():
                own.keep()
                start = own.prior_mean if again else own.particle(0)
                own.original.copy_(own.mean_theta(own.original) if last else start)
        for scope in {id(p.reader): p.reader for p in posteriors}.values():
            norm_statistics.keep(scope)
            if last or not again:
                norm_statistics.write(norm_statistics.kept(scope, None if last else 0), scope.root)
            else:
                norm_statistics.write_start(scope.root)
        if not last:
            self.renew(number)


Ensemble.stages = Members
