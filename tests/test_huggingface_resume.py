"""BayesTrainer: a run that is interrupted and resumed ends with the weights of one that was not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_zoo import TEXT
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

from bayesify import bayesify as make_bayesian
from bayesify import named_posteriors
from bayesify.integrations.huggingface import BayesTrainer

STEPS, SAVED_EVERY, STOPPED_AT = 7, 2, 5
OPTIONS = {"sgld": {"thin": 2, "burnin": 1}}


class Stop(TrainerCallback):
    """End the process, or raise, after some step."""

    def __init__(self, kill):
        self.kill = kill

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STOPPED_AT:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt


def trainer(method, folder, callbacks=()):
    """A run whose every random part matters: dropout, shuffling, draws of theta."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**TEXT))
    make_bayesian(model, method, prior_sig=0.1, **OPTIONS.get(method, {}))
    tokens = torch.randint(3, 40, (10, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": (row[0] > 20).long()} for row in tokens]
    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=SAVED_EVERY,
        eval_strategy="steps",
        eval_steps=3,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        seed=11,
    )
    return BayesTrainer(model, args, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks))


def everything(model):
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return {**state, **{f"std of {n}": p.std for n, p in named_posteriors(model)}}


def assert_same(one, other):
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def run_until_killed(method, folder):
    trainer(method, folder, [Stop(kill=True)]).train()


def uninterrupted(method, folder):
    run = trainer(method, folder)
    run.train()
    return everything(run.model)


def test_a_killed_process_resumes_bit_by_bit(tmp_path):
    code = f"import test_huggingface_resume as t; t.run_until_killed('vi', {str(tmp_path / 'run')!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    # A process may also die while it writes a checkpoint.
    half = tmp_path / "run" / f"checkpoint-{SAVED_EVERY * 3}"
    half.mkdir()
    (half / "config.json").write_text("{}")
    resumed = trainer("vi", tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    assert_same(everything(resumed.model), uninterrupted("vi", tmp_path / "whole"))


@pytest.mark.parametrize("method", ["vanilla", "mc_dropout", "sgld", "la"])
def test_every_method_resumes_bit_by_bit(method, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trainer(method, tmp_path / "run", [Stop(kill=False)]).train()
    resumed = trainer(method, tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert_same(everything(resumed.model), uninterrupted(method, tmp_path / "whole"))


def test_resuming_needs_a_complete_checkpoint(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        trainer("vi", tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_is_a_folder_for_everybody(tmp_path):
    run = trainer("vi", tmp_path)
    run.train()
    folder = tmp_path / f"checkpoint-{STEPS}"
    plain, info = BertForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    means = {name: posterior.mean for name, posterior in named_posteriors(run.model)}
    assert_same({n: p.detach() for n, p in plain.named_parameters()}, means)
