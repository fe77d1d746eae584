"""save_pretrained and from_pretrained: folders for everybody, exact for bayesify."""

import json
import os

import pytest
import torch
from bayesify.integrations.huggingface import from_pretrained, save_pretrained
from huggingface_zoo import BY_NAME, main_output, no_warning
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from bayesify import bayesify as make_bayesian
from bayesify import named_posteriors, sample

TIED = {"GPT2": AutoModelForCausalLM, "Qwen2": AutoModelForCausalLM, "T5": AutoModelForSeq2SeqLM}


def logits(model, name):
    with torch.no_grad():
        return main_output(model(**BY_NAME[name].batch()))


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_in_several_files(name, tmp_path):
    model = make_bayesian(BY_NAME[name].build(), "vi", init_sig=0.1)
    with no_warning():
        save_pretrained(model, tmp_path, max_shard_size="10KB")
        plain, info = TIED[name].from_pretrained(tmp_path, output_loading_info=True)
    assert sum(f.startswith("model-") for f in os.listdir(tmp_path)) > 1
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ends = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    assert ends[0] is ends[1]
    assert torch.equal(logits(plain, name), logits(model, name))
    again = from_pretrained(tmp_path)
    with sample(model, seed=1), sample(again, seed=1):
        assert torch.equal(logits(again, name), logits(model, name))


def test_saving_again_replaces_the_files(tmp_path):
    save_pretrained(make_bayesian(BY_NAME["GPT2"].build(), "vi"), tmp_path, max_shard_size="10KB")
    model = make_bayesian(BY_NAME["GPT2"].build(), "mc_dropout")
    save_pretrained(model, tmp_path, max_shard_size="10KB")
    again = from_pretrained(tmp_path)
    assert again._bayesify_scope.method.name == "mc_dropout"


def test_the_expected_mean_of_dropout_is_what_everybody_gets(tmp_path):
    model = make_bayesian(BY_NAME["GPT2"].build(), "mc_dropout", mean="expected", p_drop=0.5, prior_mean="zero")
    save_pretrained(model, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(plain, "GPT2"), logits(model, "GPT2"))
    assert torch.equal(logits(from_pretrained(tmp_path), "GPT2"), logits(model, "GPT2"))


def test_half_precision_comes_back(tmp_path):
    plain = BY_NAME["GPT2"].build().to(torch.bfloat16)
    # A spread that half precision can show.
    model = make_bayesian(plain, "vi", init_sig=0.05)
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    for (_, one), (_, other) in zip(named_posteriors(model), named_posteriors(again), strict=True):
        assert torch.equal(one.std, other.std)
    with sample(model, seed=1), sample(again, seed=1):
        assert torch.equal(logits(again, "GPT2"), logits(model, "GPT2"))


def test_the_folder_names_the_plain_class(tmp_path):
    model = make_bayesian(BY_NAME["CLIP"].build(), "vi")  # has a parameter of its own, so torch derives a class
    save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["CLIPModel"]


def test_a_part_of_the_model_stays_plain(tmp_path):
    model = make_bayesian(BY_NAME["Bert"].build(), "vi", include="classifier.*")
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert [n for n, _ in named_posteriors(again)] == ["classifier.weight", "classifier.bias"]
    assert torch.equal(logits(again, "Bert"), logits(model, "Bert"))


def test_the_class_can_be_given(tmp_path):
    model = make_bayesian(BY_NAME["GPT2"].build(), "vi")
    save_pretrained(model, tmp_path)
    assert torch.equal(logits(from_pretrained(tmp_path, AutoModelForCausalLM), "GPT2"), logits(model, "GPT2"))
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Mine"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"names the class 'Mine'.*pass model_class="):
        from_pretrained(tmp_path)


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="call bayesify"):
        save_pretrained(BY_NAME["Bert"].build(), tmp_path)
    with pytest.raises(TypeError, match=r"use bayesify\.save"):
        save_pretrained(make_bayesian(torch.nn.Linear(2, 2)), tmp_path)
    model = BY_NAME["Bert"].build()
    make_bayesian(model.bert)
    with pytest.raises(ValueError, match="only a part of the model"):
        save_pretrained(model, tmp_path)


def test_a_folder_without_a_posterior(tmp_path):
    BY_NAME["Bert"].build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no posterior\.safetensors"):
        from_pretrained(tmp_path)
