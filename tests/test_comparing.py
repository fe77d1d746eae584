"""`bayesify compare`: a user's case is read, scored fairly, and answered honestly."""

import math
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import metrics, predict
from bayesify.cli.compare import Case, Row, apart, compare, detects, last_linear, read_case, table, verdict
from bayesify.cli.main import main
from bayesify.prediction.predictive import Predictive

SCALED, NOVEL = "plain + temperature", "plain + novelty"
FILE = """
import torch
from bayesify import bayesify, fit_laplace, methods
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def loader(count, seed, shuffle=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    y = (x[:, 0] + torch.randn(count, generator=generator) > 0).long()
    return DataLoader(TensorDataset(x, y), 50, shuffle=shuffle)

def case():
    model = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2))
    return model, loader(100, 0, True), loader(100, 1), loader(200, 2, True), [10 * torch.randn(50, 4)]

def trained():
    torch.manual_seed(0)
    model, train, *others = case()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    names = ("model", "train", "validation", "test", "ood")
    return dict(zip(names, (model, train, *others)))

def wrong():
    return case()[:3]

def own(case):
    return bayesify(case.model, "la", include="2.*") and fit_laplace(case.model, case.train)

class Wide(methods.VI):
    name = "wide"

def numbers():
    def loader(count, seed, shuffle=False):
        generator = torch.Generator().manual_seed(seed)
        x, noise = torch.randn(count, 2, generator=generator), torch.randn(count, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1) + 0.3 * noise), 50, shuffle=shuffle)
    model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
    return model, loader(100, 0, True), loader(100, 1), loader(200, 2), [10 * torch.randn(50, 2)]

value = 3
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])  # where the folder of a case goes
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_a_trained_model(source, tmp_path, capsys):
    assert main(["compare", f"{source}:trained", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "out" / "compare.md").read_text() in text
    for name in (
        "plain",
        SCALED,
        NOVEL,
        "la, last layer",
        'la, last layer, tune="self"',
        "la, all weights, calibrated",
    ):
        assert f"| {name} |" in text
    assert "vi" not in text and "ensemble" not in text
    assert f"{SCALED} is enough here" in text or "is best: its NLL is lower" in text


def test_a_model_that_is_trained_here(source):
    rows, left_out = compare(read_case(source), epochs=3, lr=0.01)
    assert not left_out
    assert [row.name for row in rows][-4:] == [
        "vi + temperature",
        "mc_dropout + temperature",
        "ensemble + temperature",
        "5 trainings + temperature",
    ]
    assert all(len(row.found) == 200 and row.unknown is not None for row in rows)
    for row in rows[1:]:  # one order of the shuffled test data for all
        assert torch.equal(row.found.labels, rows[0].found.labels)
    assert rows[-1].seconds > 0 and rows[0].cost == 1


def test_what_has_no_time_or_fails_is_told(source):
    rows, left_out = compare(read_case(f"{source}:trained"), minutes=0)
    assert [row.name for row in rows] == ["plain"] and len(left_out) == 5 and "no time was left" in left_out[0]
    rows, left_out = compare(read_case(f"{source}:trained"), head="nothing")
    assert len(rows) == 4 and len(left_out) == 2 and "nothing" in left_out[0]
    assert f"Left out: {left_out[0]}" in table(rows, left_out)


WRONG = [
    ("nowhere.py", "cannot read 'nowhere.py'"),
    ("nowhere_at_all:case", "cannot read 'nowhere_at_all'"),
    ("{}:missing", "has no function 'missing'; write 'def case(): return model, train, validation, test'"),
    ("{}:value", "has no function 'value'"),
    ("{}:wrong", "must return (model, train, validation, test) or these and ood, got tuple of 3"),
]


@pytest.mark.parametrize(("case", "message"), WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_case_is_told_in_one_line(case, message, source, tmp_path, capsys):
    assert main(["compare", case.format(source), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_data_without_labels_is_an_error(source):
    def without(*parts):
        case = read_case(f"{source}:trained")()
        bare = {part: [batch[0] for batch in getattr(case, part)] for part in parts}
        return lambda: case._replace(**bare)

    with pytest.raises(ValueError, match="the test batches have no labels"):
        compare(without("test"))
    with pytest.raises(ValueError, match="the training batches have no labels"):
        compare(without("train"), epochs=1)
    _, left_out = compare(without("validation"))
    assert "the validation batches have no labels" in left_out[0]


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).relu())


def test_the_last_layer_is_found_by_a_forward_pass():
    assert last_linear(Odd(), torch.randn(5, 3)) == "head"
    with pytest.raises(ValueError, match="--head"):
        last_linear(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.randn(5, 3))


def test_methods_are_chosen_and_may_be_ones_own(source):
    own, wide = f"{source}:own", f"{source}:Wide"
    rows, left_out = compare(read_case(f"{source}:trained"), methods=["novelty", own, "vi"])
    assert [row.name for row in rows] == ["plain", SCALED, NOVEL, own]
    assert rows[-1].found.method == "la"
    assert left_out == ["vi + temperature: it takes a training of its own; pass --epochs"]
    rows, left_out = compare(read_case(source), methods=[wide, "ivon", "swag", "sgld"], epochs=2, lr=0.01)
    assert not left_out
    assert [row.found.method for row in rows[2:]] == ["wide", "ivon", "swag", "sgld"]
    with pytest.raises(ValueError, match="has no function 'none'"):
        compare(read_case(source), methods=[f"{source}:none"])


def test_a_regression(source):
    rows, left_out = compare(read_case(f"{source}:numbers"), epochs=20, lr=0.02)
    assert not left_out
    assert [row.name for row in rows][:2] == ["plain", "plain + noise"] and "la-self" not in str(rows)
    assert not rows[0].found.noise_known and all(row.found.noise_known for row in rows[1:])
    for row in rows[1:]:
        assert float(row.losses.mean()) == pytest.approx(row.found.scores["nll"])
    text = table(rows, left_out)
    assert ("| 95% intervals hold |" in text and "plain + noise is enough" in text) or "is best: its NLL" in text
    assert "OOD AUROC, standard deviation" in text and "OOD AUROC, novelty" in text


def row(name, shift, labels, unknown=None):
    """Return a row whose logits of the true class are higher by a shift, with some scatter of their own."""
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(len(labels), 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[torch.arange(len(labels)), labels] += shift + 0.01 * torch.randn(len(labels), generator=generator)
    return Row(name, 1.0, 1.0, Predictive.from_logits(logits.unsqueeze(0), labels), unknown)


def test_the_verdict_needs_two_standard_errors_and_a_gain_that_matters():
    labels = torch.randint(2, (400,), generator=torch.Generator().manual_seed(1))
    rows = [row("plain", 0.5, labels), row(SCALED, 1.0, labels), row("some", 1.0, labels)]
    assert verdict(rows) == f"{SCALED} is enough here: nothing has a clearly lower NLL."
    rows.append(row("tiny", 1.004, labels))
    mean, error = apart(rows[-1], rows[1])
    assert mean < -2 * error and "is enough here" in verdict(rows)  # not "lower by 0.001 ± 0.000"
    rows.append(row("good one", 1.3, labels))
    mean, error = apart(rows[-1], rows[1])
    each = rows[-1].losses - rows[1].losses
    assert (mean, error) == pytest.approx((float(each.mean()), float(each.std()) / math.sqrt(400)))
    assert verdict(rows) == f"good one is best: its NLL is lower than that of {SCALED} by {-mean:.3f} ± {error:.3f}."


def test_the_verdict_on_out_of_distribution_data():
    labels = torch.randint(2, (100,), generator=torch.Generator().manual_seed(1))
    unsure, sure = (Predictive.from_logits(torch.full((50, 2), 0.0) + torch.tensor([c, 0.0])) for c in (0.0, 9.0))
    plain, scaled = row("plain", 1.0, labels, sure), row(SCALED, 1.0, labels, sure)
    assert "Nothing is clearly better than the plain model at detecting" in verdict([plain, scaled])
    found = verdict([plain, scaled, row("la", 1.0, labels, unsure)])
    assert "The entropy of la is best at detecting out-of-distribution data: AUROC 1.000, against 0.000" in found


def test_the_difference_of_two_aurocs_has_its_standard_error():
    """Against the scatter over repetitions, with scores that share what they see."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(400):
        known, new = (torch.randn(2, n, generator=generator, dtype=torch.float64) for n in (120, 80))
        known, new = known + known[0], new + new[0] + torch.tensor([[1.0], [0.7]])
        pairs = (known[0], new[0]), (known[1], new[1])
        difference, error = detects(*pairs)
        assert difference == pytest.approx(metrics.auroc(*pairs[0]) - metrics.auroc(*pairs[1]))
        found.append((difference, error))
    differences, errors = torch.tensor(found).T
    assert float(errors.mean()) == pytest.approx(float(differences.std()), rel=0.15)


def test_the_plain_row_is_the_models_own_prediction(source):
    case = read_case(f"{source}:trained")()
    assert isinstance(case, Case) and isinstance(case.train, DataLoader)
    assert isinstance(case.train.dataset, TensorDataset)
    rows, _ = compare(lambda: case, minutes=0)
    assert torch.equal(rows[0].found.log_probs, predict(case.model, case.test).log_probs)


def test_a_case_imports_what_lies_beside_it(source, tmp_path):
    (tmp_path / "beside_the_case.py").write_text(FILE)
    (tmp_path / "mine.py").write_text("from beside_the_case import case")
    assert isinstance(read_case(source)().model, nn.Module)
