"""An ensemble in one training: the posterior is K particles, the weights at the ends of `Cycles`.

Pretrained weights make members cheap: each is a short trip from the prior mean. At the end of a cycle the weights
become a member, training goes back to the start, and a new head starts from its own random numbers. What is frozen has
no copies. A draw picks a member; `samples` and `predict` take them in turn.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.core import distributed as shards
from bayesify.core.modes import MEAN, MEMBER, Mode
from bayesify.core.moments import NotReadyError
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior, following
from bayesify.core.ranks import is_whole
from bayesify.core.stored import Kept
from bayesify.core.wrap import bayesify, unbayesify
from bayesify.engine import noise as noises
from bayesify.methods.cycles import Stages
from bayesify.methods.ensemble import statistics
from bayesify.methods.ensemble.members import Members
from bayesify.methods.vanilla import Vanilla, VanillaPosterior

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Ensemble(Vanilla):
    """Options of "ensemble".

    Any optimizer trains the model with `bayesify.Cycles`, whose steps all members share. Training reads the parameter;
    a draw is a member. The statistics of normalization layers belong to their member.

    Attributes:
        members: K, how many particles the posterior has at most, each of the size of what is trained.
        wd: Weight decay towards the prior mean, as in "vanilla".
        mean: What mean mode reads: "first" is the first member, "soup" the average of the members' weights, which works
            for members that start from one another or share their head.
        offload: Whether members are kept on the CPU, and sent to the model's device when they are read.
        dtype: The precision in which members are kept: None is the parameter's own, or "float16", "bfloat16".
        bias: "penalty" treats biases as the weights, "ignore" leaves them free.
        nst: Samples at prediction; None is every member once.

    Example:
        >>> import torch
        >>> from bayesify import Cycles, bayesify, components
        >>> model, x = bayesify(torch.nn.Linear(3, 2), "ensemble", members=2), torch.ones(4, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> cycles = Cycles(optimizer, model, steps=6)
        >>> for _ in range(6):
        ...     optimizer.zero_grad()
        ...     model(x).square().mean().backward()
        ...     optimizer.step()
        ...     cycles.step()
        >>> len(components(model))
        2
    """

    name: ClassVar[str] = "ensemble"
    stages: ClassVar[type[Stages]] = Members

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
        for option, known in (("mean", ("first", "soup")), ("dtype", (None, *DTYPES)), ("offload", (False, True))):
            if getattr(self, option) not in known:
                raise ValueError(f"{option} must be one of {list(known)}, got {getattr(self, option)!r}")

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, without members at first."""
        flat = (prior.is_bias and self.bias == "ignore") or self.wd == 0
        return EnsemblePosterior(param, prior, flat=flat, fixed_row=fixed_row, method=self)

    def wrapped(self, scope: Any) -> None:
        """Let normalization layers read the statistics of the member that is in force."""
        for offset, norm in statistics.norms_of(scope):
            borrow = statistics.Borrow(scope, offset)
            norm.register_forward_pre_hook(borrow)
            norm.register_forward_hook(statistics.GiveBack(borrow), always_call=True)

    def bake(self, scope: Any, mode: Mode) -> None:
        """Write the statistics of the member that a mode reads into the layers."""
        statistics.put(scope, MEAN if mode.mean else mode.member)

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
        return [_alone(root, scope, number) for number in range(self.default_samples(scope.posteriors))]


class EnsemblePosterior(VanillaPosterior):
    """K particles; the parameter while training, and before the first.

    Tensors: `members`, (k, ...), those that there are; `statistics`, (k, n), in the first posterior of a model: the
    running statistics of its normalization layers, one after the other.
    """

    kept = Posterior.kept | {"members": Kept("stack", precise=False), "statistics": Kept("free")}
    particles = True
    draws_on_shards = True

    members: Tensor | None
    statistics: Tensor | None

    def __init__(self, param: Tensor, prior: Prior, *, flat: bool, fixed_row: int | None, method: Ensemble) -> None:
        super().__init__(param, prior, flat=flat, fixed_row=fixed_row, wd=method.wd)
        self.most, self.soup = method.members, method.mean == "soup"
        self.offload, self.dtype = method.offload, method.dtype

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
        theta = self._kept(self.original.detach()).unsqueeze(0)
        theta = theta.clone(memory_format=torch.contiguous_format)
        self.members = theta if self.members is None else torch.cat([self.members, theta])

    def _kept(self, theta: Tensor) -> Tensor:
        """Return a tensor where members are kept, and in their precision."""
        device = torch.device("cpu") if self.offload else theta.device
        return theta.to(device, theta.dtype if self.dtype is None else DTYPES[self.dtype])

    @torch.no_grad()
    def put(self, value: Tensor) -> None:
        """Let training go on from here."""
        self.original.copy_(value)

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
        members = self.members.to(original.device)
        center = members.mean(0, dtype=torch.float64 if members.dtype == torch.float64 else torch.float32)
        return following((center if self.soup else members[0]).to(original.dtype), original)

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
        if scope.posteriors[0] is self and (live := statistics.live(scope)) is not None:
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


def _alone(root: nn.Module, scope: Any, number: int) -> nn.Module:
    """Return a copy of a model that is one member."""
    left = [t for p in scope.posteriors for t in (p.members, p.statistics) if t is not None]
    memo: dict[int, Any] = {id(t): None for t in left}
    memo |= {id(p): nn.Parameter(p.data, requires_grad=False) for p in root.parameters() if not p.requires_grad}
    twin = unbayesify(copy.deepcopy(root, memo))
    names = {p.name: p for p in scope.posteriors}
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in names and names[name].members is not None:
                parameter.copy_(names[name].particle(number))
    statistics.write(statistics.kept(scope, number), [m for m in twin.modules() if statistics.is_norm(m)])
    prior = {name: p.prior_mean for name, p in names.items()}
    about = scope.method
    return bayesify(twin, "vanilla", wd=about.wd, bias=about.bias, prior_mean=prior, include=lambda n, _: n in names)
