"""save_pretrained and from_pretrained: folders for everybody, exact for bayesify."""

import copy
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import PyTorchModelHubMixin
from huggingface_zoo import BY_NAME, main_output, no_warning
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from bayesify import bayesify as make_bayesian
from bayesify import named_posteriors, sample, unbayesify
from bayesify.integrations import folders
from bayesify.integrations.huggingface import from_pretrained, save_pretrained

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


def assert_loads_as_mean_and_as_posterior(folder, model, name="GPT2"):
    plain, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(plain, name), logits(model, name))
    again = from_pretrained(folder)
    assert not again.training
    with sample(model, seed=1), sample(again, seed=1):
        assert torch.equal(logits(again, name), logits(model, name))


def trained_gpt2(method="vi", **options):
    model = make_bayesian(BY_NAME["GPT2"].build(), method, **options).eval()
    with torch.no_grad():
        for _, posterior in named_posteriors(model):
            posterior.original.mul_(1.5)
    return model


def test_the_models_own_save_pretrained_writes_mean_and_posterior(tmp_path):
    model = trained_gpt2(init_sig=0.1)
    with no_warning():
        model.save_pretrained(tmp_path / "own", max_shard_size="10KB")
    assert_loads_as_mean_and_as_posterior(tmp_path / "own", model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.transformer.wte.parametrizations.weight.original.zero_()
    copied.save_pretrained(tmp_path / "copy")
    assert_loads_as_mean_and_as_posterior(tmp_path / "copy", copied)


def test_a_state_dict_that_is_handed_over_is_written_under_plain_names(tmp_path):
    model = trained_gpt2("mc_dropout", mean="expected", p_drop=0.5, prior_mean="zero")
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(plain, "GPT2"), logits(model, "GPT2"))
    assert set(folders.plain_state(model)) == set(BY_NAME["GPT2"].build().state_dict())


def test_push_to_hub_uploads_mean_and_posterior(tmp_path, monkeypatch):
    model = trained_gpt2(init_sig=0.1)
    uploaded = []

    def upload(self, folder, repo_id, **options):
        shutil.copytree(folder, tmp_path / f"hub{len(uploaded)}")
        uploaded.append((repo_id, options["commit_message"]))

    class Hub:
        def create_repo(self, repo_id, **options):
            return SimpleNamespace(repo_id=repo_id)

    monkeypatch.setattr(transformers.utils.hub, "hf_api", Hub)
    monkeypatch.setattr(transformers.utils.hub, "create_and_tag_model_card", lambda *a, **k: Card())
    monkeypatch.setattr(transformers.PreTrainedModel, "_upload_modified_files", upload)
    model.push_to_hub("me/model", commit_message="first")
    model.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id="me/second", commit_message="next")
    assert uploaded == [("me/model", "first"), ("me/second", "next")]
    for folder in ("hub0", "local", "hub1"):
        assert_loads_as_mean_and_as_posterior(tmp_path / folder, model)


class Card:
    def save(self, path):
        pass


def test_a_plain_trainer_saves_what_a_plain_model_loads(tmp_path):
    model = trained_gpt2(init_sig=0.1)
    args = transformers.TrainingArguments(tmp_path, report_to="none", use_cpu=True)
    transformers.Trainer(model, args).save_model()
    assert_loads_as_mean_and_as_posterior(tmp_path, model.eval())


def test_a_part_of_a_bayesified_model_writes_its_mean(tmp_path):
    model = trained_gpt2()
    model.transformer.save_pretrained(tmp_path)
    plain, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(plain.wte.weight, model.transformer.wte.parametrizations.weight.original)
    assert not (tmp_path / "posterior.safetensors").exists()


def test_other_libraries_with_save_pretrained_write_plain_names_too(tmp_path):
    class Mine(torch.nn.Module, PyTorchModelHubMixin):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

    model = make_bayesian(Mine(), "vi")
    model.save_pretrained(tmp_path)
    plain = Mine.from_pretrained(tmp_path, local_files_only=True)
    assert torch.equal(plain.layer.weight, model.layer.parametrizations.weight.original)
    assert (tmp_path / "posterior.safetensors").exists()


def test_unbayesify_gives_the_own_save_pretrained_back(tmp_path):
    model = unbayesify(trained_gpt2())
    assert not any("save_pretrained" in vars(m) for m in model.modules())
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "posterior.safetensors").exists()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), "GPT2"), logits(model, "GPT2"))
