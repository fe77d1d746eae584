"""Features are what the last layer takes at the posterior mean, in eval mode, whatever the model is in."""

import pytest
import torch
import torchvision
from torch import nn

from bayesify import active, bayesify, metrics, mix

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(9) % 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.mark.parametrize("method", [None, "vi", "mc_dropout", "mixture"])
def test_features_are_what_the_last_layer_takes_at_the_mean(method):
    expected = network().eval()[:-1](X).detach()
    model = network()
    if method == "mixture":
        model = mix([bayesify(model, "vi"), bayesify(network(), "vi")])
    elif method is not None:
        bayesify(model, method)
    model.train()
    found, labels = active.features(model, [(X[:5], Y[:5]), (X[5:], Y[5:])])
    torch.testing.assert_close(found, expected)
    assert torch.equal(labels, Y)
    assert model.training and not found.requires_grad
    again, none = active.features(model, X)
    assert torch.equal(again, found) and none is None
    assert all(not m._forward_hooks for m in network().modules())
    assert metrics.feature_distance(found, labels, again).shape == (9,)


def test_the_layer_of_a_large_model_is_found_or_named():
    model = bayesify(torchvision.models.resnet18(num_classes=5), "vi").eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    pooled: list[torch.Tensor] = []
    handle = model.avgpool.register_forward_hook(lambda m, a, out: pooled.append(out.flatten(1)))
    found, _ = active.features(model, images)
    handle.remove()
    assert torch.equal(found, pooled[0])
    assert torch.equal(active.features(model, images, layer="fc")[0], found)


class Twice(nn.Module):
    """Calls one layer twice, and returns neither output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        """Return three outputs."""
        return self.layer(self.layer(x))[:, :3] + 1


@pytest.mark.parametrize(
    ("model", "data", "layer", "message"),
    [
        (network(), X, "head", r"no layer 'head'; its last linear layers are \['0', '4'\]"),
        (Twice(), X, None, "no single linear layer gives the model's output; name .* layer="),
        (Twice(), X, "layer", "'layer' is called 2 times in a forward pass"),
        (network(), [], None, "data has no batches"),
        (nn.Linear(4, 3), torch.ones(2, 5, 4), None, r"shape \(2, 5, 4\), not \(examples, features\).*layer="),
    ],
)
def test_what_has_no_features(model, data, layer, message):
    with pytest.raises(ValueError, match=message):
        active.features(model, data, layer)
    assert not any(m._forward_hooks for m in model.modules())
