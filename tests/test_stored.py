"""A state dict says what its tensors mean; tools that cannot work on a bayesified model say how they can."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as distributed
from torch.optim.swa_utils import AveragedModel

from bayesify import bayesify, fit_laplace, named_posteriors, predict, unbayesify
from bayesify.core.stored import PAGE, StateDictError, decoded, encoded

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def assert_loads_nothing(target, state, message, **options):
    before = {k: v.clone() for k, v in target.state_dict().items()}
    with pytest.raises(StateDictError, match=message):
        target.load_state_dict(state, **options)
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ({"method": "vi", "link": "clamp"}, {"method": "vi"}, "link='clamp', the model has link='softplus'"),
        (
            {"method": "vi", "prior_sig": 0.1},
            {"method": "vi", "prior_sig": 1.0},
            r"prior_sig=0\.1, the model has prior_sig=1\.0",
        ),
        ({"method": "vi"}, {"method": "vi", "bias": "uninformative"}, "flat=False, the model has flat=True"),
        ({"method": "sgld"}, {"method": "la"}, "method='sgld'.*the model has method='la'"),
        ({"method": "vanilla"}, {"method": "mc_dropout"}, "method='vanilla'"),
        ({"method": "mc_dropout"}, {"method": "mc_dropout", "p_drop": 0.5}, r"p_drop=0\.1, the model has p_drop=0\.5"),
        ({"method": "vanilla"}, {"method": "vanilla", "wd": 0.5}, r"wd=0\.0001, the model has wd=0\.5"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_of_another_posterior_is_refused_and_both_are_named(saved, loaded, message, strict):
    state = bayesify(net(), **saved).state_dict()
    assert_loads_nothing(bayesify(net(1), **loaded), state, message, strict=strict)
    assert_loads_nothing(nn.Sequential(bayesify(net(1), **loaded)), {f"0.{k}": v for k, v in state.items()}, message)


def test_a_part_of_a_state_dict_is_checked_too():
    state = bayesify(net(), "vi", link="clamp")[0].state_dict()
    with pytest.raises(StateDictError, match="link='clamp'"):
        bayesify(net(), "vi")[0].load_state_dict(state)


def test_a_tuned_prior_goes_with_the_state_dict():
    model = fit_laplace(bayesify(net(), "la"), [(X, Y)], tune=[(X, Y)])
    other = bayesify(net(1), "la")
    other.load_state_dict(model.state_dict())
    for (_, a), (_, b) in zip(named_posteriors(model), named_posteriors(other), strict=True):
        assert a.fitted_sig == b.fitted_sig != 1
        assert a.tuned == b.tuned == "validation"


def test_the_noise_of_a_regression_goes_with_the_state_dict():
    model = fit_laplace(bayesify(net(), "la"), [(X, torch.randn(8, 2))], likelihood="regression")
    other = bayesify(net(1), "la")
    other.load_state_dict(model.state_dict())
    assert other._bayesify_scope.method == model._bayesify_scope.method
    found, wanted = (predict(m, X, task="regression", samples=50, seed=0) for m in (other, model))
    for a, b in ((found.aleatoric, wanted.aleatoric), (found.std, wanted.std)):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_state_dict_without_settings_lacks_keys():
    state = {k: v for k, v in bayesify(net()).state_dict().items() if not k.endswith("_extra_state")}
    model = bayesify(net(1))
    with pytest.raises(RuntimeError, match=r"Missing key.*_extra_state"):
        model.load_state_dict(state)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert len(missing) == 4
    assert not unexpected


def test_settings_are_bytes_in_a_tensor_of_a_length_that_numbers_do_not_change():
    for about in (
        {"settings": {"a": 0.1}, "results": {}, "options": {}, "held": {}},
        {"settings": {"a": 1e-30}, "results": {"b": None}, "options": {}, "held": {"c": 1}},
    ):
        assert decoded(encoded(about)) == about
        assert encoded(about).dtype == torch.uint8
        assert len(encoded(about)) == PAGE
    for junk in (torch.zeros(3), torch.zeros(3, dtype=torch.uint8), encoded({"settings": 1}), {"settings": {}}):
        with pytest.raises(StateDictError, match="damaged, or of another library"):
            decoded(junk)


@pytest.mark.parametrize("method", ["vi", "mc_dropout", "vanilla", "sgld", "la"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_copies_averages_and_distributed_checkpoints_carry_the_settings(method, tmp_path):
    model = bayesify(net(), method)
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    AveragedModel(model).update_parameters(model)
    state = distributed.get_model_state_dict(model)
    distributed.set_model_state_dict(twin, state)
    torch.distributed.checkpoint.save({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    fresh = bayesify(net(1), method)
    into = {"model": distributed.get_model_state_dict(fresh)}
    torch.distributed.checkpoint.load(into, checkpoint_id=tmp_path, no_dist=True)
    distributed.set_model_state_dict(fresh, into["model"])
    assert torch.equal(fresh.eval()(X), model.eval()(X))


@pytest.mark.parametrize("strict", [True, False])
def test_a_plain_state_dict_says_how_it_is_loaded(strict):
    for model in (bayesify(net(), "vi"), nn.Sequential(bayesify(net(), "vi"))):
        plain = nn.Sequential(net()) if len(model) == 1 else net()
        assert_loads_nothing(model, plain.state_dict(), r"plain model.*load it before bayesify\(model\)", strict=strict)
    unbayesify(model[0]).load_state_dict(net().state_dict())
    bayesify(model).load_state_dict({}, strict=False)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:`torch.jit.script` is not supported")
def test_script_says_what_to_do():
    model = bayesify(net())
    with pytest.raises(TypeError, match=r"torch\.jit\.script.*unbayesify\(model\) first"):
        torch.jit.script(model)
    model(X)


@pytest.mark.parametrize("value", [torch.zeros(4, 3), nn.Parameter(torch.zeros(4, 3)), None])
def test_assigning_a_weight_says_what_to_do(value):
    model = bayesify(net())
    with pytest.raises(AttributeError, match=r"'weight'.*Linear.*parametrizations\.weight\.original\.copy_"):
        model[0].weight = value
    model[0].note = 3
    model[0].extra = nn.Parameter(torch.zeros(1))
    assert model[0].note == 3
    assert unbayesify(model)[0].weight.shape == (4, 3)
    model[0].weight = nn.Parameter(torch.zeros(4, 3))
    assert not model[0].weight.any()


def test_an_rnn_still_follows_its_attributes():
    model = bayesify(nn.LSTM(3, 4))
    model(torch.zeros(5, 3))
    with pytest.raises(AttributeError, match="cannot be assigned"):
        model.weight_ih_l0 = nn.Parameter(torch.zeros(16, 3))
