"""BayesTrainer: the gradient of a step, the optimizer, evaluation, logging."""

import copy
import math
import warnings

import pytest
import torch
from huggingface_zoo import BY_NAME, TEXT
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import bayesify
from bayesify import bayesify as make_bayesian
from bayesify import metrics, named_posteriors, penalty, predict
from bayesify.integrations.huggingface import BayesTrainer, BayesTrainerMixin

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def arguments(folder, **options):
    defaults = {
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "log_level": "error",
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


def classifier(**options):
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**TEXT, **STILL, **options))


def masked():
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**TEXT, **STILL))


def sentences(n=16):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 40, (n, 6), generator=generator)
    return [{"input_ids": row, "labels": (row[0] > 20).long()} for row in tokens]


def texts(n=16):
    """Sequences whose labels end in padding, more of it in each."""
    out = []
    for i, row in enumerate(sentences(n)):
        labels = row["input_ids"].clone()
        labels[2 + i % 5 :] = -100
        out.append({"input_ids": row["input_ids"], "labels": labels})
    return out


def together(data):
    return {key: torch.stack([row[key] for row in data]) for key in data[0]}


class Step:
    """Run one optimizer step of a Trainer and keep its gradient."""

    def __init__(self, model, data, folder, batch, steps, cls=BayesTrainer, trainer_options=None, **options):
        # A plain descent with learning rate 1: the change of the weights is the gradient.
        args = arguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            **options,
        )
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.trainer = cls(model, args, train_dataset=data, **(trainer_options or {}))
        self.trainer.train()
        self.gradient = {n: before[n] - p.detach() for n, p in model.named_parameters()}


def by_hand(model, data, num_data, loss=None):
    """The gradient of the mean loss over all the data plus the penalty."""
    model.train()
    batch = together(data)
    value = model(**batch).loss if loss is None else loss(model(**batch), batch["labels"])
    (value + penalty(model, num_data)).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


CASES = {
    "classifier": (classifier, sentences, 8),
    "masked language model": (masked, texts, None),
    "GPT-2": (BY_NAME["GPT2"].build, texts, None),
    "Llama": (BY_NAME["Llama"].build, texts, None),
}


@pytest.mark.parametrize(("batch", "steps"), [(8, 1), (2, 4), (3, 3)])
@pytest.mark.parametrize("name", CASES)
def test_gradient_of_a_step_is_that_of_the_hand_written_loop(name, batch, steps, tmp_path):
    build, make_data, num_data = CASES[name]
    plain, data = build(), make_data(8)
    for module in plain.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    shifted = name in ("GPT-2", "Llama")
    labels = together(data)["labels"]
    num_data = num_data or int((labels[:, 1:] if shifted else labels).ne(-100).sum())
    expected = by_hand(
        make_bayesian(copy.deepcopy(plain), "mc_dropout", p_drop=0.0, prior_mean="zero", pull=0.0), data, num_data
    )
    step = Step(
        make_bayesian(plain, "mc_dropout", p_drop=0.0, prior_mean="zero", pull=0.0), data, tmp_path, batch, steps
    )
    assert step.trainer.num_data == num_data
    assert step.trainer.counting.divides == shifted
    torch.testing.assert_close(step.gradient, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_gradient_of_sampling_methods_at_one_theta(method, tmp_path):
    data = sentences(8)
    # With a scale of one's own the spread takes plain gradients, not natural ones.
    models = [make_bayesian(classifier(), method, prior_mean="zero", prior_sig=0.1) for _ in range(2)]
    with bayesify.sample(models[0], seed=5):
        expected = by_hand(models[0], data, 8)
    with bayesify.sample(models[1], seed=5):
        step = Step(models[1], data, tmp_path, 2, 4)
    torch.testing.assert_close(step.gradient, expected, rtol=1e-6, atol=1e-6)


def summed_loss(output, labels, num_items_in_batch=None):
    loss = F.cross_entropy(output.logits, labels, reduction="sum")
    return loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def mean_loss(output, labels, num_items_in_batch=None):
    return F.cross_entropy(output.logits, labels)


@pytest.mark.parametrize("loss", [summed_loss, mean_loss])
def test_gradient_with_a_loss_of_ones_own(loss, tmp_path):
    data = sentences(8)
    expected = by_hand(make_bayesian(classifier(), "mc_dropout", p_drop=0.0, prior_mean="zero"), data, 8, loss)
    model = make_bayesian(classifier(), "mc_dropout", p_drop=0.0, prior_mean="zero")
    step = Step(model, data, tmp_path, 2, 4, trainer_options={"compute_loss_func": loss})
    assert step.trainer.counting.divides == (loss is summed_loss)
    torch.testing.assert_close(step.gradient, expected, rtol=1e-6, atol=1e-6)


def test_gradient_with_label_smoothing(tmp_path):
    data = sentences(8)
    steps = [
        Step(make_bayesian(classifier(), "mc_dropout", p_drop=0.0), data, tmp_path, *cut, label_smoothing_factor=0.1)
        for cut in ((8, 1), (2, 4))
    ]
    torch.testing.assert_close(steps[0].gradient, steps[1].gradient, rtol=1e-6, atol=1e-6)


def test_num_data_can_be_given(tmp_path):
    model = make_bayesian(classifier(), "mc_dropout", p_drop=0.0, prior_mean="zero")
    expected = by_hand(make_bayesian(classifier(), "mc_dropout", p_drop=0.0, prior_mean="zero"), sentences(8), 1000)
    step = Step(model, sentences(8), tmp_path, 8, 1, trainer_options={"num_data": 1000})
    torch.testing.assert_close(step.gradient, expected, rtol=1e-6, atol=1e-6)


def test_finding_out_how_the_loss_counts_leaves_no_trace(tmp_path):
    model = make_bayesian(classifier(), "vi")
    trainer = BayesTrainer(model, arguments(tmp_path), train_dataset=sentences())
    model.train()
    state = torch.get_rng_state()
    assert not trainer.counting.divides
    assert trainer.num_data == 16
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield from sentences(4)


def test_data_without_a_length_needs_num_data(tmp_path):
    trainer = BayesTrainer(make_bayesian(classifier()), arguments(tmp_path, max_steps=1), train_dataset=Endless())
    with pytest.raises(ValueError, match="pass num_data="):
        trainer.train()
    trainer = BayesTrainer(
        make_bayesian(classifier()), arguments(tmp_path, max_steps=1), train_dataset=Endless(), num_data=100
    )
    trainer.train()


def test_a_plain_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="call bayesify"):
        BayesTrainer(classifier(), arguments(tmp_path), train_dataset=sentences())


@pytest.mark.parametrize(
    ("options", "message"), [({"samples": -1}, "samples must be"), ({"burnin_epochs": -1}, "burnin_epochs must be")]
)
def test_options_out_of_range(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BayesTrainer(make_bayesian(classifier()), arguments(tmp_path), train_dataset=sentences(), **options)


def test_the_plain_trainer_warns_that_the_penalty_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("bayesify.model.steps.PATIENCE", 2)
    args = arguments(tmp_path, max_steps=5)
    trainer = Trainer(make_bayesian(classifier()), args, train_dataset=sentences())
    with pytest.warns(UserWarning, match="BayesTrainer"):
        trainer.train()


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
    assert rates == {"body": 1e-3, "head": 0.1, "sig": 0.2}


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


# -- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [None, 0, 3])
def test_evaluation_is_that_of_predict(samples, tmp_path):
    model, data = make_bayesian(classifier(), "vi", init_sig=0.3), sentences(10)
    args = arguments(tmp_path, per_device_eval_batch_size=4, seed=7)
    trainer = BayesTrainer(model, args, eval_dataset=data, samples=samples)
    found = trainer.evaluate()
    expected = predict(model, [together(data)], samples, seed=7)
    assert found["eval_error"] == pytest.approx(expected.scores["error"])
    assert found["eval_nll"] == pytest.approx(expected.scores["nll"], rel=1e-5)
    assert found["eval_ece"] == pytest.approx(expected.scores["ece"], rel=1e-4)
    assert found["eval_mutual_information"] == pytest.approx(float(expected.mutual_information.mean()), abs=1e-6)
    assert found["eval_posterior_samples"] == expected.num_samples
    assert math.isfinite(found["eval_loss"])


def test_metrics_of_ones_own_see_the_averaged_log_probabilities(tmp_path):
    model, data = make_bayesian(classifier(), "vi", init_sig=0.3), sentences(10)

    def accuracy(evaluated):
        return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}

    trainer = BayesTrainer(model, arguments(tmp_path, seed=7), eval_dataset=data, compute_metrics=accuracy)
    found = trainer.evaluate()
    assert found["eval_accuracy"] == pytest.approx(1 - found["eval_error"])
    output = trainer.predict(data)
    expected = predict(model, [together(data)], seed=7)
    torch.testing.assert_close(torch.from_numpy(output.predictions).double(), expected.log_probs, rtol=1e-5, atol=1e-6)
    assert output.metrics["test_nll"] == pytest.approx(found["eval_nll"])


@pytest.mark.parametrize("name", ["GPT-2", "masked language model"])
def test_evaluation_of_language_models_scores_tokens(name, tmp_path):
    build, make_data, _ = CASES[name]
    model, data = make_bayesian(build(), "vi"), make_data(10)
    found = BayesTrainer(model, arguments(tmp_path), eval_dataset=data, samples=0).evaluate()
    batch = together(data)
    with torch.no_grad():
        logits, labels = model.eval()(**batch).logits, batch["labels"]
    if name == "GPT-2":
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits[labels != -100], labels[labels != -100]
    assert found["eval_nll"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert found["eval_error"] == pytest.approx(metrics.error(logits.softmax(-1), labels))
    assert found["eval_ece"] == pytest.approx(metrics.ece(logits.softmax(-1), labels), rel=1e-4)


def test_evaluation_of_regression(tmp_path):
    model = make_bayesian(classifier(num_labels=1), "vi", init_sig=0.3)
    data = [{**row, "labels": row["labels"].float()} for row in sentences(10)]
    found = BayesTrainer(model, arguments(tmp_path, seed=7), eval_dataset=data).evaluate()
    batch = together(data)
    expected = predict(model, [batch], seed=7, task="regression")
    error = (expected.mean.squeeze(-1) - batch["labels"]).square().mean().sqrt()
    assert found["eval_rmse"] == pytest.approx(float(error), rel=1e-5)
    assert found["eval_std"] == pytest.approx(float(expected.std.square().mean().sqrt()), rel=1e-5)


def test_evaluation_of_several_labels_at_a_time(tmp_path):
    model = make_bayesian(classifier(num_labels=3, problem_type="multi_label_classification"), "vi", init_sig=0.3)
    data = [{**row, "labels": torch.tensor([1.0, 0.0, 1.0])} for row in sentences(6)]
    output = BayesTrainer(model, arguments(tmp_path, seed=7), eval_dataset=data).predict(data)
    logits = predict(model, [together(data)], seed=7).logits
    expected = logits.sigmoid().mean(0)
    torch.testing.assert_close(torch.from_numpy(output.predictions).sigmoid(), expected, rtol=1e-4, atol=1e-5)


def test_evaluation_takes_the_random_numbers_of_a_plain_one(tmp_path):
    trainer = BayesTrainer(make_bayesian(classifier(), "vi"), arguments(tmp_path), eval_dataset=sentences(4))
    first = trainer.evaluate()
    after = torch.get_rng_state()
    Trainer(classifier(), arguments(tmp_path), eval_dataset=sentences(4)).evaluate()
    assert torch.equal(torch.get_rng_state(), after)
    assert trainer.evaluate()["eval_nll"] == first["eval_nll"]


def test_loss_is_logged_with_its_parts(tmp_path):
    model = make_bayesian(classifier(), "vi")
    args = arguments(
        tmp_path, max_steps=4, gradient_accumulation_steps=2, logging_steps=2, lr_scheduler_type="constant"
    )
    trainer = BayesTrainer(model, args, train_dataset=sentences(), eval_dataset=sentences(4))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["loss"] == pytest.approx(row["nll"] + row["penalty"], rel=1e-4)
        assert 0.4 < row["nll"] < 1.2  # of two classes, once per step whatever the accumulation
    with torch.no_grad():
        # The rate is small, so that the penalty hardly moves between the last steps.
        assert rows[-1]["penalty"] == pytest.approx(float(penalty(model, 16)), rel=0.1)


# -- the Trainer's own features --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(method, reentrant, tmp_path):
    weights = []
    for checkpointing in (False, True):
        model = make_bayesian(classifier(), method)
        args = arguments(
            tmp_path,
            max_steps=2,
            optim="sgd",
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        with warnings.catch_warnings():
            # The embeddings' output needs a gradient under reentrant checkpointing; torch remarks on the rest.
            warnings.filterwarnings("ignore", message=".*use_reentrant.*")
            BayesTrainer(model, args, train_dataset=sentences()).train()
        weights.append({n: p.detach() for n, p in model.named_parameters()})
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-7)


def test_bf16(tmp_path):
    model = make_bayesian(classifier(), "vi")
    args = arguments(tmp_path, max_steps=2, bf16=True)
    trainer = BayesTrainer(model, args, train_dataset=sentences(), eval_dataset=sentences(4))
    trainer.train()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert math.isfinite(trainer.evaluate()["eval_nll"])


def test_early_stopping_and_the_best_model(tmp_path):
    model = make_bayesian(classifier(), "vi")
    args = arguments(
        tmp_path,
        num_train_epochs=20,
        learning_rate=0.3,  # far too much: it gets worse soon
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="nll",
        greater_is_better=False,
    )
    trainer = BayesTrainer(
        model,
        args,
        train_dataset=sentences(),
        eval_dataset=sentences(8),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    scores = [row["eval_nll"] for row in trainer.state.log_history if "eval_nll" in row]
    assert len(scores) < 20
    assert trainer.evaluate()["eval_nll"] == pytest.approx(min(scores), rel=1e-6)


def test_model_init_and_a_trainer_of_ones_own(tmp_path):
    class Mine(BayesTrainerMixin, Trainer):
        pass

    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(model)

    trainer = Mine(
        model_init=lambda: make_bayesian(classifier(), "vi"),
        args=arguments(tmp_path, max_steps=1),
        train_dataset=sentences(),
        callbacks=[Look()],
    )
    trainer.train()
    assert seen == [trainer.model]


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


def test_the_spread_of_regression_outputs():
    from bayesify.integrations.hf_evaluation import Average, Evaluation

    outputs = [10 + 1e-4 * torch.randn(6, 1, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    average = Average("values")
    for output in outputs:
        average.add(output)
    evaluation = Evaluation(make_bayesian(torch.nn.Linear(2, 1)), 5, seed=0, shifts=False)
    evaluation.add_values(evaluation.values(average, torch.zeros(6, 1)))
    wanted = torch.stack(outputs).double().var(0).mean().sqrt()
    assert evaluation.metrics()["std"] == pytest.approx(float(wanted), rel=1e-6)
    assert evaluation.metrics()["rmse"] == pytest.approx(10, rel=1e-4)


def test_predictions_that_are_no_numbers_count(tmp_path):
    model = make_bayesian(classifier(), "vi")

    def spoil(module, args, output):
        output = output.clone()
        output[0] = torch.nan
        return output

    model.classifier.register_forward_hook(spoil)
    found = BayesTrainer(model, arguments(tmp_path), eval_dataset=sentences(12)).evaluate()
    assert math.isnan(found["eval_nll"]) and math.isnan(found["eval_mutual_information"])
