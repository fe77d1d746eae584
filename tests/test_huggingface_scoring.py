"""score: log-probabilities and uncertainty of given text, against loops by hand."""

import math

import pytest
import torch
from huggingface_zoo import BY_NAME, ids
from torch.nn import functional as F

from bayesify import bayesify as make_bayesian
from bayesify import mean, mix, predict, samples
from bayesify.integrations.huggingface import score, semantic_entropy

ANSWERS = torch.tensor([[3, 4, 5], [6, 7, -100]])


def model_of(name):
    return make_bayesian(BY_NAME[name].build(), "vi", init_sig=0.1)


def by_hand(model, prompt, answer):
    """Return the log-probability of one answer, token by token, in passes that grow by a token."""
    total, seen = 0.0, prompt.tolist()
    for token in (t for t in answer.tolist() if t >= 0):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([seen])).logits[0, -1]
        total += float(F.log_softmax(logits.double(), -1)[token])
        seen.append(token)
    return total


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Qwen2"])
def test_log_probabilities_by_hand(name):
    model, prompts = model_of(name), ids(2, 5)
    model.eval()
    found = score(model, prompts, ANSWERS, samples=3, seed=4)
    expected = [
        [by_hand(model, p, a) for p, a in zip(prompts, ANSWERS, strict=True)] for _ in samples(model, 3, seed=4)
    ]
    assert torch.allclose(found.log_prob.double(), torch.tensor(expected).double(), atol=1e-5)
    mixed = torch.tensor(expected).double().exp().mean(0).log()
    assert torch.allclose(found.mean_log_prob.double(), mixed, atol=1e-5)


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Gemma"])
def test_labels_are_shifted_as_in_the_models_own_loss(name):
    model, prompts = model_of(name), ids(2, 5)
    model.eval()
    labels = torch.cat([torch.full_like(prompts, -100), ANSWERS], 1)
    batch = {"input_ids": torch.cat([prompts, ANSWERS.clamp_min(0)], 1), "labels": labels}
    with mean(model), torch.no_grad():
        loss = model(**batch).loss
    predicted = predict(model, batch, samples=0)
    counts = predicted.labels >= 0
    own = -predicted.log_probs[counts].gather(-1, predicted.labels[counts].unsqueeze(-1))
    assert math.isclose(float(own.mean()), float(loss), rel_tol=1e-6)
    found = score(model, prompts, ANSWERS, samples=0)
    assert math.isclose(-float(found.log_prob.sum()) / int((ANSWERS >= 0).sum()), float(loss), rel_tol=1e-6)
    assert not found.mutual_information[ANSWERS >= 0].any()


def test_entropy_and_mutual_information_by_hand():
    model, prompts = model_of("Llama"), ids(2, 5)
    model.eval()
    found = score(model, prompts, ANSWERS, samples=3, seed=4)
    tokens = torch.cat([prompts, ANSWERS.clamp_min(0)], 1)
    with torch.no_grad():
        probs = torch.stack([model(input_ids=tokens).logits[:, 4:-1].softmax(-1) for _ in samples(model, 3, seed=4)])

    def entropy(p):
        return -(p * p.log()).sum(-1)

    counts = ANSWERS >= 0
    assert torch.allclose(found.entropy[counts], entropy(probs.mean(0))[counts], atol=1e-5)
    information = (entropy(probs.mean(0)) - entropy(probs).mean(0))[counts]
    assert torch.allclose(found.mutual_information[counts], information, atol=1e-5)
    assert found.entropy[~counts].isnan().all()


def test_padding_on_the_left_changes_nothing():
    model, prompts = model_of("GPT2"), ids(2, 5)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), prompts], 1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    found = score(model, padded, ANSWERS, samples=2, seed=1, prompt_mask=mask)
    expected = score(model, prompts, ANSWERS, samples=2, seed=1)
    assert torch.allclose(found.log_prob, expected.log_prob, atol=1e-5)


def test_a_mixture_takes_its_members_in_turn():
    models = [model_of("GPT2") for _ in range(2)]
    prompts = ids(2, 5)
    found = score(mix(models), prompts, ANSWERS, samples=4, seed=1).log_prob
    assert found.shape == (4, 2)
    assert not torch.allclose(found[0], found[1])


def test_training_flags_and_the_generator_are_left_alone():
    model = model_of("GPT2").train()
    state = torch.get_rng_state()
    score(model, ids(2, 5), ANSWERS, samples=2, seed=1)
    assert all(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("prompts", "answers", "options", "why"),
    [
        (ids(2, 5)[0], ANSWERS, {}, "prompt_ids must be integers of shape"),
        (ids(2, 5), ANSWERS.float(), {}, "answer_ids must be integers"),
        (ids(3, 5), ANSWERS, {}, "3 prompts and 2 answers"),
        (ids(2, 5), ANSWERS, {"samples": -1}, "samples must be"),
        (ids(2, 5), ANSWERS, {"prompt_mask": torch.ones(2, 4)}, "prompt_mask must be of shape"),
    ],
)
def test_mistakes(prompts, answers, options, why):
    with pytest.raises(ValueError, match=why):
        score(model_of("GPT2"), prompts, answers, **options)


def test_semantic_entropy_is_that_of_the_clusters():
    texts = [["a", "A", "b", "c"], ["x", "x", "x", "X"]]
    found = semantic_entropy(texts, lambda a, b: a.lower() == b.lower())
    expected = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert torch.allclose(found, torch.tensor([expected, 0.0]))
    with pytest.raises(ValueError, match="question 1 has no answers"):
        semantic_entropy([["a"], []], lambda a, b: a == b)
