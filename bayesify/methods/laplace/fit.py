"""Fit the Laplace approximation: one pass over the data after training, for the curvature of the loss."""

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from bayesify.core import ranks
from bayesify.core.distributed import gathered_whole, part_of
from bayesify.core.penalty import noise_in
from bayesify.core.scopes import check_module, check_num_data, mean, plain_name, scopes_of
from bayesify.core.selection import Candidate, Patterns, select
from bayesify.engine import noise as noises
from bayesify.methods.laplace.curvature import Curvature
from bayesify.methods.laplace.evidence import Fitted, settle
from bayesify.methods.laplace.method import KRON, LaplacePosterior
from bayesify.methods.laplace.tuning import CHOICES, choose, first_examples, inputs_needed
from bayesify.prediction import likelihoods
from bayesify.prediction.batches import (
    LabelPlaces,
    as_batches,
    call_model,
    device_of,
    logits_of,
    reads_a_part,
    split_batch,
    to_device,
)
from bayesify.prediction.likelihoods import Given, Likelihood, Loss, Regression
from bayesify.prediction.view import evaluation

M = TypeVar("M", bound=nn.Module)

LOOSE = 10  # prior scales
CHANGED = ("deviation", *KRON, *LaplacePosterior.results, "_stamp")  # what a fit changes in a posterior


def fit_laplace(
    model: M,
    loader: Any,
    loss: Loss | None = None,
    *,
    num_data: float | None = None,
    curvature: str = "ef",
    structure: str = "diag",
    likelihood: Any = None,
    tune: Any = None,
    include: Patterns = None,
    same_data: bool | None = None,
    progress: bool = False,
) -> M:
    """Fit the Gaussian of method "la" around the trained weights, by one pass over the data.

    v = 1/(1/sigma^2 + Ninflate (num_data/seen) h + damping), where h is a curvature of the summed loss: element by
    element, or in the eigenbasis of each layer's Kronecker factors. The model is in eval and mean mode meanwhile.
    Per-example gradients are computed in batches, exactly. Where torch.distributed runs several processes, curvature
    and counts are summed over them, unless all have seen the same data; every process gets the same posterior.

    Args:
        model: A model bayesified with "la" and trained, or a module that contains one.
        loader: Batches: (inputs, labels), or dicts with "labels", which stand as in the model's own loss (a causal
            language model shifts them).
        loss: A function of (output, target) that returns the loss of each example, as a negative log-likelihood; where
            the model returns an object, a function of its logits will do.
        num_data: The size of the training set; as many as the loaders of all processes give, by default.
        curvature: "ef", the empirical Fisher, h = sum_n g_n^2 over the gradients of the examples' losses; or "ggn", the
            generalized Gauss-Newton, h = sum_n diag(J_n^T H_n J_n), by exact sums over few outputs, else by draws.
        structure: "diag"; or "kron", a Kronecker-factored Gauss-Newton for every linear and convolutional weight with
            its bias, which share the weight's prior_sig, and a diagonal one for everything else.
        likelihood: In place of a loss: "classification" (also of tokens and pixels, where labels of -100 do not count),
            "regression" (Gaussian; the noise is that of `methods.noise(model)` or `likelihoods.Regression(noise_var)`,
            or else is estimated from the residuals, one for each output), "heteroscedastic" (outputs are means and log
            variances), "multilabel", or a function as `loss`. With neither it is found from outputs and targets, or an
            error names the choice.
        tune: Chooses the scale of the prior that the spread is computed with, and logs it; `prior_sig`, which training
            used, stays. Validation batches choose it by the NLL of the prediction; "marglik" by the Laplace
            evidence, in a regression or for a last layer, if the prior mean is not the trained weights themselves;
            "wide", for a regression, takes the widest prior that the evidence allows, as None does where `prior_sig` is
            relative; "self" without labels: the widest spread with which the NLL of the model's own predictions on the
            training inputs rises by at most 0.1, a fixed dose that costs as much on a model that was calibrated before.
        include: Which parameters get a variance: glob pattern(s) over names, or a callable of (name, parameter).
        same_data: In several processes, whether the loaders of all give the same data (True) or parts of it, whose
            curvature is then summed (False). None asks the loader's sampler: a DistributedSampler means parts.
        progress: Whether to show a progress bar.

    Returns:
        The same model.

    Raises:
        ValueError: The model is of another method, the loader is empty, labels do not fit, the loss is not
            finite, an argument is out of range, or nothing says whether several processes read the same data. The
            posterior is as it was before.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, fit_laplace, predict
        >>> model = bayesify(torch.nn.Linear(3, 2), "la")
        >>> batches = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> predict(fit_laplace(model, batches, structure="kron"), torch.ones(4, 3))
        Predictive(4 examples, 2 classes, closed form)
    """
    posteriors, scopes = _posteriors(model), scopes_of(model)
    chosen = _selected(model, include)
    for name, value, known in (("curvature", curvature, ["ef", "ggn"]), ("structure", structure, ["diag", "kron"])):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    if num_data is not None:
        check_num_data(num_data)
    if isinstance(tune, bool) or (isinstance(tune, str) and tune not in CHOICES):
        raise ValueError(f"tune must be one of {list(CHOICES)}, validation batches or None, got {tune!r}")
    given = copy.copy(likelihoods.likelihood_of(likelihood, loss))
    if (learned := noise_in(model)) is not None and loss is None and likelihood in (None, "regression"):
        given = Regression(learned.variance)
    with gathered_whole(model):
        run = Pass(model, chosen, given, curvature == "ggn", structure == "kron")
        data = run.over(loader, inputs_needed(tune), parts=_gives_parts(loader, same_data), progress=progress)
    data = first_examples(data, inputs_needed(tune, run.examples))
    fitted, found = run.fitted(posteriors, num_data)
    factor = None
    if isinstance(found, Regression):
        wide = tune == "wide" or (tune is None and all(f.posterior.relative for f in fitted if f.h is not None))
        examples = run.count if num_data is None else num_data
        fitted, widest = settle(fitted, found, examples, wide=wide, power=1 if run.ggn else 2)
        factor = widest if wide else None
    elif tune == "wide":
        raise ValueError("tune='wide' is for regression and its training batches; give validation batches, or 'self'")
    noise_var = found.noise_var if isinstance(found, Regression) else None
    before: list[tuple[Any, str, Any]] = [(scope, "method", scope.method) for scope in scopes]
    before += [(posterior, name, getattr(posterior, name)) for posterior in posteriors for name in CHANGED]
    try:
        for scope in scopes:  # first, since candidates for the prior's scale are predicted with
            scope.method = replace(scope.method, noise_var=noise_var, likelihood=found.name)  # type: ignore[call-arg]
        factor = choose(tune, fitted, model, found, data) if factor is None else factor
        while fitted:
            fitted.pop().spread(factor)  # no more than one curvature is kept beside its deviation
    except BaseException:
        for owner, name, value in before:
            setattr(owner, name, value)
        raise
    for posterior in posteriors:
        posterior.tuned = "" if tune is None else CHOICES[tune] if isinstance(tune, str) else "validation"
    _warn_if_unbounded(posteriors)
    return model


def _gives_parts(loader: Any, same_data: bool | None) -> bool:
    """Return whether every process has data of its own, which sums over the data could not show."""
    if not ranks.several():
        return False
    if same_data is None and not reads_a_part(loader):
        raise ValueError(
            "fit_laplace runs in several processes, and the loader has no DistributedSampler that says whose data it "
            "gives; pass same_data=True (every process gives all of it) or same_data=False (each a part of its own)"
        )
    return not same_data


def _posteriors(model: nn.Module) -> list[LaplacePosterior]:
    """Return the posteriors inside a module; all must be of method "la"."""
    check_module(model)
    every: list[Any] = [p for scope in scopes_of(model) for p in scope.posteriors]
    for posterior in every:
        if not isinstance(posterior, LaplacePosterior):
            raise ValueError(
                f"fit_laplace fits models of method 'la', this one is {posterior.reader.method.name!r}; "
                "bayesify(model, 'la') first"
            )
    inside = set(model.modules())
    return [p for p in every if p in inside]


def _selected(model: nn.Module, include: Patterns) -> dict[str, LaplacePosterior]:
    """Return the posteriors that get a variance (unless nothing reaches them), by name."""
    names: dict[LaplacePosterior, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LaplacePosterior):
            names.setdefault(module, []).append(plain_name(path))
    # The last name is that in the bayesified model itself, whatever it is wrapped in.
    every = {p: Candidate(p.original, [], [*found, p.name]) for p, found in names.items()}
    select(list(every.values()), include, None)
    return {candidate.name: p for p, candidate in every.items() if not candidate.skipped}


def _warn_if_unbounded(posteriors: Iterable[LaplacePosterior]) -> None:
    """Warn where a flat prior meets so little curvature that samples lie far outside of any prior."""
    flat = [part_of(p) for p in posteriors if p.flat and p.deviation is not None]
    loose = sum(int((p.std > LOOSE * p.prior_sig).sum()) for p in flat)
    if loose:
        warnings.warn(
            f"{loose} of {sum(p.std.numel() for p in flat)} elements under a flat prior have so little curvature that "
            f"their standard deviation is over {LOOSE} prior_sig, up to {max(float(p.std.max()) for p in flat):.3g}: "
            "samples may be useless; pass bias='informative', or damping=, to bayesify",
            stacklevel=3,
        )


class Pass:
    """The pass over the data, which sums the curvature of a model's loss."""

    def __init__(
        self, model: nn.Module, chosen: dict[str, LaplacePosterior], loss: Likelihood | None, ggn: bool, kron: bool
    ) -> None:
        # DDP's own forward waits for the other processes, which may have fewer batches.
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.chosen, self.likelihood = chosen, loss  # or None: by the first batch
        self.ggn, self.kron = ggn or kron, kron
        self.params = {name: p.original for name, p in chosen.items()}
        self.curvature = Curvature(self.model, self.params, _pairs(chosen) if kron else {})
        self.places = LabelPlaces(self.model)
        self.generator = torch.Generator()
        self.count = self.examples = 0  # items of data, and examples of this process

    def over(self, loader: Any, keep: int, *, parts: bool, progress: bool) -> list[Any]:
        """Run over the data, and return the first batches, with `keep` examples or all of them."""
        if self.ggn:
            self.generator.manual_seed(noises.global_seed())
        batches, first = as_batches(loader), []
        wanted = {id(p) for p in self.params.values()}
        with evaluation(self.model), mean(self.model), torch.inference_mode(False), ExitStack() as stack:
            if self.likelihood is None or getattr(self.likelihood, "needs_residuals", False):
                batches = list(batches) if isinstance(batches, Iterator) else batches
                self._settle_noise(batches, parts)
            for param in self.model.parameters():  # layers below the chosen ones build no graph
                if param.requires_grad and id(param) not in wanted:
                    stack.callback(param.requires_grad_(False).requires_grad_, True)
            for batch in tqdm(batches, desc="fit_laplace", unit="batch", disable=not progress):
                if self.examples < keep:
                    first.append(batch)
                self._add(batch)
        if parts:
            self._sum_over_ranks()
        if self.count == 0:
            raise ValueError("the loader has no batches; pass a non-empty one")
        return first

    def fitted(self, posteriors: Sequence[LaplacePosterior], num_data: float | None) -> tuple[list[Fitted], Likelihood]:
        """Return each posterior's curvature times Ninflate num_data/seen, and the likelihood; forget the sums."""
        assert self.likelihood is not None
        size = self.count if num_data is None else num_data
        scale = self.likelihood.settle("ggn" if self.ggn else "ef") * size / self.count
        once = self.kron or isinstance(self.likelihood, Regression)  # which is read linearly: nothing to temper
        scales = {name: scale * p.reader.method.inflation(size, kron=once) for name, p in self.chosen.items()}
        found: dict[str, Any] = {**self.curvature.factors(scales)}
        weights = {layer.bias: self.chosen[weight] for weight, layer in (self.curvature.layers or {}).items()}
        names = {posterior: name for name, posterior in self.chosen.items()}
        out = []
        for posterior in posteriors:
            name = names.get(posterior, "")
            if (total := self.curvature.squares.pop(name, None)) is not None:
                layout = posterior.layout
                found[name] = total.mul_(scales[name]) if layout is None else layout.own(total, scales[name])
            out.append(Fitted(posterior, found.pop(name, None), weights.get(name)))
        return out, self.likelihood

    def _add(self, batch: Any) -> None:
        """Add the curvature of one batch."""
        inputs, target = split_batch(to_device(batch, device_of(self.model)))
        with torch.enable_grad():
            found = self.curvature.recorder.forward(
                lambda: call_model(self.model, inputs, target), len(target) if isinstance(target, Tensor) else 0
            )
        if not isinstance(self.likelihood, Given):  # a loss of the caller's own knows which labels it compares
            moved = self.places(batch, found)
            target = moved.to(target.device) if isinstance(moved, Tensor) else moved
        likelihood = self.likelihood = self.likelihood or likelihoods.found_likelihood(found, target)
        with torch.enable_grad():
            losses = likelihood.losses(found, target)
        count, output = len(losses), logits_of(found) if self.ggn else losses
        if not count:
            return
        likelihood.observe(found, target)
        if self.ggn and len(output) != count:
            raise ValueError(f"curvature='ggn' needs an output per example, got {len(output)} for {count}; use 'ef'")
        if output.grad_fn is not None:
            seeds = likelihood.roots(output, target, self.generator) if self.ggn else [torch.ones_like(output)]
            self.curvature.add(
                output, seeds, lambda diagonal: likelihood.curvature(output, target, self.generator, diagonal=diagonal)
            )
        self.examples += count
        self.count += likelihood.items(target, count)

    def _settle_noise(self, batches: Iterable[Any], parts: bool) -> None:
        """Find the noise of each of several outputs from the residuals, before the curvature that it weighs.

        Curvatures of one output are rescaled in the end, so that its first batch is enough.
        """
        for batch in batches:
            inputs, target = split_batch(to_device(batch, device_of(self.model)))
            if self.likelihood is None and not (isinstance(target, Tensor) and target.is_floating_point()):
                return  # no regression
            found = call_model(self.model, inputs, target)
            self.likelihood = self.likelihood or likelihoods.found_likelihood(found, target)
            if not isinstance(self.likelihood, Regression) or logits_of(found)[:1].numel() == 1:
                return
            self.likelihood.observe(found, target)
        if self.likelihood is not None:
            if parts:
                self.likelihood.join(ranks.gathered)
            self.likelihood.settle("ggn")

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
        curvature.counts = sum(ranks.gathered(curvature.counts), Counter())
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
