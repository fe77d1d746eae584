"""Fit the Laplace approximation: one pass over the data after training, for the curvature of the loss."""

import copy
import warnings
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from bayesify.core import ranks
from bayesify.core.distributed import gathered_whole, part_of
from bayesify.core.gaussian_noise import noise_in
from bayesify.core.scopes import check_module, check_num_data, plain_name, scopes_of
from bayesify.core.selection import Candidate, Patterns, select
from bayesify.methods.laplace.evidence import Fitted
from bayesify.methods.laplace.method import Laplace, LaplacePosterior
from bayesify.methods.laplace.passes import Pass
from bayesify.methods.laplace.regression import settle
from bayesify.methods.laplace.tuning import BOUND_EXAMPLES, CHOICES, SELF_EXAMPLES, choose, trial
from bayesify.prediction.batches import reads_a_part
from bayesify.prediction.likelihoods import (
    Classification,
    Likelihood,
    Loss,
    Regression,
    likelihood_of,
)

M = TypeVar("M", bound=nn.Module)

CURVATURES = ("ef", "ggn")
STRUCTURES = ("diag", "kron")
LOOSE = 10  # prior scales


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
            language model shifts them). None keeps the factors of the last fit with structure="kron" and only tunes
            the prior's scale anew.
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
        progress: Whether to show progress bars.

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
    methods = _methods(model)
    chosen = _selected(model, include)
    given = copy.copy(likelihood_of(likelihood, loss))
    learned = noise_in(model)
    if learned is not None and loss is None and likelihood in (None, "regression"):
        given = Regression(learned.variance)
    _check_arguments(curvature, structure, num_data, tune)
    first: list[Any] = []
    if loader is None:
        fitted, found = _kept(methods), given or _likelihood_of_fit(model)
    else:
        kron, parts = structure == "kron", _gives_parts(loader, same_data)
        looked = BOUND_EXAMPLES if tune is None else SELF_EXAMPLES if tune == "self" else 0
        with gathered_whole(model):
            run = Pass(model, chosen, given, ggn=kron or curvature == "ggn", kron=kron)
            first = run.over(loader, looked, parts=parts, progress=progress)
        first = trial(first, run.examples) if tune is None else first
        if any(scope.sharded for scope in scopes_of(model)):
            first = first[: min(ranks.gathered(len(first)))]  # their forwards wait for each other
        fitted, found = run.fitted(methods, num_data)
    factor = None
    if isinstance(found, Regression) and loader is not None:
        relative = all(f.posterior.relative for f in fitted if f.h is not None)
        wide = tune == "wide" or (tune is None and relative)
        count = run.count if num_data is None else num_data
        fitted, own = settle(fitted, found, count, wide=wide, power=1 if run.ggn else 2)
        factor = own if wide else None
    elif tune == "wide":
        raise ValueError("tune='wide' is for regression and its training batches; give validation batches, or 'self'")
    before = [(scope, scope.method) for scope in scopes_of(model)]
    noise_var = found.noise_var if isinstance(found, Regression) else None
    try:
        for scope, method in before:  # which say how candidates for the prior's scale are to be predicted with
            if isinstance(method, Laplace):
                scope.method = replace(method, noise_var=noise_var, likelihood=found.name)
        _store(model, fitted, tune, found, first, factor, progress=progress)
    except BaseException:
        for scope, method in before:
            scope.method = method
        raise
    return model


def _gives_parts(loader: Any, same_data: bool | None) -> bool:
    """Return whether every process has data of its own; equal sums of equal data could not tell."""
    if not ranks.several():
        return False
    if same_data is None and not reads_a_part(loader):
        raise ValueError(
            "fit_laplace runs in several processes, and the loader has no DistributedSampler that says whose data it "
            "gives; pass same_data=True (every process gives all of it) or same_data=False (each a part of its own)"
        )
    return not same_data


def _likelihood_of_fit(model: nn.Module) -> Likelihood:
    """Return the likelihood of the last fit: a regression leaves its noise behind, else it is a classification."""
    noise_var = next((s.method.noise_var for s in scopes_of(model) if isinstance(s.method, Laplace)), None)
    return Classification() if noise_var is None else Regression(noise_var)


def _check_arguments(curvature: str, structure: str, num_data: float | None, tune: Any) -> None:
    for name, value, known in (("curvature", curvature, CURVATURES), ("structure", structure, STRUCTURES)):
        if value not in known:
            raise ValueError(f"{name} must be one of {list(known)}, got {value!r}")
    if num_data is not None:
        check_num_data(num_data)
    if isinstance(tune, bool) or (isinstance(tune, str) and tune not in (*CHOICES, "wide")):
        raise ValueError(f"tune must be one of {[*CHOICES, 'wide']}, validation batches or None, got {tune!r}")


def _kept(methods: "dict[LaplacePosterior, Laplace]") -> list[Fitted]:
    """Return the curvature of the last fit, where all of it was kept."""
    names = {p.name: p for p in methods}
    for posterior in methods:
        if posterior.kron is None and (not posterior.ready or posterior.moves):
            raise ValueError(
                f"loader=None needs the factors of an earlier fit with structure='kron', which {posterior.name!r} does "
                "not have; give the training batches"
            )
    return [Fitted(p, p.kron, names[p.partner] if p.partner else None) for p in methods]


def _methods(model: nn.Module) -> dict[LaplacePosterior, Laplace]:
    """Return the posteriors with their options; all must be of method "la"."""
    out = {}
    check_module(model)
    inside = set(model.modules())
    for scope in scopes_of(model):
        for posterior in scope.posteriors:
            if not isinstance(posterior, LaplacePosterior) or not isinstance(scope.method, Laplace):
                raise ValueError(
                    f"fit_laplace fits models of method 'la', this one is {scope.method.name!r}; "
                    "bayesify(model, 'la') first"
                )
            if posterior in inside:
                out[posterior] = scope.method
    return out


def _selected(model: nn.Module, include: Patterns) -> dict[str, LaplacePosterior]:
    """Return the posteriors that get a variance (unless nothing reaches them), by name."""
    names: dict[LaplacePosterior, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LaplacePosterior):
            names.setdefault(module, []).append(plain_name(path))
    for posterior, found in names.items():
        found.append(posterior.name)  # as in the bayesified model itself, whatever it is wrapped in
    every = {p: Candidate(p.original, [], found) for p, found in names.items()}
    select(list(every.values()), include, None)
    return {candidate.name: p for p, candidate in every.items() if not candidate.skipped}


def _store(
    model: nn.Module,
    fitted: list[Fitted],
    tune: Any,
    likelihood: Likelihood,
    first: list[Any],
    factor: float | None,
    *,
    progress: bool,
) -> None:
    """Give the posteriors their variances, with the prior's scale that `tune` chooses; uses `fitted` up."""
    before = {f.posterior: f.posterior.fitted() for f in fitted}
    try:
        tuned = "evidence" if tune == "wide" else ""
        if factor is None:
            factor, tuned = choose(tune, fitted, model, likelihood, first, progress=progress)
        while fitted:
            # One after the other, so that no more than one curvature is kept beside its deviation.
            fitted.pop().spread(factor)
    except BaseException:
        for posterior, old in before.items():
            posterior.put_back(old)
        raise
    for posterior in before:
        posterior.tuned = tuned
    _warn_of_loose(list(before))


def _warn_of_loose(posteriors: list[LaplacePosterior]) -> None:
    """Warn where a flat prior meets so little curvature that samples lie far outside of any prior."""
    flat = [part_of(p) for p in posteriors if p.flat and p.deviation is not None]
    loose = sum(int((p.std > LOOSE * p.prior_sig).sum()) for p in flat)
    if loose:
        warnings.warn(
            f"{loose} of {sum(p.std.numel() for p in flat)} elements under a flat prior have so little curvature that "
            f"their standard deviation is over {LOOSE} prior_sig, up to {max(float(p.std.max()) for p in flat):.3g}: "
            "samples may be useless; pass bias='informative', or damping=, to bayesify",
            stacklevel=4,
        )
