"""PEFT: only the adapters are Bayesian, and the posterior is kept beside them."""

import copy
import os

import pytest
import torch
from huggingface_zoo import BY_NAME, no_warning
from safetensors import safe_open
from transformers import TrainingArguments

from bayesify import bayesify as make_bayesian
from bayesify import mean, named_posteriors, penalty, sample, summary, unbayesify
from bayesify.integrations.huggingface import BayesTrainer, from_pretrained, generate, save_pretrained

peft = pytest.importorskip("peft")
BASES = {"Bert": ("SEQ_CLS", ["query", "value"]), "Llama": ("CAUSAL_LM", ["q_proj", "v_proj"])}


def adapted(name):
    base = BY_NAME[name].build()
    task, targets = BASES[name]
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets, task_type=task)
    torch.manual_seed(3)
    return peft.get_peft_model(base, config)


def bayesian(name, method="vi", **options):
    return make_bayesian(adapted(name), method, include="*lora_*", prior_mean="zero", **options)


def trained(name, method="vi", **options):
    model = bayesian(name, method, **options).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (model(**BY_NAME[name].batch()).loss + penalty(model, 10)).backward()
        optimizer.step()
    return model.eval()


def logits(model, name):
    with torch.no_grad():
        return model(**BY_NAME[name].batch()).logits


@pytest.fixture(params=BASES)
def name(request):
    return request.param


@pytest.mark.parametrize("block", [None, 3])
def test_merging_in_train_mode_bakes_in_the_mean_or_the_block(block):
    model = trained("Bert", init_sig=0.3)
    with mean(model) if block is None else sample(model, seed=block):
        expected = logits(model, "Bert")
    model.train()
    if block is None:
        merged = model.merge_and_unload()
    else:
        with sample(model, seed=block):
            merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged.eval(), "Bert"), expected, rtol=1e-4, atol=1e-5)


def test_unbayesify_gives_merging_back_to_peft():
    model = unbayesify(bayesian("Bert"))
    assert not any("merge_and_unload" in vars(m) or "merge_adapter" in vars(m) for m in model.modules())


@pytest.mark.parametrize("method", ["vanilla", "vi", "mc_dropout", "sgld", "la"])
def test_only_adapters_become_bayesian(name, method):
    plain = adapted(name).eval()
    before = logits(plain, name)
    model = bayesian(name, method).eval()
    assert torch.equal(logits(model, name), before)
    assert all("lora_" in n for n, _ in named_posteriors(model))
    assert sum(1 for _ in named_posteriors(model)) == sum("lora_" in n for n, _ in plain.named_parameters())
    for _, posterior in named_posteriors(model):
        assert float(posterior.prior_mean.abs().max()) == 0


def test_the_frozen_base_costs_nothing(name):
    model = bayesian(name)
    adapters = sum(p.original.nbytes for _, p in named_posteriors(model))
    # rho, a zero prior mean without an array, and two numbers of the natural steps.
    assert adapters <= summary(model).extra_bytes <= adapters + 12 * sum(1 for _ in named_posteriors(model))
    (model.train()(**BY_NAME[name].batch()).loss + penalty(model, 10)).backward()
    assert all(p.grad is None for n, p in model.named_parameters() if not p.requires_grad)


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_merge_at_the_mean(name, method):
    model = trained(name, method)
    expected = logits(model, name)
    merged = unbayesify(model).merge_and_unload()
    assert type(merged).__name__ == BY_NAME[name].model
    torch.testing.assert_close(logits(merged, name), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["vanilla", "vi", "mc_dropout"])
def test_saves_and_loads_beside_the_adapter(name, method, tmp_path):
    model = trained(name, method)
    with no_warning():
        save_pretrained(model, tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors", "posterior.safetensors"} <= set(os.listdir(tmp_path))
    with safe_open(tmp_path / "posterior.safetensors", "pt") as file:
        assert all("lora_" in key or "classifier" in key for key in file.keys())  # noqa: SIM118

    with no_warning():
        everybodys = peft.PeftModel.from_pretrained(BY_NAME[name].build(), tmp_path)
    assert torch.equal(logits(everybodys.eval(), name), logits(model, name))

    again = from_pretrained(tmp_path, base=BY_NAME[name].build()).eval()
    assert torch.equal(logits(again, name), logits(model, name))
    with sample(model, seed=3), sample(again, seed=3):
        assert torch.equal(logits(again, name), logits(model, name))


def test_a_loaded_adapter_merges_to_the_mean(name, tmp_path):
    model = trained(name, init_sig=0.5)
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path, base=BY_NAME[name].build())
    assert not any(m.training for m in again.modules())
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits(merged, name), logits(model, name), rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    assert not (tmp_path / "merged" / "posterior.safetensors").exists()


def test_the_base_model_is_found_by_its_name(tmp_path):
    base = BY_NAME["Llama"].build()
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = make_bayesian(peft.get_peft_model(base, config), "vi", include="*lora_*", prior_mean="zero").eval()
    save_pretrained(model, tmp_path / "adapter")
    again = from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(logits(again, "Llama"), logits(model, "Llama"))


def test_trainer_trains_saves_and_resumes(tmp_path):
    def run(folder, steps, resume=None):
        model = bayesian("Bert")
        batch = BY_NAME["Bert"].batch()
        data = [{k: v[i % 2] for k, v in batch.items()} for i in range(8)]
        args = TrainingArguments(
            str(folder),
            max_steps=4,
            per_device_train_batch_size=2,
            save_steps=2,
            learning_rate=1e-2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
        )
        trainer = BayesTrainer(model, args, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return model

    whole = run(tmp_path / "a", 4)
    resumed = run(tmp_path / "b", 4, resume=str(tmp_path / "a" / "checkpoint-2"))
    for (n, p), (_, q) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(p, q), n


def test_generate_under_an_adapter():
    model = trained("Llama", init_sig=0.1)
    tokens = BY_NAME["Llama"].batch()["input_ids"]
    found = generate(
        model, input_ids=tokens, attention_mask=torch.ones_like(tokens), samples=3, seed=1, max_new_tokens=4
    )
    assert found.tokens.shape[:2] == (3, 2)
    assert float(found.mutual_information.nanmean()) > 0


def test_the_mean_inside_train_mode(name):
    model = trained(name)
    expected = logits(model, name)
    other = copy.deepcopy(model)
    with mean(other.train()):
        other.eval()
        assert torch.equal(logits(other, name), expected)
