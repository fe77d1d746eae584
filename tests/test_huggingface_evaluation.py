"""BayesTrainer's evaluation and log: what `predict` says, for every kind of task."""

import math

import pytest
import torch
from torch.nn import functional as F
from trainers import CASES, arguments, classifier, sentences, together
from transformers import Trainer

from bayesify import bayesify as make_bayesian
from bayesify import fit_laplace, metrics, mix, penalty, predict
from bayesify.integrations.huggingface import BayesTrainer
from bayesify.integrations.huggingface.evaluation import Average, Evaluation

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


def last_layer(seed=0, **options):
    model = make_bayesian(classifier(**options), "la", prior_sig=1.0)
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.classifier.parametrizations.weight.original)
    return model


def assert_as_predicted(found, expected):
    assert found["eval_nll"] == pytest.approx(expected.scores["nll"], rel=1e-5)
    assert found["eval_ece"] == pytest.approx(expected.scores["ece"], rel=1e-4)
    assert found["eval_mutual_information"] == pytest.approx(float(expected.mutual_information.mean()), rel=1e-3)
    assert found["eval_posterior_samples"] == expected.num_samples


@pytest.mark.parametrize("members", [1, 2])
def test_evaluation_takes_the_closed_form_of_a_last_layer(members, tmp_path):
    data, models = sentences(10), []
    for seed in range(members):
        models.append(last_layer(seed))
        fit_laplace(models[-1], [together(data)], structure="kron", include="classifier.*")
    model = mix(models) if members > 1 else models[0]
    args = arguments(tmp_path, per_device_eval_batch_size=4, seed=7)
    expected = predict(model, [together(data)])
    assert expected.closed_form
    assert float(expected.mutual_information.mean()) > 0.01
    assert_as_predicted(BayesTrainer(model, args, eval_dataset=data).evaluate(), expected)
    sampled = BayesTrainer(model, args, eval_dataset=data, samples=4).evaluate()
    assert_as_predicted(sampled, predict(model, [together(data)], 4, seed=7))


def test_a_closed_form_of_regression(tmp_path):
    model = last_layer(num_labels=1)
    data = [{**row, "labels": row["labels"].float()} for row in sentences(10)]
    batch = together(data)
    batch["labels"] = batch["labels"].unsqueeze(-1)
    fit_laplace(model, [batch], likelihood="regression", include="classifier.*")
    args = arguments(tmp_path, per_device_eval_batch_size=4)
    found = BayesTrainer(model, args, eval_dataset=data).evaluate()
    expected = predict(model, [batch], task="regression")
    assert expected.closed_form
    assert found["eval_std"] == pytest.approx(float(expected.epistemic.square().mean().sqrt()), rel=1e-5)
    assert found["eval_posterior_samples"] == 0


def test_without_a_closed_form_a_last_layer_is_sampled(tmp_path):
    model, data = last_layer(num_labels=3, problem_type="multi_label_classification"), sentences(6)
    data = [{**row, "labels": torch.tensor([1.0, 0.0, 1.0])} for row in data]
    fit_laplace(model, [together(data)], likelihood="multilabel", include="classifier.*")
    trainer = BayesTrainer(model, arguments(tmp_path, seed=7), eval_dataset=data)
    logits = predict(model, [together(data)], 5, seed=7, task="multilabel").logits
    found = torch.from_numpy(trainer.predict(data).predictions).sigmoid()
    torch.testing.assert_close(found, logits.sigmoid().mean(0), rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_the_last_one_now_and_then_is_an_error():
    evaluation = Evaluation(make_bayesian(torch.nn.Linear(2, 2)), None, seed=0, shifts=False)
    evaluation.rows.append(torch.zeros(1, 5))
    with pytest.raises(ValueError, match="not the same for all batches; give samples="):
        evaluation.take_samples()


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


def test_the_spread_of_regression_outputs():
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
