"""Eval mode for a while: flags come back, also when several threads want it of one model."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import tensor
from torch import nn

from bayesify import bayesify, predict
from bayesify.core.evaluating import _HELD, evaluation


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))


def test_flags_and_the_generator_are_as_before():
    model, state = net(), torch.get_rng_state()
    model[2].eval()
    with evaluation(model):
        assert not any(m.training for m in model.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3)
    with pytest.raises(KeyError), evaluation(model):
        raise KeyError
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m in _HELD for m in model.modules())


def test_flags_come_back_with_the_last_to_leave():
    model = net()
    first, second = evaluation(model), evaluation(nn.Sequential(model))
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with second:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        assert entered.wait(10)
    assert not any(m.training for m in model.modules())
    leave.set()
    thread.join()
    assert all(m.training for m in model.modules())


def test_concurrent_predictions_are_those_of_one_alone():
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(*(net() for _ in range(20))), init_sig=0.1)
    batches = [tensor(8, 4) for _ in range(3)]
    alone = predict(model, batches, samples=4, seed=1).logits
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: predict(model, batches, samples=4, seed=1).logits, range(12)))
    assert all(torch.equal(f, alone) for f in found)
    assert all(m.training for m in model.modules())
