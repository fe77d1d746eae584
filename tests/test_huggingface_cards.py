"""Model cards, and repositories of the hub: a folder says what it is, and is found by its id."""

import shutil

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from huggingface_zoo import BY_NAME
from transformers import TrainingArguments

from bayesify import bayesify as make_bayesian
from bayesify import calibrate, components, mix, predict, unbayesify
from bayesify.integrations.huggingface import BayesTrainer, from_pretrained, hub, pipeline, save_pretrained


def bert(seed=0, method="vi", **options):
    torch.manual_seed(seed)
    return make_bayesian(BY_NAME["Bert"].build(), method, **options).eval()


def inputs(name="Bert"):
    return {k: v for k, v in BY_NAME[name].batch().items() if k != "labels"}


def card(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def repository(tmp_path, name, revisions):
    """Lay folders out as the hub's cache has them: what `from_pretrained` finds without a network."""
    root = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
    for revision, folder in revisions.items():
        commit = revision.encode().hex().ljust(40, "0")
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / revision).write_text(commit)
        shutil.copytree(folder, root / "snapshots" / commit)
    return tmp_path / "cache"


def test_the_card_says_what_the_posterior_is_and_how_to_load_it(tmp_path):
    model = bert(prior_sig=0.1, prior_mean="zero")
    save_pretrained(model, tmp_path, scores={"nll": 0.25, "error": 0.125})
    text = card(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.to_dict() == {
        "library_name": "transformers",
        "tags": ["bayesify", "uncertainty"],
    }
    for line in (
        "# BertForSequenceClassification",
        "method: `VI(",
        "prior: Gaussian around zero, standard deviation 0.1\n",
        "| nll | 0.25 |",
        "| error | 0.125 |",
        "from bayesify.integrations.huggingface import from_pretrained",
        "loads as the posterior mean",
    ):
        assert line in text, line
    weights = sum(p.numel() for p in BY_NAME["Bert"].build().parameters())
    assert f"Bayesian weights: {weights:,}\n" in text


def test_the_models_own_save_pretrained_writes_it_too_and_again(tmp_path):
    model = bert()
    model.save_pretrained(tmp_path)
    first = card(tmp_path)
    assert "Scores" not in first
    assert "around the weights that training began with" in first
    assert "by each tensor's own size" in first
    (tmp_path / "README.md").write_text(first.replace("# Bert", "# Mine, a Bert") + "\nWords of my own.\n")
    batch = BY_NAME["Bert"].batch()
    calibrate(model, [(inputs(), batch["labels"])], samples=2, progress=False)
    model.save_pretrained(tmp_path, scores=predict(model, batch, 2, seed=0).scores)
    again = card(tmp_path)
    assert again.count("<!-- bayesify -->") == 1
    assert "# Mine, a Bert" in again
    assert again.endswith("Words of my own.\n")
    assert "| nll |" in again
    assert ("spread calibrated by a factor of" in again) == (
        model.classifier.parametrizations.weight[0].calibration != 1
    )


def test_an_adapters_card_keeps_what_peft_wrote(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    model = make_bayesian(peft.get_peft_model(BY_NAME["Bert"].build(), config), "vi", include="*lora_*")
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.library_name == "peft"
    assert card(tmp_path).count("method: `VI(") == 1


def test_a_mixtures_card_counts_its_members(tmp_path):
    model = mix([bert(0), bert(1, "vanilla")])
    save_pretrained(model, tmp_path, scores={"nll": 0.5})
    text = card(tmp_path)
    assert "a mixture of 2 members" in text
    assert "method: `VI(" in text
    assert "method: `Vanilla(" in text
    assert "| nll | 0.5 |" in text
    assert "first member" in text


def test_a_model_without_a_posterior_gets_no_card(tmp_path):
    unbayesify(bert()).save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize("members", [1, 2])
def test_the_trainer_knows_the_scores_of_its_last_evaluation(tmp_path, members):
    batch = BY_NAME["Bert"].batch()
    data = [{k: v[i % 2] for k, v in batch.items()} for i in range(8)]
    options = {"max_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, **options)
    trainer = BayesTrainer(bert(), args, train_dataset=data, eval_dataset=data, members=members)
    trainer.train()
    trainer.save_model()
    assert "Scores" not in card(tmp_path)
    found = trainer.evaluate()
    trainer.save_model()
    assert f"| nll | {found['eval_nll']:.6g} |" in card(tmp_path)
    if members == 1:
        trainer.train()
        trainer.state.global_step += 1
        trainer.save_model()
        assert "Scores" not in card(tmp_path)


def test_what_is_pushed_has_the_card(tmp_path, monkeypatch):
    class Card:
        def save(self, path):
            with open(path, "w") as file:
                file.write("---\nlibrary_name: transformers\n---\n\n# A template\n")

    class Hub:
        def create_repo(self, repo_id, **options):
            return type("Repo", (), {"repo_id": repo_id})

    def upload(self, folder, repo_id, **options):
        shutil.copytree(folder, tmp_path / "pushed")

    monkeypatch.setattr(transformers.utils.hub, "hf_api", Hub)
    monkeypatch.setattr(transformers.utils.hub, "create_and_tag_model_card", lambda *a, **k: Card())
    monkeypatch.setattr(transformers.PreTrainedModel, "_upload_modified_files", upload)
    bert().push_to_hub("me/model")
    assert "# A template" in card(tmp_path / "pushed")
    assert "method: `VI(" in card(tmp_path / "pushed")


def test_a_mixture_is_pushed_whole(tmp_path, monkeypatch):
    done = {}

    class Api:
        def __init__(self, token):
            done["token"] = token

        def create_repo(self, repo_id, **options):
            done.update(repo_id=repo_id, **options)
            return type("Repo", (), {"repo_id": f"me/{repo_id}"})

        def upload_folder(self, *, repo_id, folder_path, **options):
            shutil.copytree(folder_path, tmp_path / "pushed")
            done.update(pushed=repo_id, **options)

    monkeypatch.setattr(hub, "HfApi", Api)
    model = mix([bert(0), bert(1)])
    save_pretrained(model, tmp_path / "mine", push_to_hub=True, private=True, commit_message="all")
    assert done == {"token": None, "repo_id": "mine", "private": True, "exist_ok": True, "pushed": "me/mine"} | {
        "commit_message": "all"
    }
    assert len(components(from_pretrained(tmp_path / "pushed"))) == 2
    assert "a mixture of 2 members" in card(tmp_path / "pushed")


def test_a_repository_is_found_by_its_id_and_revision(tmp_path):
    models = {"main": bert(0, init_sig=0.1), "second": mix([bert(1), bert(2)])}
    for name, model in models.items():
        save_pretrained(model, tmp_path / name)
    cache = repository(tmp_path, "me/model", {name: tmp_path / name for name in models})
    found = from_pretrained("me/model", cache_dir=cache)
    wanted = predict(models["main"], inputs(), 3, seed=1).log_probs
    assert torch.equal(predict(found, inputs(), 3, seed=1).log_probs, wanted)
    second = from_pretrained("me/model", cache_dir=cache, revision="second")
    assert len(components(second)) == 2
    with pytest.raises(ValueError, match=r"me/other has no posterior.safetensors"):
        from_pretrained("me/other", cache_dir=cache)


@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_an_adapter_and_its_base_are_found_by_their_ids(tmp_path):
    peft = pytest.importorskip("peft")
    BY_NAME["Bert"].build().save_pretrained(tmp_path / "base")
    cache = repository(tmp_path, "me/base", {"main": tmp_path / "base"})
    base = transformers.BertForSequenceClassification.from_pretrained("me/base", cache_dir=cache)
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    model = make_bayesian(peft.get_peft_model(base, config), "vi", include="*lora_*", init_sig=0.1).eval()
    save_pretrained(model, tmp_path / "adapter")
    repository(tmp_path, "me/adapter", {"v1": tmp_path / "adapter"})
    found = from_pretrained("me/adapter", cache_dir=cache, revision="v1")
    for count in (0, 3):
        one, other = (predict(m, inputs(), count, seed=1).log_probs for m in (model, found))
        assert torch.equal(one, other)


def test_a_pipeline_of_a_folder_with_another_task_is_told():
    with pytest.raises(ValueError, match="task must be one of"):
        pipeline("fill-mask", "me/model")
