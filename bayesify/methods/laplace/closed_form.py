"""Predict with a fitted last layer in one pass: a linear layer's Gaussian weights give Gaussian logits."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from bayesify.core.distributed import whole
from bayesify.core.posterior import Posterior
from bayesify.core.reading import Scope
from bayesify.prediction.gaussian import GaussianLogits, Spread


class LastLayer(NamedTuple):
    """A linear layer with all of the model's spread.

    Attributes:
        head: The layer.
        weight: Its weight's posterior.
        bias: Its bias's posterior, or None where that is a point.
    """

    head: nn.Linear
    weight: Any
    bias: Any

    def spread(self) -> Spread:
        """Return how the layer spreads its outputs, whose covariance is Q_B diag(q) Q_B^T.

        With z the features in A's eigenbasis (and the bias's constant input with them), q_nk = sum_i z_ni^2/(b_k a_i +
        1/sigma^2 + damping). For a diagonal posterior q is sum_i x_ni^2 v_ki + v_k of the bias, and the basis the
        identity. The factor of `calibrate` is in both.
        """
        kron = self.weight.kron
        if kron is None:
            constant = None if self.bias is None else whole(self.bias.std).square()
            return Spread(None, None, whole(self.weight.std).square().T, constant, None)
        own = None if self.bias is None else self.bias.kron
        shift = None if own is None or own.right is None else own.right.squeeze(0)
        variances = kron.variances(self.weight.ridge).T * self.weight.calibration**2
        return Spread(kron.right, shift, variances, None, kron.left)

    def logits(self, features: Tensor, mean: Tensor) -> GaussianLogits:
        """Return the distribution of the layer's outputs.

        Args:
            features: The layer's inputs, (N, ..., in).
            mean: Its outputs in mean mode, (N, ..., K).
        """
        return self.spread().logits(features, mean)


def last_layer(scope: Scope) -> LastLayer | None:
    """Return the linear layer that alone has variance, or None where there is no such layer.

    Whether it is the last one is seen in the model's outputs, by whoever runs it.
    """
    movers: dict[Posterior, list[tuple[nn.Module, str]]] = {}
    moving = {p for p in scope.posteriors if p.moves}
    for site in scope.sites:
        for posterior in site.module.parametrizations[site.attribute]:  # type: ignore[index]
            if posterior in moving:
                movers.setdefault(posterior, []).append((site.module, site.attribute))
    places = {attribute: (posterior, found) for posterior, found in movers.items() for _, attribute in found}
    homes = {module for found in movers.values() for module, _ in found}
    single = all(len(found) == 1 for found in movers.values()) and len(movers) == len(places)
    if len(homes) != 1 or not single or not places.keys() <= {"weight", "bias"} or "weight" not in places:
        return None
    head, weight = homes.pop(), places["weight"][0]
    bias = places["bias"][0] if "bias" in places else None
    if not isinstance(head, nn.Linear) or any(len(head.parametrizations[a]) != 1 for a in places):  # type: ignore[index]
        return None
    if bias is not None and (weight.kron is None) != (bias.kron is None):
        return None  # the sum of two covariances with different bases
    return LastLayer(head, weight, bias)
