"""What the training examples share: hyperparameters as text, early stopping, and going on after a stop."""

import json
import math
import random
from pathlib import Path

import torch

PLACES = ("data_root", "log_dir", "out", "root", "workers")


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


def add_options(parser, *, epochs, patience, batch_size, momentum, lr, heldout):
    """Add what every training has, with an example's own defaults."""
    parser.add_argument("--hparams", type=hparams, default={}, help="name=value,... of bayesify; burnin is in epochs")
    parser.add_argument("--epochs", type=int, default=epochs, help="at most this many")
    parser.add_argument("--patience", type=int, default=patience, help="stop after so many epochs without a better one")
    parser.add_argument(
        "--keep", choices=("best", "last"), default="best", help="which epoch's posterior is the result"
    )
    parser.add_argument("--lr", type=float, default=lr, help="learning rate")
    parser.add_argument("--lr_sig", type=float, help="learning rate of VI's spread; --lr if not given")
    parser.add_argument("--momentum", type=float, default=momentum)
    parser.add_argument("--schedule", choices=("constant", "cosine"), default="constant", help="of the learning rates")
    parser.add_argument("--batch_size", type=int, default=batch_size)
    parser.add_argument("--val_heldout", type=float, default=heldout, help="fraction of the training images")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the initial weights and everything else")


def parse(parser, argv):
    """Parse, and stop at training options that make no sense."""
    args = parser.parse_args(argv)
    if not 0 < args.val_heldout < 1:
        parser.error(f"--val_heldout must be between 0 and 1, got {args.val_heldout}: early stopping needs both parts")
    if args.hparams.get("burnin", 0) >= args.epochs:
        parser.error(f"burnin must be less than --epochs {args.epochs}, got {args.hparams['burnin']}")
    return args


def scheduled(optimizer, args, epoch, steps):
    """Yield once per step of an epoch, with the learning rates that the schedule wants; put them back at the end."""
    base = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        cosine = (1 + math.cos(math.pi * (epoch + step / steps) / args.epochs)) / 2
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * (cosine if args.schedule == "cosine" else 1.0)
        yield
    for group, lr in zip(optimizer.param_groups, base, strict=True):
        group["lr"] = lr


def best_of(history):
    """Return the epoch with the lowest validation loss, or None before there is one."""
    return min((e for e in history if "val_loss" in e), key=lambda e: e["val_loss"], default=None)


def finished(history, args):
    """Return whether all epochs are over, or the last better one is too long ago."""
    best = best_of(history)
    return len(history) >= args.epochs or (best is not None and len(history) - best["epoch"] >= args.patience)


def is_best(entry, history):
    """Return whether an epoch has a lower validation loss than all before it."""
    best = best_of(history)
    return best is None or entry["val_loss"] < best["val_loss"]


def settings_of(args):
    """Return what a run is, without where it happens."""
    found = {name: value for name, value in vars(args).items() if name not in PLACES}
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def check_settings(path, saved, args):
    """Stop if a folder holds a run of other settings."""
    now = settings_of(args)
    differ = sorted(name for name in now.keys() | saved.keys() if now.get(name) != saved.get(name))
    if differ:
        raise SystemExit(f"{path} is of a run with other settings ({', '.join(differ)}); choose another folder")


def remember(path, args, parts, history):
    """Write what `resume` needs, by one atomic rename, and the log.

    Args:
        path: Of the file.
        args: The settings.
        parts: What has a state, by name: model, optimizer and the like.
        history: One entry per epoch.
    """
    state = {name: part.state_dict() for name, part in parts.items()}
    states = {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    state |= {"random": states, "history": history, "settings": settings_of(args)}
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
    path.with_name("log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in history))


def resume(path, args, parts):
    """Go on where an earlier run stopped, if there was one, and return its history."""
    if not path.is_file():
        return []
    state = torch.load(path, map_location="cpu", weights_only=True)
    check_settings(path, state["settings"], args)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    random.setstate(state["random"]["python"])
    torch.set_rng_state(state["random"]["cpu"])
    torch.cuda.set_rng_state_all(state["random"]["cuda"])
    return state["history"]


def read_result(path, args):
    """Return the result of a finished run of these settings, or None."""
    if not path.is_file():
        return None
    result = json.loads(path.read_text())
    check_settings(path, result["settings"], args)
    return result


def write_result(path, result):
    """Write a result by one atomic rename."""
    path.with_suffix(".tmp").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".tmp").replace(path)
