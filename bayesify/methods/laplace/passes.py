"""The pass over the data that sums a model's curvature: batch by batch, and over the processes of a distributed run."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from bayesify.core import ranks
from bayesify.core.scopes import mean
from bayesify.engine import noise as noises
from bayesify.methods.laplace.curvature import Curvature
from bayesify.methods.laplace.evidence import Fitted
from bayesify.methods.laplace.kron import Kron
from bayesify.methods.laplace.method import Laplace, LaplacePosterior
from bayesify.prediction.batches import (
    LabelPlaces,
    as_batches,
    call_model,
    device_of,
    logits_of,
    split_batch,
    to_device,
)
from bayesify.prediction.likelihoods import Given, Likelihood, Regression, found_likelihood
from bayesify.prediction.view import evaluation
from bayesify.quality.regression import Residuals


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
        # DDP's own forward waits for the other processes, which may have fewer batches.
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.chosen, self.likelihood, self.ggn, self.kron = chosen, likelihood, ggn, kron
        self.params = {name: p.original for name, p in chosen.items()}
        self.curvature = Curvature(self.model, self.params, _pairs(chosen) if kron else {})
        self.places = LabelPlaces(self.model)
        self.generator = torch.Generator()
        self.count = self.examples = 0

    def over(self, loader: Any, keep: int, *, parts: bool, progress: bool) -> list[Any]:
        """Run over the data, and return the first batches, with `keep` examples or all of them.

        Raises:
            ValueError: There are no batches, or they do not fit.
        """
        if self.ggn:
            self.generator.manual_seed(noises.global_seed())
        batches, first = as_batches(loader), []
        with evaluation(self.model), mean(self.model), torch.inference_mode(False):
            if self.likelihood is None or getattr(self.likelihood, "needs_residuals", False):
                batches = list(batches) if isinstance(batches, Iterator) else batches
                self._settle_noise(batches, parts=parts)
            with _gradients_of(self.model, self.params):
                for batch in tqdm(batches, desc="fit_laplace", unit="batch", disable=not progress):
                    if self.examples < keep:
                        first.append(batch)
                    self.count += self._add(batch)
        if parts:
            self._sum_over_ranks()
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
        once = self.kron or isinstance(self.likelihood, Regression)  # which is read linearly: nothing to temper
        scales = {name: scale * methods[p].inflation(size, kron=once) for name, p in self.chosen.items()}
        krons = self.curvature.factors(scales)
        layers = (self.curvature.layers or {}).items()
        weights = {layer.bias: self.chosen[weight] for weight, layer in layers}
        names = {posterior: name for name, posterior in self.chosen.items()}
        out = []
        for posterior in methods:
            name = names.get(posterior, "")
            h: Tensor | Kron | None = krons.pop(name, None)
            joined = weights.get(name) if h is not None else None
            if h is None and (total := self.curvature.squares.pop(name, None)) is not None:
                h = total.mul_(scales[name]) if posterior.layout is None else posterior.layout.own(total, scales[name])
            out.append(Fitted(posterior, h, joined))
        return out, self.likelihood

    def _add(self, batch: Any) -> int:
        """Add the curvature of one batch, and return how many items of data it has."""
        inputs, target = split_batch(to_device(batch, device_of(self.model)))
        with torch.enable_grad():
            found = self.curvature.recorder.forward(
                lambda: call_model(self.model, inputs, target), len(target) if isinstance(target, Tensor) else 0
            )
        self.likelihood, target = self._read(batch, found, target)
        likelihood = self.likelihood
        with torch.enable_grad():
            losses = likelihood.losses(found, target)
        count, output = len(losses), logits_of(found) if self.ggn else losses
        if not count:
            return 0
        likelihood.observe(found, target)
        if self.ggn and len(output) != count:
            raise ValueError(f"curvature='ggn' needs an output per example, got {len(output)} for {count}; use 'ef'")
        if output.grad_fn is not None:
            seeds = likelihood.roots(output, target, self.generator) if self.ggn else [torch.ones_like(output)]
            self.curvature.add(
                output,
                seeds,
                lambda diagonal: likelihood.curvature(output, target, self.generator, diagonal=diagonal),
            )
        self.examples += count
        return likelihood.items(target, count)

    def _read(self, batch: Any, found: Any, target: Any) -> tuple[Likelihood, Any]:
        """Return the likelihood, and the labels where it compares them; a loss of the caller's own knows itself."""
        if not isinstance(self.likelihood, Given):
            moved = self.places(batch, found)
            target = moved.to(target.device) if isinstance(moved, Tensor) else moved
        return self.likelihood or found_likelihood(found, target), target

    def _settle_noise(self, batches: Iterable[Any], *, parts: bool) -> None:
        """Find the noise of each of several outputs from the residuals, before the curvature that it weighs.

        Curvatures of one output are rescaled in the end, so that its first batch is enough.
        """
        likelihood: Any = self.likelihood
        for batch in batches:
            inputs, target = split_batch(to_device(batch, device_of(self.model)))
            if likelihood is None and not (isinstance(target, Tensor) and target.is_floating_point()):
                return  # no regression
            found = call_model(self.model, inputs, target)
            likelihood = self.likelihood = likelihood or found_likelihood(found, target)
            if not isinstance(likelihood, Regression):
                return
            likelihood.observe(found, target)
            if not likelihood.needs_residuals:
                likelihood.residuals = Residuals()
                return
        if likelihood is not None:
            if parts:
                likelihood.join(ranks.gathered)
            likelihood.settle("ggn")

    def _sum_over_ranks(self) -> None:
        """Sum over the processes."""
        curvature = self.curvature
        layers = [known for known in ranks.gathered(curvature.layers) if known]
        if any(other != layers[0] for other in layers):
            raise ValueError("the processes found different layers for structure='kron'; use structure='diag'")
        curvature.layers = layers[0] if layers else {}
        if self.likelihood is not None:
            self.likelihood.join(ranks.gathered)
        for totals in (curvature.squares, curvature.inputs, curvature.outputs):
            ranks.sum_over(totals, self.params)
        counts: dict[str, int] = {}
        for other in ranks.gathered(curvature.counts):
            for name, rows in other.items():
                counts[name] = counts.get(name, 0) + rows
        curvature.counts = counts
        self.count = sum(ranks.gathered(self.count))


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
