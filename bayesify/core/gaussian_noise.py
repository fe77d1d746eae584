"""The noise of a regression's data, learned beside the model: a variance per output, which belongs to the model."""

import math

import torch
from torch import Tensor, nn

from bayesify.core.prior import state_dtype
from bayesify.core.scopes import NOISE, scopes_of


class GaussianNoise(nn.Module):
    """Gaussian noise of one variance per output, whose logarithm is a parameter.

    It begins with the mean squared residual of the first batch that it sees.

    Args:
        outputs: How many outputs an example has.
    """

    begun: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

    @property
    def variance(self) -> Tensor:
        """The variance of each output."""
        return self.log_var.detach().exp()

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the Gaussian's NLL: 1/2 ((y - f)^2/v + log(2 pi v)), summed over outputs, its mean over examples.

        Args:
            outputs: The model's, (N,) or (N, ...).
            targets: Of the same shape.

        Raises:
            ValueError: The shapes differ, or are of another number of outputs.
        """
        count = self.log_var.numel()
        if outputs.shape != targets.shape or outputs.numel() != len(outputs) * count:
            raise ValueError(
                f"outputs and targets must have one shape with {count} values per example, got {tuple(outputs.shape)} "
                f"and {tuple(targets.shape)}; nothing is broadcast: use squeeze or view, or noise(model, outputs=)"
            )
        squares = (targets - outputs).square().reshape(len(outputs), count)
        if not bool(self.begun) and torch.is_grad_enabled() and len(squares):
            with torch.no_grad():
                self.log_var.copy_(squares.mean(0).clamp_min(torch.finfo(self.log_var.dtype).tiny).log())
                self.begun.fill_(True)
        each = squares * torch.exp(-self.log_var) + self.log_var + math.log(2 * math.pi)
        return each.sum(1).mean() / 2


def noise(model: nn.Module, outputs: int = 1) -> GaussianNoise:
    """Give a regression model noise that is learned in training, and return its loss.

    The noise is a part of the model: `param_groups` has it, `save` and `load` keep it, `predict` and `fit_laplace` use
    it, and `unbayesify` removes it.

    Args:
        model: A bayesified model.
        outputs: How many outputs an example has, each of which gets a variance.

    Returns:
        A module: call it with outputs and targets for the mean Gaussian NLL. Of a model that has noise already, that.

    Raises:
        ValueError: The model is not bayesified, or more than one part of it is; outputs is no positive integer.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, methods, penalty
        >>> model = bayesify(torch.nn.Linear(3, 1), "vi")
        >>> noise = methods.noise(model)
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> loss = noise(model(x), y) + penalty(model, num_data=20)
    """
    roots = [scope.root for scope in scopes_of(model)]
    if len(roots) != 1 or roots[0] is None:
        raise ValueError(f"{len(roots)} parts of the model were bayesified on their own; give noise to one of them")
    if isinstance(outputs, bool) or not isinstance(outputs, int) or outputs < 1:
        raise ValueError(f"outputs must be a positive integer, got {outputs!r}")
    found = roots[0]._modules.get(NOISE)
    if found is None:
        first = next(roots[0].parameters())
        found = GaussianNoise(outputs).to(first.device, state_dtype(first))
        roots[0].add_module(NOISE, found)
    if not isinstance(found, GaussianNoise) or found.log_var.numel() != outputs:
        raise ValueError(f"the model has noise already, not for {outputs} outputs; unbayesify(model) removes it")
    return found


def noise_in(model: nn.Module) -> GaussianNoise | None:
    """Return the noise that was learned beside a model, or None."""
    return next((module for module in model.modules() if isinstance(module, GaussianNoise)), None)
