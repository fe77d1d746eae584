"""What mixtures and followed paths cost over one plain model, as docs/mixtures.md says.

    python -m tests.benchmarks.mixtures            # two minutes, goes on where it was stopped; writes the page's table
    python -m tests.benchmarks.mixtures --pages    # the table alone, from the results

Every row trains its whole posterior (all members, the fit after it) and is timed in turn with the training of one plain
model on the same batches.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from bayesify import SGLD, Cycles, bayesify, fit_laplace, mix, penalty, predict, save
from bayesify.core.mixture import shared_copy
from bayesify.core.posterior import Posterior
from bayesify.prediction.batches import call_model, logits_of
from examples.sections import write_section
from tests.benchmarks.timing import interleave

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "mixtures.json"
PAGE = ROOT / "docs" / "mixtures.md"
EPOCHS, BATCHES, MEMBERS = 4, 10, 5
STEPS = EPOCHS * BATCHES
COLUMNS = ("training", "prediction", "memory", "file")


@dataclass(frozen=True)
class Work:
    """A model to be trained, and its data.

    Attributes:
        name: What the table calls it.
        build: Makes the plain model from a seed.
        batch: Makes a batch of inputs and labels from a generator.
        head: The name pattern of its last layer.
        prior_mean: As `bayesify` takes it: pretrained weights, or zero for a model from scratch.
        adapted: Puts a LoRA adapter on the model, where the model takes one.
    """

    name: str
    build: Callable[[int], nn.Module]
    batch: Callable[[torch.Generator], tuple[Any, torch.Tensor]]
    head: str
    prior_mean: str | None = None
    adapted: Callable[[nn.Module], nn.Module] | None = None

    def bayesian(self, seed: int, method: str, **options: Any) -> nn.Module:
        """Return a model that is not trained yet."""
        return bayesify(self.build(seed), method, prior_mean=self.prior_mean, **options)

    def data(self) -> list[tuple[Any, torch.Tensor]]:
        """Return the training set: ten batches, always the same."""
        generator = torch.Generator().manual_seed(0)
        return [self.batch(generator) for _ in range(BATCHES)]

    @property
    def num_data(self) -> int:
        """How many examples there are."""
        return sum(len(labels) for _, labels in self.data())


def perceptron(seed: int) -> nn.Module:
    """Return the benchmarks' MLP, with weights of its own."""
    torch.manual_seed(seed)
    hidden = [m for a, b in pairwise((784, 1000, 1000, 1000)) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1000, 10))


def pixels(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 128 images."""
    return torch.randn(128, 784, generator=generator), torch.randint(10, (128,), generator=generator)


def sentences(generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return eight sentences of 32 tokens."""
    ids = torch.randint(1000, 20000, (8, 32), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.randint(2, (8,), generator=generator)


def encoder(seed: int) -> nn.Module:
    """Return a BERT of two layers, with a head of its own on a body that is always the same, as if pretrained."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    model = BertForSequenceClassification(BertConfig(**size))
    torch.manual_seed(seed)
    model.classifier.reset_parameters()
    return model


def lora(model: nn.Module) -> nn.Module:
    """Put an adapter of rank 8 on the attention of an encoder."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    adapted: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
    return adapted


WORKS = (
    Work("MLP, batch 128", perceptron, pixels, "6.*", "zero"),
    Work("BERT of two layers, batch 8", encoder, sentences, "classifier.*", adapted=lora),
)


# -- the rows ------------------------------------------------------------------------------------------------------


def trained(work: Work, model: nn.Module, optimizer: Any = None, cycles: Any = None) -> nn.Module:
    """Train a model on all batches, four times; by SGD with momentum unless told otherwise."""
    if optimizer is None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    bayesian, num_data = any(isinstance(m, Posterior) for m in model.modules()), work.num_data
    data = work.data()
    model.train()
    for _ in range(EPOCHS):
        for inputs, labels in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(logits_of(call_model(model, inputs)), labels)
            (loss + penalty(model, num_data) if bayesian else loss).backward()
            optimizer.step()
            if cycles is not None:
                cycles.step()
    return model.eval()


def plain(work: Work) -> nn.Module:
    """Train one model that knows nothing of posteriors."""
    return trained(work, work.build(0))


def ensemble(work: Work) -> nn.Module:
    """Train five models and mix them."""
    return mix([trained(work, work.bayesian(seed, "vanilla")) for seed in range(MEMBERS)])


def last_layers(work: Work) -> nn.Module:
    """Train five models, fit the last layer of each, and mix them."""
    members = [trained(work, work.bayesian(seed, "la", include=work.head)) for seed in range(MEMBERS)]
    return mix([fit_laplace(member, work.data(), structure="kron") for member in members])


def swag(work: Work) -> nn.Module:
    """Train one model and follow its path."""
    model = work.bayesian(0, "swag")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return trained(work, model, optimizer, Cycles(optimizer, model, steps=STEPS))


def cycles(work: Work) -> nn.Module:
    """Run one chain through five cycles."""
    model = work.bayesian(0, "sgld", thin=1)
    chain = SGLD(model, 1e-3, num_data=work.num_data, momentum=0.9)
    drive = Cycles(chain, model, steps=STEPS, cycles=MEMBERS, beta=0.5)
    trained(work, model, chain, drive)
    return drive.mixture().eval()


def adapters(work: Work) -> nn.Module:
    """Train five adapters on one base, and mix them."""
    assert work.adapted is not None
    base = work.build(0)
    return mix([trained(work, bayesify(work.adapted(shared_copy(base)), "vanilla")) for _ in range(MEMBERS)])


ROWS: dict[str, Callable[[Work], nn.Module]] = {
    "five plain models": ensemble,
    "five last layers by Laplace": last_layers,
    "SWAG": swag,
    "SGLD in five cycles": cycles,
    "five LoRA adapters": adapters,
}


def rows_of(work: Work) -> list[str]:
    """Return the rows that a work can have."""
    return [row for row, train in ROWS.items() if train is not adapters or work.adapted is not None]


# -- the measures --------------------------------------------------------------------------------------------------


def measure(work: Work, row: str, *, rounds: int = 2) -> dict[str, float]:
    """Return the costs of a row over those of one plain model; times are the processor's."""
    inputs, train, made = [x for x, _ in work.data()], ROWS[row], dict[str, nn.Module]()

    def make(name: str, function: Callable[[Work], nn.Module]) -> None:
        made[name] = function(work)

    def passes() -> None:
        with torch.no_grad():
            for x in inputs:
                call_model(made["plain"], x)

    training = interleave({"plain": lambda: make("plain", plain), row: lambda: make(row, train)}, rounds)
    prediction = interleave({"plain": passes, row: lambda: predict(made[row], inputs, seed=0)}, rounds)
    return {
        "training": training[row].over(training["plain"])["cpu"],
        "prediction": prediction[row].over(prediction["plain"])["cpu"],
        "memory": held(made[row]) / held(made["plain"]),
        "file": stored(made[row]) / stored(made["plain"]),
    }


def held(model: nn.Module) -> int:
    """Return the bytes of all the memory that a model's tensors lie in."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [t for m in model.modules() if isinstance(m, Posterior) for t in m.state().values()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def stored(model: nn.Module) -> int:
    """Return the bytes of the file that a model is loaded from; an adapter's base is not in it."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "posterior.safetensors"
        if not any(isinstance(m, Posterior) for m in model.modules()):
            save_file(model.state_dict(), file)
        elif hasattr(model, "config"):
            from bayesify.integrations.huggingface import save_pretrained

            save_pretrained(model, name)
        else:
            save(model, name)
        return file.stat().st_size


# -- the page ------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """Return the page's table and the words below it."""
    lines = ["| model | posterior | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for key, numbers in results["rows"].items():
        work, row = key.split(" | ")
        lines.append(f"| {work} | {row} | " + " | ".join(f"{numbers[c]:.2f}" for c in COLUMNS) + " |")
    words = (
        f"Each over one plain model that is trained and run beside it ({results['machine']}, one thread, "
        f"{results['date']}). Training is {results['steps']} steps with all that belongs to the posterior: five "
        "members, the fit, the iterates, which weigh less in a longer training. Prediction is `predict` as it stands, "
        f"on {BATCHES} batches: one pass for each plain member, adapter and closed form, 30 samples of SWAG, five of "
        "every cycle. A draw costs the same for a batch as for a million, and SWAG's reads ten iterates: on more data "
        "each sample comes nearer to one pass. Memory is that of the model's tensors, ready to predict; the file is "
        "`posterior.safetensors`, without the base of adapters. Times are the processor's, "
        "on a machine that other work shares. "
        "`make bench-mixtures` measures it anew."
    )
    return "\n".join([*lines, "", words, ""])


def measure_all() -> None:
    """Measure every row, or those that are missing since a run was stopped."""
    from tests.benchmarks.conftest import processor

    every = [(work, row) for work in WORKS for row in rows_of(work)]
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    rows = rows if len(rows) < len(every) else {}
    for work, row in every:
        if f"{work.name} | {row}" in rows:
            continue
        rows[f"{work.name} | {row}"] = {name: round(value, 3) for name, value in measure(work, row).items()}
        print(work.name, row, rows[f"{work.name} | {row}"], flush=True)
        machine = f"{processor()}, torch {torch.__version__}"
        results = {"date": date.today().isoformat(), "machine": machine, "steps": STEPS, "rows": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Measure every row and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="write the table from the results, and measure nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.pages:
        measure_all()
    write_section(PAGE, "costs", table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
