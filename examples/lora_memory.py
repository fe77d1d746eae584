"""What training and storing LoRA adapters costs in memory: measured on a model here, computed for one of 8 billion.

    python examples/lora_memory.py            # a small random Llama
    python examples/lora_memory.py --write    # SmolLM2-135M (see examples/evidence/adapters), and docs/lora.md's table

Adapters of rank 16 on the attention's queries and values; two steps by AdamW, so that all state is there. Counted are
the bytes of tensors: weights and posterior, gradients, and the optimizer's state. Activations come on top.
"""

import argparse
import copy
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from bayesify import IVON, SGLD, bayesify, named_posteriors, param_groups, penalty

PAGE = Path(__file__).parents[1] / "docs/lora.md"
METHODS = (None, "vi", "ivon", "sgld", "la")
RANK = 16
LARGE = {"weights": 8.03e9, "layers": 32, "hidden": 4096, "values": 1024}  # Llama-3.1-8B
BASES = {"float32": 4.0, "bfloat16": 2.0, "4 bits (NF4, blocks of 64)": 0.5 + 4 / 64}


def small():
    """Return a random Llama."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))


def measured(base, method):
    """Return the adapters' weights, and per weight the bytes of weights and posterior, of gradients and optimizer."""
    torch.manual_seed(0)
    lora = LoraConfig(r=RANK, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    model = get_peft_model(copy.deepcopy(base, {id(p): p for p in base.parameters()}), lora)
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if method is not None:
        bayesify(model, method, include="*lora_*", prior_mean="zero", **({"thin": 1} if method == "sgld" else {}))
    if method in ("sgld", "ivon"):
        optimizer = {"sgld": SGLD, "ivon": IVON}[method](model, 1e-3, num_data=100)
    else:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained if method is None else param_groups(model, 1e-3))
    rows = torch.arange(16).view(2, 8)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        (loss if method is None else loss + penalty(model, 100)).backward()
        optimizer.step()
    kept = [t for _, p in named_posteriors(model) for t in p.state().values()] if method else []
    trained = [p for p in model.parameters() if p.requires_grad]
    weighed = {t.data_ptr(): t.nbytes for t in (*trained, *kept)}
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    parts = (sum(weighed.values()), sum(p.grad.nbytes for p in trained), sum(t.nbytes for t in states))
    return weights, [part / weights for part in parts]


def table(name, base, found):
    """Return the tables: what was measured, and what follows for the large model."""
    count = sum(p.numel() for p in base.parameters())
    adapters = next(iter(found.values()))[0]
    large = LARGE["layers"] * RANK * (3 * LARGE["hidden"] + LARGE["values"])  # A and B of queries, and of values
    lines = [
        f"{name}: {count / 1e6:.4g} million weights, {adapters / 1e6:.3g} million in adapters of rank {RANK}. "
        "Bytes per adapter weight, measured:",
        "",
        "| | weights and posterior | gradients | optimizer | all |",
        "|---|--:|--:|--:|--:|",
    ]
    for method, (_, parts) in found.items():
        cells = " | ".join(f"{part:.1f}" for part in (*parts, sum(parts)))
        lines.append(f"| {method or 'plain LoRA'} | {cells} |")
    lines += [
        "",
        f"Computed from these for Llama-3.1-8B ({large / 1e6:.1f} million in adapters of rank {RANK}), in GB "
        "(10^9 bytes), without activations:",
        "",
        "| base | weights | " + " | ".join(method or "plain LoRA" for method in found) + " |",
        "|---|--:" + "|--:" * len(found) + "|",
    ]
    for kind, size in BASES.items():
        base_bytes = size * LARGE["weights"]
        cells = [f"{(base_bytes + large * sum(parts)) / 1e9:.2f}" for _, parts in found.values()]
        lines.append(f"| {kind} | {base_bytes / 1e9:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="measure SmolLM2, and write the page's table")
    args = parser.parse_args()
    if args.write:
        from evidence.adapters.tasks import pretrained
        from sections import write_section

        base = pretrained()[0]
    else:
        base = small()
    found = {method: measured(base, method) for method in METHODS}
    name = "SmolLM2-135M" if args.write else "A small Llama"
    print(table(name, base, found))
    if args.write:
        write_section(PAGE, "memory", table(name, base, found))


if __name__ == "__main__":
    main()
