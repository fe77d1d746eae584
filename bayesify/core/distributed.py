"""A posterior of which every process holds a part: the shards of FSDP2 (`torch.distributed.fsdp.fully_shard`).

All state of a posterior is cut like its parameter, into runs of rows. What is done element by element is done on the
part by the methods' own formulas, on a stand-in that looks like a posterior of fewer rows; its noise is that of its
place in the whole, so that one seed is one theta however it is cut. Inside a forward FSDP2 has the parameters whole.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bayesify.core.prior import following
from bayesify.core.ranks import in_a_group

Posterior = Any  # bayesify.core.posterior.Posterior, which imports this file
P = TypeVar("P")
WHOLE = {"post_forward_mesh_info": None, "reduce_grads": False, "reshard_after_backward": False}
"""The settings of FSDP2 with which parameters that are whole stay so; they cannot be read by public names."""
NOTHING: Mapping[tuple[int, str], Tensor] = {}


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor holds only this process's part of itself."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all of its parts; all processes have to ask."""
    if not is_sharded(tensor):
        return tensor
    cut: Any = tensor.detach()
    found: Tensor = cut.full_tensor()
    return found


def part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, in the same memory."""
    if not is_sharded(tensor):
        return tensor.detach()
    cut: Any = tensor.detach()
    with torch.no_grad():
        local: Tensor = cut.to_local()
    return local


def copy_whole(target: Tensor, source: Tensor) -> None:
    """Write a whole tensor, which every process has, to a tensor that may be sharded."""
    if is_sharded(target):
        layout = Layout.of(target, "a tensor")
        part(target).copy_(source.narrow(0, layout.first, layout.rows))
    else:
        target.copy_(source)


def shards_itself(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a module."""
    # Where another thread imports it now, it has no class yet.
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


class Layout(NamedTuple):
    """How a parameter is cut: which rows this process holds."""

    mesh: Any  # the processes
    axis: int  # the dimension of the mesh along which rows are dealt out; along others they are repeated
    shape: torch.Size  # the whole parameter's
    first: int  # the first row of this process
    rows: int  # how many it has

    @classmethod
    def of(cls, tensor: Any, name: str) -> "Layout":
        """Return the layout of a sharded parameter, or raise a ValueError if it is not cut into runs of rows."""
        cuts = [(axis, p.dim) for axis, p in enumerate(tensor.placements) if p.is_shard()]
        if len(cuts) != 1 or cuts[0][1] != 0 or any(p.is_partial() for p in tensor.placements):
            raise ValueError(
                f"{name!r} is sharded as {tuple(tensor.placements)}; a posterior can be cut along its first dimension "
                "only: leave out fully_shard's shard_placement_fn, and tensor parallelism on Bayesian parameters"
            )
        axis = cuts[0][0]
        count, size = tensor.shape[0], tensor.device_mesh.size(axis)
        step = -(-count // size)
        first = min(tensor.device_mesh.get_local_rank(axis) * step, count)
        return cls(tensor.device_mesh, axis, tensor.shape, first, min(step, count - first))

    @property
    def start(self) -> int:
        """How many elements come before this process's."""
        return self.first * self.shape[1:].numel()

    @property
    def size(self) -> int:
        """How many processes share the rows."""
        return int(self.mesh.size(self.axis))

    @property
    def group(self) -> "Layout":
        """The layout without sizes: equal for all parameters whose rows the same processes share."""
        return self._replace(shape=torch.Size(), first=0, rows=0)

    def row(self, row: int | None) -> int | None:
        """Return where a row is in this process's part; None where it is not."""
        return None if row is None or not self.first <= row < self.first + self.rows else row - self.first

    def cut(self, tensor: Tensor) -> Tensor:
        """Make a sharded tensor of a whole one, which every process has; leading dimensions beyond the shape stay."""
        above = tensor.dim() - len(self.shape)
        own = tensor.to(self.mesh.device_type).narrow(above, self.first, self.rows)
        return self.joined(own.clone(memory_format=torch.contiguous_format))

    def own(self, tensor: Tensor, factor: float = 1.0) -> Tensor:
        """Return this process's rows of a whole tensor, in memory of their own, times a factor."""
        return tensor.narrow(0, self.first, self.rows) * factor

    def joined(self, local: Tensor) -> Tensor:
        """Make a sharded tensor of the parts of all processes."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        above = local.dim() - len(self.shape)
        shape = torch.Size((*local.shape[:above], *self.shape))
        placements = [Shard(above) if axis == self.axis else Replicate() for axis in range(self.mesh.ndim)]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    def summed(self, values: Tensor) -> Tensor:
        """Add up values over the processes that share the rows."""
        torch.distributed.all_reduce(values, group=self.mesh.get_group(self.axis))
        return values


def over_processes(values: Iterable[tuple[Posterior, Tensor]]) -> Tensor:
    """Return the sum over posteriors and processes of what this process has found on its part of each posterior.

    A whole posterior counts once; values of a sharded one are added up over the processes that share its rows. All
    processes give the posteriors in the same order, and tensors of one shape.
    """
    sums: dict[Layout | None, Tensor] = {}
    for posterior, value in values:
        group = None if posterior.layout is None else posterior.layout.group
        sums[group] = sums[group] + value.to(sums[group]) if group in sums else value
    first, *others = (value if group is None else group.summed(value) for group, value in sums.items())
    return first if not others else torch.stack([first, *(o.to(first) for o in others)]).sum(0)


def follow(posteriors: Iterable[Posterior], known: Mapping[tuple[int, str], Tensor] = NOTHING) -> bool:
    """Shard the state of posteriors like their parameters; return whether any is sharded.

    `known` has the shards of parameters that are whole now, by the id of their module and their name.
    """
    found = False
    for posterior in posteriors:
        places = {"original": posterior._home, **{name: (posterior, name) for name in posterior._parameters}}
        shards = {key: known.get((id(m), name), m._parameters[name]) for key, (m, name) in places.items()}
        if is_sharded(shards["original"]) and posterior._shards.get("original") is not shards["original"]:
            posterior.layout, posterior._shards = Layout.of(shards["original"], posterior.name), shards
        if posterior.layout is not None:
            found = True
            for name in posterior.like_mean():
                tensor = getattr(posterior, name)
                if tensor is not None and tensor.dim() >= len(posterior.shape) > 0 and not is_sharded(tensor):
                    setattr(posterior, name, posterior.layout.cut(tensor))
    return found


def follow_at_work(root: nn.Module, posteriors: list[Posterior]) -> bool:
    """Do `follow` inside a forward, where FSDP2 has gathered some parameters already."""
    if not in_a_group():
        return False
    # What FSDP2 keeps is not public: without it the state is cut after the first step.
    held = [held for group in _groups(root) for held in group.fsdp_params]
    known = {(id(h._module_info.module), h._module_info.param_name): h.sharded_param for h in held}
    return any(map(shards_itself, root.modules())) and follow(posteriors, known)


def _groups(model: nn.Module) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers and cuts together."""
    states: list[Any] = [module._get_fsdp_state() for module in model.modules() if shards_itself(module)]  # type: ignore[operator]
    # Older versions have one at most, under another name.
    found = [getattr(s, "_fsdp_param_groups", None) or [getattr(s, "_fsdp_param_group", None)] for s in states]
    return [group for groups in found for group in groups if group is not None]


@contextmanager
def gathered_whole(model: nn.Module) -> Iterator[None]:
    """Keep all parameters whole: inside, no forward and no backward pass gathers, shards or reduces anything.

    So processes may do different numbers of them.
    """
    before = [(group, {name: getattr(group, name) for name in WHOLE}) for group in _groups(model)]
    for group, _ in before:
        vars(group).update(WHOLE)
    try:
        for module in filter(shards_itself, model.modules()):
            module.unshard()  # type: ignore[operator]
        yield
    finally:
        for group, kept in before:
            vars(group).update(kept)
        rest(model)


def rest(model: nn.Module) -> None:
    """Reshard what FSDP2 has left whole after a forward, so that writes to the parameters are kept."""
    for module in filter(shards_itself, model.modules()):
        module.reshard()  # type: ignore[operator]


# -- stand-ins ---------------------------------------------------------------------------------------------------------


def part_of(posterior: P) -> P:
    """Return a posterior of this process's rows, in the memory of the sharded one; itself where it is whole."""
    sharded: Any = posterior
    layout: Layout | None = sharded.layout
    if layout is None:
        return posterior
    local = {name: part(tensor) for name, tensor in sharded._shards.items() if tensor is not None}
    for name, tensor in local.items():
        grad = sharded._shards[name].grad
        tensor.grad = None if grad is None else part(grad)
    kept = {name: part(tensor) for name, tensor in sharded.held().items() if name in sharded.like_mean()}
    place = {"start": layout.start, "fixed_row": layout.row(sharded.fixed_row)}
    return _stand_in(posterior, local, shape=torch.Size((layout.rows, *layout.shape[1:])), **place, **kept)


def whole_of(posterior: P, original: Tensor, names: Iterable[str]) -> P:
    """Return a sharded posterior with all rows for a draw inside a forward, in the precision of its state.

    FSDP2 has made `original` whole, perhaps in a lower precision. `names` are those of kept tensors that are needed.
    """
    sharded: Any = posterior
    now = {"original": original, **sharded._parameters}
    tensors = {
        name: now[name].detach() if now[name].dtype == shard.dtype and not is_sharded(now[name]) else whole(shard)
        for name, shard in sharded._shards.items()
        if shard is not None and now[name] is not None
    }
    return _stand_in(posterior, tensors, **{n: whole(t) for n, t in sharded.held().items() if n in names})


def _stand_in(posterior: P, tensors: dict[str, Tensor], **changes: Any) -> P:
    """Copy a sharded posterior, with other parameters and attributes."""
    sharded: Any = posterior
    own: P = object.__new__(type(posterior))
    own.__dict__.update(sharded.__dict__, layout=None, **changes)
    for name, tensor in tensors.items():
        tensor.requires_grad_(sharded._shards[name].requires_grad)
    own.__dict__["_parameters"] = {name: tensors.get(name) for name in sharded._parameters}
    own.__dict__["_home"] = (SimpleNamespace(_parameters={"original": tensors["original"]}), "original")
    return own


@contextmanager
def on_shard(posterior: P) -> Iterator[P]:
    """Work on this process's part of a posterior; tensors and results that are new or changed are taken over."""
    own: Any = part_of(posterior)
    yield own
    sharded: Any = posterior
    if own is posterior:
        return
    for name in sharded.taken_over():
        setattr(posterior, name, getattr(own, name))
    for name in sharded.kept:
        before, now = getattr(posterior, name), getattr(own, name)
        if now is None or name not in sharded.like_mean() or not now.dim():
            setattr(posterior, name, now)
        elif before is None or part(before).data_ptr() != now.data_ptr():
            setattr(posterior, name, sharded.layout.joined(now))


# -- what a forward reads ----------------------------------------------------------------------------------------------


def check_whole(posterior: Posterior, original: Tensor) -> None:
    """Raise where a sample that is wanted with its gradient would be drawn of a parameter that is sharded now."""
    if is_sharded(original) and torch.is_grad_enabled() and original.requires_grad:
        raise RuntimeError(
            f"{posterior.name!r} is sharded now: it is read outside of its module's forward, or tensor parallelism has "
            "sharded it for good; read it inside of a forward of a module of fully_shard, or under torch.no_grad()"
        )


def drawn(posterior: Posterior, original: Tensor, seed: int) -> Tensor:
    """Return theta of a draw, whole, in the parameter's precision: drawn on the parts where all processes draw it."""
    apart = posterior.draws_on_shards
    own = part_of(posterior) if apart else whole_of(posterior, original, posterior.drawn_with)
    theta: Tensor = own.calibrated(own.original, own.draw(own.original, seed))
    return (whole(posterior.layout.joined(theta)) if apart else theta).to(original.dtype)


def pulled(posterior: Posterior, original: Tensor, seed: int, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a draw with respect to the whole mean and `learnable()`, in their precision."""
    found: tuple[Tensor | None, ...] = (grad,)  # where theta moves as the mean, whatever the moments are
    if not posterior.draws_on_shards:
        own = whole_of(posterior, original, () if posterior.pulls_by_hand else posterior.drawn_with)
        found = own.calibrated_pullback(own.original, seed, grad.to(own.original.dtype))
    inputs = (original, *posterior.learnable())
    return tuple(None if g is None else g.to(x.dtype) for g, x in zip(found, inputs, strict=True))


def mean_of(posterior: Posterior, original: Tensor) -> Tensor:
    """Return theta in mean mode, whole; the gradient passes to the parameter."""
    own = part_of(posterior)
    with torch.no_grad():
        mean = own.mean_theta(own.original)
    if mean is own.original:
        return original
    if not posterior.draws_on_shards:
        found: Tensor = whole_of(posterior, original, posterior.drawn_with).mean_theta(original)
        return found
    return following(whole(posterior.layout.joined(mean)).to(original.dtype), original)


class Remaking:
    """The thetas of one forward of a sharded model: backward makes them again, when FSDP2 has gathered the parameters.

    A layer's backward pass needs its weights. FSDP2 frees those of a plain model after the layer's forward; a theta
    in the graph would stay whole on every process, for every layer at once.
    """

    def __init__(self) -> None:
        self.thetas: dict[int, tuple[Posterior, int, Tensor]] = {}  # by their memory
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        """Let graphs keep their tensors again."""
        self._hooks.__exit__()
        self.thetas.clear()

    def add(self, posterior: Posterior, seed: int, theta: Tensor) -> None:
        """Keep a theta out of the graph."""
        self.thetas[theta.untyped_storage().data_ptr()] = posterior, seed, theta

    def drop(self, inside: Collection[nn.Module]) -> None:
        """Free the thetas of modules whose parameters are sharded again."""
        self.thetas = {place: known for place, known in self.thetas.items() if known[0] not in inside}

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor or not tensor.numel():
            return tensor
        known = self.thetas.get(tensor.untyped_storage().data_ptr())
        if known is None:
            return tensor
        posterior, seed, theta = known
        offset = int(tensor.storage_offset() - theta.storage_offset())
        return partial(_remade, posterior, seed, tensor.shape, tensor.stride(), offset)


def _unpack(kept: Any) -> Any:
    return kept() if isinstance(kept, partial) else kept


@torch.no_grad()
def _remade(posterior: Posterior, seed: int, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """Return a theta once more, or a view of it."""
    theta: Tensor = posterior.drawn(posterior.original, seed)
    return theta.as_strided(size, stride, theta.storage_offset() + offset)
