"""Fit the Laplace approximation: one pass over the data after training, for the curvature of the loss."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from bayesify import noise as noises
from bayesify.batches import call_model, device_of, is_one_batch, logits_of, split_batch, to_device
from bayesify.core import check_num_data, mean, plain_name, scopes_of
from bayesify.curvature import SquaredGradients
from bayesify.likelihood import Likelihood, Loss
from bayesify.methods.la import Laplace, LaplacePosterior
from bayesify.posteriors import Posterior
from bayesify.prediction import evaluation
from bayesify.selection import Candidate, Patterns, select
from bayesify.tuning import Fitted, by_evidence, by_validation

M = TypeVar("M", bound=nn.Module)

CURVATURES = ("ef", "ggn")
TRIAL_EXAMPLES = 2
LOOSE = 10  # prior scales


def fit_laplace(
    model: M,
    loader: Any,
    loss: Loss | None = None,
    *,
    num_data: float | None = None,
    curvature: str = "ef",
    tune: Any = None,
    include: Patterns = None,
    progress: bool = False,
) -> M:
    """Fit the Gaussian of method "la" around the trained weights, by one pass over the data.

    v = 1/(1/sigma^2 + Ninflate (num_data/seen) h + damping), element by element, where h is a diagonal curvature of the
    summed loss. The model is in eval and mean mode meanwhile. Per-example gradients are computed in batches, exactly.

    Args:
        model: A model bayesified with "la" and trained, or a module that contains one.
        loader: Batches: (inputs, labels), or dicts with "labels".
        loss: A function of (output, target) that returns the loss of each example, as a negative log-likelihood; where
            the model returns an object, a function of its logits will do. Cross-entropy by default.
        num_data: The size of the training set; as many as the loader gives, by default.
        curvature: "ef", the empirical Fisher, h = sum_n g_n^2 over the gradients of the examples' losses; or "ggn", the
            generalized Gauss-Newton, h = sum_n diag(J_n^T H_n J_n), by exact sums over few outputs, else by draws.
        tune: "marglik" chooses prior_sig by the Laplace evidence, validation batches choose it by the NLL of the
            sampled prediction. The choice is logged, and stands in `summary`.
        include: Which parameters get a variance: glob pattern(s) over names, or a callable of (name, parameter).
        progress: Whether to show a progress bar.

    Returns:
        The same model.

    Raises:
        ValueError: The model is of another method, the loader is empty, labels do not fit, the loss is not finite, or
            an argument is out of range. The posterior is as it was before.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, fit_laplace, predict
        >>> model = bayesify(torch.nn.Linear(3, 2), "la")
        >>> batches = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> predict(fit_laplace(model, batches), torch.ones(4, 3), samples=5, seed=0)
        Predictive(4 examples, 2 classes, 5 samples)
    """
    methods = _methods(model)
    chosen = _selected(model, include)
    likelihood = Likelihood(loss)
    if curvature not in CURVATURES:
        raise ValueError(f"curvature must be one of {list(CURVATURES)}, got {curvature!r}")
    if num_data is not None:
        check_num_data(num_data)
    if isinstance(tune, bool) or (isinstance(tune, str) and tune != "marglik"):
        raise ValueError(f"tune must be 'marglik', validation batches or None, got {tune!r}")
    generator = torch.Generator().manual_seed(noises.global_seed()) if curvature == "ggn" else torch.Generator()
    squares = SquaredGradients({name: p.original for name, p in chosen.items()})
    batches = [loader] if is_one_batch(loader) else loader
    if not isinstance(batches, Iterable):
        raise TypeError(f"loader must be an iterable of batches, got {type(loader).__name__}")
    seen = 0
    with evaluation(model), mean(model), torch.inference_mode(False):
        for batch in tqdm(batches, desc="fit_laplace", unit="batch", disable=not progress):
            seen += _add_batch(model, batch, likelihood, squares, generator, ggn=curvature == "ggn")
    if seen == 0:
        raise ValueError("the loader has no batches; pass a non-empty one")
    scale = 1.0 if num_data is None else num_data / seen
    names = {posterior: name for name, posterior in chosen.items()}
    fitted = []
    for posterior, method in methods.items():
        total = squares.totals.pop(names[posterior], None) if posterior in names else None
        h = None if total is None else total.mul_(scale * method.Ninflate)
        fitted.append(Fitted(posterior, h, method.damping))
    _store(model, fitted, tune, likelihood)
    return model


def _methods(model: nn.Module) -> dict[LaplacePosterior, Laplace]:
    """Return the posteriors with their options; all must be of method "la"."""
    out = {}
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


def _selected(model: nn.Module, include: Patterns) -> dict[str, Posterior]:
    """Return the posteriors that get a variance (unless nothing reaches them), by name."""
    names: dict[Posterior, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Posterior):
            names.setdefault(module, []).append(plain_name(path))
    for posterior, found in names.items():
        found.append(posterior.name)  # as in the bayesified model itself, whatever it is wrapped in
    every = {p: Candidate(p.original, [], found) for p, found in names.items()}
    select(list(every.values()), include, None)
    return {candidate.name: p for p, candidate in every.items() if not candidate.skipped}


def _add_batch(
    model: nn.Module,
    batch: Any,
    likelihood: Likelihood,
    squares: SquaredGradients,
    generator: torch.Generator,
    *,
    ggn: bool,
) -> int:
    """Add the curvature of one batch, and return how many examples it has."""
    inputs, target = split_batch(to_device(batch, device_of(model)))

    def run(inputs: Any, target: Any) -> tuple[Tensor, Tensor]:
        output = call_model(model, inputs, target)
        losses = likelihood.losses(output, target)
        return losses, logits_of(output) if ggn else losses

    with torch.enable_grad():
        losses, output = run(inputs, target)
    count = len(losses)
    if not count:
        return 0
    if ggn and len(output) != count:
        raise ValueError(f"curvature='ggn' needs an output per example, got {len(output)} for {count}; use 'ef'")

    def smaller() -> Tensor | None:
        few = _first((inputs, target), TRIAL_EXAMPLES, count)
        try:
            return run(*few)[1]
        except Exception:
            # Only a cheaper trial: what cannot be cut is tried as a whole.
            return None

    if output.grad_fn is not None:
        seeds = likelihood.roots(output, target, generator) if ggn else [torch.ones_like(output)]
        squares.add(output, seeds, smaller)
    return count


def _first(batch: Any, few: int, count: int) -> Any:
    """Keep the first few examples of every tensor that has `count` of them."""
    if isinstance(batch, Tensor):
        return batch[:few] if batch.dim() > 0 and len(batch) == count else batch
    if isinstance(batch, Mapping):
        return {k: _first(v, few, count) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_first(v, few, count) for v in batch)
    return batch


def _store(model: nn.Module, fitted: list[Fitted], tune: Any, likelihood: Likelihood) -> None:
    """Give the posteriors their standard deviations, with the prior's scale that `tune` chooses; uses `fitted` up."""
    before = {f.posterior: f.posterior.deviation for f in fitted}

    def spread(factor: float) -> None:
        for posterior, h, damping in fitted:
            posterior.deviation = posterior.spread(h, posterior.prior_sig * factor, damping)

    factor, tuned = 1.0, ""
    try:
        if isinstance(tune, str):
            factor, tuned = by_evidence(fitted), "evidence"
        elif tune is not None:
            factor, tuned = by_validation(fitted, model, tune, likelihood, spread), "validation"
        while fitted:
            # One after the other, so that no more than one curvature is kept beside its deviation.
            posterior, h, damping = fitted.pop()
            posterior.deviation = posterior.spread(h, posterior.prior_sig * factor, damping)
    except BaseException:
        for posterior, old in before.items():
            posterior.deviation = old
        raise
    for posterior in before:
        posterior.prior_sig *= factor
        posterior.tuned = tuned
    for scope in scopes_of(model):
        for mode in scope.modes:
            if mode.draw is not None:
                mode.draw.values.clear()  # thetas of the posterior that was
    _warn_of_loose(list(before))


def _warn_of_loose(posteriors: list[LaplacePosterior]) -> None:
    """Warn where a flat prior meets so little curvature that samples lie far outside of any prior."""
    flat = [p for p in posteriors if p.flat and p.deviation is not None]
    loose = sum(int((p.std > LOOSE * p.prior_sig).sum()) for p in flat)
    if loose:
        warnings.warn(
            f"{loose} of {sum(p.std.numel() for p in flat)} elements under a flat prior have so little curvature that "
            f"their standard deviation is over {LOOSE} prior_sig, up to {max(float(p.std.max()) for p in flat):.3g}: "
            "samples may be useless; pass bias='informative', or damping=, to bayesify",
            stacklevel=4,
        )
