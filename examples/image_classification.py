r"""Fine-tune any timm or torchvision model on a folder of images, Bayesian by any method, and measure its uncertainty.

    python examples/image_classification.py --data photos --model tf_efficientnet_lite0 --pretrained --method vi \
        --hparams prior_sig=0.1,kld=0.1 --lr 1e-3 --lr_head 1e-2

`photos` holds `train/<class>/*.jpg` and the test images in `test/<class>` (or `val/<class>`). Validation images, for
early stopping, are a part of `train` that is not trained on; nothing is chosen by looking at the test images.
`--data pets` and `--data flowers` are torchvision's datasets, downloaded; the BayesDLL paper's section 5.2 is

    python examples/image_classification.py --data pets --model torchvision/resnet101 --pretrained --method vi \
        --hparams prior_sig=1.0,kld=1e-3,nst=5 --lr 1e-4 --lr_head 1e-2 --val_heldout 0.5 --batch_size 16
    python examples/image_classification.py --data flowers --model torchvision/vit_l_32 --pretrained --method sgld \
        --hparams prior_sig=0.01,Ninflate=1e3,nd=1.0,burnin=5,thin=10 --lr 1e-4 --lr_head 1e-2 --val_heldout 0.5

The output folder gets `log.jsonl` (one line per epoch), `last.pt` (to go on after a stop: run the same command again),
`best/` (the posterior with the lowest validation loss), `report.html`, and `result.json`, whose scores are fractions.
"""

import argparse
import json
import math
import os
import random
from pathlib import Path

import torch
from bayesify.integrations.vision import create_bayesian, update_bn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from torchvision import datasets
from torchvision.transforms import Compose, Resize
from tqdm import tqdm

from bayesify import SGLD, fit_laplace, load, metrics, param_groups, penalty, plots, predict, save

NOT_SETTINGS = ("out", "workers", "root")  # where a run happens, not what it is
SCORES = ("error", "nll", "ece", "mce", "brier")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(os.environ.get("BAYESIFY_DATA", "data"))
    parser.add_argument("--root", type=Path, default=root, help="where data sets lie, and are downloaded to")
    parser.add_argument("--data", default="hymenoptera", help="a folder (in --root or any other), pets or flowers")
    parser.add_argument("--model", default="tf_efficientnet_lite0", help="a timm or torchvision name")
    parser.add_argument("--pretrained", action="store_true", help="prior mean and start: the weights of the hub")
    parser.add_argument("--weights", type=Path, help="the same with a weights file")
    parser.add_argument("--method", default="vi", choices=("vanilla", "vi", "mc_dropout", "sgld", "la"))
    parser.add_argument("--hparams", type=hparams, default={}, help="name=value,... of bayesify; burnin is in epochs")
    parser.add_argument("--epochs", type=int, default=10, help="at most this many")
    parser.add_argument("--patience", type=int, default=5, help="stop after so many epochs without a better one")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the body")
    parser.add_argument("--lr_head", type=float, help="learning rate of the head; that of the body if not given")
    parser.add_argument("--lr_sig", type=float, help="learning rate of VI's spread; that of the body if not given")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--schedule", choices=("constant", "cosine"), default="constant", help="of the learning rates")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--size", type=int, help="pixels per side; the model's own if not given")
    parser.add_argument("--no_augment", action="store_true", help="train on the images as they are tested")
    parser.add_argument("--val_heldout", type=float, default=0.2, help="fraction of the training images for validation")
    parser.add_argument("--update_bn", type=int, help="at the end, BatchNorm statistics of so many draws (0: mean)")
    parser.add_argument(
        "--keep", choices=("best", "last"), default="best", help="which epoch's posterior is the result"
    )
    parser.add_argument("--last_layer", action="store_true", help="fit Laplace on the head alone")
    parser.add_argument("--tune", action="store_true", help="let Laplace choose its scale on the validation images")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the new head and everything else")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")
    parser.add_argument("--out", type=Path, default=Path("runs/images"))
    args = parser.parse_args(argv)
    if not 0 < args.val_heldout < 1:
        parser.error(f"--val_heldout must be between 0 and 1, got {args.val_heldout}: early stopping needs both parts")
    if args.hparams.get("burnin", 0) >= args.epochs:
        parser.error(f"burnin must be less than --epochs {args.epochs}, got {args.hparams['burnin']}")
    return args


def hparams(text):
    """Read name=value,... with numbers as numbers."""
    pairs = dict(item.split("=", 1) for item in text.split(",") if item)
    return {name.strip(): number(value.strip()) for name, value in pairs.items()}


def number(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# -- data -----------------------------------------------------------------------------------------------------------


class Images(Dataset):
    """Some images of a data set, each through a transform."""

    def __init__(self, source, numbers, transform):
        self.source, self.numbers, self.transform = source, numbers, transform

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        image, label = self.source[self.numbers[i]]
        return self.transform(image.convert("RGB")), label


def open_data(args):
    """Return the training images, the test images and the names of the classes."""
    if args.data == "pets":
        train = datasets.OxfordIIITPet(args.root, "trainval", download=True)
        return train, datasets.OxfordIIITPet(args.root, "test", download=True), train.classes
    if args.data == "flowers":
        parts = [datasets.Flowers102(args.root, part, download=True) for part in ("train", "val", "test")]
        return ConcatDataset(parts[:2]), parts[2], [str(i) for i in range(102)]
    folder = next((p for p in (args.root / args.data, Path(args.data)) if (p / "train").is_dir()), None)
    if folder is None:
        raise SystemExit(f"no {args.data}/train in {args.root} or here; give a folder of train/<class>, test/<class>")
    test = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if test is None:
        raise SystemExit(f"{folder} has neither test/ nor val/; the test images belong there, one folder per class")
    train = datasets.ImageFolder(folder / "train")
    return train, datasets.ImageFolder(test), train.classes


def split(labels, heldout, seed):
    """Return the numbers of training and of validation images: disjoint, together all, the same share of each class."""
    generator = torch.Generator().manual_seed(seed)
    train, val = [], []
    for label in sorted(set(labels)):
        of_class = [i for i, other in enumerate(labels) if other == label]
        order = [of_class[i] for i in torch.randperm(len(of_class), generator=generator)]
        held = round(heldout * len(order))
        val += order[:held]
        train += order[held:]
    return train, val


def labels_of(source):
    """Return the labels of a data set, without opening its images where that can be helped."""
    if isinstance(source, ConcatDataset):
        return [label for part in source.datasets for label in labels_of(part)]
    for attribute in ("targets", "_labels"):
        if hasattr(source, attribute):
            return list(getattr(source, attribute))
    return [label for _, label in source]


def loaders(args, built, source, test):
    """Return loaders of training images, augmented and not, of validation images and of test images."""
    train_numbers, val_numbers = split(labels_of(source), args.val_heldout, args.seed)
    resize = [Resize((args.size, args.size), antialias=True)] if args.size else []
    plain = Compose([built.eval_transform, *resize])
    augment = plain if args.no_augment else Compose([built.train_transform, *resize])
    parts = {
        "train": Images(source, train_numbers, augment),
        "fit": Images(source, train_numbers, plain),
        "val": Images(source, val_numbers, plain),
        "test": Images(test, range(len(test)), plain),
    }
    options = {"num_workers": args.workers, "pin_memory": torch.cuda.is_available()}
    return {
        name: DataLoader(part, args.batch_size, shuffle=name == "train", drop_last=name == "train", **options)
        for name, part in parts.items()
    }


# -- training -------------------------------------------------------------------------------------------------------


def build(args, classes, steps_per_epoch):
    """Return the Bayesian model with its transforms, on the GPU if there is one."""
    torch.manual_seed(args.seed)
    random.seed(args.seed)  # timm's transforms draw from it
    options = dict(args.hparams)
    if "burnin" in options:
        options["burnin"] *= steps_per_epoch
    built = create_bayesian(
        args.model, args.method, num_classes=len(classes), pretrained=args.weights or args.pretrained, **options
    )
    built.model.to("cuda" if torch.cuda.is_available() else "cpu")
    return built


def make_optimizer(args, model, head, num_data):
    lr_head = {} if args.lr_head is None else {"lr_head": args.lr_head, "head": head}
    groups = param_groups(model, args.lr, lr_sig=args.lr_sig, **lr_head)
    if args.method == "sgld":
        return SGLD(model, groups, num_data=num_data, momentum=args.momentum)
    return torch.optim.SGD(groups, momentum=args.momentum)


def train_epoch(model, optimizer, scaler, loader, rates, title):
    """Take one pass over the training images and return their mean loss; `rates` scales the learning rates by step."""
    model.train()
    device = next(model.parameters()).device
    base = [group["lr"] for group in optimizer.param_groups]
    total = 0.0
    for (images, labels), rate in zip(bar := tqdm(loader, desc=title, unit="batch", leave=False), rates, strict=True):
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * rate
        with torch.autocast(device.type, enabled=device.type == "cuda"):
            # Convolutions are a quarter faster on this layout, also on a CPU.
            logits = model(images.to(device, memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), labels.to(device))
        optimizer.zero_grad()
        scaler.scale(loss + penalty(model, num_data=len(loader.dataset))).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    for group, lr in zip(optimizer.param_groups, base, strict=True):
        group["lr"] = lr
    return total / len(loader)


def rates_of(epoch, args, steps):
    """Return the factor of the learning rates at every step of an epoch."""
    if args.schedule == "constant":
        return [1.0] * steps
    return [(1 + math.cos(math.pi * (epoch + step / steps) / args.epochs)) / 2 for step in range(steps)]


def train(args, model, optimizer, data):
    """Train until the validation loss stops improving, keep the best posterior, and return the history."""
    last = args.out / "last.pt"
    scaler = torch.amp.GradScaler(enabled=torch.cuda.is_available())
    history = resume(last, args, model, optimizer, scaler)
    burnin = args.hparams.get("burnin", 0)  # until then an SGLD chain has no moments
    while not finished(history, args):
        epoch = len(history)
        rates = rates_of(epoch, args, len(data["train"]))
        loss = train_epoch(model, optimizer, scaler, data["train"], rates, f"epoch {epoch + 1}")
        entry = {"epoch": epoch + 1, "train_loss": loss}
        if epoch >= burnin:
            validation = predict(model, data["val"], samples=0).scores
            entry |= {"val_loss": validation["nll"], "val_error": validation["error"]}
            if entry["val_loss"] < min((e["val_loss"] for e in history if "val_loss" in e), default=math.inf):
                save(model, args.out / "best")
        history.append(entry)
        remember(last, args, model, optimizer, scaler, history)
        print(" ".join(f"{k} {v:.4g}" for k, v in entry.items()), flush=True)
    return history


def finished(history, args):
    """Tell whether all epochs are over, or the last better one is too long ago."""
    best = best_of(history)
    return len(history) >= args.epochs or (best is not None and len(history) - best["epoch"] >= args.patience)


def best_of(history):
    return min((e for e in history if "val_loss" in e), key=lambda e: e["val_loss"], default=None)


def settings_of(args):
    return {name: str(value) for name, value in vars(args).items() if name not in NOT_SETTINGS}


def remember(path, args, model, optimizer, scaler, history):
    """Write what `resume` needs, by one atomic rename, and the log."""
    states = {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    state = {name: part.state_dict() for name, part in parts.items()}
    state |= {"random": states, "history": history, "settings": settings_of(args)}
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
    path.with_name("log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in history))


def resume(path, args, model, optimizer, scaler):
    """Go on where an earlier run stopped, if there was one, and return its history."""
    if not path.is_file():
        return []
    state = torch.load(path, map_location="cpu", weights_only=True)
    check_settings(path, state["settings"], args)
    for name, part in {"model": model, "optimizer": optimizer, "scaler": scaler}.items():
        part.load_state_dict(state[name])
    random.setstate(state["random"]["python"])
    torch.set_rng_state(state["random"]["cpu"])
    torch.cuda.set_rng_state_all(state["random"]["cuda"])
    return state["history"]


def check_settings(path, saved, args):
    """Stop if a folder holds a run of other settings."""
    now = settings_of(args)
    differ = sorted(name for name in now.keys() | saved.keys() if now.get(name) != saved.get(name))
    if differ:
        raise SystemExit(f"{path} is of a run with other settings ({', '.join(differ)}); choose another --out")


# -- results --------------------------------------------------------------------------------------------------------


def evaluate(args, model, data):
    """Score the posterior mean and the samples on the validation and test images, and write the report."""
    samples = None if args.method != "vanilla" else 0
    out = {"val": {}, "test": {}}
    for name, count in {"mean": 0, "samples": samples}.items():
        validation, found = (predict(model, data[p], samples=count, seed=args.seed, progress=True) for p in out)
        for part, predictive in (("val", validation), ("test", found)):
            out[part][name] = {s: getattr(metrics, s)(predictive.probs, predictive.labels) for s in SCORES}
    try:
        temperature = metrics.fit_temperature(validation.logits, validation.labels)
    except metrics.TemperatureError:  # every validation image right: no temperature suits best
        temperature = 1.0
    plots.report(found, args.out / "report.html", temperature=temperature, title=f"{args.model}, {args.method}")
    return out


def run(args):
    """Train, evaluate and write `result.json`; return it."""
    target = args.out / "result.json"
    if target.is_file():
        result = json.loads(target.read_text())
        check_settings(target, result["settings"], args)
        return result
    args.out.mkdir(parents=True, exist_ok=True)
    source, test, classes = open_data(args)
    num_data = len(split(labels_of(source), args.val_heldout, args.seed)[0])
    if num_data < args.batch_size:
        raise SystemExit(f"{num_data} training images are less than one batch; lower --batch_size {args.batch_size}")
    built = build(args, classes, num_data // args.batch_size)
    model, data = built.model, loaders(args, built, source, test)
    history = train(args, model, make_optimizer(args, model, built.head, num_data), data)
    if args.keep == "best":
        load(model, args.out / "best")
    if args.method == "la":
        include = [f"{name}.*" for name in built.head] if args.last_layer else None
        fit_laplace(model, data["fit"], tune=data["val"] if args.tune else None, include=include, progress=True)
    if args.update_bn is not None:
        update_bn(model, data["fit"], samples=args.update_bn, seed=args.seed, progress=True)
    save(model, args.out / "best")
    images = {name: len(data[name].dataset) for name in ("train", "val", "test")}
    result = {
        "settings": settings_of(args),
        "images": images,
        **evaluate(args, model, data),
        "best_epoch": best_of(history)["epoch"],
        "val_loss": best_of(history)["val_loss"],
        "epochs": len(history),
    }
    target.with_suffix(".tmp").write_text(json.dumps(result, indent=1) + "\n")
    target.with_suffix(".tmp").replace(target)
    return result


def main():
    args = parse()
    result = run(args)
    print(f"\n{'test':10}" + "".join(f"{name:>10}" for name in SCORES))
    for name, found in result["test"].items():
        print(f"{name:10}" + "".join(f"{found[score]:10.4f}" for score in SCORES))
    print(f"see {args.out / 'report.html'}")


if __name__ == "__main__":
    main()
