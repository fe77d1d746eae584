"""The UCI tables: networks that are trained at once never meet, and a mixture's members are those that were trained."""

import pytest
import torch


@pytest.fixture
def uci(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.config.rootpath / "examples"))
    import uci

    return uci


@pytest.fixture
def part(uci):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    y = x[:, 0] + 0.1 * torch.randn(40, generator=generator)
    return uci.Part(x, y, [torch.arange(0, 30), torch.arange(10, 40)])


def test_a_part_of_the_networks_is_what_it_was_among_all(uci, part):
    torch.manual_seed(0)
    nets = uci.Nets(part.times(3))
    whole = nets(part.times(3).x)
    for k in range(3):
        torch.testing.assert_close(nets.some(slice(2 * k, 2 * k + 2))(part.x), whole[:, 2 * k : 2 * k + 2])
    one, (x, _) = nets.one(5), nets.rows(part.times(3), 5)
    torch.testing.assert_close(one(x).squeeze(1) * nets.y_std[5] + nets.y_mean[5], whole[:, 5])


def test_a_mixture_has_five_trained_members(uci, part):
    outputs = uci.Stage(part, part).outputs("mix", (1.0, 60, {}))
    assert outputs.shape == (uci.MEMBERS, 30, 2)
    assert float(outputs.std(0).min()) > 0
    assert float((outputs.mean(0) - part.y).square().mean()) < float(part.y.var())


def test_a_difference_has_the_error_of_overlapping_splits(uci, monkeypatch):
    import uci_tables

    rows, vanilla = [{"ll": value} for value in (1.0, 2.0, 4.0)], [{"ll": 1.0}] * 3
    # a variance of 7/3, times 1/3 + 1/9 where s^2/3 would be that of independent ones
    assert uci_tables.apart(rows, vanilla) == f"+1.33 ± {(7 / 3 * (1 / 3 + 1 / 9)) ** 0.5:.2f}"
