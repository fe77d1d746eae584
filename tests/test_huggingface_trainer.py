"""BayesTrainer: the gradient of a step, and the Trainer's own features."""

import copy
import math
import warnings

import pytest
import torch
from torch.nn import functional as F
from trainers import CASES, arguments, classifier, sentences, together
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import bayesify
from bayesify import bayesify as make_bayesian
from bayesify import penalty
from bayesify.integrations.huggingface import BayesTrainer, BayesTrainerMixin


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


def test_after_the_plain_trainer_the_penalty_is_missed(tmp_path):
    args = arguments(tmp_path, max_steps=5)
    trainer = Trainer(make_bayesian(classifier()), args, train_dataset=sentences())
    trainer.train()
    assert any("BayesTrainer" in note for note in bayesify.summary(trainer.model).notes)


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
