"""Likelihoods p(y|x): the loss of each example, its curvature in the model's outputs, and the NLL of a mixture.

A likelihood is a name, an object of this module, or a function of (output, target). Where none is given it is found
from what the model returns and what the targets are, and where these leave a choice the error names it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.prediction.batches import (
    IGNORED,
    as_target,
    class_labels,
    classes_last,
    logits_of,
    mean_and_log_var,
    same_shape,
    values_like,
)
from bayesify.quality.regression import Residuals

Loss = Callable[[Any, Any], Tensor]

FEW_OUTPUTS = 16  # up to which a Gauss-Newton curvature is summed over exactly, a backward pass each
DRAWS = 8  # per example, over which it is averaged otherwise
MOST_OUTPUTS = 1024  # up to which a loss of unknown form can be differentiated twice


class Likelihood(ABC):
    """-log p(y|x) of each example, given by the model's output.

    An example is made of items (tokens, pixels, several targets), which are independent given the weights.
    """

    name: ClassVar[str]

    @abstractmethod
    def item_losses(self, outputs: Tensor, target: Any) -> Tensor:
        """Return -log p of every item, (examples, ...); 0 for items that do not count."""

    @abstractmethod
    def roots(self, outputs: Tensor, target: Any, generator: torch.Generator) -> list[Tensor]:
        """Return tensors s_k of the outputs' shape with sum_k s_k s_k^T = H for every example.

        H is the Hessian of the example's loss in its outputs, or its expectation over the targets where that is not
        positive. Exactly for few outputs, else in expectation over `generator`.
        """

    def curvature(self, outputs: Tensor, target: Any, generator: torch.Generator, *, diagonal: bool) -> Tensor:
        """Return the sum over the examples of H, for outputs (examples, K): (K, K), or its diagonal."""
        total = outputs.new_zeros(outputs.shape[1] if diagonal else (outputs.shape[1],) * 2)
        for root in self.roots(outputs, target, generator):
            total += root.square().sum(0) if diagonal else root.T @ root
        return total

    def losses(self, output: Any, target: Any) -> Tensor:
        """Return one value per example, the sum over its items."""
        found = _checked(self.item_losses(logits_of(output), target), target)
        return found.flatten(1).sum(1) if found.dim() > 1 else found

    def mixture_nll(self, outputs: Tensor, target: Any) -> Tensor:
        """Return -log 1/S sum_s p_s(y) of every item, summed over each example's, for outputs (S, examples, ...)."""
        each = torch.stack([self.item_losses(sample, target).cpu().double() for sample in outputs])
        mixed = math.log(len(each)) - torch.logsumexp(-each, 0)
        return mixed.flatten(1).sum(1) if mixed.dim() > 1 else mixed

    def items(self, target: Any, count: int) -> int:
        """Return how many items of data `count` examples are: what num_data counts."""
        return count

    def observe(self, output: Any, target: Any) -> None:  # noqa: B027, most have nothing to learn from it
        """See one batch of the data of the fit."""

    def join(self, gathered: Callable[[Any], list[Any]]) -> None:  # noqa: B027
        """Join what several processes have observed, by a function that returns everyone's copy of a value."""

    def settle(self, curvature: str) -> float:
        """End the fit: return the factor that the curvature collected so far lacks."""
        return 1.0


class Classification(Likelihood):
    """Cross-entropy: integer labels, or probabilities of the logits' shape.

    Logits are (N, K) with labels (N,), or (N, T, K) with (N, T), as token classifiers have them, or (N, K, H, W, ...)
    with (N, H, W, ...), as segmentation has them. Beyond (N, K), labels of -100 do not count.
    """

    name = "classification"

    def item_losses(self, outputs: Tensor, target: Any) -> Tensor:
        """Return -log softmax(outputs)_y of every item."""
        logits = classes_last(outputs)
        labels, log_probs = class_labels(logits, target), F.log_softmax(logits, -1)
        if labels.is_floating_point():
            return -(labels * log_probs).sum(-1)
        losses = -log_probs.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return torch.where(labels == IGNORED, torch.zeros_like(losses), losses)

    def roots(self, outputs: Tensor, target: Any, generator: torch.Generator) -> list[Tensor]:
        """Return roots of H = diag(p) - p p^T for every item.

        Exactly, sqrt(p_k) (e_k - p) at one position each; else (e_y - p)/sqrt(draws) with labels y drawn from p at
        every position.
        """
        logits = classes_last(outputs.detach())
        labels, p, classes = class_labels(logits, target), logits.softmax(-1), logits.shape[-1]
        counts = torch.ones_like(p[..., 0]) if labels.is_floating_point() else (labels != IGNORED).to(p)
        if p[0].numel() <= FEW_OUTPUTS:
            positions = p[0].numel() // classes
            eye = torch.eye(classes, dtype=p.dtype, device=p.device)
            only = torch.eye(positions, dtype=p.dtype, device=p.device).view(positions, *p.shape[1:-1])
            weights = [(p[..., k].sqrt() * counts * here, eye[k]) for here in only for k in range(classes)]
            found = [weight.unsqueeze(-1) * (one - p) for weight, one in weights]
        else:
            drawn = torch.multinomial(p.flatten(0, -2).float().cpu(), DRAWS, replacement=True, generator=generator)
            drawn = drawn.to(p.device).view(*p.shape[:-1], DRAWS)
            found = [(F.one_hot(y, classes) - p) * counts.unsqueeze(-1) / DRAWS**0.5 for y in drawn.unbind(-1)]
        return [root.movedim(-1, 1) for root in found] if outputs.dim() >= 4 else found

    def curvature(self, outputs: Tensor, target: Any, generator: torch.Generator, *, diagonal: bool) -> Tensor:
        """Return sum_n diag(p_n) - p_n p_n^T, exactly for any number of classes, or its diagonal."""
        class_labels(outputs, target)
        p = outputs.detach().softmax(-1)
        return (p - p.square()).sum(0) if diagonal else torch.diag(p.sum(0)) - p.T @ p

    def items(self, target: Any, count: int) -> int:
        """Return the number of labels that count."""
        if not isinstance(target, Tensor) or target.is_floating_point() or target.dim() < 2:
            return count
        return int((target != IGNORED).sum())


class Regression(Likelihood):
    """Gaussian noise, of one variance per output: (y - f)^2/(2 v) + 1/2 log(2 pi v), summed over an example's targets.

    Args:
        noise_var: v, a number or one for each output, in the order of a flattened example; where it is None,
            `fit_laplace` estimates it from the residuals of its data, and until then v is 1.
    """

    name = "regression"

    def __init__(self, noise_var: "float | Sequence[float] | Tensor | None" = None) -> None:
        self.estimated = noise_var is None
        try:
            values = [] if noise_var is None else torch.as_tensor(noise_var, dtype=torch.float64).flatten().tolist()
        except (TypeError, ValueError):
            values = [math.nan]  # no numbers
        if not all(math.isfinite(v) and v > 0 for v in values) or not (values or self.estimated):
            raise ValueError(f"noise_var must be finite and > 0, or None to estimate it, got {noise_var!r}")
        self.noise_var: float | tuple[float, ...] | None = values[0] if len(values) == 1 else tuple(values) or None
        self.residuals = Residuals()

    @property
    def needs_residuals(self) -> bool:
        """Whether the curvature has to wait for the noise: that of several outputs weighs them."""
        return self.noise_var is None and self.residuals.outputs != 1

    def variances(self, outputs: Tensor) -> Tensor:
        """Return v, which broadcasts to outputs (examples, ...)."""
        if not isinstance(self.noise_var, tuple):
            return outputs.new_full((), self.noise_var or 1.0)
        count, outs = len(self.noise_var), outputs[0].numel()
        if outs != count:
            raise ValueError(f"noise_var has {count} variances, the model {outs} outputs per example")
        return torch.tensor(self.noise_var, dtype=outputs.dtype).to(outputs.device).view(outputs.shape[1:])

    def item_losses(self, outputs: Tensor, target: Any) -> Tensor:
        """Return the Gaussian's -log density of every target."""
        var = self.variances(outputs)
        return ((values_like(outputs, target) - outputs).square() / var + (2 * math.pi * var).log()) / 2

    def roots(self, outputs: Tensor, target: Any, generator: torch.Generator) -> list[Tensor]:
        """Return roots of H = diag(1/v)."""
        values_like(outputs, target)
        outputs = outputs.detach()
        return _diagonal_roots(self.variances(outputs).rsqrt().expand_as(outputs), generator)

    def observe(self, output: Any, target: Any) -> None:
        """Add a batch's residuals, until the noise has been estimated from them."""
        if self.estimated and self.noise_var is not None:
            return
        outputs = logits_of(output).detach()
        self.residuals += Residuals.of(values_like(outputs, target), outputs)

    def join(self, gathered: Callable[[Any], list[Any]]) -> None:
        """Sum the residuals of all processes."""
        self.residuals = sum(gathered(self.residuals), Residuals())

    def settle(self, curvature: str) -> float:
        """Set v, where it was not given, to the mean squared residual; curvatures so far were taken at v = 1.

        The Gauss-Newton curvature goes with 1/v, the squared gradients of the empirical Fisher with 1/v^2. That is for
        one output; with several, the noise is settled before there are curvatures.
        """
        if self.noise_var is not None:
            return 1.0
        squares = self.residuals.squares
        found = (squares / self.residuals.count).tolist() if isinstance(squares, Tensor) else []
        if not found or not all(v > 0 for v in found):
            raise ValueError("all residuals are 0: the noise is unknown; pass likelihood=Regression(noise_var=...)")
        self.noise_var = found[0] if len(found) == 1 else tuple(found)
        return found[0] ** (-1 if curvature == "ggn" else -2) if len(found) == 1 else 1.0


class Heteroscedastic(Likelihood):
    """Gaussian noise of the model's own: the last dimension of its outputs is the means, then their log variances.

    1/2 (w + (y - m)^2 exp(-w) + log 2 pi) for a mean m and a log variance w.
    """

    name = "heteroscedastic"

    def item_losses(self, outputs: Tensor, target: Any) -> Tensor:
        """Return the Gaussian's -log density of every target."""
        mean, log_var = mean_and_log_var(outputs)
        squares = (values_like(mean, target) - mean).square()
        return (log_var + squares * torch.exp(-log_var) + math.log(2 * math.pi)) / 2

    def roots(self, outputs: Tensor, target: Any, generator: torch.Generator) -> list[Tensor]:
        """Return roots of E[H] = diag(exp(-w), 1/2), the Fisher information: H itself is not positive."""
        mean, log_var = mean_and_log_var(outputs.detach())
        values_like(mean, target)
        scale = torch.cat([torch.exp(-log_var / 2).flatten(1), torch.full_like(mean, 0.5**0.5).flatten(1)], -1)
        return _diagonal_roots(scale.view_as(outputs), generator)


class Multilabel(Likelihood):
    """Independent Bernoulli labels: binary cross-entropy of every output, for targets in 0..1 of the logits' shape."""

    name = "multilabel"

    def item_losses(self, outputs: Tensor, target: Any) -> Tensor:
        """Return softplus(f) - y f of every label."""
        return F.softplus(outputs) - self._labels(outputs, target) * outputs

    def roots(self, outputs: Tensor, target: Any, generator: torch.Generator) -> list[Tensor]:
        """Return roots of H = diag(p (1 - p))."""
        self._labels(outputs, target)
        p = outputs.detach().sigmoid()
        return _diagonal_roots((p * (1 - p)).sqrt(), generator)

    @staticmethod
    def _labels(outputs: Tensor, target: Any) -> Tensor:
        labels = values_like(outputs, target.to(outputs.dtype) if isinstance(target, Tensor) else target)
        low, high = (float(labels.min()), float(labels.max())) if labels.numel() else (0.0, 0.0)
        if not (low >= 0 and high <= 1):
            raise ValueError(f"labels of 'multilabel' must be in 0..1, got {low:g}..{high:g}")
        return labels


def _diagonal_roots(scale: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return roots of H = diag(scale^2): scale_k e_k, or random signs times the scale over sqrt(draws)."""
    count = scale[0].numel()
    if count <= FEW_OUTPUTS:
        eye = torch.eye(count, dtype=scale.dtype, device=scale.device)
        return [(scale.flatten(1) * eye[k]).view_as(scale) for k in range(count)]
    return [scale * signs / DRAWS**0.5 for signs in _signs(scale, generator)]


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (DRAWS, *like.shape), generator=generator).mul_(2).sub_(1).to(like)


class Given(Likelihood):
    """A function of (output, target) that returns one value per example.

    Where the model returns an object, it may take the object or its logits.
    """

    name = "given"

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def losses(self, output: Any, target: Any) -> Tensor:
        """Return one value per example, of what the model returned or of its logits."""
        try:
            found = self.loss(output, target)
        except (AttributeError, TypeError) as error:
            if isinstance(output, Tensor) and isinstance(error, TypeError):
                raise
            other = SimpleNamespace(logits=output) if isinstance(output, Tensor) else logits_of(output)
            found = self.loss(other, target)
        return _checked(found, target, dims=1)

    def item_losses(self, outputs: Tensor, target: Any) -> Tensor:
        """Return the losses for a tensor of logits, whatever object the model returns them in."""
        return self.losses(outputs, target)

    def roots(self, outputs: Tensor, target: Any, generator: torch.Generator) -> list[Tensor]:
        """Return the columns of S with S S^T = H, found by differentiating twice, or S times random signs."""
        outputs, count = outputs.detach(), outputs[0].numel()
        if count > MOST_OUTPUTS:
            raise ValueError(
                f"curvature='ggn' differentiates a loss of its own kind twice, for at most {MOST_OUTPUTS} outputs per "
                f"example, got {count}; use curvature='ef', or a likelihood by name"
            )
        with torch.enable_grad():
            leaf = outputs.clone().requires_grad_()
            losses = self.item_losses(leaf, target).sum()
            slope = torch.autograd.grad(losses, leaf, create_graph=True)[0].flatten(1)
            hessian = torch.zeros(len(outputs), count, count, dtype=torch.float64, device="cpu")
            for k in range(count if slope.requires_grad else 0):
                row = torch.autograd.grad(slope[:, k].sum(), leaf, retain_graph=True, allow_unused=True)[0]
                if row is not None:
                    hessian[:, k] = row.flatten(1)
        values, vectors = torch.linalg.eigh(hessian)
        if bool((values < -1e-4 * values.abs().amax(-1, keepdim=True)).any()):
            raise ValueError("curvature='ggn' needs a loss that is convex in the model's output; use curvature='ef'")
        columns = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).to(outputs)
        if count <= FEW_OUTPUTS:
            return [root.view_as(outputs) for root in columns.unbind(-1)]
        signs = _signs(columns[..., 0], generator)
        return [root.view_as(outputs) for root in torch.einsum("nik,dnk->dni", columns, signs) / DRAWS**0.5]


def _checked(losses: Any, target: Any, *, dims: int | None = None) -> Tensor:
    """Return the losses, if they are finite and as many as the targets (and of so many dimensions)."""
    count = len(target) if isinstance(target, Tensor) and target.dim() > 0 else None
    fits = isinstance(losses, Tensor) and losses.dim() >= 1 and dims in (None, losses.dim())
    if not fits or count not in (None, len(losses)):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"loss must return one value per example (reduction='none'), got {got} for {count} targets")
    if not bool(torch.isfinite(losses).all()):
        raise ValueError("the loss is not finite; check the data, or train the model with a smaller learning rate")
    found: Tensor = losses
    return found


NAMES: dict[str, Callable[[], Likelihood]] = {
    "classification": Classification,
    "tokens": Classification,
    "regression": Regression,
    "heteroscedastic": Heteroscedastic,
    "multilabel": Multilabel,
}


def likelihood_of(given: Any, loss: Loss | None = None) -> Likelihood | None:
    """Turn what a caller gives into a likelihood; None is to be found from the data."""
    if loss is not None:
        if not callable(loss):
            raise TypeError(f"loss must be a function of (output, target), got {loss!r}")
        if given is not None:
            raise ValueError("give loss= or likelihood=, not both")
        return Given(loss)
    if given is None or isinstance(given, Likelihood):
        return given
    if isinstance(given, str):
        if given not in NAMES:
            raise ValueError(f"likelihood must be one of {list(NAMES)} or a function, got {given!r}")
        return NAMES[given]()
    if not callable(given) or isinstance(given, type):
        raise TypeError(f"likelihood must be one of {list(NAMES)}, or a function of (output, target), got {given!r}")
    return Given(given)


def found_likelihood(output: Any, target: Any) -> Likelihood:
    """Find the likelihood that outputs and targets leave no choice about; an error names the choice.

    Integer labels (N,) for logits (N, K > 1) and labels of the positions of (N, T, K) or (N, K, H, W) are a
    classification; Booleans of the outputs' shape are multilabel; floats of the outputs' shape that are not all in
    0..1 a regression; floats that are half as many as the outputs, and not all whole, a heteroscedastic regression.
    """
    outputs, target = logits_of(output).detach(), as_target(target, logits_of(output))
    shape, wanted = tuple(target.shape), tuple(outputs.shape)
    if target.is_floating_point():
        if same_shape(shape, wanted):
            if bool(((target < 0) | (target > 1)).any()):
                return Regression()
            choice = ["'regression' (Gaussian noise)", "'multilabel' (probabilities of independent labels)"]
            choice += ["'classification' (probabilities of classes)"] if outputs.dim() > 1 and wanted[1] > 1 else []
            raise _choice("floats in 0..1", shape, wanted, choice)
        if same_shape(shape, (*wanted[:-1], wanted[-1] // 2)) and not bool((target == target.round()).all()):
            return Heteroscedastic()
        raise _choice("floats", shape, wanted, ["'classification' with labels.long()", "a loss= of your own"])
    if target.dtype == torch.bool and shape == wanted:
        return Multilabel()
    logits = classes_last(outputs)
    if outputs.dim() >= 2 and logits.shape[-1] > 1 and shape == tuple(logits.shape[:-1]):
        return Classification()
    if outputs.dim() == 2 and wanted[1] > 1 and shape != wanted:
        return Classification()  # says itself what is wrong with the labels' shape
    choice = ["'multilabel' (labels 0 and 1, one output each)", "'regression' with targets.float()"]
    raise _choice("integers", shape, wanted, [*choice, "a loss= of your own"])


def _choice(kind: str, shape: tuple[int, ...], outputs: tuple[int, ...], choice: list[str]) -> ValueError:
    return ValueError(
        f"targets that are {kind} of shape {shape} for outputs of shape {outputs} do not determine the likelihood; "
        f"give likelihood=: {', or '.join(choice)}"
    )
