"""BayesTrainer on two processes: the same step as on one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from bayesify.integrations.huggingface import BayesTrainer
from huggingface_zoo import BY_NAME, TEXT
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from bayesify import bayesify as make_bayesian

RANKS = 2


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
    torch.distributed.destroy_process_group()


def test_two_processes_take_the_step_of_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    code = f"import test_huggingface_distributed as t; t.on_every_rank({str(tmp_path)!r})"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=Path(__file__).parent,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for kind in ("classifier", "texts"):
        together = torch.load(tmp_path / f"{kind}.pt")
        alone = step(kind, tmp_path / "alone", batch=8, steps=1)
        torch.testing.assert_close(together["weights"], alone["weights"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(together["scores"], alone["scores"], rtol=1e-4, atol=1e-5)
