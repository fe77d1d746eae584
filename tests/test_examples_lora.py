"""What examples and docs say of adapters: several of them asked with stock libraries, their memory, TRL's trainer."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_zoo import BY_NAME, ids

from bayesify import bayesify as make_bayesian
from bayesify import predict
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


def test_the_script_needs_no_bayesify(served):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    _, base, folders = served
    words = {word: i for i, word in enumerate(["[UNK]", "water", "is", "wet", "dry"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(base)
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


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
def test_sft_trainer_with_the_penalty(tmp_path):
    from trl import SFTConfig, SFTTrainer

    from bayesify.integrations.huggingface.trainer import BayesTrainerMixin

    class BayesSFTTrainer(BayesTrainerMixin, SFTTrainer):
        pass

    base = BY_NAME["Llama"].build()
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = make_bayesian(peft.get_peft_model(base, lora), "vi", include="*lora_*", prior_mean="zero")
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids(4, 6)]
    trainer = BayesSFTTrainer(
        model, SFTConfig(tmp_path, max_steps=1, report_to="none", use_cpu=True), train_dataset=rows
    )
    assert trainer.num_data == 4 * 5  # shifted labels
