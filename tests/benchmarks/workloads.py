"""The models that are measured, and one training step of each method on them."""

import itertools
from dataclasses import dataclass

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from bayesify import SGLD, bayesify, param_groups, penalty

NUM_DATA = 60_000
CLASSES = 10
METHODS = ("vi", "ivon", "mc_dropout", "sgld", "swag", "la")


@dataclass(frozen=True)
class Workload:
    """A model with a batch.

    Attributes:
        name: The model, "mlp" or a torchvision builder.
        batch: Examples in a batch.
        rounds: How often each step is timed.
    """

    name: str
    batch: int
    rounds: int

    def model(self) -> nn.Module:
        """Build the model, always with the same weights."""
        torch.manual_seed(0)
        if self.name != "mlp":
            model: nn.Module = getattr(torchvision.models, self.name)(weights=None, num_classes=CLASSES)
            if self.name.startswith("vit"):
                nn.init.normal_(model.heads.head.weight, std=0.02)  # zero at first, and nothing below has a gradient
            return model
        sizes = (784, 1000, 1000, 1000)
        layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(1000, CLASSES))

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one batch."""
        shape = (784,) if self.name == "mlp" else (3, 224, 224)
        generator = torch.Generator().manual_seed(0)
        return (
            torch.randn(self.batch, *shape, generator=generator),
            torch.randint(CLASSES, (self.batch,), generator=generator),
        )

    def __str__(self) -> str:
        return f"{self.name}, batch {self.batch}"


MLP = Workload("mlp", 128, 30)
SHORT = (MLP, Workload("resnet50", 8, 4), Workload("vit_b_32", 8, 5))
LONG = (Workload("resnet101", 16, 2), Workload("vit_l_32", 16, 2))


def plain_step(work: Workload):
    """Return a closure that does one step of plain SGD."""
    model, (x, y) = work.model(), work.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def bayesian_step(work: Workload, method: str, **options):
    """Return a closure that does one training step of a method, at its defaults unless options are given."""
    model, (x, y) = bayesify(work.model(), method, **options), work.data()
    if method == "sgld":
        optimizer = SGLD(model, 1e-3, num_data=NUM_DATA, momentum=0.5)
    elif method == "ivon":
        from bayesify import IVON  # older checkouts, which this one is set beside, have none

        optimizer = IVON(model, 1e-3, num_data=NUM_DATA)
    else:
        optimizer = torch.optim.SGD(param_groups(model, 1e-3), momentum=0.5)

    def step():
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + penalty(model, NUM_DATA)).backward()
        optimizer.step()

    return step
