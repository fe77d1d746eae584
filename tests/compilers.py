"""Models for the tests of compilers, and what is compared."""

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from bayesify import bayesify, named_posteriors

METHODS = ("vi", "mc_dropout", "ivon", "la", "sgld", "vanilla")
DRAWING = ("vi", "mc_dropout", "ivon")  # in train mode
COMPILED = [  # the marks of a module whose tests compile
    pytest.mark.skipif(
        TorchVersion(torch.__version__) < (2, 15),
        reason="the compilers of older releases cannot trace context variables",
    ),
    pytest.mark.usefixtures("fresh_compiler"),
]


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.inp(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return x + self.norm(torch.tanh(self.lin(x)))


class Stack(nn.Module):
    """Equal blocks, each of them checkpointed if that is asked for."""

    def __init__(self):
        super().__init__()
        self.inp, self.blocks, self.saves = nn.Linear(4, 4), nn.ModuleList(Block() for _ in range(4)), False

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
        return x


X = torch.linspace(-1, 1, 20).view(5, 4)


def vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=8, patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=3
    )
    nn.init.normal_(model.heads.head.weight)
    return model, torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config), torch.arange(10).view(2, 5)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), torch.arange(10).view(2, 5)


MODELS = {"mlp": lambda: (MLP(), X), "sequential": lambda: (nn.Sequential(MLP(), nn.ReLU()), X), "vit": vit}
MODELS |= {"bert": bert, "gpt2": gpt2}


def made(kind: str, method: str):
    """Return a bayesified model whose posterior can be sampled, with an input."""
    model, x = MODELS[kind]()
    options = {} if method == "vanilla" else {"prior_sig": 0.3}
    bayesify(model, method, prior_mean="zero" if method == "mc_dropout" else None, **options)
    for _, q in named_posteriors(model):
        if method == "la":
            q.fit(torch.full(q.shape, 30.0), q.prior_sig)
        elif method == "sgld":
            for away in (0.1, -0.2):
                q.collect()
                with torch.no_grad():
                    q.original.add_(away)
    return model, x


def out(result):
    return result if isinstance(result, torch.Tensor) else result.logits


def gradients(model, loss):
    model.zero_grad()
    torch.manual_seed(3)
    loss().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
