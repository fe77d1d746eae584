"""What a process holds of a model in training, by method: whole on one process, or sharded by FSDP2 over several.

torchrun --nproc_per_node 2 examples/bytes_per_process.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bayesify import IVON, SGLD, bayesify, fit_laplace, named_posteriors, param_groups, penalty

METHODS = {"vi": {}, "mc_dropout": {}, "sgld": {"thin": 1}, "la": {}, "swag": {"every": 1, "rank": 2}, "ivon": {}}
x, y = torch.randn(4, 256), torch.arange(4)


def held(tensors):
    """Return the bytes of this process's parts."""
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors if isinstance(t, torch.Tensor))


def measured(method, options):
    """Return the bytes of the posteriors, of gradients and of the optimizer, in units of the plain model's weights."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
    model = nn.Sequential(*layers)
    weights = held(model.parameters())
    bayesify(model, method, **options)
    if method == "la":
        fit_laplace(model, [(x, y)])
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if method in ("sgld", "ivon"):
        optimizer = {"sgld": SGLD, "ivon": IVON}[method](model, 0.01, num_data=1000)
    else:
        optimizer = torch.optim.AdamW(param_groups(model, 1e-3))
    for _ in range(2):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + penalty(model, 1000)).backward()
        optimizer.step()
    posteriors = [t for _, p in named_posteriors(model) for t in (p.original, *p.state().values())]
    states = [t for state in optimizer.state.values() for t in state.values()]
    return [n / weights for n in (held(posteriors), held(p.grad for p in model.parameters()), held(states))]


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
for method, options in METHODS.items():
    found = measured(method, options)
    if dist.get_rank() == 0:
        print(f"{method:10}  posterior {found[0]:.2f}  gradients {found[1]:.2f}  optimizer {found[2]:.2f}", flush=True)
dist.destroy_process_group()
