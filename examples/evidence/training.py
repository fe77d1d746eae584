"""Training: the same start, order and schedule for every method; plain members are trained once and kept."""

import copy
import hashlib
import json
import time
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from bayesify import IVON, SGLD, Cycles, bayesify, fit_laplace, mean, named_posteriors, penalty, unbayesify

from . import tasks

FISHER_ITEMS = 256


class Trained(NamedTuple):
    """A model, the loss of its first step, and the processor seconds of its training."""

    model: nn.Module
    first_loss: float
    seconds: float


def train(
    task, method, *, member=0, point=False, sgd=False, lr=1.0, epochs=1.0, options=None, cycles=None, first_only=False
):
    """Train one method.

    Args:
        task: With its seed.
        method: "plain", or one of bayesify's.
        member: Which member of an ensemble: another start and another order.
        point: Every gradient is taken at the posterior mean, and IVON's curvature stays constant: what is left of the
            method when its spread goes to 0.
        sgd: Plain training steps by SGD with the learning rate of SGLD and IVON, whatever the task's own optimizer is.
        lr: A factor on the task's learning rates.
        epochs: A factor on the task's epochs.
        options: Of `bayesify`.
        cycles: Of method "ensemble": the arguments of `Cycles`.
        first_only: Whether its training ends with the first cycle.
    """
    seed = 1000 * task.seed + member
    torch.manual_seed(seed)
    model, count = task.model(), len(task.train.y)
    rounds, steps = length(task, epochs)
    begin = time.process_time()
    if method != "plain":
        bayesify(model, method, **(options or {}))
    optimizer = optimizer_of(task, model, method, lr, count, point, sgd)
    warm = 10 if point else 1  # IVON's own, which it has where b2 is not given
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / warm) * (1 - step / steps))
    if method == "swag":
        schedule = Cycles(optimizer, model, steps=steps, before=schedule)
    elif method == "ensemble":
        schedule = Cycles(optimizer, model, steps=steps, seed=seed, **(cycles or {}))
        steps = schedule.ends[0] if first_only else steps
    order, first, done = torch.Generator().manual_seed(seed), None, 0
    task.set_training(model)
    for _ in range(rounds):
        for rows in torch.randperm(count, generator=order).split(task.batch):
            if done == steps:
                break
            done += 1
            inputs, labels = task.train.take(rows)
            optimizer.zero_grad()
            if point:
                with mean(model):
                    loss = F.cross_entropy(task.logits(model, inputs), labels)
            else:
                loss = F.cross_entropy(task.logits(model, inputs), labels)
            if method != "plain":
                loss = loss + penalty(model, num_data=count)
            first = float(loss.detach()) if first is None else first
            loss.backward()
            optimizer.step()
            schedule.step()
    if method == "la":
        fit_laplace(model, task.train.batches(50))
    return Trained(model.eval(), first, time.process_time() - begin)


def warm_up(task):
    """Take one step that nobody needs: a process's first is slower than the others, and would count as training."""
    model = task.model()
    inputs, labels = task.train.take(torch.arange(min(task.batch, len(task.train.y))))
    F.cross_entropy(task.logits(model, inputs), labels).backward()


def length(task, epochs=1.0):
    """Return how many epochs and how many steps a training has, of a factor on the task's epochs."""
    rounds = max(1, round(task.epochs * epochs))
    return rounds, rounds * -(-len(task.train.y) // task.batch)


def optimizer_of(task, model, method, lr, count, point, sgd):
    """Return the task's own optimizer, or the method's with the learning rates of SGD, or of AdamW."""
    if method in ("sgld", "ivon") and task.like == "adamw":
        own = {"sgld": SGLD, "ivon": IVON}[method]
        return own(model, task.groups(model, task.lr * lr), num_data=count, like="adamw")
    if method == "sgld":
        return SGLD(model, task.groups(model, task.sgd_lr * lr), num_data=count, momentum=0.9)
    if method == "ivon":
        constant = {"betas": (0.9, 1 - 1e-12)} if point else {}
        same = task.sgd_lr * lr / (1 - 0.9)  # IVON averages gradients where SGD's momentum of 0.9 sums them
        return IVON(model, task.groups(model, same), num_data=count, **constant)
    if sgd:
        return tasks.sgd(task.plain_groups(model, task.sgd_lr * lr))
    return task.optimizer(model, bayesian=method != "plain", factor=lr)


def member(task, number, **setting):
    """Return a plain member, trained once per task, seed, number and setting."""
    what = {
        "count": len(task.train.y),
        "epochs": task.epochs,
        "batch": task.batch,
        "lr": task.lr,
        "sgd_lr": task.sgd_lr,
        **setting,
    }
    mark = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]
    path = tasks.CACHE / "members" / f"{task.name}-{task.seed}-{number}-{mark}.pt"
    if not path.is_file():
        found = train(task, "plain", member=number, **setting)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"state": found.model.state_dict(), "first_loss": found.first_loss, "seconds": found.seconds}
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    kept = torch.load(path, weights_only=True)
    model = task.model()
    model.load_state_dict(kept["state"])
    return Trained(model.eval(), kept["first_loss"], kept["seconds"])


def follows(task, model, method, options):
    """Return the rank correlation of s over its start with the Fisher diagonal, within tensors: their mean."""
    start = bayesify(task.model(), method, **options)
    before = {name: q.std for name, q in named_posteriors(start)}
    twin = task.model()
    twin.load_state_dict(unbayesify(copy.deepcopy(model)).state_dict())
    bayesify(twin, "la", prior_sig=1e6)
    fit_laplace(twin, task.train.take(torch.arange(min(FISHER_ITEMS, len(task.train.y)))).batches(50))
    fisher = {name: q.std.double() ** -2 for name, q in named_posteriors(twin)}
    found = []
    for name, q in named_posteriors(model):
        ratio = (q.std / before[name]).double().flatten()
        if len(ratio) > 50 and ratio.std() > 0:
            ranks = [t.argsort().argsort().double() for t in (ratio, fisher[name].flatten())]
            found.append(float(torch.corrcoef(torch.stack(ranks))[0, 1]))
    return sum(found) / len(found) if found else 0.0
