"""The tasks: data by seed, a model, and how plain training is done.

A task hands out training and held-out data freely. What it is scored on comes from `validation()`, or from `test()`,
which `files.score_once` alone calls.
"""

import gzip
import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from bayesify import param_groups

from . import shifts

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "runs/evidence"
HELD_OUT = 0.2
HELD_OUT_MOST = 2000  # enough for one factor or one temperature


class Part(NamedTuple):
    """Inputs, a tensor or a dict of tensors, and labels."""

    x: torch.Tensor | dict[str, torch.Tensor]
    y: torch.Tensor

    def take(self, rows):
        """Return some rows, without columns that are padding in all of them."""
        if not isinstance(self.x, dict):
            return Part(self.x[rows], self.y[rows])
        longest = int(self.x["attention_mask"][rows].sum(1).max())
        return Part({name: tensor[rows][:, :longest] for name, tensor in self.x.items()}, self.y[rows])

    def batches(self, size=100):
        """Return all rows in batches; sentences sorted by length, which needs less padding."""
        order = self.x["attention_mask"].sum(1).argsort() if isinstance(self.x, dict) else torch.arange(len(self.y))
        return [tuple(self.take(rows)) for rows in order.split(size)]


class Scored(NamedTuple):
    """What a run is scored on: data like the training data, the same shifted, and data of another kind."""

    known: Part
    shifted: Part
    levels: torch.Tensor
    ood: Part


def data(*parts):
    """Return a path in the folder of the real data."""
    if "BAYESIFY_DATA" not in os.environ:
        raise SystemExit("set BAYESIFY_DATA to the folder with MNIST, FashionMNIST, hymenoptera, text and weights")
    return Path(os.environ["BAYESIFY_DATA"], *parts)


def cached(name, make):
    """Return what an earlier call made, or make it and keep it."""
    path = CACHE / "data" / f"{name}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(make(), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    return torch.load(path, weights_only=True)


def chosen(count, size, seed):
    """Return `size` of `count` rows, and the others."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:size], order[size:]


def strange(x):
    """Return inputs of another kind as a part; their labels mean nothing."""
    return Part(x, torch.zeros(len(next(iter(x.values())) if isinstance(x, dict) else x), dtype=torch.long))


def sgd(groups):
    """Return the optimizer of plain training, unless a task has another; each group has its learning rate."""
    return torch.optim.SGD(groups, momentum=0.9)


class Task:
    """A task with one seed. A subclass sets these, `train`, `held_out` and what is scored."""

    name: str
    about: str
    head = "classifier.*"  # the last layer
    overlap = 0.0  # test items over training items, where seeds split the same data
    epochs, batch, lr, sgd_lr = 40, 32, 0.1, 0.1
    like = "sgd"  # whose learning rate SGLD and IVON take

    def __init__(self, seed):
        self.seed = seed

    def hold_out(self, part):
        """Cut the training rows into those that train and the fifth, or 2,000, that settings are chosen on."""
        held, rest = chosen(len(part.y), min(HELD_OUT_MOST, round(HELD_OUT * len(part.y))), self.seed)
        self.train, self.held_out = part.take(rest), part.take(held)

    def logits(self, model, inputs):
        """Run a model."""
        return model(inputs)

    def set_training(self, model):
        """Put a model into the mode that training needs."""
        model.train()

    def groups(self, model, lr):
        """Return the parameter groups of a Bayesian model."""
        return param_groups(model, lr)

    def plain_groups(self, model, lr):
        """Return the parameter groups of a plain model."""
        return [{"params": [p for p in model.parameters() if p.requires_grad], "lr": lr}]

    def optimizer(self, model, *, bayesian, factor):
        """Return plain training's optimizer, its learning rates times a factor."""
        groups = (self.groups if bayesian else self.plain_groups)(model, self.lr * factor)
        return sgd(groups)


class Digits(Task):
    """Scikit-learn's digits."""

    name = "digits"
    about = "1,200 digits of 8 x 8 pixels, an MLP of 100 units; 597 test digits; shifts rotate or add noise; OOD: noise"
    head = "2.*"

    def __init__(self, seed):
        super().__init__(seed)
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        self.all = Part(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
        train, self.test_rows = chosen(len(y), 1200, 1000)
        self.hold_out(self.all.take(train))

    def scored(self, part, seed):
        shifted = shifts.rotated_or_noisy(part.x.view(-1, 1, 8, 8), seed).flatten(1)
        noise = torch.rand(500, 64, generator=torch.Generator().manual_seed(seed))
        return Scored(part, Part(shifted, part.y), shifts.levels(len(part.y)), strange(noise))

    def validation(self):
        """Return the held-out digits: there are no others."""
        return self.scored(self.held_out, 2000 + self.seed)

    def test(self):
        return self.scored(self.all.take(self.test_rows), 3000 + self.seed)

    def model(self):
        return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def idx(folder, name):
    """Read a file of MNIST's format: images as rows of numbers between 0 and 1, or labels."""
    with gzip.open(data(folder, "raw", name + "-ubyte.gz")) as file:
        values = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    return values[16:].view(-1, 784).float() / 255 if "images" in name else values[8:].long()


class MNIST(Task):
    """MNIST with the paper's MLP."""

    name = "mnist"
    about = (
        "5,000 images, the paper's MLP of 2.8 million weights; 2,000 test images, 1,000 of them shifted (rotated or "
        "with noise); OOD: 1,000 of FashionMNIST"
    )
    head = "6.*"
    epochs, batch, lr, sgd_lr = 10, 128, 0.1, 0.1
    count, tested = 5000, 2000

    def __init__(self, seed):
        super().__init__(seed)
        self.all = Part(idx("MNIST", "train-images-idx3"), idx("MNIST", "train-labels-idx1"))
        rows, self.others = chosen(len(self.all.y), self.count, 1000 + seed)
        self.hold_out(self.all.take(rows))

    def scored(self, part, fashion, seed):
        few = part.take(slice(0, 1000))
        shifted = shifts.rotated_or_noisy(few.x.view(-1, 1, 28, 28), seed).flatten(1)
        return Scored(part, Part(shifted, few.y), shifts.levels(len(few.y)), strange(fashion))

    def validation(self):
        """Return training images that this seed does not train on."""
        part = self.all.take(self.others[:1000])
        return self.scored(part, idx("FashionMNIST", "t10k-images-idx3")[5000:6000], 2000 + self.seed)

    def test(self):
        part = Part(idx("MNIST", "t10k-images-idx3"), idx("MNIST", "t10k-labels-idx1"))
        part = part.take(chosen(len(part.y), self.tested, 1000)[0])
        return self.scored(part, idx("FashionMNIST", "t10k-images-idx3")[:1000], 3000 + self.seed)

    def model(self):
        hidden = [m for a, b in pairwise((784, 1000, 1000, 1000)) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(1000, 10))


class MNIST55000(MNIST):
    """All of MNIST."""

    name = "mnist55000"
    about = "55,000 images and otherwise as mnist, with all 10,000 test images"
    epochs, count, tested = 5, 55000, 10000


class UpperNet(nn.Module):
    """The upper blocks of an EfficientNet, on what its lower blocks make of an image."""

    def __init__(self, net, first):
        super().__init__()
        self.blocks, self.conv_head, self.bn2 = net.blocks[first:], net.conv_head, net.bn2
        self.global_pool, self.classifier = net.global_pool, net.classifier

    def forward(self, x):
        return self.classifier(self.global_pool(self.bn2(self.conv_head(self.blocks(x)))))


class Photos(Task):
    """Ants and bees."""

    name = "photos"
    about = (
        "random splits of 397 photos of ants and bees (hymenoptera) into 244 and 153, EfficientNet-lite0 with ImageNet "
        "weights at 128 pixels, the upper three blocks and the head trained; shifts blur or darken; OOD: 150 MNIST "
        "digits in RGB"
    )
    epochs, batch, lr, lr_head, sgd_lr = 8, 16, 1e-3, 1e-2, 1e-3
    size, first, tested, overlap = 128, 4, 153, 153 / 244

    def __init__(self, seed):
        super().__init__(seed)
        found = cached("photos", self.prepare)
        self.y, self.clean, self.shifted, self.strange = (found[k] for k in ("y", "clean", "shifted", "strange"))
        self.test_rows, rows = chosen(len(self.y), self.tested, 1000 + seed)
        self.rows = rows
        self.hold_out(Part(self.clean[rows], self.y[rows]))

    def prepare(self):
        """Run all photos, clean and shifted, and the digits through the frozen lower blocks."""
        images, labels = [], []
        from PIL import Image
        from torchvision.transforms.functional import center_crop, pil_to_tensor, resize

        for label, kind in enumerate(("ants", "bees")):
            for path in sorted(p for part in ("train", "val") for p in data("hymenoptera", part, kind).glob("*.jpg")):
                image = Image.open(path).convert("RGB")
                square = resize(center_crop(image, min(image.size)), [self.size, self.size])
                images.append(pil_to_tensor(square).float() / 127.5 - 1)
                labels.append(label)
        clean = torch.stack(images)
        order = torch.randperm(len(clean), generator=torch.Generator().manual_seed(0))  # levels for both classes
        clean, y = clean[order], torch.tensor(labels)[order]
        digits = [idx("MNIST", f"{part}-images-idx3")[:150].view(-1, 1, 28, 28) for part in ("t10k", "train")]
        digits = F.interpolate(torch.cat(digits), size=self.size, mode="bilinear").expand(-1, 3, -1, -1) * 2 - 1
        net = self.whole().eval()
        lower = nn.Sequential(net.conv_stem, net.bn1, net.blocks[: self.first])
        with torch.no_grad():
            made = [
                torch.cat([lower(x) for x in images.split(50)])
                for images in (clean, shifts.blurred_or_dark(clean), digits)
            ]
        return {"y": y, "clean": made[0], "shifted": made[1], "strange": made[2]}

    def scored(self, rows, ood):
        y = self.y[rows]
        levels = shifts.levels(len(self.y))[rows]
        return Scored(Part(self.clean[rows], y), Part(self.shifted[rows], y), levels, strange(ood))

    def validation(self):
        """Return the held-out photos: there are no others."""
        held = self.rows[chosen(len(self.rows), round(HELD_OUT * len(self.rows)), self.seed)[0]]
        return self.scored(held, self.strange[150:])

    def test(self):
        return self.scored(self.test_rows, self.strange[:150])

    def whole(self):
        """Return the network with ImageNet's weights and a new head, which starts as timm's own does."""
        import timm
        from safetensors.torch import load_file

        net = timm.create_model("tf_efficientnet_lite0")
        net.load_state_dict(load_file(data("weights", "efficientnet_lite0_in1k_timm.safetensors")))
        net.reset_classifier(2)
        return net

    def model(self):
        return UpperNet(self.whole(), self.first)

    def set_training(self, model):
        """Train with the running statistics: batches of sixteen photos have poor ones."""
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    def groups(self, model, lr):
        """Return groups with a ten times larger learning rate for the new head."""
        return param_groups(model, lr, lr_head=lr * self.lr_head / self.lr, head="classifier")

    def plain_groups(self, model, lr):
        head = list(model.classifier.parameters())
        body = [p for p in model.parameters() if all(p is not h for h in head)]
        return [{"params": body, "lr": lr}, {"params": head, "lr": lr * self.lr_head / self.lr}]
