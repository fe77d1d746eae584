"""Arguments, small models and data for BayesTrainer."""

import torch
from huggingface_zoo import BY_NAME, TEXT
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, TrainingArguments

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def arguments(folder, **options):
    defaults = {
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "log_level": "error",
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


def classifier(**options):
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**TEXT, **STILL, **options))


def masked():
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**TEXT, **STILL))


def sentences(n=16):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 40, (n, 6), generator=generator)
    return [{"input_ids": row, "labels": (row[0] > 20).long()} for row in tokens]


def texts(n=16):
    """Sequences whose labels end in padding, more of it in each."""
    out = []
    for i, row in enumerate(sentences(n)):
        labels = row["input_ids"].clone()
        labels[2 + i % 5 :] = -100
        out.append({"input_ids": row["input_ids"], "labels": labels})
    return out


def together(data):
    return {key: torch.stack([row[key] for row in data]) for key in data[0]}


CASES = {
    "classifier": (classifier, sentences, 8),
    "masked language model": (masked, texts, None),
    "GPT-2": (BY_NAME["GPT2"].build, texts, None),
    "Llama": (BY_NAME["Llama"].build, texts, None),
}
