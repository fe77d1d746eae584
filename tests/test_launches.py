"""What a training step launches, moves and waits for on a GPU, counted without one; see docs/benchmarks_gpu.md."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
LAYERS = 60
TENSORS = 2 * LAYERS
# Above plain SGD: launches of all draws of a forward; of penalty, the sum with the loss and the optimizer; per tensor
# in backward; bytes per weight.
CEILINGS = {
    "vi": (5, 11, 1.2, 100),
    "mc_dropout": (5, 11, 1.2, 60),
    "vanilla": (0, 11, 1.2, 60),
    "sgld": (0, 11, 1.2, 60),
    "ivon": (5, 30, 0.1, 60),
}


@pytest.fixture(scope="module")
def gpu():
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.benchmarks import gpu

    yield gpu
    sys.path.pop(0)


@pytest.mark.filterwarnings("ignore:the spread of the posterior")
@pytest.mark.parametrize("method", CEILINGS)
def test_a_step_launches_little(gpu, method):
    plain, ours = gpu.as_on_a_gpu(None, LAYERS), gpu.as_on_a_gpu(method, LAYERS)
    launches = {part: ours[part].launches - plain[part].launches for part in gpu.PARTS}
    size = sum(ours[part].bytes - plain[part].bytes for part in gpu.PARTS[:-1])
    forward, rest, each, most = CEILINGS[method]
    assert launches["forward"] <= forward
    assert launches["penalty"] + launches["optimizer"] <= rest
    assert launches["backward"] <= each * TENSORS + 10
    assert size / (LAYERS * (gpu.WIDTH + 1) * gpu.WIDTH) <= most


@pytest.mark.parametrize("method", CEILINGS)
def test_training_waits_for_nothing(gpu, method):
    assert gpu.waits(method)["step"] == 0
