"""BatchNorm statistics of the weights that are in force: of the posterior mean, of a sample, of each member.

During training they follow the training draws, or one iterate after another; a posterior's mean and its samples are
other weights, with other statistics.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm.auto import tqdm

from bayesify.core.mixture import member_count
from bayesify.core.modes import MEAN, override
from bayesify.core.ranks import is_whole
from bayesify.core.reading import Scope
from bayesify.core.scopes import samples as draws
from bayesify.core.scopes import scopes_of
from bayesify.prediction.batches import as_batches, call_model, device_of, split_batch, to_device

STALE = "statistics are another's"  # in `Scope.told`: the mean has moved since the statistics were computed


def update_bn(
    model: nn.Module,
    loader: Iterable[Any],
    samples: int | None = 0,
    *,
    seed: int | None = None,
    progress: bool = False,
) -> nn.Module:
    """Estimate the running statistics of every BatchNorm anew.

    During training they follow the training draws: an average over samples, not the statistics of the mean nor those
    of any one sample. This replaces them by the plain average over the batches of a loader, with every other module in
    eval mode. Of a mixture, every member gets its own.

    Args:
        model: A bayesified model, or a module that contains one.
        loader: Batches as `predict` takes them; better large ones, without augmentation.
        samples: 0 estimates for the posterior mean, n for the average over n posterior samples, None for whatever is
            in force: inside `sample(model)` or a turn of `samples(model, n)` that is this one draw.
        seed: Which samples, as in `samples(model, n, seed)`; of a mixture, n for each member.
        progress: Whether to show a progress bar.

    Returns:
        The same model.

    Raises:
        ValueError: The loader is empty, or `samples` is out of range. The statistics are then as before.

    Example:
        >>> import torch
        >>> from bayesify import bayesify
        >>> from bayesify.integrations.vision import update_bn
        >>> model = bayesify(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
        >>> update_bn(model, [torch.randn(64, 3)])[1].num_batches_tracked
        tensor(1)
    """
    if not (samples is None or (is_whole(samples) and samples >= 0)):
        raise ValueError(f"samples must be an integer >= 0, or None for what is in force, got {samples!r}")
    scopes = scopes_of(model)
    norms = norms_in(model)
    if norms:
        with _estimating(model, norms):
            for turn, _ in enumerate(_modes(model, scopes, samples, seed)):
                bar = tqdm(as_batches(loader), desc="update_bn", unit="batch", disable=not progress)
                if not _run(model, bar):
                    raise ValueError(
                        f"no batches are left for sample {turn + 1}; pass a list or a DataLoader"
                        if turn
                        else "the loader has no batches; pass a non-empty one"
                    )
    for scope in scopes:
        scope.told.discard(STALE)
    return model


@contextmanager
def own_statistics(model: nn.Module, batches: Iterable[Any] | None) -> Iterator[None]:
    """Use the statistics of the weights in force inside a `with` block, and the model's own again afterwards.

    Args:
        model: A model, in the mode whose statistics are wanted.
        batches: Where they are computed; None, or a model without BatchNorm, changes nothing.
    """
    norms = norms_in(model) if batches is not None else []
    if not norms:
        yield
        return
    kept = _buffers(norms)
    try:
        with _estimating(model, norms):
            if not _run(model, batches or ()):
                raise ValueError("update_bn has no batches; pass the training data")
        yield
    finally:
        _put_back(norms, kept)


def norms_in(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def warn_where_stale(model: nn.Module, scopes: Sequence[Scope]) -> None:
    """Warn, once, where a posterior's mean is not the weights that the statistics were computed with."""
    stale = [scope for scope in scopes if STALE in scope.told]
    if stale and norms_in(model):
        for scope in stale:
            scope.told.discard(STALE)
        warnings.warn(
            "the model's BatchNorm statistics are those of its last iterate, not of the posterior's mean or samples; "
            "call predict(..., update_bn=train_loader), or bayesify.integrations.vision.update_bn(model, train_loader)",
            stacklevel=3,
        )


def _modes(model: nn.Module, scopes: list[Scope], samples: int | None, seed: int | None) -> Iterator[None]:
    """Yield once in each mode whose statistics are averaged."""
    if samples:
        for _ in draws(model, samples * member_count(model), seed):
            yield
    else:
        for member in range(member_count(model) if samples == 0 else 1):
            with override(scopes, MEAN._replace(member=member)) if samples == 0 else nullcontext():
                yield


def _run(model: nn.Module, batches: Iterable[Any]) -> int:
    """Run a model on batches and return how many there were."""
    device, count = device_of(model), 0
    for batch in batches:
        call_model(model, to_device(split_batch(batch)[0], device))
        count += 1
    return count


@contextmanager
def _estimating(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Eval mode but for the norms, which start to average from nothing; an error puts their statistics back.

    A norm starts anew at its first batch: one that no batch reaches, such as a resting member's, keeps what it has.
    """
    flags = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    before = _buffers(norms)
    reached: set[nn.Module] = set()

    def start(norm: Any, _: Any) -> None:
        if norm not in reached:
            reached.add(norm)
            norm.reset_running_stats()

    hooks = [norm.register_forward_pre_hook(start) for norm in norms]
    model.eval()
    try:
        for norm in norms:
            norm.momentum = None  # every batch counts the same
            norm.training = True
        with torch.no_grad():
            yield
    except BaseException:
        _put_back(norms, before)
        raise
    finally:
        for hook, norm, momentum in zip(hooks, norms, momenta, strict=True):
            hook.remove()
            norm.momentum = momentum
        for module, training in flags:
            module.training = training


def _buffers(norms: list[_BatchNorm]) -> list[dict[str, torch.Tensor]]:
    return [{name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)} for norm in norms]


def _put_back(norms: list[_BatchNorm], kept: list[dict[str, torch.Tensor]]) -> None:
    with torch.no_grad():
        for norm, buffers in zip(norms, kept, strict=True):
            for name, buffer in buffers.items():
                getattr(norm, name).copy_(buffer)
