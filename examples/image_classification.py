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

`--members 5` trains five models, with seeds of their own on the same split, in `member-0` to `member-4` of the output
folder, and keeps their mixture: of plain models (`--method vanilla`) a deep ensemble.

    python examples/image_classification.py --data photos --pretrained --method la --last_layer --tune --members 5

The output folder gets `log.jsonl` (one line per epoch), `last.pt` (to go on after a stop: run the same command again),
`best/` (the posterior with the lowest validation loss), `report.html`, and `result.json`, whose scores are fractions.
"""

import argparse
import os
import random
from pathlib import Path

import torch
import training
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from torchvision import datasets
from torchvision.transforms import Compose, Resize
from tqdm import tqdm

from bayesify import SGLD, Cycles, fit_laplace, load, metrics, mix, param_groups, penalty, plots, predict, save
from bayesify.integrations.vision import create_bayesian, update_bn

SCORES = ("error", "nll", "ece", "mce", "brier")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(os.environ.get("BAYESIFY_DATA", "data"))
    parser.add_argument("--root", type=Path, default=root, help="where data sets lie, and are downloaded to")
    parser.add_argument("--data", default="hymenoptera", help="a folder (in --root or any other), pets or flowers")
    parser.add_argument("--model", default="tf_efficientnet_lite0", help="a timm or torchvision name")
    parser.add_argument("--pretrained", action="store_true", help="prior mean and start: the weights of the hub")
    parser.add_argument("--weights", type=Path, help="the same with a weights file")
    parser.add_argument("--method", default="vi", choices=("vanilla", "vi", "mc_dropout", "sgld", "la", "swag"))
    parser.add_argument("--members", type=int, default=1, help="models to train, of which the mixture is the result")
    training.add_options(parser, epochs=10, patience=5, lr=1e-3, batch_size=32, momentum=0.9, heldout=0.2)
    parser.add_argument("--lr_head", type=float, help="learning rate of the head; --lr if not given")
    parser.add_argument("--size", type=int, help="pixels per side; the model's own if not given")
    parser.add_argument("--no_augment", action="store_true", help="train on the images as they are tested")
    parser.add_argument("--update_bn", type=int, help="at the end, BatchNorm statistics of so many draws (0: mean)")
    parser.add_argument("--last_layer", action="store_true", help="fit Laplace on the head alone")
    parser.add_argument("--tune", action="store_true", help="let Laplace choose its scale on the validation images")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")
    parser.add_argument("--out", type=Path, default=Path("runs/images"))
    args = training.parse(parser, argv)
    args.member = 0
    if args.members < 1:
        parser.error(f"--members must be at least 1, got {args.members}")
    if args.method == "swag":  # its schedule is made for all the epochs, and its iterates come at the end
        args.patience, args.keep = args.epochs, "last"
    return args


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
    torch.manual_seed(args.seed + args.member)
    random.seed(args.seed + args.member)  # timm's transforms draw from it
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


def cycles_of(args, model, optimizer, steps):
    """Return SWAG's schedule around that of the others; None for other methods."""
    if args.method != "swag":
        return None
    before = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if args.schedule == "cosine" else None
    return Cycles(optimizer, model, steps=steps, before=before)


def train_epoch(args, model, optimizer, scaler, loader, epoch, cycles=None):
    """Take one pass over the training images and return their mean loss."""
    model.train()
    device = next(model.parameters()).device
    total = 0.0
    rates = training.scheduled(optimizer, args, epoch, len(loader)) if cycles is None else [None] * len(loader)
    bar = tqdm(loader, desc=f"epoch {epoch + 1}", unit="batch", leave=False)
    for (images, labels), _ in zip(bar, rates, strict=True):
        with torch.autocast(device.type, enabled=device.type == "cuda"):
            # Convolutions are faster on this layout, also on a CPU.
            logits = model(images.to(device, memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), labels.to(device))
        optimizer.zero_grad()
        scaler.scale(loss + penalty(model, num_data=len(loader.dataset))).backward()
        scaler.step(optimizer)
        scaler.update()
        if cycles is not None:
            cycles.step()
        total += loss.item()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return total / len(loader)


def train(args, model, optimizer, data):
    """Train until the validation loss stops improving, keep the best posterior, and return the history."""
    last = args.out / "last.pt"
    scaler = torch.amp.GradScaler(enabled=torch.cuda.is_available())
    cycles = cycles_of(args, model, optimizer, args.epochs * len(data["train"]))
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, **({} if cycles is None else {"cycles": cycles})}
    history = training.resume(last, args, parts)
    # Until then an SGLD chain has no moments, and SWAG no mean.
    burnin = args.epochs - 1 if args.method == "swag" else args.hparams.get("burnin", 0)
    while not training.finished(history, args):
        epoch = len(history)
        loss = train_epoch(args, model, optimizer, scaler, data["train"], epoch, cycles)
        entry = {"epoch": epoch + 1, "train_loss": loss}
        if epoch >= burnin:
            validation = predict(model, data["val"], samples=0, update_bn=statistics(args, data)).scores
            entry |= {"val_loss": validation["nll"], "val_error": validation["error"]}
            if training.is_best(entry, history):
                save(model, args.out / "best")
        history.append(entry)
        training.remember(last, args, parts, history)
        print(" ".join(f"{k} {v:.4g}" for k, v in entry.items()), flush=True)
    return history


# -- results --------------------------------------------------------------------------------------------------------


def statistics(args, data):
    """Return what BatchNorm statistics of every sample are computed from, or None where those of training fit."""
    return data["fit"] if args.method == "swag" else None


def evaluate(args, model, data):
    """Score the posterior mean and the samples on the validation and test images, and write the report.

    The mean of a mixture is its first member.
    """
    samples = None if args.method != "vanilla" or args.members > 1 else 0
    options = {"seed": args.seed, "progress": True, "update_bn": statistics(args, data)}
    out = {"val": {}, "test": {}}
    for name, count in {"mean": 0, "samples": samples}.items():
        validation, found = (predict(model, data[p], samples=count, **options) for p in out)
        for part, predictive in (("val", validation), ("test", found)):
            out[part][name] = {s: getattr(metrics, s)(predictive.probs, predictive.labels) for s in SCORES}
    try:
        temperature = metrics.fit_temperature(validation.logits, validation.labels)
    except metrics.TemperatureError:  # every validation image right: no temperature suits best
        temperature = 1.0
    plots.report(found, args.out / "report.html", temperature=temperature, title=f"{args.model}, {args.method}")
    return out


def train_member(args):
    """Train one model into the output folder, or load it where that was done; return it, its data and what it took."""
    args.out.mkdir(parents=True, exist_ok=True)
    source, test, classes = open_data(args)
    num_data = len(split(labels_of(source), args.val_heldout, args.seed)[0])
    if num_data < args.batch_size:
        raise SystemExit(f"{num_data} training images are less than one batch; lower --batch_size {args.batch_size}")
    built = build(args, classes, num_data // args.batch_size)
    model, data = built.model, loaders(args, built, source, test)
    done = args.out / "trained.json"
    if (took := training.read_result(done, args)) is not None:
        return load(model, args.out / "best"), data, took
    history = train(args, model, make_optimizer(args, model, built.head, num_data), data)
    if args.keep == "best":
        load(model, args.out / "best")
    if args.method == "la":
        include = [f"{name}.*" for name in built.head] if args.last_layer else None
        fit_laplace(model, data["fit"], tune=data["val"] if args.tune else None, include=include, progress=True)
    if args.update_bn is not None:
        update_bn(model, data["fit"], samples=args.update_bn, seed=args.seed, progress=True)
    save(model, args.out / "best")
    best = training.best_of(history)
    took = {"best_epoch": best["epoch"], "val_loss": best["val_loss"], "epochs": len(history)}
    training.write_result(done, {"settings": training.settings_of(args), **took})
    return model, data, took


def run(args):
    """Train, evaluate and write `result.json`; return it."""
    target = args.out / "result.json"
    if (result := training.read_result(target, args)) is not None:
        return result
    if args.members == 1:
        model, data, took = train_member(args)
    else:
        places = [(k, args.out / f"member-{k}") for k in range(args.members)]
        members = [train_member(argparse.Namespace(**{**vars(args), "member": k, "out": out})) for k, out in places]
        model, data, took = mix(model for model, _, _ in members), members[0][1], {}
        save(model, args.out / "best")
        took["members"] = [{name: value for name, value in m[2].items() if name != "settings"} for m in members]
    images = {name: len(data[name].dataset) for name in ("train", "val", "test")}
    result = {**took, "settings": training.settings_of(args), "images": images, **evaluate(args, model, data)}
    training.write_result(target, result)
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
