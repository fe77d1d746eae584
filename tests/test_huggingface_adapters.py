"""Adapters on one base: mixtures of them, and plain ones drawn from a posterior."""

import copy

import pytest
import torch
from huggingface_zoo import BY_NAME, no_warning

from bayesify import bayesify as make_bayesian
from bayesify import components, mix, named_posteriors, predict, samples
from bayesify.core.mixture import shared_copy
from bayesify.integrations.huggingface import export_adapters, from_pretrained, generate, save_pretrained

peft = pytest.importorskip("peft")
TARGETS = {"Bert": ("SEQ_CLS", ["query", "value"]), "Llama": ("CAUSAL_LM", ["q_proj", "v_proj"])}


def adapted(name, base, seed, method="vi", **options):
    """Return a Bayesian LoRA on a base, with weights of its own."""
    task, targets = TARGETS[name]
    config = peft.LoraConfig(r=2, target_modules=targets, task_type=task)
    torch.manual_seed(seed)
    model = make_bayesian(peft.get_peft_model(base, config), method, include="*lora_*", prior_mean="zero", **options)
    with torch.no_grad():
        for _, posterior in named_posteriors(model):
            posterior.original.normal_(std=0.3)
        for part, parameter in model.named_parameters():
            if "classifier" in part and parameter.requires_grad:
                parameter.normal_()
    return model.eval()


def mixture(name="Bert", count=4, **options):
    base = BY_NAME[name].build()
    return mix(adapted(name, shared_copy(base), seed, **options) for seed in range(count))


def storage_bytes(model):
    """Return the bytes of all the memory that a model's tensors lie in."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [t for _, p in named_posteriors(model) for t in p.state().values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def batch(name):
    return {k: v for k, v in BY_NAME[name].batch().items() if k != "labels"}


def logits(model, name):
    with torch.no_grad():
        return model(**batch(name)).logits


@pytest.mark.parametrize("loaded", [False, True])
def test_a_mixture_of_adapters_has_one_base_in_memory(tmp_path, loaded):
    count, model = 8, mixture(count=8)
    if loaded:
        save_pretrained(model, tmp_path)
        model = from_pretrained(tmp_path, base=BY_NAME["Bert"].build())
    plain = BY_NAME["Bert"].build()
    base = sum(t.nbytes for t in (*plain.parameters(), *plain.buffers()))
    first = components(model)[0]
    one = storage_bytes(first)
    adapter = sum(p.nbytes for p in first.parameters() if p.requires_grad)
    adapter += sum(t.nbytes for _, p in named_posteriors(first) for t in p.state().values())
    found = storage_bytes(model)
    assert found <= 1.05 * (base + count * adapter)
    assert found < 0.6 * count * one
    bases = {m.base_model.model.bert.embeddings.word_embeddings.weight.data_ptr() for m in components(model)}
    assert len(bases) == 1


def test_adapters_on_bases_of_their_own_share_one_when_they_are_mixed():
    base = BY_NAME["Bert"].build()
    models = [adapted("Bert", copy.deepcopy(base), seed) for seed in range(3)]
    before = [logits(m, "Bert") for m in models]
    apart = sum(storage_bytes(m) for m in models)
    model = mix(models)
    assert storage_bytes(model) < 0.6 * apart
    assert all(torch.equal(logits(m, "Bert"), b) for m, b in zip(models, before, strict=True))


def test_a_mixture_of_adapters_is_a_folder(tmp_path):
    model = mixture()
    with no_warning():
        save_pretrained(model, tmp_path)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    parts = [t.nbytes for _, p in named_posteriors(model) for t in (p.original, *p.state().values())]
    heads = [p for m in components(model) for n, p in m.named_parameters() if p.requires_grad and "lora" not in n]
    parts += [p.nbytes for p in heads]
    assert sizes["posterior.safetensors"] < sum(parts) + 40_000  # the base is not in it, descriptions are
    restored = from_pretrained(tmp_path, base=BY_NAME["Bert"].build())
    assert len(components(restored)) == 4
    for one, other in zip(components(model), components(restored), strict=True):
        assert torch.equal(logits(one, "Bert"), logits(other, "Bert"))
    inputs = batch("Bert")
    assert torch.equal(predict(model, inputs, 8, seed=1).log_probs, predict(restored, inputs, 8, seed=1).log_probs)
    plain = peft.PeftModel.from_pretrained(BY_NAME["Bert"].build(), tmp_path).eval()
    assert torch.equal(logits(plain, "Bert"), logits(components(model)[0], "Bert"))


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
@pytest.mark.parametrize("name", TARGETS)
def test_exported_adapters_are_the_pinned_samples(tmp_path, name, method):
    base = BY_NAME[name].build()
    model = adapted(name, copy.deepcopy(base), 3, method, **({"init_sig": 0.2} if method == "vi" else {"p_drop": 0.3}))
    expected = [logits(model, name) for _ in samples(model, 3, seed=5)]
    with no_warning():
        folders = export_adapters(model, 3, tmp_path, seed=5)
    assert not any((folder / "posterior.safetensors").exists() for folder in folders)
    plain = peft.PeftModel.from_pretrained(base, folders[0], adapter_name="sample-0").eval()
    for folder in folders[1:]:
        plain.load_adapter(folder, adapter_name=folder.name)
    for folder, one in zip(folders, expected, strict=True):
        plain.set_adapter(folder.name)
        assert torch.equal(logits(plain, name), one)
    assert not torch.equal(expected[0], expected[1])
    if name == "Bert":  # and so their average is the prediction
        average = torch.stack(expected).softmax(-1).mean(0)
        torch.testing.assert_close(predict(model, batch(name), 3, seed=5).probs.float(), average)


def test_the_members_of_a_mixture_are_exported_in_turn(tmp_path):
    model = mixture(count=2, method="vanilla")
    for i, folder in enumerate(export_adapters(model, 4, tmp_path)):
        plain = peft.PeftModel.from_pretrained(BY_NAME["Bert"].build(), folder).eval()
        assert torch.equal(logits(plain, "Bert"), logits(components(model)[i % 2], "Bert"))


def test_what_cannot_be_exported(tmp_path):
    with pytest.raises(TypeError, match="export_adapters is for PEFT models, got"):
        export_adapters(make_bayesian(BY_NAME["Bert"].build(), "vi"), 2, tmp_path)
    with pytest.raises(ValueError, match="k must be an integer >= 1, got 0"):
        export_adapters(adapted("Bert", BY_NAME["Bert"].build(), 0), 0, tmp_path)
    task, targets = TARGETS["Bert"]
    model = peft.get_peft_model(BY_NAME["Bert"].build(), peft.LoraConfig(r=2, target_modules=targets, task_type=task))
    model.base_model.model.bert.pooler.requires_grad_(True)
    make_bayesian(model, "vi")
    with pytest.raises(ValueError, match=r"pooler.*an adapter's folder does not hold them"):
        export_adapters(model, 2, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_mixture_generates():
    model = mixture("Llama", count=2, init_sig=0.2)
    tokens = batch("Llama")["input_ids"]
    options = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "max_new_tokens": 4}
    found = generate(model, samples=4, seed=1, **options)
    assert found.tokens.shape[:2] == (4, 2)
    for i, _ in enumerate(samples(model, 4, seed=1)):
        alone = components(model)[i % 2].generate(**options)
        assert torch.equal(found.sequences[i][:, : alone.shape[1]], alone)
