"""pipeline: Hugging Face's own, on the average of the samples, with the doubt beside each score."""

import pytest
import torch
from huggingface_zoo import TEXT
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, pipelines

from bayesify import bayesify as make_bayesian
from bayesify import fit_laplace, mix, predict
from bayesify.integrations.huggingface import from_pretrained, pipeline, save_pretrained

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [*SPECIAL, "the", "film", "is", "fine", "dull", "long", "and", "not", "a", "good", "bad", "plot"]
TEXTS = ["the film is fine", "a dull plot and a long film", "not bad"]


def tokenizer():
    return BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})


def build(seed=0, method="vi", **config):
    torch.manual_seed(seed)
    model = BertForSequenceClassification(BertConfig(**TEXT, num_labels=3, **config))
    return make_bayesian(model, method, **({"init_sig": 0.1} if method == "vi" else {})).eval()


def expected(model, count, **options):
    return predict(model, dict(tokenizer()(TEXTS, padding=True, return_tensors="pt")), count, seed=4, **options)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_the_posteriors_average_and_come_with_doubt(batch_size):
    model = build()
    classify = pipeline("text-classification", model, samples=6, seed=4, tokenizer=tokenizer(), device="cpu")
    assert isinstance(classify, pipelines.TextClassificationPipeline)
    wanted = expected(model, 6)
    for i, found in enumerate(classify(TEXTS, batch_size=batch_size)):
        assert found["score"] == pytest.approx(float(wanted.probs[i].max()), abs=1e-5)
        assert found["label"] == f"LABEL_{int(wanted.probs[i].argmax())}"
        assert found["entropy"] == pytest.approx(float(wanted.entropy[i]), abs=1e-5)
        assert found["mutual_information"] == pytest.approx(float(wanted.mutual_information[i]), abs=1e-5)
        assert found["mutual_information"] > 1e-4
    every = classify(TEXTS[0], top_k=None)
    assert [set(one) for one in every] == [{"label", "score", "entropy", "mutual_information"}] * 3
    assert classify(TEXTS[0])[0]["score"] == classify(TEXTS[0])[0]["score"]


def test_a_folder_is_enough(tmp_path):
    model = mix([build(0, "vanilla"), build(1, "vanilla")])
    save_pretrained(model, tmp_path)
    tokenizer().save_pretrained(tmp_path)
    wanted = expected(model, None)
    for i, found in enumerate(pipeline("text-classification", tmp_path, device="cpu")(TEXTS)):
        assert found["score"] == pytest.approx(float(wanted.probs[i].max()), abs=1e-5)
        assert found["mutual_information"] == pytest.approx(float(wanted.mutual_information[i]), abs=1e-5)
    assert len(from_pretrained(tmp_path).members) == 2


def fitted(seed=0):
    """Return a model with spread in its last layer alone, so wide that samples and closed form differ."""
    torch.manual_seed(seed)
    model = BertForSequenceClassification(BertConfig(**TEXT, num_labels=3))
    inputs = dict(tokenizer()(TEXTS, padding=True, return_tensors="pt"))
    model = make_bayesian(model, "la", include="classifier.*", prior_sig=3.0)
    return fit_laplace(model, [(inputs, torch.tensor([0, 1, 2]))], structure="kron")


@pytest.mark.parametrize("kind", ["one", "mixture", "mixture with a point"])
def test_a_last_layer_is_averaged_in_closed_form(kind):
    model = fitted() if kind == "one" else mix([fitted(), fitted(1) if kind == "mixture" else build(2, "vanilla")])
    classify = pipeline("text-classification", model, tokenizer=tokenizer(), device="cpu")
    for texts in (1, 3):
        found = classify(TEXTS, batch_size=texts, top_k=None)
        exact, drawn = expected(model, None), expected(model, 5)
        for i, every in enumerate(found):
            scores = {one["label"]: one["score"] for one in every}
            scores = torch.tensor([scores[f"LABEL_{k}"] for k in range(3)]).double()
            torch.testing.assert_close(scores, exact.probs[i], atol=1e-5, rtol=0)
            assert (scores - drawn.probs[i]).abs().max() > 1e-3
            assert every[0]["entropy"] == pytest.approx(float(exact.entropy[i]), abs=1e-5)
            assert every[0]["mutual_information"] == pytest.approx(float(exact.mutual_information[i]), abs=1e-5)
    sampled = pipeline("text-classification", model, samples=4, seed=4, tokenizer=tokenizer(), device="cpu")
    assert sampled(TEXTS[0])[0]["score"] == pytest.approx(float(expected(model, 4).probs[0].max()), abs=1e-5)


def test_a_single_label_is_a_yes_or_no():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**TEXT, num_labels=1))
    model = make_bayesian(model, "vi", init_sig=0.3).eval()
    wanted = expected(model, 5, task="multilabel").probs.flatten().tolist()
    classify = pipeline("text-classification", model, samples=5, seed=4, tokenizer=tokenizer(), device="cpu")
    assert [found["score"] for found in classify(TEXTS)] == pytest.approx(wanted, abs=1e-5)


def test_several_labels_at_a_time():
    model = build(problem_type="multi_label_classification")
    classify = pipeline("text-classification", model, samples=5, seed=4, tokenizer=tokenizer(), device="cpu")
    wanted = expected(model, 5, task="multilabel")
    for i, found in enumerate(classify(TEXTS, top_k=None)):
        scores = {one["label"]: one["score"] for one in found}
        assert [scores[f"LABEL_{k}"] for k in range(3)] == pytest.approx(wanted.probs[i].tolist(), abs=1e-5)
        p = wanted.probs[i].double()
        entropy = -(p * p.log() + (1 - p) * (1 - p).log()).sum()
        assert found[0]["entropy"] == pytest.approx(float(entropy), abs=1e-5)
        assert 0 < found[0]["mutual_information"] < found[0]["entropy"]


def test_a_point_has_no_disagreement():
    found = pipeline("sentiment-analysis", build(method="vanilla"), tokenizer=tokenizer(), device="cpu")(TEXTS[0])
    assert found[0]["mutual_information"] == pytest.approx(0, abs=1e-6)


def test_what_cannot_be():
    with pytest.raises(ValueError, match=r"task must be one of .*, got 'text-generation'; for texts use generate"):
        pipeline("text-generation", build())
    with pytest.raises(ValueError, match="samples must be an integer >= 0"):
        pipeline("text-classification", build(), samples=-1)
    with pytest.raises(ValueError, match=r"problem_type is 'regression'; use predict\(model, inputs, task='regress"):
        pipeline("text-classification", build(problem_type="regression"))
    with pytest.raises(ValueError, match="call bayesify"):
        pipeline("text-classification", BertForSequenceClassification(BertConfig(**TEXT)))
