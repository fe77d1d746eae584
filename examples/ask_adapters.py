"""Ask several adapters the same question, and average the probabilities of their answers; without bayesify.

    python examples/ask_adapters.py BASE served/sample-0 served/sample-1 --prompt "Water is" --choices " wet" " dry"

`export_adapters` wrote the folders. Only stock `transformers` and `peft` are needed: one base in memory, and a forward
pass per adapter. Without --choices the likeliest next tokens are shown.
"""

import argparse

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def loaded(base, folders):
    """Return a base model with the adapters of some folders, named by their place."""
    first, *others = map(str, folders)
    model = PeftModel.from_pretrained(base, first, adapter_name="0")
    for i, folder in enumerate(others, 1):
        model.load_adapter(folder, adapter_name=str(i))
    return model.eval()


@torch.no_grad()
def ask(model, input_ids, attention_mask=None, tokens=None):
    """Return the next token's probabilities averaged over the adapters, and the mutual information.

    Args:
        model: What `loaded` returns.
        input_ids: The prompts, (B, T), with padding on the left.
        attention_mask: 1 for tokens and 0 for padding, (B, T).
        tokens: The tokens that count as answers, (K,); None is all.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    each = []
    for name in model.peft_config:
        model.set_adapter(name)
        logits = model(input_ids=input_ids, attention_mask=mask, position_ids=positions).logits[:, -1].float()
        each.append((logits if tokens is None else logits[:, tokens]).softmax(-1))
    each = torch.stack(each)
    probs = each.mean(0)
    return probs, torch.special.entr(probs).sum(-1) - torch.special.entr(each).sum(-1).mean(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a folder or the name of a causal language model")
    parser.add_argument("adapters", nargs="+", help="folders of adapters")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--choices", nargs="+", help="answers, each by its first token")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    model = loaded(AutoModelForCausalLM.from_pretrained(args.base), args.adapters)
    tokens = None
    if args.choices:
        tokens = torch.tensor([tokenizer(choice, add_special_tokens=False).input_ids[0] for choice in args.choices])
    probs, information = ask(model, tokenizer(args.prompt, return_tensors="pt").input_ids, tokens=tokens)
    top = probs[0].topk(min(5, probs.shape[1]))
    for p, i in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        print(f"{p:.3f}  {args.choices[i] if args.choices else tokenizer.decode([i])!r}")
    print(f"mutual information {information.item():.3f} nats between {len(args.adapters)} adapters")


if __name__ == "__main__":
    main()
