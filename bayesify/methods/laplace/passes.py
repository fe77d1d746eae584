"""The pass over the data that sums a model's curvature: batch by batch, and over the processes of a distributed run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from bayesify.core import ranks
from bayesify.core.wrap import mean
from bayesify.engine import noise as noises
from bayesify.methods.laplace.curvature import SquaredGradients
from bayesify.methods.laplace.factors import Factors
from bayesify.methods.laplace.kron import Kron
from bayesify.methods.laplace.method import Laplace, LaplacePosterior
from bayesify.methods.laplace.tuning import Fitted
from bayesify.prediction.batches import as_batches, call_model, device_of, logits_of, split_batch, to_device
from bayesify.prediction.likelihoods import Likelihood, found_likelihood
from bayesify.prediction.view import evaluation

TRIAL_EXAMPLES = 2


class Pass:
    """Sums the curvature of a model's loss over batches.

    Args:
        model: The model.
        chosen: The posteriors that get a variance, by name.
        likelihood: The loss; None is found from the first batch.
        ggn: Whether the curvature is the Gauss-Newton one, and not the empirical Fisher.
        kron: Whether layers get Kronecker factors where they can.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: dict[str, LaplacePosterior],
        likelihood: Likelihood | None,
        *,
        ggn: bool,
        kron: bool,
    ) -> None:
        self.model, self.chosen, self.likelihood, self.ggn = model, chosen, likelihood, ggn
        self.params = {name: p.original for name, p in chosen.items()}
        self.kron = kron
        self.factors = Factors(self.params, _pairs(chosen) if kron else {})
        self.squares = SquaredGradients(self.params)
        self.generator = torch.Generator()
        self.count = 0

    def over(self, loader: Any, keep: int, *, progress: bool) -> list[Any]:
        """Run over the data, and return the first batches, with `keep` examples or all of them.

        Raises:
            ValueError: There are no batches, or they do not fit.
        """
        if self.ggn:
            self.generator.manual_seed(noises.global_seed())
        batches = as_batches(loader)
        # DDP's own forward waits for the other processes, which may have fewer batches.
        inner = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
        first, checksum = [], 0.0
        with evaluation(self.model), mean(self.model), torch.inference_mode(False), _gradients_of(inner, self.params):
            for batch in tqdm(batches, desc="fit_laplace", unit="batch", disable=not progress):
                if self.count < keep:
                    first.append(batch)
                checksum += _checksum(batch)
                self.count += self._add(inner, batch)
        self._sum_over_ranks(checksum)
        if self.count == 0:
            raise ValueError("the loader has no batches; pass a non-empty one")
        return first

    def fitted(
        self, methods: Mapping[LaplacePosterior, Laplace], num_data: float | None
    ) -> tuple[list[Fitted], Likelihood]:
        """Return each posterior's curvature times Ninflate num_data/seen, and the likelihood; forget the sums."""
        assert self.likelihood is not None
        scale = self.likelihood.settle("ggn" if self.ggn else "ef")
        scale *= 1.0 if num_data is None else num_data / self.count
        size = self.count if num_data is None else num_data
        scales = {name: scale * methods[p].inflation(size, kron=self.kron) for name, p in self.chosen.items()}
        krons = self.factors.finish(scales)
        weights = {layer.bias: self.chosen[layer.weight] for layer in self.factors.layers.values()}
        names = {posterior: name for name, posterior in self.chosen.items()}
        out = []
        for posterior in methods:
            name = names.get(posterior, "")
            h: Tensor | Kron | None = krons.pop(name, None)
            joined = weights.get(name) if h is not None else None
            if h is None and (total := self.squares.totals.pop(name, None)) is not None:
                h = total.mul_(scales[name]) if posterior.layout is None else posterior.layout.own(total, scales[name])
            out.append(Fitted(posterior, h, joined))
        return out, self.likelihood

    def _add(self, model: nn.Module, batch: Any) -> int:
        """Add the curvature of one batch, and return how many items of data it has."""
        inputs, target = split_batch(to_device(batch, device_of(model)))
        with torch.enable_grad():
            found = call_model(model, inputs, target)
        self.likelihood = likelihood = self.likelihood or found_likelihood(found, target)

        def wanted(output: Any, target: Any) -> tuple[Tensor, Tensor]:
            losses = likelihood.losses(output, target)
            return losses, logits_of(output) if self.ggn else losses

        with torch.enable_grad():
            losses, output = wanted(found, target)
        count = len(losses)
        if not count:
            return 0
        likelihood.observe(found, target)
        if self.ggn and len(output) != count:
            raise ValueError(f"curvature='ggn' needs an output per example, got {len(output)} for {count}; use 'ef'")

        def smaller() -> Tensor | None:
            try:
                some, few = _first((inputs, target), TRIAL_EXAMPLES, count)
                return wanted(call_model(model, some, few), few)[1]
            except Exception:
                # Only a cheaper trial: what cannot be cut is tried as a whole.
                return None

        def seeds() -> list[Tensor]:
            return likelihood.roots(output, target, self.generator) if self.ggn else [torch.ones_like(output)]

        def summed(diagonal: bool) -> Tensor:
            return likelihood.curvature(output, target, self.generator, diagonal=diagonal)

        if output.grad_fn is not None:
            if self.factors.pairs:
                self.factors.add(output, seeds, summed, smaller)
                for name in self.factors.names():
                    self.squares.params.pop(name, None)
            if self.squares.params:
                self.squares.add(output, seeds(), smaller)
        return likelihood.items(target, count)

    def _sum_over_ranks(self, checksum: float) -> None:
        """Sum over the processes, unless all of them have seen the same data."""
        found = ranks.gathered((self.count, checksum))
        if len(set(found)) == 1:
            return
        layers = [known for known in ranks.gathered(self.factors.layers) if known]
        if any(other != layers[0] for other in layers):
            raise ValueError("the processes found different layers for structure='kron'; use structure='diag'")
        self.factors.layers = layers[0] if layers else {}
        if self.likelihood is not None:
            self.likelihood.join(ranks.gathered)
        for totals in (self.squares.totals, self.factors.inputs, self.factors.outputs):
            ranks.sum_over(totals, self.params)
        counts: dict[str, int] = {}
        for other in ranks.gathered(self.factors.counts):
            for name, rows in other.items():
                counts[name] = counts.get(name, 0) + rows
        self.factors.counts = counts
        self.count = sum(count for count, _ in found)


def _checksum(batch: Any) -> float:
    """Return a number that tells the data of two processes apart; 0 where there is only one."""
    if not ranks.several():
        return 0.0
    if isinstance(batch, Tensor):
        return float(batch.detach().cpu().double().sum()) * (1 + batch.numel() % 7)
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return sum(_checksum(item) for item in batch) if isinstance(batch, (tuple, list)) else 0.0


def _pairs(chosen: Mapping[str, LaplacePosterior]) -> dict[str, str | None]:
    """Return which parameters may be weights with a Kronecker-factored curvature, each with the name of its bias."""
    out: dict[str, str | None] = {}
    for name, posterior in chosen.items():
        if posterior.original.dim() > 1 and posterior.fixed_row is None:
            head, found, rest = name.rpartition("weight")
            bias = f"{head}bias{rest}"
            out[name] = bias if found and bias in chosen else None
            if out[name] is not None and chosen[bias].flat:
                raise ValueError(
                    f"structure='kron' gives {name!r} and {bias!r} one Gaussian with the weight's prior, but the "
                    "bias's prior is flat; bayesify with bias='informative', or use structure='diag'"
                )
    return out


@contextmanager
def _gradients_of(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """Let no other parameter ask for a gradient, so that what lies below them makes no graph."""
    wanted = {id(p) for p in params.values()}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in wanted]
    for param in others:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in others:
            param.requires_grad_(True)


def _first(batch: Any, few: int, count: int) -> Any:
    """Keep the first few examples of every tensor that has `count` of them."""
    if isinstance(batch, Tensor):
        return batch[:few] if batch.dim() > 0 and len(batch) == count else batch
    if isinstance(batch, Mapping):
        return {k: _first(v, few, count) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_first(v, few, count) for v in batch)
    return batch
