"""Shared fixtures: determinism, and the case table of models."""

import pytest
import torch
from cases import CASES, Case


@pytest.fixture(autouse=True)
def _fixed_seed():
    """Start every test from the same global random state."""
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """Let a test compile as if nothing had been compiled before it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param
