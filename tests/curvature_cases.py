"""Every way that a parameter can be used, in small models: for squared per-example gradients."""

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 3


class Lambda(nn.Module):
    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x):
        return self.function(self, x)


def param(*shape):
    return nn.Parameter(torch.randn(shape))


class LastFirst(nn.Module):
    """Time comes first inside, as in nn.MultiheadAttention."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, ids):
        return self.head(self.layer(self.table(ids).transpose(0, 1)).mean(0))


def attend(m, x):
    h = m.table(x)
    return m.head(m.attention(h, h[:, :2], h[:, :2], need_weights=False)[0][:, 0])


IMAGES, VECTORS, WORDS = (3, 8, 8), (7,), None

CASES = {
    "linear": (VECTORS, lambda: nn.Linear(7, CLASSES)),
    "mlp": (VECTORS, lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, CLASSES, bias=False))),
    "conv": (
        IMAGES,
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(64, CLASSES)
        ),
    ),
    "conv groups dilation": (
        IMAGES,
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, groups=3, padding="same", dilation=2), nn.PReLU(6), nn.Flatten(), nn.Linear(384, CLASSES)
        ),
    ),
    "conv transposed": (
        IMAGES,
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 2, 3, stride=2), nn.Flatten(), nn.Linear(578, CLASSES)),
    ),
    "conv 1d and 3d": (
        IMAGES,
        lambda: Lambda(
            lambda m, x: m.b(m.a(x.flatten(2)).view(-1, 2, 4, 4, 4)).flatten(1)[:, :CLASSES],
            a=nn.Conv1d(3, 2, 3, padding=1),
            b=nn.Conv3d(2, 2, 3),
        ),
    ),
    "conv over frames": (
        IMAGES,
        lambda: Lambda(
            lambda m, x: m.a(x.reshape(-1, 1, 8, 8)).view(len(x), -1)[:, ::50][:, :CLASSES], a=nn.Conv2d(1, 2, 3)
        ),
    ),
    "norms": (
        IMAGES,
        lambda: nn.Sequential(
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 4, 3),
            nn.GroupNorm(2, 4),
            nn.LayerNorm([6, 6]),
            nn.Flatten(),
            nn.RMSNorm(144),
            nn.Linear(144, CLASSES),
        ),
    ),
    "sequence": (
        WORDS,
        lambda: Lambda(
            lambda m, x: m.b(m.a(m.table(x))).mean(1),
            table=nn.Embedding(11, 6),
            a=nn.Linear(6, 5),
            b=nn.Linear(5, CLASSES),
        ),
    ),
    "padding": (
        WORDS,
        lambda: Lambda(
            lambda m, x: m.a(m.table(x).sum(1)), table=nn.Embedding(11, 6, padding_idx=2), a=nn.Linear(6, CLASSES)
        ),
    ),
    "attention": (
        WORDS,
        lambda: Lambda(
            attend,
            table=nn.Embedding(11, 6),
            attention=nn.MultiheadAttention(6, 2, batch_first=True),
            head=nn.Linear(6, CLASSES),
        ),
    ),
    "time first": (WORDS, LastFirst),
    "tied ends": (
        WORDS,
        lambda: Lambda(lambda m, x: (m.table(x).mean(1) @ m.table.weight.T)[:, :CLASSES], table=nn.Embedding(11, 6)),
    ),
    "used twice": (VECTORS, lambda: Lambda(lambda m, x: m.a(torch.tanh(m.a(x)))[:, :CLASSES], a=nn.Linear(7, 7))),
    "bare parameters": (
        WORDS,
        lambda: Lambda(
            lambda m, x: (
                (torch.cat([m.token.expand(len(x), -1, -1), m.table(x) * m.scale], 1) + m.places - m.shift).mean(1)[
                    :, :CLASSES
                ]
                * m.log.exp()
            ),
            token=param(1, 1, 6),
            table=nn.Embedding(11, 6),
            scale=param(6),
            places=param(1, 6, 6),
            shift=param(6),
            log=param(),
        ),
    ),
    "positions": (
        WORDS,
        lambda: Lambda(
            lambda m, x: (m.table(x) + m.places(torch.arange(5)[None])).mean(1)[:, :CLASSES],
            table=nn.Embedding(11, 6),
            places=nn.Embedding(9, 6),
        ),
    ),
    "a table that a network makes": (
        WORDS,
        lambda: Lambda(
            lambda m, x: (m.table(x) * m.make(torch.ones(5, 2).double())[None]).mean(1)[:, :CLASSES],
            table=nn.Embedding(11, 6),
            make=nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 6)),
        ),
    ),
    "einsum and repeat": (
        WORDS,
        lambda: Lambda(
            lambda m, x: torch.einsum("ntc,cd->nd", m.table(x) + m.token.repeat(len(x), 5, 1), m.weight),
            table=nn.Embedding(11, 6),
            token=param(1, 1, 6),
            weight=param(6, CLASSES),
        ),
    ),
    "weight of two parameters": (
        VECTORS,
        lambda: Lambda(
            lambda m, x: x @ (m.a @ m.b + m.a.sum() * m.c), a=param(7, 2), b=param(2, CLASSES), c=param(7, 1)
        ),
    ),
    "lstm": (
        WORDS,
        lambda: Lambda(
            lambda m, x: m.head(m.lstm(m.table(x))[0][:, -1]),
            table=nn.Embedding(11, 6),
            lstm=nn.LSTM(6, 4, batch_first=True),
            head=nn.Linear(4, CLASSES),
        ),
    ),
}


def case(name, count=6, seed=0):
    torch.manual_seed(seed)
    shape, make = CASES[name]
    model = make().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    x = torch.randint(11, (count, 5)) if shape is None else torch.randn(count, *shape, dtype=torch.float64)
    labels = torch.randint(CLASSES, (count,))
    params = dict(model.named_parameters())
    return model, params, lambda s: F.cross_entropy(model(x[s]), labels[s], reduction="none")
