"""Every architecture with every method: a training step, the mean, a folder for everybody."""

import pytest
import torch
import transformers
from huggingface_zoo import ARCHITECTURES, BY_NAME, Architecture, main_output, no_warning

import bayesify
from bayesify import bayesify as make_bayesian
from bayesify import mean, named_posteriors, penalty, sample, unbayesify
from bayesify.integrations.huggingface import from_pretrained, save_pretrained

METHODS = ["vanilla", "vi", "mc_dropout", "sgld", "la"]
pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")]


@pytest.fixture(params=ARCHITECTURES, ids=lambda a: a.name)
def architecture(request):
    return request.param


def fit(model, method: str, batch) -> None:
    """Take one training step, and what the method needs to be sampled."""
    if method == "sgld":
        optimizer = bayesify.SGLD(model, 1e-4, num_data=10)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(2 if method == "sgld" else 1):
        optimizer.zero_grad()
        loss = model(**batch).loss + penalty(model, num_data=10)
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
    model.eval()


@pytest.mark.parametrize("method", METHODS)
def test_trains_saves_and_loads(architecture: Architecture, method: str, tmp_path):
    plain, batch = architecture.build(), architecture.batch()
    with torch.no_grad():
        before = main_output(plain(**batch))
    options = {"thin": 1} if method == "sgld" else {}
    model = make_bayesian(plain, method, prior_sig=0.1, **options)
    with torch.no_grad():
        assert torch.equal(main_output(model(**batch)), before)
        model.train()
        with mean(model):
            model.eval()
            assert torch.equal(main_output(model(**batch)), before)

    fit(model, method, batch)
    trained = {name: p.grad is not None for name, p in model.named_parameters()}
    assert any(trained.values())
    with torch.no_grad():
        after = main_output(model(**batch))
    assert not torch.equal(after, before)

    with no_warning():
        save_pretrained(model, tmp_path)
        auto = getattr(transformers, architecture.auto)
        everybodys, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(everybodys).__name__ == architecture.model
    with torch.no_grad():
        assert torch.equal(main_output(everybodys(**batch)), after)

    with no_warning():
        again = from_pretrained(tmp_path)
    for (name, saved), (other, loaded) in zip(named_posteriors(model), named_posteriors(again), strict=True):
        assert name == other
        for what in ("mean", "std", "prior_mean"):
            torch.testing.assert_close(getattr(loaded, what), getattr(saved, what), rtol=0, atol=0)
    if method not in ("vanilla", "la"):
        with torch.no_grad(), sample(model, seed=3), sample(again, seed=3):
            assert torch.equal(main_output(again(**batch)), main_output(model(**batch)))
    assert type(unbayesify(again)).__name__ == architecture.model


def test_hidden_states_are_recorded_in_a_model_with_its_own_parameter():
    """Transformers finds what to record by the class, which a parameter of the model itself changes."""
    config = BY_NAME["Wav2Vec2"].build().config
    config.mask_time_prob = 0.1  # gives the model the parameter
    model = transformers.Wav2Vec2Model(config).eval()
    inputs = {"input_values": BY_NAME["Wav2Vec2"].batch()["input_values"], "output_hidden_states": True}
    with torch.no_grad():
        before = model(**inputs).hidden_states
        after = make_bayesian(model, "vi")(**inputs).hidden_states
    assert len(before) == 3
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
