"""What examples and docs say of adapters: several of them asked with stock libraries, their memory, TRL's trainer."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_zoo import BY_NAME, ids

from bayesify import bayesify as make_bayesian
from bayesify import mean, penalty, predict
from bayesify.integrations.huggingface import export_adapters

peft = pytest.importorskip("peft")
EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import ask_adapters  # noqa: E402
import lora_memory  # noqa: E402


@pytest.fixture
def served(tmp_path):
    """Return a posterior of adapters, the folder of its base, and those of three draws."""
    base = BY_NAME["Llama"].build()
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = make_bayesian(peft.get_peft_model(base, lora), "vi", include="*lora_*", init_sig=0.3, prior_sig=1.0).eval()
    return model, tmp_path / "base", export_adapters(model, 3, tmp_path / "served", seed=4)


def test_the_average_of_exported_adapters_is_the_prediction(served):
    posterior, base, folders = served
    prompts = ids(2, 5)
    model = ask_adapters.loaded(BY_NAME["Llama"].build().from_pretrained(base), folders)
    probs, information = ask_adapters.ask(model, prompts)
    expected = predict(posterior, {"input_ids": prompts}, samples=3, seed=4)
    torch.testing.assert_close(probs.double(), expected.probs.view(2, 5, -1)[:, -1], rtol=1e-4, atol=1e-6)
    found = expected.mutual_information.view(2, 5)[:, -1]
    torch.testing.assert_close(information, found.to(information.dtype), rtol=1e-3, atol=1e-6)
    assert information.min() > 0


def test_padding_and_choices(served):
    _, base, folders = served
    model = ask_adapters.loaded(BY_NAME["Llama"].build().from_pretrained(base), folders)
    prompts, tokens = ids(1, 5), torch.tensor([3, 9, 4])
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompts], 1)
    mask = torch.tensor([[0] * 3 + [1] * 5])
    alone, _ = ask_adapters.ask(model, prompts, tokens=tokens)
    found, _ = ask_adapters.ask(model, padded, mask, tokens)
    assert found.shape == (1, 3) and torch.allclose(found.sum(), torch.ones(()))
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)


def tokenizer():
    """Return one that knows four words."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[UNK]", "water", "is", "wet", "dry"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = dict.fromkeys(("unk_token", "pad_token", "eos_token"), "[UNK]")
    return PreTrainedTokenizerFast(tokenizer_object=plain, **special)


def test_the_script_needs_no_bayesify(served):
    _, base, folders = served
    tokenizer().save_pretrained(base)
    code = "import sys; sys.modules['bayesify'] = None; sys.argv = sys.argv[1:]; import runpy; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    options = [base, *folders, "--prompt", "water is", "--choices", "wet", "dry"]
    command = [sys.executable, "-c", code, EXAMPLES / "ask_adapters.py", *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = [float(line.split()[0]) for line in done.stdout.splitlines()[:2]]
    assert abs(sum(shown) - 1) < 0.002 and "3 adapters" in done.stdout


def test_vi_on_adapters_takes_at_most_twice_their_memory():
    found = {method: lora_memory.measured(lora_memory.small(), method) for method in lora_memory.METHODS}
    bytes_of = {method: sum(parts) for method, (_, parts) in found.items()}
    assert abs(bytes_of[None] - 16) < 0.1  # a weight, its gradient, and two moments
    assert all(size <= 2.01 * bytes_of[None] for size in bytes_of.values())
    text = lora_memory.table("small", lora_memory.small(), found)
    assert "6.8 million" in text and "| vi |" in text


@pytest.mark.filterwarnings("ignore")  # of the libraries below TRL
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
def test_sft_trainer_with_the_penalty(tmp_path):
    import datasets
    from trl import SFTConfig, SFTTrainer

    from bayesify.integrations.huggingface.trainer import BayesTrainerMixin

    class BayesSFTTrainer(BayesTrainerMixin, SFTTrainer):
        pass

    base = BY_NAME["Llama"].build()
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = make_bayesian(peft.get_peft_model(base, lora), "vi", include="*lora_*", prior_mean="zero")
    lengths = (6, 4, 3, 6)  # the shorter ones are padded, and padding does not count
    rows = [{"input_ids": row[:n].tolist()} for row, n in zip(ids(4, 6), lengths, strict=True)]
    train = datasets.Dataset(datasets.table.InMemoryTable.from_pylist(rows), fingerprint="rows")
    options = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options["dataset_kwargs"] = {"skip_prepare_dataset": True}
    config = SFTConfig(tmp_path, report_to="none", use_cpu=True, bf16=False, learning_rate=1e-12, **options)
    trainer = BayesSFTTrainer(model, config, train_dataset=train, processing_class=tokenizer())
    trainer.train()
    count = sum(lengths) - len(lengths)  # the first token of a text has no prediction
    assert trainer.num_data == count
    with mean(model), torch.no_grad():
        losses = [
            model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["input_ids"]])).loss
            for row in rows
        ]
    expected = sum(float(loss) * (n - 1) for loss, n in zip(losses, lengths, strict=True)) / count
    logged = trainer.state.log_history[0]
    assert abs(logged["nll"] - expected) < 1e-3  # draws of a spread of 1e-3
    assert (
        abs(logged["penalty"] - float(penalty(model, count).detach())) < 0.01 * logged["penalty"]
    )  # two steps of its spread
