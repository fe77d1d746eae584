"""Predictions run views of the model: nothing changes for whoever trains it, or predicts with it too."""

import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import tensor
from torch import nn

from bayesify import bayesify, predict, sample
from bayesify.prediction.view import can_be_viewed, evaluation, view


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))


def test_a_view_has_flags_buffers_and_attributes_of_its_own():
    model = nn.Sequential(net(), nn.LSTM(4, 4))
    model.notes = ["a"]
    own = view(model)
    assert not any(m.training for m in own.modules())
    assert all(m.training for m in model.modules())
    own[0][2].running_mean.add_(1)
    own.notes.append("b")
    assert float(model[0][2].running_mean.sum()) == 0
    assert model.notes == ["a"]
    assert [id(p) for p in own.parameters()] == [id(p) for p in model.parameters()]
    assert type(own[1]) is nn.LSTM


def test_a_view_follows_methods_and_lists_of_modules():
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Dropout(0.9)
            self.chain = [self.first]
            self.forward = self.run

        def run(self, x):
            return self.chain[0](x)

    model, x = Lists(), torch.ones(3, 4)
    assert can_be_viewed(model)
    assert torch.equal(view(model)(x), x)
    assert not torch.equal(model(x), x)


def test_flags_come_back_after_an_error():
    model = net()
    model[2].eval()
    with pytest.raises(KeyError), evaluation(model):
        raise KeyError(*(m.training for m in model.modules()))
    assert [m.training for m in model.modules()] == [True, True, True, False]


@pytest.mark.parametrize("compiled", [False, True])
def test_flags_are_as_before_also_of_a_compiled_model(compiled: bool):
    model = bayesify(net(), init_sig=0.1)
    flags = [m.training for m in model.modules()]
    predict(torch.compile(model, backend="eager") if compiled else model, tensor(8, 4), samples=2)
    assert [m.training for m in model.modules()] == flags


def test_the_global_generator_moves_by_one_number_and_by_what_the_data_takes():
    model = bayesify(net(), init_sig=0.1)

    def batches():
        yield torch.randn(8, 4)

    torch.manual_seed(0)
    predict(model, batches(), samples=2)
    found = torch.rand(())
    torch.manual_seed(0)
    torch.randint(2**63 - 1, (), dtype=torch.int64)
    torch.randn(8, 4)
    assert torch.equal(found, torch.rand(()))
    first, second = (predict(model, batches(), samples=2, seed=0).logits for _ in range(2))
    assert not torch.equal(first, second)


def test_a_thread_that_predicts_changes_nothing_for_one_that_trains():
    model = bayesify(net(), init_sig=0.1)
    stop, batches = threading.Event(), [tensor(8, 4)] * 3

    def serve() -> None:
        while not stop.is_set():
            predict(model, batches, samples=2, seed=0)

    seen, drawn = [], []
    model[1].register_forward_pre_hook(lambda m, a: seen.append(m.training) if m is model[1] else None)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for _ in range(100):
            x = torch.randn(8, 4)
            drawn.append(float(x.sum()))
            model(x).sum().backward()
    finally:
        stop.set()
        thread.join()
    assert seen == [True] * 100
    assert len(set(drawn)) == 100


def test_a_library_that_another_thread_imports_now_is_no_obstacle(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", types.ModuleType("half"))
    assert len(predict(bayesify(net()), tensor(8, 4), samples=2)) == 8


@pytest.mark.parametrize("build", [lambda: nn.Sequential(*(net() for _ in range(5))), lambda: Last()])
def test_concurrent_predictions_are_those_of_one_alone(build):
    torch.manual_seed(0)
    model = bayesify(build(), init_sig=0.1)
    batches = [tensor(8, 4) if isinstance(model, nn.Sequential) else tensor(2, 5, 4) for _ in range(3)]
    alone = [predict(model, batches, samples=2, seed=seed).logits for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: predict(model, batches, samples=2, seed=i % 4).logits, range(40)))
    assert all(torch.equal(f, alone[i % 4]) for i, f in enumerate(found))
    assert all(m.training for m in model.modules())


class Last(nn.Module):
    """The last output of an LSTM, which keeps a list of the weights that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


def test_a_prediction_inside_a_block_is_its_own():
    model, x = bayesify(net(), init_sig=0.1).eval(), tensor(8, 4)
    alone = predict(model, x, samples=2, seed=0).logits
    with sample(model, seed=7), torch.no_grad():
        inside = model(x)
        assert torch.equal(predict(model, x, samples=2, seed=0).logits, alone)
        assert torch.equal(model(x), inside)
