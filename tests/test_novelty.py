"""Novelty: the distance is its formula, the p-value keeps its promise, and every prediction of a model has both."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import bayesify, fit_laplace, fit_novelty, load, metrics, mix, predict, save
from bayesify.prediction.novelty import Novelty
from bayesify.quality.conformal import conformal_pvalues
from bayesify.quality.metrics import BANK, Moments, whitened


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


X = 2 + torch.randn(300, 4, generator=rng())
Y = (X[:, 0] > 2).long() + 2 * (X[:, 1] > 2).long()
HELD = 2 + torch.randn(199, 4, generator=rng(1))
NEW = torch.cat([2 + torch.randn(20, 4, generator=rng(2)), -9 + torch.randn(20, 4, generator=rng(3))])


def network(outputs=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))


# -- the distance ------------------------------------------------------------------------------------------------------


def shrunk(s, n):
    """Return Chen's estimate, by a loop over nothing but its formula."""
    d = len(s)
    trace, square = float(s.trace()), float((s @ s).trace())
    a = min(1.0, ((1 - 2 / d) * square + trace**2) / ((n + 1 - 2 / d) * (square - trace**2 / d)))
    return (1 - a) * s + a * trace / d * torch.eye(d, dtype=s.dtype), a


@pytest.mark.parametrize(("rows", "size"), [(30, 50), (500, 5)])
def test_the_shrunk_covariance_is_chens(rows, size):
    covariance = pytest.importorskip("sklearn.covariance")
    x = torch.randn(rows, size, generator=rng(), dtype=torch.float64) * torch.linspace(0.5, 2, size).double()
    wanted, share = shrunk(x.T @ x / rows, rows)
    got = whitened(x.T @ x, rows)
    torch.testing.assert_close(got @ got.T, wanted.inverse(), rtol=1e-4, atol=1e-6)
    # scikit-learn leaves out the terms in 2/D
    assert share == pytest.approx(covariance.OAS(assume_centered=True).fit(x.numpy()).shrinkage_, rel=2 / size)


def by_hand(train, labels, new):
    """Return the squared Mahalanobis distances to the nearest class, and to the mean of all, row by row."""
    z, u = F.normalize(train.double(), dim=1), F.normalize(new.double(), dim=1)
    means = torch.stack([z[labels == c].mean(0) for c in labels.unique()])
    residuals = torch.cat([z[labels == c] - means[i] for i, c in enumerate(labels.unique())])
    within = shrunk(residuals.T @ residuals / (len(z) - len(means)), len(z) - len(means))[0].inverse()
    overall = shrunk(torch.cov(z.T), len(z) - 1)[0].inverse()
    near = [min(float((row - m) @ within @ (row - m)) for m in means) for row in u]
    away = [float((row - z.mean(0)) @ overall @ (row - z.mean(0))) for row in u]
    return torch.tensor(near, dtype=torch.float64), torch.tensor(away, dtype=torch.float64)


def test_distances_are_their_formulas_whatever_the_batches():
    near, away = by_hand(X, Y, NEW)
    moments = Moments()
    for part in torch.arange(len(X)).split(70):
        moments.add(X[part], Y[part])
    torch.testing.assert_close(moments.reference().score(NEW), near, rtol=1e-4, atol=1e-4)
    x, new = X.double(), NEW.double()
    relative = metrics.feature_distance(x, Y, new, kind="relative")
    torch.testing.assert_close(relative, near - away, rtol=1e-4, atol=1e-4)
    z, u = F.normalize(x, dim=1), F.normalize(new, dim=1)
    neighbours = (u[:, None] - z).norm(dim=2).sort(1).values[:, 9]
    torch.testing.assert_close(metrics.feature_distance(x, None, new, kind="knn"), neighbours)


def test_neighbours_are_searched_in_a_random_sample():
    """Of 4 BANK even angles between 0 and 90 degrees a fourth is kept, and each place is as likely as any other."""
    angles = torch.linspace(0, math.pi / 2, 4 * BANK, dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], 1)
    found = metrics.feature_distance(x, None, x, kind="knn")
    gap = (math.pi / 2) / BANK  # between neighbours in the sample: the tenth nearest is five gaps away
    halves = [float(part.mean()) for part in found.chunk(2)]
    assert halves == pytest.approx([5 * gap, 5 * gap], rel=0.1)


def test_244_rows_of_1280_features():
    rows = torch.randn(244, 1280, generator=rng()) + 1
    moments = Moments()
    moments.add(rows, torch.arange(244) % 2)
    found = moments.reference()
    assert found.whitening.shape == (1280, 1280) and bool(found.score(rows).isfinite().all())


def test_labels_that_are_no_classes_count_as_one():
    alone, together = Moments(), Moments()
    alone.add(X, torch.arange(300))
    together.add(X, None)
    torch.testing.assert_close(alone.reference().score(NEW), together.reference().score(NEW))


# -- the p-value -------------------------------------------------------------------------------------------------------


def test_a_pvalue_is_a_share():
    held = torch.tensor([1.0, 2.0, 2.0, 3.0])
    assert conformal_pvalues(torch.tensor([0.0, 2.0, 2.5, 3.0, 9.0]), held).tolist() == [1, 0.8, 0.4, 0.4, 0.2]


def test_false_alarms_are_as_promised():
    repetitions, count = 10_000, 99
    generator = rng(5)
    known = torch.randn(500, 3, generator=generator) @ torch.randn(3, 3, generator=generator) + 1
    moments = Moments()
    moments.add(known, None)
    reference = moments.reference()
    rows = known[torch.randint(500, (repetitions * (count + 1),), generator=generator)]
    rows = rows + 0.1 * torch.randn(rows.shape, generator=generator)
    scores = reference.score(rows).view(repetitions, count + 1)
    held = scores[:, :count].sort(1).values
    found = torch.stack([conformal_pvalues(s[count:], h)[0] for s, h in zip(scores, held, strict=True)])
    for level in (0.01, 0.05, 0.1):
        error = math.sqrt(level * (1 - level) / repetitions)
        assert abs(float((found <= level).double().mean()) - level) < 4 * error


def test_false_alarms_of_a_whole_fit_are_as_promised():
    repetitions, generator = 300, rng(6)
    model, flagged = network(), []
    for seed in range(repetitions):
        x = torch.randn(130, 4, generator=generator)
        y = (x[:, 0] > 0).long()
        fit_novelty(model, [(x[:60], y[:60])], held_out=[x[60:114]], false_alarms=0.1, seed=seed)
        assert len(model.novelty.held_out) == 49  # a tenth of the 54 found the scales
        flagged.append(predict(model, x[114:]).alarm().double().mean())
    rate, error = torch.stack(flagged).mean(), torch.stack(flagged).std() / math.sqrt(repetitions)
    assert abs(float(rate) - 0.1) < 4 * float(error)


# -- predictions -------------------------------------------------------------------------------------------------------


def plain():
    return network()


def vi():
    return bayesify(network(), "vi")


def closed_form():
    return fit_laplace(bayesify(network(), "la", include="2.*"), [(X, Y)], structure="kron")


def mixture():
    return mix([bayesify(network(), "vi"), bayesify(network(), "vi")])


@pytest.mark.parametrize("make", [plain, vi, closed_form, mixture])
@pytest.mark.parametrize("samples", [None, 0, 3])
def test_every_prediction_has_the_novelty_of_the_mean(make, samples):
    wanted = predict(fit_novelty(plain(), [(X[:150], Y[:150]), (X[150:], Y[150:])], held_out=HELD), NEW)
    model = fit_novelty(make(), [(X[:150], Y[:150]), (X[150:], Y[150:])], held_out=HELD)
    for data in ([NEW[:25], NEW[25:]], iter([NEW[:25], NEW[25:]])):
        found = predict(model, data, samples, seed=0)
        torch.testing.assert_close(found.novelty, wanted.novelty, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.alarm(), found.novelty_pvalue <= 0.05)
    assert float(found.alarm()[20:].double().mean()) == 1
    assert torch.equal(found[30:].novelty, found.novelty[30:]) and len(found[3].alarm()) == 1
    assert set(found.numpy()) > {"novelty", "novelty_pvalue"}


def test_a_score_is_distance_and_entropy():
    model = fit_novelty(plain(), [(X, Y)], held_out=HELD)
    kept = model.novelty
    features = model[:2](NEW).detach()
    entropy = torch.distributions.Categorical(logits=model(NEW)).entropy().detach()
    wanted = kept.reference.score(features) / kept.scales[0] + entropy / kept.scales[1]
    torch.testing.assert_close(predict(model, NEW).novelty, wanted)
    assert kept.reference.means.shape == (4, 16)


@pytest.mark.parametrize("task", ["regression", "heteroscedastic", "multilabel"])
def test_other_tasks_have_distance_alone(task):
    targets = torch.randn(300, 4, generator=rng())
    model = fit_novelty(vi(), [(X, targets)], held_out=HELD)
    found = predict(model, NEW, samples=2, seed=0, task=task)
    torch.testing.assert_close(
        found.novelty, model.novelty.reference.score(plain()[:2](NEW).detach()), rtol=1e-4, atol=1e-4
    )
    assert bool(found.alarm()[20:].all()) and "novelty" in found.numpy()
    assert torch.equal(found[20:].novelty_pvalue, found.novelty_pvalue[20:])


def test_tokens_have_the_novelty_of_their_sequence():
    model, tokens = nn.Linear(4, 3), torch.randn(60, 5, 4, generator=rng())
    fit_novelty(model, tokens, held_out=torch.randn(60, 5, 4, generator=rng(1)))
    labels = torch.zeros(7, 5, dtype=torch.long)
    labels[0, :2] = -100
    found = predict(model, [(tokens[:7], labels)])
    flat = found.flat()
    assert found.novelty.shape == (7,) and len(flat.novelty) == 33
    assert torch.equal(flat.novelty, found.novelty.repeat_interleave(5)[2:])


class Counted(nn.Module):
    """Counts the rows that pass."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen = inner, SimpleNamespace(rows=0)  # which views of the model share

    def forward(self, x):
        """Run the network."""
        self.seen.rows += len(x)
        return self.inner(x)


def test_one_pass_is_enough():
    for inner in (plain(), closed_form()):
        model = Counted(inner)
        fit_novelty(model, [(X[part], Y[part]) for part in torch.arange(300).split(50)], held_out=HELD)
        assert model.seen.rows == 300 + 199 + 1  # the first example finds the layer
        model.seen.rows = 0
        predict(model, [NEW[:20], NEW[20:]])
        assert model.seen.rows == 40


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_the_state_is_copied_pickled_and_put_back(tmp_path):
    model = fit_novelty(plain(), [(X, Y)], held_out=HELD)
    wanted = predict(model, NEW)
    torch.save(model.novelty.state_dict(), tmp_path / "novelty.pt")
    other = plain()
    other.novelty = Novelty.from_state_dict(torch.load(tmp_path / "novelty.pt", weights_only=True))
    torch.save(model, tmp_path / "model.pt")
    for again in (other, copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        found = predict(again, NEW)
        assert torch.equal(found.novelty, wanted.novelty)
        assert torch.equal(found.novelty_pvalue, wanted.novelty_pvalue)
    assert repr(model.novelty) == (
        "Novelty(mahalanobis++ in 16 features of '2' at the mean, 179 held-out examples, 0.05 false alarms)"
    )


def test_other_weights_have_no_novelty():
    model = fit_novelty(plain(), [(X, Y)], held_out=HELD)
    assert predict(bayesify(model, "vi"), NEW, samples=2).novelty is not None  # the same mean
    with torch.no_grad():
        model[0].parametrizations.weight.original.mul_(1.01)
    with pytest.warns(UserWarning, match="the model's weights are not those of fit_novelty"):
        found = predict(model, NEW)
    with pytest.raises(ValueError, match="the prediction has no novelty; call fit_novelty"):
        found.alarm()


def test_a_part_of_the_loader_is_set_aside():
    with pytest.warns(UserWarning, match=r"set \d+ examples of the loader aside"):
        model = fit_novelty(plain(), [(X, Y)])
    kept = model.novelty
    assert 30 < len(kept.held_out) < 75
    with pytest.warns(UserWarning, match="set 2000 examples of the loader aside"):
        fit_novelty(model, [(x, (x[:, 0] > 0).long()) for x in torch.randn(12_000, 4, generator=rng()).split(500)])
    assert len(model.novelty.held_out) == 1800


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": "start"}, r"at must be one of \['mean'.*got 'start'"),
        ({"layer": "head"}, r"the model has no layer 'head'; its last linear layers are \['0', '2'\]"),
        ({"false_alarms": 0.0}, "false_alarms must be between 0 and 1, got 0.0"),
        ({"held_out": HELD[:10]}, "10 held-out examples cannot promise a false-alarm rate of 0.05; give at least 19"),
        ({"loader": []}, "the loader has no batches"),
        ({"loader": X[:1]}, "the loader has 1 examples to learn from"),
        ({"loader": X * math.nan}, "the features of '2' are not finite for some examples"),
        ({"held_out": HELD * math.inf}, "the features of '2' are not finite for some examples"),
    ],
)
def test_what_cannot_be(options, message):
    model = plain()
    options = {"loader": [(X, Y)], "held_out": HELD} | options
    with pytest.raises(ValueError, match=message):
        fit_novelty(model, options.pop("loader"), **options)
    assert not hasattr(model, "novelty")
    with pytest.raises(ValueError, match="false_alarms must be between"):
        predict(model, NEW).alarm(2.0)


# -- at the prior mean -------------------------------------------------------------------------------------------------


def trained(method="vi", **options):
    """Return a bayesified model whose mean has moved away from the prior, and the model at the start."""
    start = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    torch.manual_seed(0)
    for p in start.parameters():
        nn.init.normal_(p, 0.0, 0.4)
    model = bayesify(copy.deepcopy(start), method, **options).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model.eval(), start.eval()


@pytest.mark.parametrize("samples", [None, 0, 2])
def test_features_of_the_prior_are_those_of_the_model_at_the_start(samples):
    model, start = trained()
    fit_novelty(model, [(X, Y)], held_out=HELD)
    assert model.novelty.at == "prior"
    for data in ([NEW[:15], NEW[15:]], iter([NEW[:15], NEW[15:]])):
        found = predict(model, data, samples, seed=0)
        with torch.no_grad():
            d = model.novelty.reference.score(start[:3](NEW))
        h = predict(model, NEW, samples=0).entropy
        wanted = d / model.novelty.scales[0] + h / model.novelty.scales[1]
        torch.testing.assert_close(found.novelty, wanted.to(d), rtol=1e-4, atol=1e-4)
    assert not model.training


def test_the_prior_costs_a_second_pass():
    model, _ = trained("vanilla")
    counted = Counted(model)
    fit_novelty(counted, [(X[part], Y[part]) for part in torch.arange(300).split(50)])
    assert counted.seen.rows - 9 <= 1.2 * 300 + 4 * math.sqrt(300 * 0.2 * 0.8)  # a fifth is set aside, and read twice
    counted.seen.rows = 0
    assert bool(predict(counted, [NEW[:20], NEW[20:]]).alarm()[20:].any())
    assert counted.seen.rows == 80


def test_a_prior_that_is_the_trained_model_is_refused():
    body_kept = bayesify(network(), "vi", include="2.*")
    with torch.no_grad():
        body_kept[2].parametrizations.weight.original.add_(1.0)
    scratch = bayesify(network(), "vi", prior_mean="zero")
    for model in (plain(), vi(), body_kept, scratch):
        with pytest.raises(ValueError, match=r"at='prior' needs a prior mean that is a network, other .*prior_mean="):
            fit_novelty(model, [(X, Y)], held_out=HELD, at="prior")
        assert fit_novelty(model, [(X, Y)], held_out=HELD).novelty.at == "mean"


@pytest.mark.parametrize("at", ["mean", "prior"])
def test_it_is_saved_with_the_model(at, tmp_path):
    model, start = trained()
    fit_novelty(model, [(X, Y)], held_out=HELD, at=at, false_alarms=0.1)
    save(model, tmp_path)
    wanted = predict(model, NEW, samples=2, seed=0)
    old = fit_novelty(copy.deepcopy(start), [(X, Y)], held_out=HELD)
    for again in (load(copy.deepcopy(start), tmp_path), load(old, tmp_path)):
        found = predict(again, NEW, samples=2, seed=0)
        assert torch.equal(found.novelty, wanted.novelty) and again.novelty.false_alarms == 0.1
        assert torch.equal(found.alarm(), wanted.alarm())
    save(trained()[0], tmp_path)
    assert not hasattr(load(old, tmp_path), "novelty")


def test_a_mixture_keeps_that_of_its_first_member(tmp_path):
    model = fit_novelty(mixture(), [(X, Y)], held_out=HELD)
    save(model, tmp_path)
    again = load(network(), tmp_path)
    assert torch.equal(predict(again, NEW, seed=0).novelty, predict(model, NEW, seed=0).novelty)
