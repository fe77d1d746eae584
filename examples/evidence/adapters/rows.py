"""The rows of the table: what is trained, and the ways to predict that come of it."""

import hashlib
import json
import time
from functools import partial

import torch

from bayesify import bayesify, calibrate, fit_laplace, fit_novelty, metrics, mix, named_posteriors, predict

from .. import tasks as store
from .. import training
from ..rows import with_temperature
from .tasks import LORA

SAMPLES = 5  # at prediction, as many as the ensemble has members
MEMBERS = 5
HEAD = ".head."


def member(task, number, **setting):
    """Return a model with plain adapters, which are trained once per task, seed, number and setting."""
    what = {"sizes": (task.count, task.epochs, task.batch, task.lr), **setting}
    mark = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]
    path = store.CACHE / "adapters" / f"{task.name}-{task.seed}-{number}-{mark}.pt"
    if not path.is_file():
        found = training.train(task, "plain", member=number, **setting)
        state = {name: p.detach() for name, p in found.model.named_parameters() if p.requires_grad}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state": state, "seconds": found.seconds}, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    kept = torch.load(path, weights_only=True)
    model = task.model()
    model.load_state_dict(kept["state"], strict=False)
    return model.eval(), kept["seconds"]


class Once:
    """A way to predict that runs once on each set of data.

    Args:
        predicted: A function of batches.
    """

    def __init__(self, predicted):
        self.predicted, self.found = predicted, {}

    def __call__(self, part):
        """Return the prediction of a `Part`."""
        if id(part) not in self.found:
            self.found[id(part)] = self.predicted(part.batches()), part
        return self.found[id(part)][0]


def both(task, predicted, kind):
    """Return a way to predict, the same with the temperature that suits held-out data, and this."""
    once = Once(predicted)
    tempered, value = with_temperature(once, task.held_out)
    return {kind: once, "temperature": tempered}, {"temperature": value}


def base(task):
    """The model before any training."""
    return {"mean": Once(partial(predict, task.model().eval()))}, {}, 0.0


def plain(task, **setting):
    """LoRA as everybody trains it."""
    model, seconds = member(task, 0, **setting)
    return *both(task, partial(predict, model), "mean"), seconds


def ensemble(task, **setting):
    """Average the probabilities of five such trainings."""
    members = [member(task, number, **setting) for number in range(MEMBERS)]
    model = mix(bayesify(one, "vanilla", **LORA) for one, _ in members)
    return *both(task, partial(predict, model), "samples"), sum(seconds for _, seconds in members)


def one_budget(task, lr=1.0, epochs=1.0, **cycles):
    """An ensemble whose members share the steps of one training."""
    model, _, seconds = training.train(task, "ensemble", lr=lr, epochs=epochs, options=dict(LORA), cycles=cycles)
    return *both(task, partial(predict, model), "samples"), seconds


def method(task, *, name, lr=1.0, epochs=1.0, **options):
    """Train the posterior of the adapters."""
    model, _, seconds = training.train(task, name, lr=lr, epochs=epochs, options={**LORA, **options})
    return *both(task, partial(predict, model, samples=SAMPLES, seed=task.seed), "samples"), seconds


def sgld(task, *, epochs=1.0, **setting):
    """Sample in the second half of the training."""
    steps = training.length(task, epochs)[1]
    return method(task, name="sgld", epochs=epochs, burnin=steps // 2, thin=2, **setting)


def laplace(task, *, include, samples=None, **setting):
    """Fit a Laplace approximation after plain training; held-out labels choose the prior's scale."""
    model, seconds = member(task, 0, **setting)
    begin = time.process_time()
    for name, parameter in model.named_parameters():
        if HEAD in name:
            parameter.requires_grad_(True)  # PEFT froze it
    bayesify(model, "la", include=include)
    fit_laplace(model, task.train.batches(50), structure="kron", tune=task.held_out.batches())
    spent = time.process_time() - begin
    return *both(task, partial(predict, model, samples=samples, seed=task.seed), "samples"), seconds + spent


def relative(model):
    """Give adapters a spread in proportion to their own size."""
    return bayesify(model, "vi", **LORA)


@torch.no_grad()
def by_direction(model):
    """Give adapters B A = (U d) (V^T A) the spread s/d_i in row i of V^T A (Shi et al. 2024, training-free)."""
    directions = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and len(module.lora_A):
            inner, outer = (next(iter(side.values())).weight for side in (module.lora_A, module.lora_B))
            u, d, v = torch.linalg.svd(outer, full_matrices=False)
            inner.copy_(v @ inner)
            outer.copy_(u * d)
            directions[name] = d.clamp_min(1e-6)
    bayesify(model, "vi", include="*lora_A*", link="exp", prior_sig=1.0, init_sig=0.01)
    for name, posterior in named_posteriors(model):
        d = directions[name.partition(".lora_A")[0]]
        posterior.rho.copy_((0.01 * d.max() / d).log().unsqueeze(1).expand_as(posterior.rho))
    return model


def existing(task, *, spread, **setting):
    """Give trained adapters a spread by `calibrate`, which sees prompts and no labels."""
    model, seconds = member(task, 0, **setting)
    begin = time.process_time()
    spread(model)
    calibrate(model, [inputs for inputs, _ in task.held_out.batches()], samples=SAMPLES, progress=False)
    spent = time.process_time() - begin
    kinds, notes = both(task, partial(predict, model, samples=SAMPLES, seed=task.seed), "samples")
    factor = next(posterior.calibration for _, posterior in named_posteriors(model))
    return kinds, {**notes, "factor": factor, "calibrate_seconds": spent}, seconds + spent


def novelty(task, **setting):
    """Measure distances in the features of the trained model; predictions are those of plain LoRA."""
    model, seconds = member(task, 0, **setting)
    begin = time.process_time()
    fit_novelty(model, task.train.batches(), held_out=task.held_out.batches())
    return {"mean": Once(partial(predict, model))}, {}, seconds + time.process_time() - begin


ROWS = {
    "base": base,
    "plain": plain,
    "vi": partial(method, name="vi"),
    "ivon": partial(method, name="ivon"),
    "sgld": sgld,
    "la_last": partial(laplace, include=f"*{HEAD}*"),
    "la_adapters": partial(laplace, include=LORA["include"], samples=SAMPLES),
    "existing": partial(existing, spread=relative),
    "existing_directions": partial(existing, spread=by_direction),
    "one_budget": one_budget,
    "ensemble5": ensemble,
    "novelty": novelty,
}
TUNED = (
    "plain",
    "vi",
    "ivon",
    "sgld",
    "one_budget",
)  # have settings of their own; the other rows take those of "plain"


def scored(predicted, known, others):
    """Return the scores of one way to predict."""
    found, strange = predicted(known), predicted(others)
    probs, labels = found.probs, found.labels
    out = {
        "nll": metrics.nll(probs, labels),
        "error": metrics.error(probs, labels),
        "error_half": metrics.risk_coverage(probs, labels).risk[len(labels) // 2 - 1],
        "ece": metrics.ece(probs, labels),
        "aurc": metrics.aurc(probs, labels),
        "ood_entropy": metrics.auroc(found.entropy, strange.entropy),
    }
    if found.num_samples > 1 or found.closed_form:
        out["ood_mi"] = metrics.auroc(found.mutual_information, strange.mutual_information)
    if found.novelty is not None:
        out["ood_novelty"] = metrics.auroc(found.novelty, strange.novelty)
    return {name: float(f"{float(value):.6g}") for name, value in out.items()}


def made(task, row, setting):
    """Return a row's ways to predict, what was found on the way, and the processor seconds of training and fitting."""
    torch.manual_seed(task.seed)  # whether a member was trained before or now must not matter
    return ROWS[row](task, **setting)
