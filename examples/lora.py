"""A language model with Bayesian adapters generates, says how sure it is, and refuses where its samples disagree.

    python examples/lora.py [--method vi] [--steps 300] [--samples 8] [--seed 0]

The language is counting: 3 5 7 9 ... A small Llama that counts in ones and twos gets LoRA adapters, which learn to
count in threes. Then it is asked to go on with threes, and with fives, which it has never seen. A minute on a laptop;
with `AutoModelForCausalLM.from_pretrained(...)` in place of `base_model` it is your model.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, logging

from bayesify import bayesify, calibrate, metrics, param_groups, penalty
from bayesify.integrations.huggingface import generate

NUMBERS, LENGTH, PROMPT = 40, 12, 4


def counted(step, count, generator):
    """Return rows that count in steps from a random start, round and round."""
    start = torch.randint(NUMBERS, (count, 1), generator=generator)
    return (start + step * torch.arange(LENGTH)) % NUMBERS


def base_model(steps, seed):
    """Train a small Llama to count in ones and twos: what a pretrained model is."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=NUMBERS, max_position_embeddings=LENGTH, pad_token_id=0, eos_token_id=None, **sizes)
    model, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in tqdm(range(steps), desc="pretraining"):
        rows = torch.cat([counted(step, 32, generator) for step in (1, 2)])
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    return model


def adapt(model, method, rows, steps, seed):
    """Put Bayesian adapters on the frozen model, and train them."""
    torch.manual_seed(seed)
    adapters = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "gate_proj", "up_proj"])
    adapted = bayesify(get_peft_model(model, adapters), method, include="*lora_*", prior_mean="zero")
    optimizer = torch.optim.AdamW(param_groups(adapted, 5e-3))
    adapted.train()
    for _ in tqdm(range(steps), desc=f"adapters, {method}"):
        batch = rows[torch.randint(len(rows), (32,))]
        optimizer.zero_grad()
        (adapted(input_ids=batch, labels=batch).loss + penalty(adapted, num_data=rows[:, 1:].numel())).backward()
        optimizer.step()
    return adapted.eval()


def ask(model, step, samples, seed):
    """Let the mean answer, and samples of the posterior go on with the same prompts: how far do they agree?"""
    rows = counted(step, 40, torch.Generator().manual_seed(100 + seed))
    prompts = rows[:, :PROMPT]
    inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    options = {"max_new_tokens": LENGTH - PROMPT, "do_sample": False}
    answer = model.generate(**inputs, **options)
    return answer, (answer == rows).all(1), generate(model, samples=samples, seed=seed, **inputs, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="vi", choices=("vi", "mc_dropout"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--threshold", type=float, default=0.9, help="answer where the samples agree at least so far")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.set_verbosity_error()
    model = base_model(args.steps, args.seed)
    rows = counted(3, 200, torch.Generator().manual_seed(args.seed))
    model = adapt(model, args.method, rows, args.steps, args.seed)
    calibrate(model, {"input_ids": counted(3, 40, torch.Generator().manual_seed(1))}, progress=False)

    found = {name: ask(model, step, args.samples, args.seed) for name, step in (("threes", 3), ("fives", 5))}
    for name, (answer, right, out) in found.items():
        answered = out.agreement >= args.threshold
        said = " ".join(str(t) for t in answer[0].tolist())
        print(f"\n{name}: {said}\n  right {right.float().mean():.0%}, answered {answered.float().mean():.0%}", end="")
        print(f", wrong among the answers {(answered & ~right).sum()} of {answered.sum()}")
        print(f"  agreement {out.agreement.mean():.2f}, mutual information {out.mutual_information.nanmean():.3f} nats")
    known, unknown = (out for *_, out in found.values())
    print(f"\nAUROC of disagreement, threes against fives: {metrics.auroc(-known.agreement, -unknown.agreement):.3f}")


if __name__ == "__main__":
    main()
