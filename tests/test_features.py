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
    assert torch.equal(found, pooled[1])  # the first forward found the layer
    assert torch.equal(active.features(model, images, layer="fc")[0], found)


class Twice(nn.Module):
    """Calls one layer twice, and returns neither output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        """Return three outputs."""
        return self.layer(self.layer(x))[:, :3] + 1


def test_tokens_and_places_are_averaged():
    tokens = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(active.features(nn.Linear(4, 3), tokens)[0], tokens.mean(1))
    image = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(18, 2))
    assert torch.equal(active.features(model, image, layer="0")[0], image.mean((2, 3)))


def test_hidden_tokens_of_a_transformer_do_not_count():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(**small, vocab_size=20, num_labels=3)
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    batch = {
        "input_ids": torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(0)),
        "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 2 + [0] * 4]),
    }
    with torch.no_grad():
        states = model.bert(**batch).last_hidden_state
    wanted = torch.stack([states[i, :n].mean(0) for i, n in enumerate((6, 4, 2))])
    torch.testing.assert_close(active.features(model, batch)[0], wanted)
    bayesify(model, "vi")
    torch.testing.assert_close(active.features(model, batch)[0], wanted)


@pytest.mark.parametrize(
    ("model", "data", "layer", "message"),
    [
        (network(), X, "head", r"no layer 'head'; its last linear layers are \['0', '4'\]"),
        (Twice(), X, None, "'layer' is called 2 times in a forward pass"),
        (Twice(), X, "layer", "'layer' is called 2 times in a forward pass"),
        (network(), [], None, "data has no batches"),
        (nn.Linear(4, 3), torch.ones(2, 5, 5, 5, 4), None, r"must be \(examples, features\), got .*layer="),
        (nn.ReLU(), X, None, "the model has no linear layer; .*layer="),
    ],
)
def test_what_has_no_features(model, data, layer, message):
    with pytest.raises(ValueError, match=message):
        active.features(model, data, layer)
    assert not any(m._forward_hooks for m in model.modules())
