"""The README alone is enough: its snippets run as they stand, its links lead somewhere, its badges are true."""

import copy
import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bayesify

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ONE_LINE, THREE_LINES, LOOP, REST = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def network():
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def loaders():
    x = torch.randn(192, 64)
    y = (x[:, :10] + 0.3 * torch.randn(192, 10)).argmax(1)
    train, test = (DataLoader(TensorDataset(x[rows], y[rows]), 32) for rows in (slice(96), slice(96, None)))
    return {"train_loader": train, "test_loader": test, "validation_loader": test}


def test_it_is_short_and_begins_with_the_one_line():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert any("bayesify(" in line for line in lines[:10])
    assert len([line for line in LOOP.splitlines() if line.strip()]) <= 15


def test_the_one_line_and_the_rest_in_short(folder, loaders):
    space = {"model": network()}
    exec(ONE_LINE, space)
    assert dict(bayesify.named_posteriors(space["model"]))
    space |= loaders | {"inputs": torch.randn(3, 64), "plain_model": network()}
    space["other_model"] = copy.deepcopy(space["model"])
    exec(REST, space)
    assert len(bayesify.components(space["ensemble"])) == 2
    assert [name for name, _ in space["model"].named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert dict(bayesify.named_posteriors(space["plain_model"]))


def test_the_training_loop_prints_what_stands_below_it(capsys):
    """On 1,200 digits and the 597 others; what is printed may differ a little between machines."""
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    train, test = (TensorDataset(x[rows], y[rows]) for rows in (slice(1200), slice(1200, None)))
    torch.manual_seed(0)
    exec(LOOP, {"train_loader": DataLoader(train, 32, shuffle=True), "test_loader": DataLoader(test, 200)})
    printed = capsys.readouterr().out
    shown = next(line for line in README.splitlines() if line.startswith("Predictive(597"))
    number = r"\d\.\d+"
    assert re.sub(number, "", printed.strip()) == re.sub(number, "", shown)
    for found, said in zip(re.findall(number, printed), re.findall(number, shown), strict=True):
        assert float(found) == pytest.approx(float(said), abs=0.01)


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
def test_a_fine_tuned_model_gets_calibration_a_threshold_and_a_picture(given, folder, capsys):
    space = given()
    exec(THREE_LINES, space)
    before, after = space["before"].scores, space["after"].scores
    assert after["nll"] < before["nll"] and after["ece"] < before["ece"] + 0.01
    assert after["error"] == pytest.approx(before["error"], abs=0.01)
    assert space["after_ood"].confidence.mean() < space["before_ood"].confidence.mean()
    answered, strange = (space[name].float().mean() for name in ("answered", "strange"))
    assert 0 < space["threshold"] < 1 and answered > strange
    assert space["wrong"].float().mean() <= 0.1 < before["error"]  # what was promised holds
    assert "answers at a confidence of" in capsys.readouterr().out
    assert "</svg>" in (folder / "before_after.svg").read_text()
    assert (folder / "report.html").stat().st_size > 10_000


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("licence", SETTINGS["license"]),
        ("python", SETTINGS["requires-python"]),
        ("pytorch", next(d for d in SETTINGS["dependencies"] if d.startswith("torch")).removeprefix("torch")),
    ],
)
def test_badges_are_true(name, said):
    badge = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
    assert f">{said.replace('>', '&gt;')}</text>" in badge
