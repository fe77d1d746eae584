"""What an ensemble does in `Cycles`: the weights at the end of a cycle are a member, and the next one starts anew."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bayesify.core import distributed as shards
from bayesify.core.modes import MEAN
from bayesify.core.posterior import Posterior
from bayesify.core.ranks import is_whole, shared_seed
from bayesify.core.selection import Candidate, matches, unmatched
from bayesify.engine import noise as noises
from bayesify.methods.cycles import Cycles, Place, Stages
from bayesify.methods.ensemble import statistics

RESTARTS = ("prior", "fresh", "first")
FIRST = 2.0  # the length of the first cycle over the others', where these start from the first member


class Members(Stages):
    """Keep the weights at the end of every cycle, and start the next one anew.

    Args:
        run: The schedule.
        restart: Where a cycle starts: "first" at the first member, which gets a cycle of twice the length; "prior" at
            the prior mean, with what `fresh` names made anew; "fresh" with all modules made anew, for a model that is
            trained from scratch. None is "first", or "prior" where `fresh` is given.
        fresh: Patterns over parameter names: the modules that `reset_parameters` makes anew, with a seed of their own.
            None is the last linear layer, where it is trained; () is none.
        seed: Of the new starts; None takes one number from torch's global generator.
    """

    cycles, high, low = 3, 4.0, 0.0
    options = ("restart", "fresh", "seed")

    def __init__(self, run: Cycles, *, restart: str | None = None, fresh: Any = None, seed: int | None = None) -> None:
        super().__init__(run)
        own = run.posteriors()
        zero = {p.name: p.constant == 0 for p in own if len(p.shape) > 1}
        restart = ("first" if fresh is None else "prior") if restart is None else restart
        if restart not in RESTARTS:
            raise ValueError(f"restart must be one of {list(RESTARTS)}, got {restart!r}")
        if seed is not None and not is_whole(seed):
            raise ValueError(f"seed must be an integer or None, got {seed!r}")
        if fresh is not None and restart != "prior":
            raise ValueError(f"fresh is for restart='prior', got restart={restart!r}; leave one of them out")
        self.restart = restart
        self._check_shared({id(p.original) for p in own})
        self.fresh = [] if restart == "first" else self._renewed(set(own), fresh)
        renewed = {p.name for _, module in self.fresh for p in posteriors_of(module)}
        if dead := [name for name, is_zero in zero.items() if is_zero and restart == "prior" and name not in renewed]:
            raise ValueError(
                f"the prior mean of {dead[0]!r} is zero, from where no cycle can learn; give restart='fresh', or "
                "fresh= patterns that name it"
            )
        self.seed = shared_seed() if seed is None else int(seed)

    def _scopes(self) -> list[Any]:
        return list({id(p.reader): p.reader for p in self.run.posteriors()}.values())

    def _check_shared(self, own: set[int]) -> None:
        """Raise where the optimizer moves parameters of the model that all members would share."""
        moved = {id(p) for group in self.run.optimizer.param_groups for p in group["params"]}
        for name, parameter in self.run.model.named_parameters():
            if id(parameter) in moved - own and parameter.requires_grad:
                raise ValueError(
                    f"{name!r} is trained but not Bayesian, so that all members would share its last value; include it "
                    "in bayesify(model, 'ensemble'), or freeze it"
                )

    def _renewed(self, own: set[Posterior], fresh: Any) -> list[tuple[str, nn.Module]]:
        """Return the modules that start anew, by name."""
        owners = [(n, m) for n, m in self.run.model.named_modules() if own.intersection(posteriors_of(m))]
        if self.restart == "fresh":
            found = owners
        elif fresh is None:
            linear = [(n, m) for n, m in self.run.model.named_modules() if isinstance(m, nn.Linear)][-1:]
            elsewhere = {p for _, m in owners if m not in dict(linear).values() for p in posteriors_of(m)}  # tied
            found = [(n, m) for n, m in linear if "lora" not in n and (n, m) in owners]
            found = [(n, m) for n, m in found if not elsewhere.intersection(posteriors_of(m))]
        else:
            patterns = [fresh] if isinstance(fresh, str) else list(fresh)
            every = [Candidate(p.original, names=[p.name]) for p in own]
            if lost := [q for q in patterns if not any(matches(q, c.names, "fresh") for c in every)]:
                raise unmatched(lost[0], every, "fresh")
            names = [(n, m, [p.name for p in posteriors_of(m)]) for n, m in owners]
            found = [(n, m) for n, m, held in names if any(matches(q, held, "fresh") for q in patterns)]
        for name, module in found:
            if reset_of(module) is None:
                raise ValueError(
                    f"{name!r} ({type(module).__name__}) has no reset_parameters, so that it cannot start anew; take "
                    "restart='prior' with fresh= patterns that leave it out"
                )
        return found

    @classmethod
    def default_cycles(cls, method: Any, steps: int) -> int:
        """Return the number of members."""
        return int(method.members)

    def shares(self, cycles: int) -> Sequence[float]:
        """Return equal lengths; with restart="first" the first cycle takes longer."""
        return [FIRST if self.restart == "first" and not number else 1.0 for number in range(cycles)]

    def check(self, places: Sequence[Place]) -> None:
        """Raise where there are members already, or too many cycles."""
        members = min(p.reader.method.members for p in self.run.posteriors())
        if len(places) > members:
            raise ValueError(f"{len(places)} cycles give more than the {members} members; bayesify(..., members=)")

    def end(self, number: int, *, last: bool) -> None:
        """Keep a member; start anew, or after the last cycle become the posterior's mean."""
        posteriors: list[Any] = self.run.posteriors()
        for scope in self._scopes():
            statistics.keep(scope)
        for posterior in posteriors:
            with shards.on_shard(posterior) as own:
                own.keep()
                own.put(own.mean_theta(own.original) if last else own.prior_mean if self.again else own.particle(0))
        for scope in self._scopes():
            if last or not self.again:
                statistics.put(scope, MEAN if last else 0)
            else:
                statistics.put_start(scope.root)
        if not last:
            for place, (_, module) in enumerate(self.fresh):
                renew(module, noises.mix(noises.mix(self.seed, number), place))
            self.run.optimizer.state.clear()

    @property
    def again(self) -> bool:
        """Whether cycles start where the first one did."""
        return self.restart != "first"

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the new starts."""
        return {"seed": self.seed, "restart": self.restart, "fresh": [name for name, _ in self.fresh]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the seed of the new starts."""
        own = self.state_dict()
        if differ := [name for name in ("restart", "fresh") if state[name] != own[name]]:
            raise ValueError(
                f"{differ[0]} was {state[differ[0]]!r} when the state was saved; make Cycles with the same"
            )
        self.seed = state["seed"]


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
    posteriors = {p for m in module.modules() for p in posteriors_of(m)}
    readers = {p: p.reader for p in posteriors}
    held = [(m, n, p) for m in module.modules() for n, p in m._parameters.items() if p is not None]
    made: dict[tuple[int, str], Tensor] = {}
    try:
        for posterior in posteriors:
            posterior.reader = None  # reads give the parameter itself
        for home, name, parameter in held:
            made[id(home), name] = home._parameters[name] = nn.Parameter(shards.whole(parameter).detach().cpu().clone())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            reset()
    finally:
        for home, name, parameter in held:
            home._parameters[name] = parameter
        for posterior, reader in readers.items():
            posterior.reader = reader
    with torch.no_grad():
        for posterior in posteriors:
            assert posterior._home is not None
            shards.copy_whole(posterior.original, made[id(posterior._home[0]), posterior._home[1]])
