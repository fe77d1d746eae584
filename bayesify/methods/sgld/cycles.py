"""Cyclical SGLD: a chain that leaves its basin again and again, and a member of a mixture for each of them."""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from bayesify.core.distributed import on_shard
from bayesify.core.mixture import Mixture, mix, shared_copy
from bayesify.core.scopes import scopes_of
from bayesify.methods.cycles import Cycles, Place, Stages


class Basins(Stages):
    """Look for a basin without noise up to `beta`; from there on sample it, and collect every `thin`-th state.

    At the end of a cycle a copy of the model is its member, and the moments start anew. The chain's own collection and
    the `burnin` of the method have no meaning here.
    """

    cycles, options = 4, ("beta",)

    def __init__(self, run: Cycles, *, beta: float = 0.8) -> None:
        super().__init__(run)
        if not 0 <= beta < 1:
            raise ValueError(f"beta must be in [0, 1), got {beta!r}")
        self.beta = beta
        self.members: list[nn.Module] = []

    @property
    def _thin(self) -> int:
        methods: list[Any] = [scope.method for scope in scopes_of(self.run.model)]
        return int(max(method.thin for method in methods if method.stages is Basins))

    def check(self, places: Sequence[Place]) -> None:
        """Raise where a cycle collects fewer than two states."""
        shortest = min(place.length for place in places)
        sampling = shortest - math.ceil(self.beta * shortest)
        if sampling // self._thin < 2:
            raise ValueError(
                f"a cycle has {sampling} steps from beta on, of which every {self._thin}th is collected: fewer than "
                "two states; take more steps, fewer cycles, a smaller beta or thin"
            )

    def before(self, place: Place | None) -> None:
        """Tell the chain whether the next step takes noise."""
        explores = place is not None and place.step < self.beta * place.length
        for group in self.run.optimizer.param_groups:
            group["noise"], group["collects"] = float(not explores), False

    def after(self, place: Place) -> None:
        """Collect a state."""
        sampled = place.step + 1 - math.ceil(self.beta * place.length)  # steps of this cycle with noise, so far
        if sampled > 0 and sampled % self._thin == 0:
            for posterior in self.run.posteriors():
                with on_shard(posterior) as own:
                    own.collect()  # type: ignore[operator]

    def end(self, number: int, *, last: bool) -> None:
        """Keep a copy of the model, and let the next cycle begin without moments."""
        self.members.append(shared_copy(self.run.model).eval())
        for posterior in self.run.posteriors():
            posterior._forget_moments()  # type: ignore[operator]

    def mixture(self) -> Mixture:
        """Return the mixture of all members so far."""
        if not self.members:
            raise ValueError(f"no cycle has ended yet: {self.run.last_epoch} steps of {self.run.ends[0]} are done")
        return mix(self.members)

    def state_dict(self) -> dict[str, Any]:
        """Return the members."""
        return {"beta": self.beta, "members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the members, as copies of the model."""
        self.beta, self.members = state["beta"], []
        for tensors in state["members"]:
            self.members.append(shared_copy(self.run.model).eval())
            self.members[-1].load_state_dict(tensors)
