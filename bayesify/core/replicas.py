"""What the replicas of a model have in common beside parameters and buffers, of which DistributedDataParallel knows.

Replicas that were built from different random numbers get the weights of rank 0 when they are wrapped.
Prior means and scales follow from weights, so that they must come from rank 0 as well: once, in the first forward.
"""

import weakref
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from bayesify.core.reading import Scope


def agree(scope: "Scope") -> None:
    """Take over prior, moments and results of rank 0, where a forward is the first under DistributedDataParallel."""
    around = DistributedDataParallel._active_ddp_module
    if around is None or (scope.replica_of is not None and scope.replica_of() is around):
        return
    scope.replica_of = weakref.ref(around)
    group = around.process_group
    first = torch.distributed.get_global_rank(group, 0)
    about = [[(p.found(), p.prior_sig, {n: (t.shape, t.dtype) for n, t in p.held().items()}) for p in scope.posteriors]]
    torch.distributed.broadcast_object_list(about, src=first, group=group)
    for posterior, (results, sig, tensors) in zip(scope.posteriors, about[0], strict=True):
        posterior.__dict__.update(results, prior_sig=sig)
        for name in posterior.kept:
            own = getattr(posterior, name)
            if name not in tensors:
                setattr(posterior, name, None)
                continue
            shape, dtype = tensors[name]
            if own is None or (own.shape, own.dtype) != (shape, dtype):
                own = torch.empty(shape, dtype=dtype, device=posterior.original.device)
                setattr(posterior, name, own)
            torch.distributed.broadcast(own, src=first, group=group)
        posterior._look_at_center()
