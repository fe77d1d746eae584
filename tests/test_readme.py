"""The README alone is enough: its snippets run as they stand, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bayesify

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FIRST, ABSTAIN, LOOP, REGRESSION, REST = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_it_is_short_and_begins_with_the_one_line():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert any("bayesify(" in line for line in lines[:10])
    assert len([line for line in LOOP.splitlines() if line.strip()]) <= 15


def fine_tuned(model, batches, lr, epochs, logits=lambda output: output):
    """Train for too long, as everybody does: the model gets too sure of itself."""
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    model.train()
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(logits(model(x)), y).backward()
            optimizer.step()
    return model.eval()


def timm_model():
    """Return an EfficientNet of timm's, fine-tuned on 150 digits, with loaders of images, and of random ones."""
    timm, sklearn = pytest.importorskip("timm"), pytest.importorskip("sklearn.datasets")
    images, labels = sklearn.load_digits(return_X_y=True)
    order = torch.randperm(len(images))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 8 - 1, torch.tensor(labels)[order]

    def as_images(rows):
        return F.interpolate(rows.view(-1, 1, 8, 8), 32, mode="bilinear").expand(-1, 3, -1, -1)

    parts = {"train": slice(150), "validation": slice(150, 400), "held": slice(900, 1500), "test": slice(400, 900)}
    space = {f"{k}_loader": DataLoader(TensorDataset(as_images(x[r]), y[r]), 50) for k, r in parts.items()}
    model = timm.create_model("test_efficientnet", num_classes=10)
    space["model"] = fine_tuned(model, [*space["train_loader"]], 2e-3, 40)
    space["other_loader"] = [as_images(torch.rand(300, 64) * 2 - 1)]
    return space


def hugging_face_model():
    """Return a BERT that tells whether low tokens are in the majority, where some labels are wrong."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=40, num_labels=2, max_position_embeddings=16, **sizes)
    ids = torch.randint(2, 30, (2100, 9))
    labels = ((ids < 16).sum(1) > 4).long() ^ (torch.rand(2100) < 0.04)
    parts = {"train": slice(300), "validation": slice(300, 600), "held": slice(1500, None), "test": slice(600, 1500)}
    space = {f"{k}_loader": [{"input_ids": ids[r], "labels": labels[r]}] for k, r in parts.items()}
    model = transformers.BertForSequenceClassification(config)
    batches = [*zip(ids[:300].split(50), labels[:300].split(50), strict=True)]
    space["model"] = fine_tuned(model, batches, 3e-3, 20, lambda output: output.logits)
    space["other_loader"] = [{"input_ids": torch.randint(30, 40, (200, 9))}]
    return space


@pytest.mark.parametrize("given", [timm_model, hugging_face_model], ids=lambda f: f.__name__)
def test_a_fine_tuned_model_gets_calibration_a_threshold_and_an_alarm(given, capsys):
    space = given()
    space["noise"], space["test_loader"] = space.pop("other_loader"), space["held_loader"]
    before = bayesify.predict(space["model"], space["test_loader"])
    exec(FIRST.replace('"4.*"', '"classifier.*"'), space)
    out, strange = space["out"], space["strange"]
    assert out.scores["nll"] < before.scores["nll"]
    assert out.scores["error"] == pytest.approx(before.scores["error"], abs=0.01)
    assert strange.alarm().float().mean() > out.alarm().float().mean()
    space["noise"] = next(iter(space["noise"]))
    code = ABSTAIN.replace("700", "300").replace("max_risk=0.05", "max_risk=0.2")
    exec(code.replace("(noise)", "(**noise)") if isinstance(space["noise"], dict) else code, space)
    assert space["threshold"] > 0 and space["wrong"] <= 0.2
    assert "of these wrong" in capsys.readouterr().out


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
