"""The closed form against the laplace-torch package, where its definitions are ours: no bias, one batch."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import bayesify, fit_laplace
from bayesify.core.scopes import scopes_of


def laplace_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("laplace")


@pytest.mark.parametrize("classes", [2, 4])
def test_the_last_layers_logits_have_the_same_mean_and_covariance(classes):
    package = laplace_torch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, classes, bias=False))
    x, y = torch.randn(30, 4), torch.randint(classes, (30,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = package.Laplace(
            model, "classification", subset_of_weights="last_layer", hessian_structure="kron", prior_precision=2.0
        )
        theirs.fit(DataLoader(TensorDataset(x, y), 30))
        mean, covariance = theirs._glm_predictive_distribution(x)
    ours = bayesify(model, "la", include="2.*", prior_sig=2**-0.5, prior_mean="zero")
    fit_laplace(ours, [(x, y)], structure="kron")
    (scope,) = scopes_of(ours)
    with torch.no_grad():
        features = ours.eval()[1](ours[0](x))
        found = scope.method.closed_form(scope).logits(features, ours[2](features))
    torch.testing.assert_close(found.mean, mean.detach())
    exact = found.basis @ torch.diag_embed(found.q) @ found.basis.T
    torch.testing.assert_close(exact, covariance.detach(), rtol=1e-3, atol=1e-4)
