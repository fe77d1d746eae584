"""Every architecture of the case table: what `bayesify` must not change, and what it must."""

import copy

import pytest
import torch
from cases import Case
from torch import nn

from bayesify import bayesify, named_posteriors, penalty, unbayesify

METHODS = ["vi", "mc_dropout", "vanilla"]


def anatomy(model: nn.Module) -> dict:
    """Return everything about a model that must come back."""
    return {
        "parameters": [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [(name, id(m), type(m)) for name, m in model.named_modules()],
        "own parameters": [list(m._parameters) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [
            [
                list(getattr(m, kind).items())
                for kind in (
                    "_forward_hooks",
                    "_forward_pre_hooks",
                    "_backward_hooks",
                    "_forward_hooks_always_called",
                    "_forward_hooks_with_kwargs",
                    "_forward_pre_hooks_with_kwargs",
                    "_state_dict_hooks",
                    "_load_state_dict_pre_hooks",
                )
            ]
            for m in model.modules()
        ],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
    }


def silence(model: nn.Module) -> None:
    """Take away the model's own randomness: dropout and stochastic depth."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for option in ("p", "drop_prob", "dropout", "layerdrop", "attention_dropout"):
                if isinstance(getattr(holder, option, None), float):
                    setattr(holder, option, 0.0)


def outputs(case: Case, model: nn.Module) -> list[torch.Tensor]:
    """Return the outputs with and without gradients: the plain model may take another path."""
    with torch.inference_mode():
        fast = case.output(model)
    return [case.output(model), fast]


@pytest.mark.parametrize("method", METHODS)
def test_bayesify_and_back(case: Case, method: str):
    model = case.build()
    model.register_forward_hook(lambda module, args, output: None)
    before, plain, rng = anatomy(model), outputs(case, model), torch.get_rng_state()
    state = copy.deepcopy(model.state_dict())

    assert bayesify(model, method) is model
    assert torch.equal(torch.get_rng_state(), rng), "bayesify consumed random numbers"
    assert all(map(torch.equal, outputs(case, model), plain))

    case.output(model.train())  # leaves nothing behind but batch statistics
    unbayesify(model.eval())
    assert anatomy(model) == before
    model.load_state_dict(state)
    assert all(map(torch.equal, outputs(case, model), plain))


def test_train_mode_draws_per_forward(case: Case):
    model = case.build().train()
    silence(model)
    assert torch.equal(case.output(model), case.output(model)), "the plain model is not silent"
    bayesify(model)
    first, second = case.output(model), case.output(model)
    assert not torch.equal(first, second)


def test_every_trained_parameter_has_a_posterior_with_gradients(case: Case):
    model = case.build().train()
    silence(model)
    case.output(model).square().mean().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)

    bayesify(model, prior_sig=0.1)  # without natural steps, which begin when a penalty has said what they are over
    (case.output(model).square().mean() + 0 * penalty(model, 100)).backward()
    posteriors = dict(named_posteriors(model))
    assert trained <= posteriors.keys()
    for name in trained:
        assert posteriors[name].original.grad is not None, name
        assert posteriors[name].rho.grad is not None, name
        assert torch.count_nonzero(posteriors[name].rho.grad) or not torch.count_nonzero(posteriors[name].original.grad)


def test_posterior_names_are_the_plain_names(case: Case):
    model = case.build()
    plain = [(name, id(p)) for name, p in model.named_parameters()]
    bayesify(model)
    assert [(name, id(q.original)) for name, q in named_posteriors(model)] == plain
