"""BayesTrainer on two processes: the same step as on one."""

import os
import runpy
import sys
from pathlib import Path

import pytest
import ranks
import torch
from huggingface_zoo import BY_NAME, TEXT
from ranks import posterior_of
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from bayesify import bayesify as make_bayesian
from bayesify.integrations.huggingface import BayesTrainer

EXAMPLE = Path(__file__).parent.parent / "examples" / "with_trainer.py"
METHODS = ["vi", "mc_dropout", "sgld", "la", "swag", "ivon", "vanilla"]


def rows(kind):
    """Eight examples; the texts' labels end in padding, more of it in each."""
    tokens = torch.randint(3, 40, (8, 6), generator=torch.Generator().manual_seed(1))
    if kind == "classifier":
        return [{"input_ids": row, "labels": (row[0] > 20).long()} for row in tokens]
    labels = [torch.where(torch.arange(6) < 2 + i % 5, row, -100) for i, row in enumerate(tokens)]
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def model_of(kind):
    torch.manual_seed(0)
    if kind == "classifier":
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(**TEXT, **still))
    else:
        model = BY_NAME["Llama"].build()
    # Without dropout and spread every process has the same theta.
    return make_bayesian(model, "mc_dropout", p_drop=0.0, prior_mean="zero")


def step(kind, folder, batch, steps):
    """Take one optimizer step with learning rate 1 and evaluate."""
    args = TrainingArguments(
        str(folder),
        max_steps=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=steps,
        per_device_eval_batch_size=3,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        logging_steps=1,
        save_strategy="no",
        average_tokens_across_devices=True,
    )
    data = rows(kind)
    trainer = BayesTrainer(model_of(kind), args, train_dataset=data, eval_dataset=data[:7])
    trainer.train()
    scores = trainer.evaluate()
    log = next(row for row in trainer.state.log_history if "penalty" in row)
    kept = {k: v for k, v in scores.items() if k in ("eval_error", "eval_nll", "eval_ece")}
    kept |= {k: log[k] for k in ("loss", "nll", "penalty")}
    return {"weights": {n: p.detach() for n, p in trainer.model.named_parameters()}, "scores": kept}


def on_every_rank(folder):
    """What each process runs."""
    for kind in ("classifier", "texts"):
        found = step(kind, Path(folder) / kind, batch=2, steps=2)
        if int(os.environ["RANK"]) == 0:
            torch.save(found, Path(folder) / f"{kind}.pt")
    for method in METHODS:
        sys.argv = ["with_trainer.py", method, str(Path(folder) / method)]
        model = runpy.run_path(str(EXAMPLE))["model"]
        torch.save(posterior_of(model), Path(folder) / f"{method} {os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    assert ranks.run(__file__, "on_every_rank", folder) == [0] * ranks.RANKS
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_with_one_posterior_on_all_ranks(folder, method):
    one, two = (torch.load(folder / f"{method} {rank}.pt") for rank in range(ranks.RANKS))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert (folder / method / "posterior.safetensors").exists()
    assert method == "vanilla" or any(bool((value > 0).any()) for name, value in one.items() if name.endswith(".std"))


def test_two_processes_take_the_step_of_one(folder):
    for kind in ("classifier", "texts"):
        together = torch.load(folder / f"{kind}.pt")
        alone = step(kind, folder / "alone", batch=8, steps=1)
        torch.testing.assert_close(together["weights"], alone["weights"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(together["scores"], alone["scores"], rtol=1e-4, atol=1e-5)
