"""generate: one theta per sequence, and the uncertainty of its tokens."""

import pytest
import torch
from huggingface_zoo import BY_NAME, ids
from transformers import GenerationConfig

from bayesify import bayesify as make_bayesian
from bayesify import sample, samples
from bayesify.integrations.huggingface import Generations, generate

WIDE = {"init_sig": 0.1}  # so that the sequences differ
LENGTH = {"max_new_tokens": 6, "min_new_tokens": 6}


def model_of(name, **options):
    return make_bayesian(BY_NAME[name].build(), "vi", **{**WIDE, **options})


def prompt(rows=2):
    tokens = ids(rows, 5)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Qwen2", "Mamba", "T5", "Bart"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"num_beams": 3}, {"do_sample": True, "top_k": 10}],
    ids=["greedy", "no cache", "beams", "sampling"],
)
def test_each_sequence_is_that_of_one_theta(name, options):
    model = model_of(name)
    torch.manual_seed(1)
    found = generate(model, **prompt(), samples=3, seed=4, **LENGTH, **options)
    torch.manual_seed(1)
    expected = [model.generate(**prompt(), **LENGTH, **options) for _ in samples(model, 3, seed=4)]
    assert torch.equal(found.sequences, torch.stack(expected))
    assert found.tokens.shape == found.entropy.shape == found.mutual_information.shape == (3, 2, 6)
    assert found.agreement.shape == (2,)
    assert not found.entropy.isnan().any()


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_the_cache_changes_nothing(name):
    model = model_of(name)
    with_cache, without = (generate(model, **prompt(), seed=4, samples=3, **LENGTH, use_cache=c) for c in (True, False))
    assert torch.equal(with_cache.sequences, without.sequences)


@pytest.mark.parametrize("name", ["GPT2", "Mamba", "Bart"])
def test_uncertainty_of_tokens_by_hand(name):
    model, given = model_of(name), prompt()
    found = generate(model, **given, samples=3, seed=4, **LENGTH)
    encodes = name == "Bart"
    for s in range(3):
        probs = []
        for _ in samples(model, 3, seed=4):
            with torch.no_grad():
                if encodes:
                    logits = model(**given, decoder_input_ids=found.sequences[s]).logits[:, :-1]
                else:
                    logits = model(input_ids=found.sequences[s]).logits[:, 4:-1]
            probs.append(logits.double().softmax(-1))
        average = torch.stack(probs).mean(0)
        entropies = [torch.special.entr(p).sum(-1) for p in (average, *probs)]
        total, expected = entropies[0], torch.stack(entropies[1:]).mean(0)
        torch.testing.assert_close(found.entropy[s].double(), total, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.mutual_information[s].double(), total - expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_padding_on_the_left_changes_nothing(name):
    model = model_of(name)
    alone = generate(model, **prompt(1), samples=2, seed=4, **LENGTH)
    tokens = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids(1, 5)], 1)
    mask = torch.tensor([[0] * 3 + [1] * 5])
    padded = generate(model, input_ids=tokens, attention_mask=mask, samples=2, seed=4, **LENGTH)
    assert torch.equal(padded.tokens, alone.tokens)
    torch.testing.assert_close(padded.entropy, alone.entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded.mutual_information, alone.mutual_information, rtol=1e-3, atol=1e-5)


def test_nothing_counts_after_the_end():
    model = model_of("GPT2")
    # Whatever comes third in the first sequence ends every sequence.
    end = int(generate(model, **prompt(), samples=3, seed=4, **LENGTH).tokens[0, 0, 2])
    found = generate(model, **prompt(), samples=3, seed=4, max_new_tokens=6, eos_token_id=end, pad_token_id=0)
    for row, entropy in zip(found.tokens.flatten(0, 1), found.entropy.flatten(0, 1), strict=True):
        length = int((row == end).nonzero()[0]) + 1 if (row == end).any() else 6
        assert (row[length:] == -1).all()
        assert (row[:length] >= 0).all()
        assert torch.equal(entropy.isnan(), row == -1)
    settings = GenerationConfig(max_new_tokens=6, eos_token_id=end, pad_token_id=0)
    same = generate(model, **prompt(), samples=3, seed=4, generation_config=settings)
    assert torch.equal(same.tokens, found.tokens)


def test_agreement_counts_equal_tokens_of_pairs():
    from bayesify.integrations.huggingface.generation import agreement

    rows = torch.tensor([[[1, 2, 3, 4]], [[1, 2, 9, -1]], [[1, 2, 3, 4]]])
    assert agreement(rows).item() == pytest.approx((2 / 4 + 4 / 4 + 2 / 4) / 3)
    assert agreement(rows[:1]).item() == 1


def test_a_narrow_posterior_agrees_and_a_wide_one_does_not():
    narrow = generate(model_of("GPT2", init_sig=1e-7), **prompt(), samples=3, seed=4, **LENGTH)
    assert torch.equal(narrow.agreement, torch.ones(2))
    assert narrow.mutual_information.max() < 1e-5
    wide = generate(model_of("GPT2", init_sig=0.3), **prompt(), samples=3, seed=4, **LENGTH)
    assert wide.agreement.max() < 1
    assert wide.mutual_information.mean() > 1e-2


def test_no_samples_is_the_posterior_mean():
    model = model_of("GPT2")
    found = generate(model, **prompt(), samples=0, **LENGTH)
    assert torch.equal(found.sequences[0], model.generate(**prompt(), **LENGTH))
    assert float(found.mutual_information.max()) < 1e-5


def test_several_sequences_per_input():
    found = generate(model_of("T5"), **prompt(), samples=2, seed=4, **LENGTH, num_beams=2, num_return_sequences=2)
    assert found.tokens.shape == (2, 4, 6)


def test_the_main_input_by_its_general_name():
    model = model_of("GPT2")
    one = generate(model, **prompt(), samples=2, seed=4, **LENGTH)
    given = prompt()
    other = generate(
        model, inputs=given["input_ids"], attention_mask=given["attention_mask"], samples=2, seed=4, **LENGTH
    )
    assert torch.equal(one.sequences, other.sequences)
    torch.testing.assert_close(one.entropy, other.entropy)


def test_modes_are_restored():
    model = model_of("GPT2").train()
    generate(model, **prompt(), samples=1, max_new_tokens=1)
    assert all(m.training for m in model.modules())
    with pytest.raises(ValueError):
        generate(model, **prompt(), samples=1, max_new_tokens=-1)
    assert all(m.training for m in model.modules())
    with sample(model, seed=1):
        generate(model, **prompt(), samples=1, max_new_tokens=1)


class Words:
    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(map(str, tokens))


def test_decode_and_print():
    found = Generations(
        sequences=torch.tensor([[[7, 1, 2]], [[7, 1, 0]]]),
        tokens=torch.tensor([[[1, 2]], [[1, -1]]]),
        entropy=torch.tensor([[[0.5, 1.0]], [[0.5, torch.nan]]]),
        mutual_information=torch.tensor([[[0.0, 0.0]], [[0.0, torch.nan]]]),
        agreement=torch.tensor([0.5]),
    )
    assert found.decode(Words()) == [["1 2", "1"]]
    assert repr(found).startswith("Generations(2 samples of 1 inputs, up to 2 tokens, agreement 0.500")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"samples": -1}, "samples must be"), ({"inputs_embeds": torch.zeros(1, 2, 16)}, "takes input_ids")],
)
def test_arguments_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        generate(model_of("GPT2"), **{**prompt(), **change})


def test_models_that_cannot():
    with pytest.raises(ValueError, match="call bayesify"):
        generate(BY_NAME["GPT2"].build(), **prompt())
    with pytest.raises(ValueError, match="cannot generate"):
        generate(make_bayesian(torch.nn.Linear(2, 2)), **prompt())


@pytest.mark.parametrize("by", ["argument", "config"])
def test_sequences_of_different_lengths_are_filled_up_as_asked(by):
    model = model_of("GPT2")
    free = generate(model, **prompt(1), samples=8, seed=0, max_new_tokens=6, pad_token_id=5)
    end = int(free.tokens[0, 0, 1])  # a token that ends this sequence, and most likely not all of them
    settings = {"max_new_tokens": 6, "pad_token_id": 5, "eos_token_id": end}
    options = settings if by == "argument" else {"generation_config": GenerationConfig(**settings)}
    found = generate(model, **prompt(1), samples=8, seed=0, **options)
    assert (found.tokens == -1).any()
    assert (found.sequences[:, :, 5:][found.tokens == -1] == 5).all()
