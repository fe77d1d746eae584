"""Other devices than the CPU: no float64 there, which not all of them have, and no waiting for a number in training."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bayesify import bayesify, penalty, predict

COPY = torch.ops.aten._to_copy.default


class Watched(TorchDispatchMode):
    """Let the device "meta", which has no numbers, stand for an accelerator; refuse float64 tensors on it.

    A look at a number raises there by itself. A copy to the CPU is one of zeros, as nothing else is known.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if function is COPY and args[0].is_meta and device is not None and torch.device(device).type == "cpu":
            out = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        else:
            out = function(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.dtype == torch.float64:
                raise AssertionError(f"{function} made a float64 tensor off the CPU")
        return out


def model_of(method: str, prior_mean: str | None) -> nn.Module:
    parts = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 4))
    return bayesify(parts, method, prior_sig=0.1, prior_mean=prior_mean).to("meta")


def test_the_watch_sees_float64():
    with Watched(), pytest.raises(AssertionError, match="off the CPU"):
        torch.ones(3, device="meta").double()


@pytest.mark.parametrize("prior_mean", [None, "zero"])
@pytest.mark.parametrize("method", ["vi", "mc_dropout", "vanilla", "sgld", "la"])
def test_training_makes_no_float64_off_the_cpu_and_waits_for_nothing(method, prior_mean):
    model, batch = model_of(method, prior_mean), torch.zeros(2, dtype=torch.long, device="meta")
    with Watched():
        (model(batch).sum() + penalty(model, 10)).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("task", ["classification", "regression", "multilabel"])
def test_predict_makes_no_float64_off_the_cpu(task, samples):
    model, batch = model_of("vi", None), torch.zeros(2, dtype=torch.long, device="meta")
    with Watched():
        predict(model, batch, samples, task=task)
