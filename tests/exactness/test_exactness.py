"""Every method computes what its mathematics says, on problems whose answer is known."""

import json

import pytest
import torch

import bayesify

from . import pages
from .problems import PROBLEMS, D, Problem
from .table import BOUNDS, TABLE, distances, rate

LINEAR = PROBLEMS[0]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name.partition(" ")[0])
@pytest.mark.parametrize("entry", TABLE, ids=lambda e: e.label)
def test_a_method_is_exact(entry, problem):
    found = list(distances(entry, problem))
    assert len(found) >= 4
    for quantity, distance, unit in found:
        assert distance < BOUNDS[unit], f"{quantity}: {distance:.3g} {unit}"


def test_every_method_of_the_package_is_in_the_table():
    own = {m.name for name in bayesify.methods.__all__ if hasattr(m := getattr(bayesify.methods, name), "name")}
    assert own - {"ensemble"} == {entry.method for entry in TABLE}  # whose particles are no density


def test_quadrature_and_newton_give_the_closed_forms_of_linear_regression():
    close = {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(LINEAR.map, LINEAR.posterior.mean, **close)
    torch.testing.assert_close(torch.linalg.inv(LINEAR.hessian), LINEAR.posterior.cov, **close)
    for quantity in ("posterior", "mean_field"):
        by_numbers = getattr(Problem, quantity).func(LINEAR)
        torch.testing.assert_close(by_numbers.mean, getattr(LINEAR, quantity).mean, **close)
        torch.testing.assert_close(by_numbers.cov, getattr(LINEAR, quantity).cov, **close)


def test_the_discretised_chain_is_the_closed_form_of_linear_regression():
    """Sigma = A^-1 (I - lr A/(2N))^-1, and Cov(theta_0, theta_k) = (I - lr A/N)^k Sigma."""
    step = rate(LINEAR) / LINEAR.count
    chain, precision = LINEAR.chain(rate(LINEAR)), torch.linalg.inv(LINEAR.posterior.cov)
    eye = torch.eye(D, dtype=torch.float64)
    sigma = torch.linalg.inv(precision @ (eye - step * precision / 2))
    torch.testing.assert_close(chain.moments.mean, LINEAR.posterior.mean, rtol=0, atol=1e-9)
    decay = torch.linalg.matrix_power(eye - step * precision, 3)
    for found, k in zip(chain.autocovariances(3, 3), range(3), strict=True):
        exact = torch.linalg.matrix_power(decay, k) @ sigma
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-8)


def test_the_page_is_what_the_results_say_and_both_have_every_method():
    assert pages.PAGE.read_text() == pages.page()
    results = json.loads(pages.RESULTS.read_text())
    every = {(entry.label, problem.name) for entry in TABLE for problem in PROBLEMS}
    assert {(r["method"], r["problem"]) for r in results["rows"]} == every
    assert all(r["distance"] < BOUNDS[r["unit"]] for r in results["rows"])
