import pytest
import torch
from torch import nn

from bayesify import bayesify, summary


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.body = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight


def test_says_what_is_bayesian_and_what_not():
    model = bayesify(Tied(), "vi", prior_sig=0.5, prior_mean={"body.*": "zero"}, bias="uninformative", init_sig=0.25)
    report = summary(model)
    rows = {r.name: r for r in report.rows}
    assert rows["embed.weight"].note == "tied, read in 2 places, padding row 0 without noise"
    assert rows["embed.weight"].prior == "N(theta0, 0.5^2)"
    assert rows["body.weight"].prior == "N(0, 0.5^2)" and rows["body.weight"].std == 0.25
    assert rows["body.bias"].prior == "flat" and rows["body.bias"].note == "bias"
    assert rows["frozen.weight"].posterior == "" and rows["frozen.weight"].note == "frozen"
    text = str(report)
    assert "Bayesian: 48 of 68 parameters (70.6%) in 3 tensors" in text
    assert "not Bayesian: 2 tensors (frozen)" in text
    # rho of all, the prior mean of the embedding, a constant each for the two zero means.
    assert report.extra_bytes == 4 * (48 + 28 + 2)


def test_not_selected_and_long_names():
    inner = nn.Sequential(nn.Linear(2, 2))
    for _ in range(40):
        inner = nn.Sequential(inner)
    model = bayesify(nn.ModuleDict({"deep": inner, "other": nn.Linear(2, 2)}), "vanilla", include="deep.*")
    report = summary(model)
    assert {r.note for r in report.rows if not r.posterior} == {"not selected"}
    assert "..." in str(report) and max(len(line) for line in str(report).splitlines()) < 160
    assert "point" in str(report)


def test_a_plain_model():
    with pytest.raises(ValueError, match="call bayesify"):
        summary(torch.nn.Linear(2, 2))
