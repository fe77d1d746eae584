"""Train one Bayesian network on MNIST and measure its uncertainty, with the flags of the BayesDLL paper (section 5.1).

    python examples/mnist.py --method vi --hparams prior_sig=1.0,kld=1e-3,bias=informative,nst=5 --epochs 100 \
        --lr 1e-2 --batch_size 128 --momentum 0.5 --val_heldout 0.5 --data_root data --log_dir runs/mnist/vi

The log folder gets `log.jsonl` (one line per epoch), `last.pt` (to go on after a stop: run the same command again),
`best/` (the posterior with the lowest validation loss; it is the result, unless `--keep last`), pictures, and
`result.json`, whose scores are fractions.
Training and validation images are disjoint, and nothing is chosen by looking at the test images.
"""

import argparse
import gzip
import math
import os
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ.setdefault("GOMP_SPINCOUNT", "30000")  # torch's idle threads soon leave the cores to the noise

import numpy as np
import torch
import training
from torch import nn
from torch.nn import functional as F

from bayesify import (
    SGLD,
    bayesify,
    fit_laplace,
    load,
    metrics,
    named_posteriors,
    param_groups,
    penalty,
    plots,
    predict,
    save,
)

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081
PAPER = {"vi": {"link": "clamp", "init_sig": 1e-6}}  # what the paper's runs have and its flags do not say
SAMPLES = 5
PREDICT_BATCH = 2000
TUNE_BATCHES = 3


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="vi", choices=("vanilla", "vi", "mc_dropout", "sgld", "la"))
    training.add_options(parser, epochs=100, patience=10, lr=1e-2, batch_size=128, momentum=0.5, heldout=0.5)
    parser.add_argument("--eval_every", type=int, default=1, help="epochs from one validation to the next")
    parser.add_argument("--tune", choices=("val",), help="how Laplace chooses its scale; not given, it keeps it")
    data_root = os.environ.get("BAYESIFY_DATA", "data")
    parser.add_argument("--data_root", type=Path, default=Path(data_root), help="holds MNIST/raw, as in torchvision")
    parser.add_argument("--log_dir", type=Path, default=Path("runs/mnist/vi"))
    return training.parse(parser, argv)


def load_mnist(root):
    """Return {"train": (images, labels), "test": ...}: normalized pixels in rows, all in memory."""
    folder = root / "MNIST" / "raw"
    if not all(find(folder, name) for names in FILES.values() for name in names):
        download(root, folder)
    out = {}
    for part, (images, labels) in FILES.items():
        pixels = read_idx(find(folder, images)).flatten(1).float() / 255
        out[part] = (pixels - PIXEL_MEAN) / PIXEL_STD, read_idx(find(folder, labels)).long()
    return out


def download(root, folder):
    """Let torchvision download the images."""
    from torchvision.datasets import MNIST

    try:
        MNIST(root, download=True)
    except (RuntimeError, OSError) as error:
        wanted = ", ".join(f"{name}.gz" for names in FILES.values() for name in names)
        raise SystemExit(
            f"MNIST is not in {folder} and could not be downloaded; put {wanted} there, or give another --data_root\n"
            f"({error})"
        ) from error


def find(folder, name):
    """Return the path of an idx file, compressed or not, or None."""
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def read_idx(path):
    """Read an idx file: two zero bytes, the type (8, unsigned bytes), the number of dimensions, these, the data."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes; remove it and let torchvision download it")
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy())


def split(count, heldout, seed):
    """Return the numbers of the training images and of the validation images: disjoint, and together all."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held = round(heldout * count)
    return order[held:], order[:held]


def network():
    sizes = (784, 1000, 1000, 1000)
    hidden = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))


def build(args, num_data):
    """Return the Bayesian network and its optimizer."""
    torch.manual_seed(args.seed)
    options = PAPER.get(args.method, {}) | args.hparams
    if "burnin" in options:
        options["burnin"] *= math.ceil(num_data / args.batch_size)
    model = bayesify(network(), args.method, prior_mean="zero", **options)
    groups = param_groups(model, args.lr, lr_sig=args.lr_sig)
    if args.method == "sgld":
        return model, SGLD(model, groups, num_data=num_data, momentum=args.momentum)
    return model, torch.optim.SGD(groups, momentum=args.momentum, fused=True)


def train_epoch(args, model, optimizer, images, labels, epoch):
    """Take one pass over the training images and return their mean loss."""
    model.train()
    total = 0.0
    order = torch.randperm(len(images)).split(args.batch_size)
    for batch, _ in zip(order, training.scheduled(optimizer, args, epoch, len(order)), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        (loss + penalty(model, num_data=len(images))).backward()
        optimizer.step()
        total += loss.item() * len(batch)
    return total / len(images)


def batches(images, labels):
    return list(zip(images.split(PREDICT_BATCH), labels.split(PREDICT_BATCH), strict=True))


def train(args, model, optimizer, data, deadline):
    """Train until the validation loss stops improving; return the history, or None where time ran out."""
    last = args.log_dir / "last.pt"
    parts = {"model": model, "optimizer": optimizer}
    history = training.resume(last, args, parts)
    burnin = args.hparams.get("burnin", 0)  # until then there is nothing that could be sampled
    while not training.finished(history, args):
        if time.time() > deadline:
            return None
        epoch, started, busy = len(history), time.time(), time.process_time()
        loss = train_epoch(args, model, optimizer, *data["train"], epoch)
        entry = {"epoch": epoch + 1, "train_loss": loss}
        due = (epoch + 1) % args.eval_every == 0 or epoch + 1 == args.epochs
        if due and epoch >= burnin:
            validation = predict(model, batches(*data["val"]), samples=0)
            entry |= {"val_loss": validation.scores["nll"], "val_error": validation.scores["error"]}
            if training.is_best(entry, history):
                save(model, args.log_dir / "best")
        history.append(entry | {"seconds": time.time() - started, "cpu_seconds": time.process_time() - busy})
        training.remember(last, args, parts, history)
        print(" ".join(f"{k} {v:.4g}" for k, v in history[-1].items()), flush=True)
    return history


def scores(probs, labels):
    return {
        "error": metrics.error(probs, labels),
        "nll": metrics.nll(probs, labels),
        "ece": metrics.ece(probs, labels),
        "mce": metrics.mce(probs, labels),
        "ece_pooled": metrics.ece(probs, labels, kind="pooled"),
        "mce_pooled": metrics.mce(probs, labels, kind="pooled"),
        "brier": metrics.brier(probs, labels),
    }


def evaluate(args, model, data):
    """Score the posterior mean and the samples, as they are and at the temperature that suits the validation images."""
    out = {"val": {}, "test": {}, "temperature": {}}
    for count in sorted({0, SAMPLES, args.hparams.get("nst", SAMPLES)}):
        name = f"nst{count}"
        found = {part: predict(model, batches(*data[part]), samples=count, seed=args.seed) for part in ("val", "test")}
        for part, predictive in found.items():
            out[part][name] = scores(predictive.probs, predictive.labels)
        try:
            fitted = metrics.fit_temperature(found["val"].logits, found["val"].labels)
        except metrics.TemperatureError as error:
            print(f"{name}: no temperature, {error}")
            continue
        test = found["test"]
        tempered, names = test.tempered(fitted), ("T = 1", f"T = {float(fitted):.3f}")
        out["temperature"][name] = {"T": float(fitted), "test": scores(tempered.probs, test.labels)}
        pictures = {"reliability": plots.before_after(test, tempered, names=names)}
        pictures["temperature"] = plots.temperature_curve(fitted, title=f"{args.method}, {name}, validation images")
        for kind, figure in pictures.items():
            figure.savefig(args.log_dir / f"{kind}_{name}.png", dpi=150)
    return out


def fit(args, model, data):
    """Fit the Laplace approximation around the trained weights, save it, and return its prior scale."""
    few = batches(*data["val"])[:TUNE_BATCHES]
    fit_laplace(model, batches(*data["train"]), tune=few if args.tune else None)
    save(model, args.log_dir / "best")
    return {"fitted_prior_sig": next(posterior.prior_sig for _, posterior in named_posteriors(model))}


def run(args, deadline=math.inf):
    """Train, evaluate and write `result.json`; return it, or None where the deadline came first."""
    target = args.log_dir / "result.json"
    if (result := training.read_result(target, args)) is not None:
        return result
    args.log_dir.mkdir(parents=True, exist_ok=True)
    torch.set_flush_denormal(True)
    data = load_mnist(args.data_root)
    images, labels = data["train"]
    parts = dict(zip(("train", "val"), split(len(images), args.val_heldout, args.seed), strict=True))
    data |= {part: (images[numbers], labels[numbers]) for part, numbers in parts.items()}
    model, optimizer = build(args, len(parts["train"]))
    history = train(args, model, optimizer, data, deadline)
    if history is None:
        return None
    if args.keep == "best":
        load(model, args.log_dir / "best")
    about = fit(args, model, data) if args.method == "la" else {}
    result = {
        "settings": training.settings_of(args),
        "images": {part: len(labels) for part, (_, labels) in data.items()},
        **evaluate(args, model, data),
        "best_epoch": training.best_of(history)["epoch"],
        "epochs": len(history),
        "seconds": sum(e["seconds"] for e in history),  # of training, with validation
        "cpu_seconds": sum(e["cpu_seconds"] for e in history),  # of all cores together
        "seconds_per_epoch": median(e["seconds"] for e in history),  # a pause of the machine does not count
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **about,
    }
    training.write_result(target, result)
    return result


def main():
    args = parse()
    result = run(args)
    for name, found in result["test"].items():
        print(f"test, {name}: " + ", ".join(f"{metric} {value:.4f}" for metric, value in found.items()))
    print(f"see {args.log_dir}")


if __name__ == "__main__":
    main()
