"""Fine-tune a timm model on folders of images as usual, then make its last layer Bayesian: calibrated, able to refuse.

    python examples/images.py --train photos/train --test photos/val --strange other_photos --model convnext_atto
    BAYESIFY_DATA=... python examples/images.py     # ants and bees, EfficientNet-lite0

A folder has one folder per class (torchvision's ImageFolder). Every second test image finds the threshold, and the
others see whether it holds. Without --strange, the test images upside down and in negative are what the model was never
shown. --weights takes a file; without it, timm fetches its own. A picture, a report and the posterior go into --out.
"""

import argparse
import os
from pathlib import Path

import timm
import torch
from timm.data import create_transform, resolve_data_config
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from bayesify import bayesify, fit_laplace, metrics, plots, predict, save

HELD_OUT = 0.2  # of the training images: they choose the scale of the prior


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = Path(os.environ.get("BAYESIFY_DATA", "data"))
    parser.add_argument("--train", type=Path, default=data / "hymenoptera/train", help="one folder per class")
    parser.add_argument("--test", type=Path, default=data / "hymenoptera/val")
    parser.add_argument("--strange", type=Path, help="images of another kind, in folders")
    parser.add_argument("--model", default="tf_efficientnet_lite0", help="a name of timm's")
    parser.add_argument("--weights", type=Path, help="a file with pretrained weights, or 'none'")
    parser.add_argument("--size", type=int, help="of the images, in pixels; what the model was made for if not given")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-3, help="of the body; the new head's is ten times as large")
    parser.add_argument("--max-risk", type=float, default=0.1, help="the error rate that is allowed where it answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("images"))
    args = parser.parse_args(arguments)
    for path in (args.train, args.test, *([args.strange] if args.strange else [])):
        if not path.is_dir():
            parser.error(f"there is no folder {path}; give --train and --test, or set BAYESIFY_DATA")
    known = data / "weights/efficientnet_lite0_in1k_timm.safetensors"
    if args.weights is None and args.model == "tf_efficientnet_lite0" and known.is_file():
        args.weights = known
    return args


def build(args, classes):
    """Return the model with a new head, and what its images must look like."""
    torch.manual_seed(args.seed)
    given = {} if args.weights is None else {"pretrained_cfg_overlay": {"file": str(args.weights)}}
    model = timm.create_model(args.model, pretrained=str(args.weights) != "none", **given)
    model.reset_classifier(classes)
    config = resolve_data_config({"input_size": (3, args.size, args.size)} if args.size else {}, model=model)
    return model, create_transform(**config, is_training=False)


def fine_tune(model, loader, args):
    """Train as everybody does: SGD with momentum, a learning rate that falls along a cosine."""
    head = [id(p) for p in model.get_classifier().parameters()]
    groups = [[p for p in model.parameters() if (id(p) in head) == new] for new in (False, True)]
    rates = [{"params": groups[0], "lr": args.lr}, {"params": groups[1], "lr": 10 * args.lr}]
    optimizer = torch.optim.SGD(rates, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    model.train()
    for _ in tqdm(range(args.epochs), desc="fine-tuning", unit="epoch"):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def main():
    args = parse()
    model, transform = build(args, len(ImageFolder(args.train).classes))
    images, tests = (ImageFolder(folder, transform) for folder in (args.train, args.test))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed)).tolist()
    held = round(HELD_OUT * len(order))
    train, validation = Subset(images, order[held:]), Subset(images, order[:held])
    fine_tune(model, DataLoader(train, 16, shuffle=True, drop_last=True), args)
    fit, tune, test = (DataLoader(part, 50) for part in (train, validation, tests))
    strange = DataLoader(ImageFolder(args.strange, transform), 50) if args.strange else [-x.flip(-2) for x, _ in test]

    before, before_ood = predict(model, test), predict(model, strange)
    head = next(name for name, module in model.named_modules() if module is model.get_classifier())
    bayesify(model, "la", include=f"{head}.*")  # the last layer
    fit_laplace(model, fit, structure="kron", tune=tune)  # one pass over the data
    after, after_ood = predict(model, test), predict(model, strange)  # one pass each, no samples

    print(f"before: {before}\nafter:  {after}")
    held, fresh = after[::2], after[1::2]  # one half finds the threshold, the other sees whether it holds
    threshold = metrics.abstain_threshold(held.probs, held.labels, max_risk=args.max_risk)
    answered, unknown = fresh.select(threshold), after_ood.select(threshold)
    if answered.any():
        wrong = fresh[answered].scores["error"]
        shares = [float(some.float().mean()) for some in (answered, unknown)]
        print(f"answers at a confidence of {threshold:.3f} or more: {shares[0]:.1%} of the others", end=", ")
        print(f"{wrong:.1%} of these wrong, and {shares[1]:.1%} of the strange")
    else:
        print(f"{len(held)} images promise no error of at most {args.max_risk:.0%}: give more, or allow more")
    save(model, args.out)
    figure = plots.before_after(before, after, ood=(before_ood, after_ood))
    figure.savefig(args.out / "before_after.svg")
    title = f"{args.model}, last layer"
    report = plots.report(after, args.out / "report.html", ood=after_ood, title=title)
    print(f"see {args.out / 'before_after.svg'} and {report}; the posterior is in {args.out}")


if __name__ == "__main__":
    main()
