"""The rows of the table: what is trained, and the ways to predict that come of it.

A row is a function of a task (with its seed) that returns an `Outcome`. It sees training and held-out data only.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from bayesify import bayesify, calibrate, fit_laplace, metrics, mix, named_posteriors, predict, unbayesify
from bayesify.core.posterior import Posterior
from bayesify.prediction.predictive import Predictive

from . import training

SAMPLES = 10
MEMBERS = 5


@dataclass
class Outcome:
    """What a row's training gives.

    Attributes:
        seconds: Processor seconds of all training and fitting.
        first_loss: Of the first step.
        bytes: Of all tensors that prediction needs.
        predictions: By kind, a function of batches.
        notes: Numbers that were chosen or found, by name.
    """

    seconds: float
    first_loss: float | None
    bytes: int
    predictions: dict[str, Callable]
    notes: dict[str, float] = field(default_factory=dict)


def size(model):
    """Return the bytes of all parameters, buffers and tensors of posteriors, each counted once."""
    posteriors = [m for m in model.modules() if isinstance(m, Posterior)]
    kept = [t for p in posteriors for t in p.state().values()]
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers(), *kept)}
    return sum(t.nbytes for t in tensors.values())


def with_temperature(predicted, held_out):
    """Return a prediction with the temperature that suits held-out data, and the temperature."""
    found = predicted(held_out)
    try:
        value = float(metrics.fit_temperature(found.log_probs, found.labels))
    except metrics.TemperatureError:  # everything that was held out is right: no temperature suits best
        value = 1.0

    def tempered(batches):
        found = predicted(batches)
        return Predictive.from_logits(found.log_probs / value, found.labels)

    return tempered, value


def plain(task, **setting):
    """One model as everybody trains it, and the same with a temperature."""
    model, first, seconds = training.member(task, 0, **setting)
    mean = partial(predict, model)
    tempered, value = with_temperature(mean, task.held_out.batches())
    return Outcome(seconds, first, size(model), {"mean": mean, "temperature": tempered}, {"temperature": value})


def ensemble(task, **setting):
    """Five such models, averaged, and a temperature of the average."""
    members = [training.member(task, number, **setting) for number in range(MEMBERS)]
    plain_size = sum(size(m.model) for m in members)  # without the prior means, which only training needs
    model = mix(bayesify(m.model, "vanilla") for m in members)
    samples = partial(predict, model)
    tempered, value = with_temperature(samples, task.held_out.batches())
    seconds = sum(m.seconds for m in members)
    kinds = {"samples": samples, "temperature": tempered}
    return Outcome(seconds, members[0].first_loss, plain_size, kinds, {"temperature": value})


def mean_of(model):
    """Return the prediction of the posterior mean, by the plain model that `unbayesify` makes of it."""
    return partial(predict, unbayesify(copy.deepcopy(model)))


def method(task, *, name, lr=1.0, epochs=1.0, **options):
    """One of bayesify's methods: its mean and its samples, both also with a temperature, and after `calibrate`."""
    model, first, seconds = training.train(task, name, lr=lr, epochs=epochs, options=options)
    notes = {}
    if name in ("vi", "ivon"):
        notes["follows"] = training.follows(task, model, name, options)
    held_out = task.held_out.batches()
    begin = time.process_time()
    wide = calibrate(copy.deepcopy(model), held_out, samples=SAMPLES, progress=False)
    notes["calibrate_seconds"] = time.process_time() - begin
    notes["factor"] = next(q.calibration for _, q in named_posteriors(wide))
    draws = {"samples": SAMPLES, "seed": task.seed}
    kinds = {"mean": mean_of(model), "samples": partial(predict, model, **draws)}
    for kind in ("mean", "samples"):
        kinds[f"tempered {kind}"], notes[f"temperature_{kind}"] = with_temperature(kinds[kind], held_out)
    kinds["calibrated"] = partial(predict, wide, **draws)
    return Outcome(seconds, first, size(model), kinds, notes)


def in_cycles(task, *, epochs=1.0, members=None, **cycles):
    """An ensemble of short trainings, which take together `epochs` times as long as a plain one."""
    options = {} if members is None else {"members": members}
    model, first, seconds = training.train(task, "ensemble", epochs=epochs, options=options, cycles=cycles)
    samples = partial(predict, model)
    tempered, value = with_temperature(samples, task.held_out.batches())
    kinds = {"samples": samples, "temperature": tempered}
    return Outcome(seconds, first, size(model), kinds, {"temperature": value})


def one_cycle(task):
    """The first of these short trainings alone: how much of their gain is that they are short."""
    model, first, seconds = training.train(task, "ensemble", first_only=True)
    mean = mean_of(model)
    tempered, value = with_temperature(mean, task.held_out.batches())
    return Outcome(seconds, first, size(model), {"mean": mean, "temperature": tempered}, {"temperature": value})


def ivon_point(task, **setting):
    """Train by IVON's step and prior without its spread: how much of its gain is the schedule's."""
    model, first, seconds = training.train(task, "ivon", point=True, **setting)
    mean = mean_of(model)
    tempered, value = with_temperature(mean, task.held_out.batches())
    return Outcome(seconds, first, size(model), {"mean": mean, "tempered mean": tempered}, {"temperature_mean": value})


def last_layer(task, *, tune):
    """Fit a Kronecker Laplace approximation of a plain model's last layer, which predicts in closed form.

    A spread can only take confidence away; a temperature after it can also add some.
    """
    model, first, seconds = training.member(task, 0)
    spent, sig = fit_last_layer(task, model, tune)
    notes = {"prior_sig": sig, "fit_over_training": spent / seconds}
    closed = partial(predict, model)
    tempered, notes["temperature_closed"] = with_temperature(closed, task.held_out.batches())
    return Outcome(seconds + spent, first, size(model), {"closed": closed, "tempered closed": tempered}, notes)


def fit_last_layer(task, model, tune):
    """Fit in place; return the processor seconds and the prior's scale that was chosen."""
    begin = time.process_time()
    bayesify(model, "la", include=task.head)
    fit_laplace(model, task.train.batches(), structure="kron", tune=tune or task.held_out.batches())
    spent = time.process_time() - begin
    return spent, next(q.fitted_sig for _, q in named_posteriors(model))


def last_layers(task):
    """Mix five of them."""
    members = [training.member(task, number) for number in range(MEMBERS)]
    spent = sum(fit_last_layer(task, m.model, None)[0] for m in members)
    model = mix(m.model for m in members)
    seconds = sum(m.seconds for m in members) + spent
    return Outcome(seconds, members[0].first_loss, size(model), {"closed": partial(predict, model)})


METHODS = ("vi", "mc_dropout", "sgld", "la", "ivon", "swag")
ROWS: dict[str, Callable] = {
    "plain": plain,
    "plain_sgd": partial(plain, sgd=True),
    "ensemble5": ensemble,
    "ensemble5_sgd": partial(ensemble, sgd=True),
    "la_last_kron": partial(last_layer, tune=None),
    "la_last_self": partial(last_layer, tune="self"),
    "mix5_la_last_kron": last_layers,
    **{name: partial(method, name=name) for name in METHODS},
    "ivon_point": ivon_point,
    "one_budget": in_cycles,
    "two_budgets": partial(in_cycles, epochs=2.0),
    "one_cycle": one_cycle,
}
TUNABLE = ("plain", *METHODS)  # have a second row with a setting that validation data chose
DEFAULTS = ("one_budget",)  # of which validation data chose the library's defaults, one setting for all tasks
WORDS = {
    "plain": "plain",
    "plain_sgd": "plain, by SGD",
    "ensemble5": "ensemble of 5",
    "ensemble5_sgd": "ensemble of 5, by SGD",
    "la_last_kron": "la, last layer",
    "la_last_self": 'la, last layer, `tune="self"`',
    "mix5_la_last_kron": "mix of 5 la, last layer",
    "ivon_point": "ivon, sigma to 0",
    "one_budget": "ensemble for one training",
    "two_budgets": "ensemble for two trainings",
    "one_cycle": "one of its cycles alone",
}
