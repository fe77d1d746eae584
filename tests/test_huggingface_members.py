"""BayesTrainer(members=...): several models one after another, a mixture of them, and going on after a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_zoo import TEXT
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

from bayesify import Cycles, components, methods, named_posteriors, predict
from bayesify import bayesify as make_bayesian
from bayesify.core.mixture import Mixture
from bayesify.integrations.huggingface import BayesTrainer, from_pretrained

STEPS, MEMBERS = 4, 3
TOKENS = torch.randint(3, 40, (10, 6), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": (row[0] > 20).long()} for row in TOKENS]
BATCH = {"input_ids": TOKENS, "labels": (TOKENS[:, 0] > 20).long()}


class Kill(TrainerCallback):
    """End the process in the middle of a member."""

    def __init__(self, member, step):
        self.member, self.step = member, step

    def on_step_end(self, args, state, control, **kwargs):
        if Path(args.output_dir).name == f"member-{self.member}" and state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def build(method="vanilla", **options):
    model = BertForSequenceClassification(BertConfig(**TEXT))
    return make_bayesian(model, method, prior_sig=0.1, **options)


def trainer(folder, method="vanilla", *, callbacks=(), fresh=False, members=MEMBERS, steps=STEPS, **options):
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        save_strategy="steps",
        save_steps=2,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        seed=11,
    )
    start = {"model_init": lambda: build(method, **options)} if fresh else {"model": build(method, **options)}
    more = {"train_dataset": DATA, "eval_dataset": DATA[:6], "callbacks": list(callbacks)}
    return BayesTrainer(args=args, members=members, **start, **more)


def weights(model):
    return [torch.cat([p.mean.flatten() for _, p in named_posteriors(m)]) for m in components(model)]


def run_until_killed(folder, member, step):
    trainer(folder, callbacks=[Kill(member, step)]).train()


@pytest.mark.parametrize("fresh", [False, True])
def test_members_are_trained_with_seeds_and_mixed(tmp_path, fresh):
    run = trainer(tmp_path, fresh=fresh)
    start = run.model
    output = run.train()
    assert output.global_step == MEMBERS * STEPS
    assert isinstance(run.model, Mixture)
    assert fresh or components(run.model)[0] is start
    assert run.args.output_dir == str(tmp_path)
    assert run.args.seed == 11
    one, two, three = weights(run.model)
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    # Each is what a run of its own seed gives.
    alone = trainer(tmp_path / "alone", fresh=True, members=1)
    alone.args.seed = 12
    if fresh:
        alone.train()
        assert torch.equal(weights(alone.model)[0], two)


def test_the_trainer_scores_the_mixture_and_saves_it(tmp_path):
    run = trainer(tmp_path)
    run.train()
    found = run.evaluate()
    expected = predict(run.model, {k: v[:6] for k, v in BATCH.items()})
    assert found["eval_posterior_samples"] == MEMBERS
    assert found["eval_nll"] == pytest.approx(expected.scores["nll"], rel=1e-5)
    assert predict(components(run.model)[0], {k: v[:6] for k, v in BATCH.items()}).scores["nll"] != pytest.approx(
        found["eval_nll"]
    )
    run.save_model(str(tmp_path / "folder"))
    restored = from_pretrained(tmp_path / "folder")
    assert len(components(restored)) == MEMBERS
    assert torch.equal(predict(restored, BATCH).log_probs, predict(run.model, BATCH).log_probs)
    # A trainer of the restored mixture evaluates as well.
    again = BayesTrainer(restored, run.args, eval_dataset=DATA[:6])
    assert again.evaluate()["eval_nll"] == pytest.approx(found["eval_nll"], rel=1e-6)
    with pytest.raises(ValueError, match="a mixture is not trained as a whole"):
        again.train()


@pytest.mark.parametrize(("member", "step"), [(0, 1), (1, 3)])
def test_a_killed_run_goes_on_at_its_member(tmp_path, member, step):
    folder = tmp_path / "run"
    code = f"import test_huggingface_members as t; t.run_until_killed({str(folder)!r}, {member}, {step})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (folder / "member-0" / "posterior.safetensors").exists() == (member > 0)
    resumed = trainer(folder)
    output = resumed.train(resume_from_checkpoint=True)
    assert output.global_step == STEPS * (MEMBERS - member)
    whole = trainer(tmp_path / "whole")
    whole.train()
    for one, other in zip(weights(whole.model), weights(resumed.model), strict=True):
        assert torch.equal(one, other)


def test_a_finished_run_is_only_loaded_and_a_new_one_begins_anew(tmp_path):
    first = trainer(tmp_path)
    first.train()
    again = trainer(tmp_path)
    assert again.train(resume_from_checkpoint=True).global_step == 0
    for one, other in zip(weights(first.model), weights(again.model), strict=True):
        assert torch.equal(one, other)
    assert trainer(tmp_path, members=2).train().global_step == 2 * STEPS


@pytest.mark.parametrize(("method", "options", "samples"), [("la", {}, 5), ("vi", {}, 5), ("swag", {}, 5)])
def test_every_member_has_its_posterior(tmp_path, method, options, samples):
    run = trainer(tmp_path, method, members=2, **options)
    run.train()
    found = run.evaluate()
    assert found["eval_posterior_samples"] == 2 * samples
    assert all(float(p.std.max()) > 0 for _, p in named_posteriors(run.model) if p.original.numel() > 2)


def test_the_trainer_makes_the_cycles_of_swag(tmp_path):
    run = trainer(tmp_path, "swag", members=1)
    run.train()
    assert isinstance(run.lr_scheduler, Cycles)
    assert (run.lr_scheduler.steps, run.lr_scheduler.last_epoch) == (STEPS, STEPS)
    assert {int(p.count) for _, p in named_posteriors(run.model)} == {2}
    assert run.evaluate()["eval_posterior_samples"] == 30


def test_what_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="members must be an integer >= 1, got 0"):
        trainer(tmp_path, members=0)
    with pytest.raises(ValueError, match="resume_from_checkpoint is True or False"):
        trainer(tmp_path).train(resume_from_checkpoint="checkpoint-2")
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="leave optimizers= to BayesTrainer"):
        BayesTrainer(model, TrainingArguments(str(tmp_path)), members=2, optimizers=(optimizer, None))


def test_the_log_leads_with_the_likelihood_and_names_the_member(tmp_path):
    run = trainer(tmp_path, "vi", members=2)
    run.args.logging_steps = 2
    lines = []

    class Read(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            lines.append(dict(logs))

    run.add_callback(Read())
    run.train()
    steps = [line for line in lines if "loss" in line]
    assert [line["member"] for line in steps] == [0, 0, 1, 1]
    assert all(list(line)[:4] == ["nll", "penalty", "member", "loss"] for line in steps)
    assert all(line["loss"] == pytest.approx(line["nll"] + line["penalty"], rel=1e-2) for line in steps)
    assert next(iter(run.evaluate())) == "eval_nll"
    assert "member" not in lines[-1]


def test_the_trainer_makes_the_cycles_of_an_ensemble_and_goes_on_after_a_stop(tmp_path):
    def run():
        return trainer(tmp_path, methods.Ensemble(members=3), members=1, steps=6)

    whole, other = run(), run()
    whole.train()
    assert {p.count for _, p in named_posteriors(whole.model)} == {3}
    assert whole.evaluate()["eval_posterior_samples"] == 3
    assert whole.lr_scheduler.state_dict()["stages"]["restart"] == "first"
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for (_, a), (_, b) in zip(named_posteriors(whole.model), named_posteriors(other.model), strict=True):
        assert torch.equal(a.members, b.members)
