"""Cyclical SGLD: a chain that leaves its basin again and again, and a member of a mixture for each of them.

A large step finds another basin, small ones with noise sample it (Zhang et al. 2020).
"""

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from bayesify.core.mixing import mix
from bayesify.core.mixture import Mixture
from bayesify.core.wrap import scopes_of
from bayesify.methods.sgld import method as sgld
from bayesify.methods.sgld.optimizer import SGLD


@dataclass(frozen=True, kw_only=True)
class Phase(sgld.SGLD):
    """The options of one step: the noise of its phase, and no collection by the optimizer's own count."""

    def collects(self, step: int) -> bool:
        """Leave it to the cycle."""
        return False


class Cycles:
    """Drive an SGLD chain through cosine cycles, each of which gives one member of a mixture.

    At position r in [0, 1) of a cycle the learning rate is lr/2 (cos(pi r) + 1). Below beta the chain takes neither
    noise nor states for its moments: it looks for a basin. From beta on it does both, and every `thin`-th state of the
    rest of the cycle is collected. At the end of a cycle a copy of the model is its member, and the moments start anew.
    The `burnin` of the method has no meaning here.

    Args:
        model: The model that the chain moves.
        chain: Its optimizer; the learning rates that it has now are those at which a cycle begins.
        steps: How many steps all cycles take together.
        cycles: How many cycles; each has steps // cycles steps.
        beta: The share of a cycle that looks for a basin.

    Raises:
        ValueError: A number is out of range, or a cycle is too short to collect two states.

    Example:
        >>> import torch
        >>> from bayesify import SGLD, bayesify, penalty, predict
        >>> model, x = bayesify(torch.nn.Linear(3, 2), "sgld", thin=1), torch.randn(8, 3)
        >>> cycles = Cycles(model, SGLD(model, lr=0.1, num_data=8), steps=20, cycles=2, beta=0.5)
        >>> for _ in range(20):
        ...     cycles.zero_grad()
        ...     (model(x).square().mean() + penalty(model, num_data=8)).backward()
        ...     cycles.step()
        >>> predict(cycles.mixture(), x)
        Predictive(8 examples, 2 classes, 10 samples)
    """

    def __init__(self, model: nn.Module, chain: SGLD, *, steps: int, cycles: int, beta: float = 0.8) -> None:
        if not 0 <= beta < 1:
            raise ValueError(f"beta must be in [0, 1), got {beta!r}")
        if cycles < 1 or steps < cycles:
            raise ValueError(f"cycles must be between 1 and steps, got {cycles} cycles of {steps} steps together")
        self.model, self.chain, self.beta = model, chain, beta
        self.length = steps // cycles
        self.scopes = scopes_of(model)
        self.rates = [group["lr"] for group in chain.param_groups]
        self.done = 0
        self.members: list[nn.Module] = []
        sampling = sum(position / self.length >= beta for position in range(self.length))
        thin = max(scope.method.thin for scope in self.scopes if isinstance(scope.method, sgld.SGLD))
        if sampling // thin < 2:
            raise ValueError(
                f"a cycle has {sampling} steps from beta on, of which every {thin}th is collected: fewer than two "
                "states; take more steps, fewer cycles, a smaller beta or thin"
            )

    def zero_grad(self) -> None:
        """Clear the gradients, as the chain does."""
        self.chain.zero_grad()

    def step(self) -> None:
        """Move the chain by one step, in place of its own `step`."""
        place = self.done % self.length
        r = place / self.length
        for group, rate in zip(self.chain.param_groups, self.rates, strict=True):
            group["lr"] = rate / 2 * (math.cos(math.pi * r) + 1)
        explores = r < self.beta
        options: list[Any] = [scope.method for scope in self.scopes]
        for scope, own in zip(self.scopes, options, strict=True):
            scope.method = Phase(**{**asdict(own), "nd": 0.0 if explores else own.nd})
        try:
            self.chain.step()
        finally:
            for scope, own in zip(self.scopes, options, strict=True):
                scope.method = own
        self.done += 1
        sampled = place + 1 - math.ceil(self.beta * self.length)  # steps of this cycle with noise, so far
        for scope, own in zip(self.scopes, options, strict=True):
            for posterior in scope.posteriors:
                if not explores and sampled % own.thin == 0 and isinstance(posterior, sgld.SGLDPosterior):
                    posterior.collect()
        if self.done % self.length == 0:
            self._end()

    def _end(self) -> None:
        """Keep a copy of the model, and let the next cycle begin without moments."""
        self.members.append(copy.deepcopy(self.model).eval())
        for scope in self.scopes:
            for posterior in scope.posteriors:
                if isinstance(posterior, sgld.SGLDPosterior):
                    posterior._forget_moments()

    def mixture(self) -> Mixture:
        """Return the mixture of all members so far.

        Raises:
            ValueError: No cycle has ended yet.
        """
        if not self.members:
            raise ValueError(f"no cycle has ended yet: {self.done} steps of {self.length} that one takes")
        return mix(self.members)
