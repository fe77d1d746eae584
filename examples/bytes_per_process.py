"""What a process holds of a model in training, by method: whole on one process, or sharded by FSDP2 over several.

    torchrun --nproc_per_node 2 examples/bytes_per_process.py            # prints it
    torchrun --nproc_per_node 2 examples/bytes_per_process.py --write    # and keeps it, for docs/scaling.md

The page has the results of one process and of two, which are in `docs/results/bytes.json`.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bayesify import IVON, SGLD, bayesify, fit_laplace, named_posteriors, param_groups, penalty
from bayesify.methods.swag import collect

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/bytes.json"
PAGE = ROOT / "docs/scaling.md"
ROWS = {  # by the table's name: the method and its options
    "plain": (None, {}),
    "vi": ("vi", {}),
    'vi, `prior_mean="zero"`': ("vi", {"prior_mean": "zero"}),
    "mc_dropout": ("mc_dropout", {}),
    "sgld": ("sgld", {"thin": 1}),
    "la": ("la", {}),
    "swag, `rank=2`": ("swag", {"rank": 2}),
    "ivon": ("ivon", {}),
}
WEIGHTS, DEVICES = 7e9, (1, 8, 64)  # of the page's example


def held(tensors):
    """Return the bytes of this process's parts."""
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors if isinstance(t, torch.Tensor))


def measured(method, options, mesh):
    """Return the bytes of the posteriors, of gradients and of the optimizer, in units of the plain model's weights."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 256), torch.arange(4)
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
    model = nn.Sequential(*layers)
    weights = held(model.parameters())
    if method is not None:
        bayesify(model, method, **options)
    if method == "la":
        fit_laplace(model, [(x, y)], same_data=True)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if method in ("sgld", "ivon"):
        optimizer = {"sgld": SGLD, "ivon": IVON}[method](model, 0.01, num_data=1000)
    else:
        optimizer = torch.optim.AdamW(model.parameters() if method is None else param_groups(model, 1e-3))
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        (loss if method is None else loss + penalty(model, 1000)).backward()
        optimizer.step()
        if method == "swag":
            collect(model)
    posteriors = [t for _, p in named_posteriors(model) for t in (p.original, *p.state().values())]
    states = [t for state in optimizer.state.values() for t in state.values()]
    parts = (posteriors or model.parameters(), (p.grad for p in model.parameters()), states)
    return [round(held(part) / weights, 2) for part in parts]


def measure():
    """Return what every row holds on this process; all processes of a group call it."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    return {row: measured(*how, mesh) for row, how in ROWS.items()}


def table(results):
    """Return the page's part: what was measured, and what follows from it for a large model."""
    lines = [
        "| method | posterior, 1 process | 2 | gradients, 1 | 2 | optimizer, 1 | 2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, one in results["1"].items():
        pairs = zip(one, results["2"][row], strict=True)
        lines.append(f"| {row} | " + " | ".join(f"{copies:.2f}" for pair in pairs for copies in pair) + " |")
    lines += [
        "",
        "From these follows, by multiplication alone, what a model of 7 billion weights in float32 needs per device, "
        "in GB (10^9 bytes), without activations:",
        "",
        "| | copies | " + " | ".join(f"{n} device{'s' if n > 1 else ''}" for n in DEVICES) + " |",
        "|---" * (2 + len(DEVICES)) + "|",
    ]
    for row, one in results["1"].items():
        gigabytes = [f"{sum(one) * 4 * WEIGHTS / 1e9 / n:.1f}" for n in DEVICES]
        lines.append(f"| {row} | {sum(one):g} | " + " | ".join(gigabytes) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the results, and write the page's part")
    args = parser.parse_args()
    found = measure()
    if dist.get_rank() == 0:
        for row, copies in found.items():
            print(f"{row:24}  posterior {copies[0]:.2f}  gradients {copies[1]:.2f}  optimizer {copies[2]:.2f}")
    if args.write and dist.get_rank() == 0:
        from sections import write_section

        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        kept[str(dist.get_world_size())] = found
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        if {"1", "2"} <= kept.keys():
            write_section(PAGE, "bytes", table(kept))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
