"""What methods do in the cycles of a training: where each starts, and the members that come of them."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from bayesify.core import distributed as shards
from bayesify.core.method import CollectedPosterior
from bayesify.core.mixture import Mixture, mix, shared_copy
from bayesify.core.posterior import Posterior
from bayesify.core.ranks import is_whole, shared_seed
from bayesify.core.scopes import scopes_of
from bayesify.core.selection import Candidate, matches, unmatched
from bayesify.engine import noise as noises
from bayesify.methods import norm_statistics

RESTARTS = ("prior", "fresh", "first")


class Place(NamedTuple):
    """Where a step is: the number of its cycle, how many steps of that one come before it, and the cycle's length."""

    cycle: int
    step: int
    length: int


class Stages:
    """What a method does in the cycles of a training. A subclass gives the defaults of `Cycles`, and what happens when.

    Args:
        run: The schedule, with its optimizer and model.
        **options: Those of `Cycles` that are named in `options`.
    """

    options: ClassVar[tuple[str, ...]] = ()
    cycles: int  # how many cycles there are by default
    least: int = 1  # how many the method needs
    first: float = 1.0  # the length of the first cycle over that of the others
    begin: float = 0.0  # the share of the steps before the first cycle
    high: float = 1.0
    low: float = 0.0

    def __init__(self, run: Any, **options: Any) -> None:
        self.run = run

    def check(self, lengths: Sequence[int]) -> None:
        """Raise a ValueError where there cannot be cycles of these lengths."""

    def before(self, place: Place | None) -> None:
        """Called before every step; the place is None before the first cycle and after the last."""

    def after(self, place: Place) -> None:
        """Called after every step of a cycle."""

    def end(self, number: int, *, last: bool) -> None:
        """Called at the end of every cycle."""

    def mixture(self) -> Mixture:
        """Return the mixture of the members, of a method that keeps them outside of the model."""
        raise ValueError("the cycles of this method collect into the model itself: predict(model, ...)")

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""


class Restarts(Stages):
    """Cycles that each start from the first member, from the prior mean, or from random numbers."""

    cycles, high = 3, 2.0
    options: ClassVar[tuple[str, ...]] = ("restart", "fresh", "seed")

    def __init__(self, run: Any, *, restart: str | None = None, fresh: Any = None, seed: int | None = None) -> None:
        super().__init__(run)
        own = run.posteriors()
        self.restart = ("first" if fresh is None else "prior") if restart is None else restart
        if self.restart not in RESTARTS:
            raise ValueError(f"restart must be one of {list(RESTARTS)}, got {restart!r}")
        if seed is not None and not is_whole(seed):
            raise ValueError(f"seed must be an integer or None, got {seed!r}")
        if fresh is not None and restart not in (None, "prior"):
            raise ValueError(f"fresh is for restart='prior', got restart={restart!r}; leave one of them out")
        self.first = 2.0 if self.restart == "first" else 1.0
        self.fresh = {} if self.restart == "first" else self._renewed(set(own), fresh)
        renewed = {p for module in self.fresh.values() for p in posteriors_of(module)}
        stuck = [p.name for p in own if p.constant == 0 and len(p.shape) > 1 and p not in renewed]
        if stuck and self.restart == "prior":
            raise ValueError(
                f"the prior mean of {stuck[0]!r} is zero, from where no cycle can learn; give restart='fresh', or "
                "fresh= patterns that name it"
            )
        self.seed = shared_seed() if seed is None else int(seed)

    def _renewed(self, own: set[Posterior], fresh: Any) -> dict[str, nn.Module]:
        """Return the modules that start anew, by name."""
        modules = dict(self.run.model.named_modules())
        found = {name: m for name, m in modules.items() if own.intersection(posteriors_of(m))}
        if self.restart != "fresh" and fresh is None:
            last = [name for name, m in modules.items() if isinstance(m, nn.Linear)][-1:]
            tied = {p for name, m in found.items() if name not in last for p in posteriors_of(m)}
            heads = [n for n in found if n in last and "lora" not in n]
            found = {n: found[n] for n in heads if not tied.intersection(posteriors_of(found[n]))}
        elif self.restart != "fresh":
            patterns = [fresh] if isinstance(fresh, str) else list(fresh)
            every = [Candidate(p.original, names=[p.name]) for p in own]
            if lost := [q for q in patterns if not any(matches(q, c.names, "fresh") for c in every)]:
                raise unmatched(lost[0], every, "fresh")
            named = {p for p in own if any(matches(q, [p.name], "fresh") for q in patterns)}
            found = {n: m for n, m in found.items() if named.intersection(posteriors_of(m))}
        for name, module in found.items():
            if reset_of(module) is None:
                raise ValueError(
                    f"{name!r} ({type(module).__name__}) has no reset_parameters, so that it cannot start anew; take "
                    "restart='prior' with fresh= patterns that leave it out"
                )
        return found

    def renew(self, number: int) -> None:
        """Give new random numbers to what starts anew after a cycle, and let the optimizer forget its state."""
        for place, module in enumerate(self.fresh.values()):
            renew(module, noises.mix(noises.mix(self.seed, number), place))
        self.run.optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the new starts."""
        return {"seed": self.seed, "restart": self.restart, "fresh": list(self.fresh)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the seed of the new starts."""
        for name in ("restart", "fresh"):
            if state[name] != (own := self.state_dict()[name]):
                raise ValueError(
                    f"{name} was {state[name]!r} when the state was saved, now {own!r}; make Cycles with the same"
                )
        self.seed = state["seed"]


class Copies(Restarts):
    """A copy of the model at the end of every cycle, the members of a mixture: what a method does that has no own way.

    Spreads start anew with the mean, or from the first member's.
    """

    def __init__(self, run: Any, **options: Any) -> None:
        super().__init__(run, **options)
        self.members: list[nn.Module] = []

    def check(self, lengths: Sequence[int]) -> None:
        """Raise where the model cannot be copied."""
        if any(shards.is_sharded(p.original) for p in self.run.posteriors()):
            raise ValueError(
                "members of this method are copies of the model, and a sharded model has none; take method 'ensemble', "
                "or train the members one by one and mix them"
            )

    @property
    def whole(self) -> nn.Module:
        """The model without DistributedDataParallel around it."""
        model: nn.Module = self.run.model
        return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model

    @torch.no_grad()
    def end(self, number: int, *, last: bool) -> None:
        """Keep a copy of the model."""
        self.members.append(shared_copy(self.whole).eval())
        mix(self.members)  # which keeps their prior means in memory once
        if not last:
            self.go_on(number)

    def go_on(self, number: int) -> None:
        """Let the next cycle start anew."""
        posteriors = self.run.posteriors()
        if self.restart == "first":
            self.whole.load_state_dict(self.members[0].state_dict())
            posteriors = [p for p in posteriors if isinstance(p, CollectedPosterior)]
        else:
            for scope in scopes_of(self.run.model):
                if scope.root is not None:
                    norm_statistics.write_start(scope.root)
            for posterior in posteriors:
                posterior.original.copy_(posterior.prior_mean)
        for posterior in posteriors:
            posterior.forget()
        self.renew(number)

    def mixture(self) -> Mixture:
        """Return the mixture of all members so far."""
        if not self.members:
            raise ValueError(f"no cycle has ended yet: {self.run.last_epoch} steps of {self.run.ends[0]} are done")
        return mix(self.members)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the new starts, and the members."""
        return {**super().state_dict(), "members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the members, as copies of the model."""
        super().load_state_dict(state)
        self.members = [shared_copy(self.whole).eval() for _ in state["members"]]
        for member, tensors in zip(self.members, state["members"], strict=True):
            member.load_state_dict(tensors)


def posteriors_of(module: nn.Module) -> list[Posterior]:
    """Return the posteriors of a module's own parameters."""
    if not parametrize.is_parametrized(module):
        return []
    lists: Any = module.parametrizations
    return [p for kept in lists.values() for p in kept if isinstance(p, Posterior)]


def reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method that gives a module its first random numbers, if it has one."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def renew(module: nn.Module, seed: int) -> None:
    """Start a module's Bayesian parameters anew, with the same numbers on every device; others stay as they are."""
    reset = reset_of(module)
    assert reset is not None
    readers = {p: p.reader for m in module.modules() for p in posteriors_of(m)}
    held = [(m, n, p) for m in module.modules() for n, p in m._parameters.items() if p is not None]
    made = {id(p): nn.Parameter(shards.whole(p).detach().cpu().clone()) for _, _, p in held}
    try:
        for posterior in readers:
            posterior.reader = None  # reads give the parameter itself
        for home, name, parameter in held:
            home._parameters[name] = made[id(parameter)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            reset()
    finally:
        for home, name, parameter in held:
            home._parameters[name] = parameter
        for posterior, reader in readers.items():
            posterior.reader = reader
    with torch.no_grad():
        for posterior in readers:
            shards.copy_whole(posterior.original, made[id(posterior.original)])
