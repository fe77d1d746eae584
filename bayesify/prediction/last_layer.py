"""What a layer sees in one pass: for closed forms of the last layer, and as the features of novelty."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.mixture import mixture_in
from bayesify.core.modes import MEAN, Mode, override
from bayesify.core.posterior import Posterior
from bayesify.core.reading import Scope
from bayesify.core.scopes import check_module, mean, named_posteriors, prior, scopes_of
from bayesify.prediction.batches import (
    LabelPlaces,
    as_batches,
    call_model,
    device_of,
    logits_of,
    split_batch,
    to_device,
)
from bayesify.prediction.view import can_be_viewed, evaluation, view, views

PROBED = 8  # examples by which a prior mean is seen to be a network


class NotLastError(Exception):
    """There is no closed form; the message says what holds for other batches only."""


class Passed(NamedTuple):
    """A batch after its pass, with the last layer's inputs and the model's."""

    features: Tensor
    output: Tensor
    target: Any
    inputs: Any


def passed(
    model: nn.Module, scopes: Sequence[Scope], head: nn.Module, batches: Iterable[Any], mode: Mode = MEAN
) -> Iterator[Passed]:
    """Yield the batches with the inputs of a layer, in a mean mode; raise a NotLastError if it is not the last."""
    device, places = device_of(model), LabelPlaces(model)
    for batch in batches:
        inputs, target = split_batch(batch)
        with override(scopes, mode):
            with watching({"": head}) as calls:
                output = logits_of(call_model(model, to_device(inputs, device), to_device(target, device)))
            if len(calls) != 1 or not same_output(calls[0].output, output):
                raise NotLastError("the layer with the spread is the model's last")
            target = places(batch, output)
        yield Passed(calls[0].inputs, output, target, inputs)


def same_output(found: Any, output: Tensor) -> bool:
    """Return whether a layer's output is the model's, perhaps in another precision."""
    if not isinstance(found, Tensor) or found.shape != output.shape:
        return False
    return found.data_ptr() == output.data_ptr() or torch.equal(found.to(output.dtype), output)


class Call(NamedTuple):
    """A call of a layer."""

    name: str
    inputs: Tensor  # the first
    output: Any


@contextmanager
def watching(layers: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Note every call of some layers."""
    calls: list[Call] = []

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(name, args[0] if args else next(iter(kwargs.values())), output))

    handles = [layer.register_forward_hook(partial(note, name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def features(model: nn.Module, data: Any, layer: str | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the features that `fit_novelty` measures distances in, at the posterior mean and in eval mode.

    Args:
        model: Any model, bayesified or not; of a mixture the first member.
        data: As `predict` takes it.
        layer: The name of the layer whose inputs are wanted; None is the last linear layer, or for a Hugging Face model
            the mean of the last hidden state over the tokens that the attention mask shows.

    Returns:
        The features, (N, D), and the labels or None, on the CPU.

    Raises:
        ValueError: There is no such layer, it is not called, its inputs are no features of examples, or there is no
            data.

    Example:
        >>> import torch
        >>> from bayesify import active
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
        >>> found, labels = active.features(net, torch.ones(4, 3))
        >>> found.shape, labels
        (torch.Size([4, 5]), None)
    """
    check_module(model)
    found, labels = list[Tensor](), list[Any]()
    with views(model) as (own,):
        reader = Reader(own, host_of(own), layer)
        for batch in as_batches(data):
            inputs, target = split_batch(batch)
            reader.find(inputs)
            found.append(reader.features(inputs, target)[0])
            labels.append(target)
    if not found:
        raise ValueError("data has no batches; give at least one")
    known = all(target is not None for target in labels)
    return torch.cat(found), torch.cat([torch.as_tensor(t).cpu() for t in labels]) if known else None


def host_of(model: nn.Module) -> nn.Module:
    """Return the module that has the attribute: the bayesified one, the first member of a mixture, or the model."""
    mixture = mixture_in(model)
    inside = model if mixture is None else mixture.members[0]
    roots = [m for m in inside.modules() if "_bayesify_scope" in m.__dict__]
    if len(roots) == 1:
        return roots[0]
    wrapped = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    inner: Any = model.module if wrapped else model
    return inner  # type: ignore[no-any-return]


def posteriors_of(host: nn.Module) -> dict[str, Posterior]:
    """Return the posteriors by name; none of a plain model."""
    return dict(named_posteriors(host)) if any(isinstance(m, Posterior) for m in host.modules()) else {}


class Reader:
    """Run a model, and read its features on the way: inputs of a layer of its `host`; without a name, `find` it."""

    def __init__(self, model: nn.Module, host: nn.Module, layer: str | None, at: str = "mean") -> None:
        self.model, self.host, self.name, self.at = model, host, layer or "", at
        self.device, self.base = device_of(model), base_of(host)
        self.start: nn.Module | None = None  # a view of the model with the buffers that it had at first
        modules = dict(host.named_modules())
        if self.name not in modules:
            linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
            raise ValueError(f"the model has no layer {layer!r}; its last linear layers are {linear[-3:]}")

    def find(self, inputs: Any) -> None:
        """Choose the layer by what a forward with the first example calls; it stays."""
        if self.name:
            return
        wanted = {name: m for name, m in self.host.named_modules() if isinstance(m, nn.Linear) or name == self.base}
        with evaluation(self.model), watching(wanted) as calls:
            output, _ = self._run("mean", rows_of(inputs, slice(0, 1)), None)
        if not calls:
            raise ValueError("the model has no linear layer; name the layer whose inputs are its features with layer=")
        if any(c.name == self.base and hidden(c.output) is not None for c in calls):
            self.name = self.base or ""
        else:
            last = (c for c in reversed(calls) if isinstance(output, Tensor) and same_output(c.output, output))
            self.name = next(last, calls[-1]).name

    def has_prior(self, inputs: Any) -> bool:
        """Return whether the prior mean before the features differs from the trained one, and depends on inputs."""
        is_body = self.name == self.base
        before = [p for n, p in posteriors_of(self.host).items() if n.startswith(f"{self.name}.") == is_body]
        if all(torch.equal(p.mean, p.prior_mean.to(p.mean).expand_as(p.mean)) for p in before):
            return False
        few = rows_of(inputs, slice(0, PROBED))
        with evaluation(self.model):
            z = self.read(self._run("prior", few, None)[1], few)
        return len(z) > 1 and not torch.allclose(z, z[:1].expand_as(z))

    def features(self, inputs: Any, target: Any) -> tuple[Tensor, Any]:
        """Run the model; return its features, (N, D) on the CPU, and its output where that is the mean's, else None."""
        output, calls = self._run(self.at, inputs, target)
        return self.read(calls, inputs), output if self.at == "mean" else None

    def entropy(self, inputs: Any, target: Any, output: Any, rows: Tensor | None = None) -> Tensor | None:
        """Return the entropy of the prediction of all rows or some; None where the outputs are no logits (N, K).

        `output` is what the mean gave for the whole batch; where it is None, the model is run on these rows.
        """
        if output is None:
            target = target[rows] if isinstance(target, Tensor) and rows is not None else target
            (output, _), rows = self._run("mean", inputs if rows is None else rows_of(inputs, rows), target), None
        logits = logits_of(output).detach()
        if logits.dim() != 2 or logits.shape[1] < 2:
            return None
        some = logits if rows is None else logits[rows.to(logits.device)]
        found: Tensor = torch.special.entr(some.float().softmax(1)).sum(1).cpu()
        return found

    def _run(self, at: str, inputs: Any, target: Any) -> tuple[Any, list[Call]]:
        """Return what the model gives, and the calls of the layer."""
        with self.weights(at) as model, self.tapped(model) as calls:
            return call_model(model, to_device(inputs, self.device), to_device(target, self.device)), calls

    @contextmanager
    def weights(self, at: str) -> Iterator[nn.Module]:
        """Yield a model whose forwards have the posterior mean or the prior mean, and the buffers of it."""
        if not any(isinstance(m, Posterior) for m in self.host.modules()):
            yield self.model
        elif at == "mean":
            with mean(self.host):
                yield self.model
        elif can_be_viewed(self.model):
            self.start = self.start or view(self.model, prior=True)
            with override(scopes_of(self.host), Mode(prior=True)):
                yield self.start
        else:
            with prior(self.host):
                yield self.model

    def tapped(self, model: nn.Module) -> AbstractContextManager[list[Call]]:
        """Note the calls of the layer, in the model or in another that is built like it."""
        host = self.host if model is self.model else host_of(model)
        return watching({self.name: host.get_submodule(self.name)})

    def read(self, calls: list[Call], inputs: Any) -> Tensor:
        """Return the features of a forward that was noted."""
        if len(calls) != 1:
            raise ValueError(f"{self.name!r} is called {len(calls)} times in a forward pass; name another with layer=")
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        value = hidden(calls[0].output) if self.name == self.base else calls[0].inputs
        return pooled(value, mask, self.name).detach().float().cpu()


def rows_of(inputs: Any, rows: Any) -> Any:
    """Return some rows of a batch's inputs."""
    if isinstance(inputs, Mapping):
        return {name: rows_of(value, rows) for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(rows_of(value, rows) for value in inputs)
    return inputs[rows] if isinstance(inputs, Tensor) and inputs.dim() else inputs


def base_of(host: nn.Module) -> str | None:
    """Return the name of a Hugging Face model's body, which gives the last hidden state; None for other models."""
    whole: Any = getattr(host, "get_base_model", lambda: host)()
    base = getattr(whole, "base_model", None) if hasattr(whole, "base_model_prefix") else None
    return next((name for name, m in host.named_modules() if m is base and name), None)


def hidden(output: Any) -> Tensor | None:
    """Return the last hidden state in what a Hugging Face model's body gave."""
    found = getattr(output, "last_hidden_state", None)
    found = output[0] if found is None and isinstance(output, tuple) and output else found
    return found if isinstance(found, Tensor) and found.dim() >= 3 else None


def pooled(value: Any, mask: Tensor | None, name: str) -> Tensor:
    """Return one row per example: the mean over the tokens that the mask shows, or over the places of an image."""
    if not isinstance(value, Tensor) or value.dim() not in (2, 3, 4):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the features of {name!r} must be (examples, features), got {got}; name another with layer=")
    if value.dim() != 3 or mask is None or mask.shape != value.shape[:2]:
        return value if value.dim() == 2 else value.mean(1) if value.dim() == 3 else value.mean((2, 3))
    shown = mask.to(value).unsqueeze(-1)
    found: Tensor = (value * shown).sum(1) / shown.sum(1).clamp_min(1)
    return found


# -- without hooks, for programs that are exported ---------------------------------------------------------------------


class Tap(nn.Module):
    """A layer that keeps what it was last called with, and what it gave, for whoever runs the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.readers = 0
        self.calls: dict[int, list[tuple[Tensor, Any]]] = {}  # by thread, so that threads may share the module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        output = self.layer(*args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()))
        self.calls[_thread()] = [(first, output)] * self.readers
        return output

    def taken(self) -> tuple[Tensor, Any]:
        """Return (first input, output) of this thread's last call, once for every reader."""
        calls = self.calls[_thread()]
        found = calls.pop()
        if not calls:
            del self.calls[_thread()]
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # models look at `head.weight.dtype`


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def tapped(model: nn.Module, layer: str) -> tuple[nn.Module, "Tap"]:
    """Put a tap on a layer of a model; return the model, which is the tap where the layer is the model."""
    if layer and isinstance(model, Tap):  # of the whole model: names go on inside
        model.layer, tap = tapped(model.layer, layer)
        return model, tap
    found = model.get_submodule(layer)
    tap = found if isinstance(found, Tap) else Tap(found)
    tap.readers += 1
    if not layer:
        return tap, tap
    parent, _, name = layer.rpartition(".")
    setattr(model.get_submodule(parent), name, tap)
    return model, tap
