"""Modules that read their weights in another way than by calling a layer: every read is of the same draw."""

import pytest
import torch
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from timm.layers.attention import Attention
from torch import nn
from torchvision.ops import DeformConv2d

from bayesify import bayesify, mean, named_posteriors, sample


class Deformed(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset, self.conv = nn.Conv2d(4, 18, 3, padding=1), DeformConv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x, self.offset(x))


class Attended(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(8, 2, batch_first=True), need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


RANDOM = torch.Generator().manual_seed(0)
IMAGE, TOKENS = torch.randn(2, 4, 7, 7, generator=RANDOM), torch.randn(2, 5, 8, generator=RANDOM)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # weights with noise of size 1 take other kernels: their roundings, and no more
READERS = {
    "MultiheadAttention": (lambda: Attended(True), TOKENS),
    "MultiheadAttention fused": (lambda: Attended(False), TOKENS),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), TOKENS),
    "timm Attention fused": (lambda: Attention(8, 2, qkv_bias=True), TOKENS),
    "DeformConv2d": (Deformed, IMAGE),
    "Conv2dSame": (lambda: Conv2dSame(4, 6, 3, stride=2), IMAGE),
    "StdConv2d": (lambda: StdConv2d(4, 6, 3, bias=True), IMAGE),
    "StdConv2dSame": (lambda: StdConv2dSame(4, 6, 3, stride=2, bias=True), IMAGE),
    "ScaledStdConv2d": (lambda: ScaledStdConv2d(4, 6, 3), IMAGE),
    "ScaledStdConv2dSame": (lambda: ScaledStdConv2dSame(4, 6, 3, stride=2), IMAGE),
    "LSTM": (lambda: nn.LSTM(8, 4, batch_first=True), TOKENS),
}


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("training", [True, False])
def test_every_parameter_is_read_as_its_draw(reader, training):
    build, x = READERS[reader]
    model = bayesify(build(), "vi", init_sig=1.0).train(training)
    posteriors = dict(named_posteriors(model))
    spread = {name: p.rho.detach().clone() for name, p in posteriors.items()}
    with torch.no_grad(), mean(model):
        plain = first(model(x))
    for name, posterior in posteriors.items():
        with torch.no_grad(), sample(model, seed=1):
            for other in posteriors.values():
                other.rho.fill_(-1e4)
            torch.testing.assert_close(first(model(x)), plain, **CLOSE)
            posterior.rho.copy_(spread[name])
            assert not torch.allclose(first(model(x)), plain), f"a large spread of {name} is seen"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("training", [True, False])
def test_a_draw_is_the_plain_module_with_that_draw_as_its_weights(reader, training):
    build, x = READERS[reader]
    model = bayesify(build(), "vi", init_sig=1.0).train(training)
    with torch.no_grad(), sample(model, seed=1):
        drawn = first(model(x))
        thetas = {name: posterior(posterior.original) for name, posterior in named_posteriors(model)}
    plain = build().train(training)
    plain.load_state_dict(thetas, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(first(plain(x)), drawn, **CLOSE)
