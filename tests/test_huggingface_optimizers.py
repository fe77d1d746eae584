"""BayesTrainer's optimizers: learning rates and weight decay by group, SGLD's chain, the fit of Laplace."""

import pytest
import torch
from trainers import arguments, classifier, sentences

import bayesify
from bayesify import bayesify as make_bayesian
from bayesify import named_posteriors
from bayesify.core.prior import RATE, step_size
from bayesify.integrations.huggingface import BayesTrainer

# -- the optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_no_weight_decay_on_posteriors(optim, tmp_path):
    model = make_bayesian(classifier(), "vi", exclude="classifier.*")
    args = arguments(tmp_path, optim=optim, weight_decay=0.5)
    optimizer = BayesTrainer(model, args, train_dataset=sentences()).create_optimizer()
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert len(decays) == sum(1 for _ in model.parameters())
    for _, posterior in named_posteriors(model):
        assert decays[id(posterior.original)] == decays[id(posterior.rho)] == 0
    assert decays[id(model.classifier.weight)] == 0.5
    assert decays[id(model.classifier.bias)] == 0


def test_learning_rates_of_head_and_spread(tmp_path):
    model = make_bayesian(classifier(), "vi")
    trainer = BayesTrainer(
        model, arguments(tmp_path), train_dataset=sentences(), head="classifier", lr_head=0.1, lr_sig=0.2
    )
    rates = {g["name"]: g["lr"] for g in trainer.create_optimizer().param_groups}
    weights = sum(p.shape.numel() for _, p in named_posteriors(model))
    assert rates == {"body": 1e-3, "head": 0.1, "sig": 0.2 / step_size(weights)}


def test_the_spread_of_an_optimizer_that_divides_by_gradients_without_eps(tmp_path):
    model = make_bayesian(classifier(), "vi")
    trainer = BayesTrainer(model, arguments(tmp_path, optim="adafactor"), train_dataset=sentences())
    (group,) = (g for g in trainer.create_optimizer().param_groups if g["name"] == "sig")
    assert group["lr"] == RATE and isinstance(group["eps"], tuple)


def test_an_optimizer_of_ones_own_is_used(tmp_path):
    model = make_bayesian(classifier(), "vi")
    optimizer = torch.optim.Adam(bayesify.param_groups(model, 1e-3))
    trainer = BayesTrainer(
        model, arguments(tmp_path, max_steps=1), train_dataset=sentences(), optimizers=(optimizer, None)
    )
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer


def test_sgld_refuses_another_optimizer(tmp_path):
    model = make_bayesian(classifier(), "sgld")
    optimizer = torch.optim.Adam(model.parameters())
    trainer = BayesTrainer(model, arguments(tmp_path), train_dataset=sentences(), optimizers=(optimizer, None))
    with pytest.raises(ValueError, match=r"bayesify\.SGLD"):
        trainer.train()


@pytest.mark.parametrize("by_epochs", [True, False])
def test_sgld_collects_after_its_burn_in(by_epochs, tmp_path):
    # 4 steps per epoch, 3 epochs, the first of which is burn-in.
    model = make_bayesian(classifier(), "sgld", thin=2, burnin=0 if by_epochs else 4)
    args = arguments(tmp_path, num_train_epochs=3, learning_rate=1e-4, eval_strategy="epoch")
    trainer = BayesTrainer(
        model,
        args,
        train_dataset=sentences(),
        eval_dataset=sentences(4),
        burnin_epochs=1 if by_epochs else None,
        momentum=0.5,
    )
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, bayesify.SGLD)
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.5
    assert {int(p.count) for _, p in named_posteriors(model)} == {4}
    taken = [row["eval_posterior_samples"] for row in trainer.state.log_history if "eval_loss" in row]
    assert taken == [0, 5, 5]  # the chain itself until there is something to sample


def test_laplace_is_fitted_after_training(tmp_path):
    model = make_bayesian(classifier(), "la", prior_sig=0.1)
    trainer = BayesTrainer(model, arguments(tmp_path, max_steps=2), train_dataset=sentences())
    trainer.train()
    assert all(float(p.std.max()) > 0 for _, p in named_posteriors(model))
    assert trainer.evaluate(sentences(4))["eval_mutual_information"] > 0


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("vi", {"momentum": 0.9}, "momentum is for method 'sgld', this model is vi"),
        ("vi", {"laplace": {}}, "laplace is for method 'la'"),
        ("la", {"laplace": {"tuned": 1}}, r"laplace takes the options .*'tune'.* got \['tuned'\]"),
    ],
)
def test_options_of_another_method(tmp_path, method, options, message):
    with pytest.raises(ValueError, match=message):
        BayesTrainer(make_bayesian(classifier(), method), arguments(tmp_path), train_dataset=sentences(), **options)


def test_a_chain_that_collects_nothing_warns(tmp_path):
    model = make_bayesian(classifier(), "sgld", burnin=100)
    trainer = BayesTrainer(model, arguments(tmp_path, num_train_epochs=1), train_dataset=sentences())
    with pytest.warns(UserWarning, match="collected no state"):
        trainer.train()


def test_laplace_stands_for_num_data(tmp_path):
    stds = []
    for options in ({"num_data": 16_000}, {"laplace": {"num_data": 16_000}}, {}):
        model = make_bayesian(classifier(), "la", prior_sig=0.1)  # a relative prior is tempered, whatever num_data is
        trainer = BayesTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=sentences(), **options)
        trainer.fit_laplace()
        stds.append(dict(named_posteriors(model))["classifier.weight"].std)
    assert torch.equal(stds[0], stds[1])
    assert (stds[0] < stds[2]).all()
