"""Per-example gradients of a layer's parameters, from its inputs and the gradients that arrive at its outputs.

Each rule is for one kind of layer. A `Part` holds the gradients of all examples in factors, and sums them and their
squares in chunks, so that they are never in memory all at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import ParametrizationList

from bayesify.core.prior import state_dtype
from bayesify.methods.laplace.recorder import Call, NoRuleError

BLOCK = 1 << 19  # elements of per-example gradients at a time: about what a cache holds

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Part:
    """The gradients of each example through one call, (examples, *shape)."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def grads(self, some: slice) -> Tensor:
        """Return the gradients of some examples."""
        return self.values[some]

    def add(self, squares: Tensor, weighted: Tensor, weights: Tensor) -> None:
        """Add sum_n g_n^2 and sum_n w_n g_n."""
        add_in_chunks([self], squares, weighted, weights)


def add_in_chunks(parts: Sequence[Part], squares: Tensor, weighted: Tensor, weights: Tensor) -> None:
    """Add sum_n g_n^2 and sum_n w_n g_n, where g_n is the sum of an example's gradients through several calls."""
    for some in chunks(len(weights), squares.numel()):
        found = reduce(torch.add, (part.grads(some) for part in parts)).to(squares.dtype)
        squares += found.square().sum(0)
        weighted.view(-1).addmv_(found.reshape(len(found), -1).T, weights[some].to(found))


def chunks(count: int, size: int) -> Iterator[slice]:
    """Cut the examples so that their gradients of `size` elements need little memory."""
    step = max(1, BLOCK // max(size, 1))
    return (slice(start, start + step) for start in range(0, count, step))


class Product(Part):
    """g_n = sum_r left[n, r] right[n, r]^T: the gradients of a matrix that is applied to several rows per example."""

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size) -> None:
        self.left, self.right, self.shape = left, right, shape

    def grads(self, some: slice) -> Tensor:
        """Return the products in the shape of the parameter."""
        return (self.left[some].mT @ self.right[some]).view(-1, *self.shape)

    def add(self, squares: Tensor, weighted: Tensor, weights: Tensor) -> None:
        """Add the sums; for one row per example that of squares is (left^2)^T (right^2)."""
        left, right = self.left, self.right
        flat = squares.view(left.shape[2], right.shape[2])
        scaled = (left * weights.to(left).view(-1, 1, 1)).flatten(0, 1)
        weighted.view_as(flat).addmm_(scaled.T, right.flatten(0, 1))
        if left.shape[1] == 1:
            flat.addmm_(left.squeeze(1).square().T, right.squeeze(1).square())
        elif flat.numel() <= BLOCK:
            for some in chunks(len(left), flat.numel()):
                flat += (left[some].mT @ right[some]).square_().sum(0)
        else:
            scratch = torch.empty_like(flat)
            for a, b in zip(left.mT, right, strict=True):
                grad = torch.mm(a, b, out=scratch)
                flat.addcmul_(grad, grad)


class Convolved(Part):
    """A convolution's weight gradients, one example at a time by the convolution's own backward."""

    def __init__(self, inputs: Tensor, outputs: Tensor, weight: Tensor, setting: tuple[Any, ...]) -> None:
        self.inputs, self.outputs, self.weight, self.setting = inputs, outputs, weight, setting

    def grads(self, some: slice) -> Tensor:
        """Return the weight's gradients."""
        backward, which = torch.ops.aten.convolution_backward, [False, True, False]
        each = zip(self.inputs[some], self.outputs[some], strict=True)
        return torch.stack([backward(d, x, self.weight, None, *self.setting, which)[1] for x, d in each])


class Lookup(Part):
    """An embedding's gradients: rows that were looked up get the sum of what arrives for them."""

    def __init__(self, rows: Tensor, outputs: Tensor, shape: torch.Size) -> None:
        self.rows, self.outputs, self.shape = rows, outputs, shape

    def grads(self, some: slice) -> Tensor:
        """Return dense gradients, for tables that are tied to another use."""
        rows, outputs = self.rows[some], self.outputs[some]
        out = outputs.new_zeros(len(rows), *self.shape)
        return out.scatter_add_(1, rows.unsqueeze(-1).expand_as(outputs), outputs)

    def add(self, squares: Tensor, weighted: Tensor, weights: Tensor) -> None:
        """Add the sums, row by row of what was looked up; a row that an example looks up twice is summed before."""
        keys = self.rows + torch.arange(len(self.rows), device=self.rows.device).unsqueeze(1) * self.shape[0]
        found, place = torch.unique(keys, return_inverse=True)
        sums = squares.new_zeros(len(found), self.shape[1])
        sums.index_add_(0, place.flatten(), self.outputs.flatten(0, 1).to(squares.dtype))
        rows = found % self.shape[0]
        weighted.index_add_(0, rows, sums * weights.to(sums)[found // self.shape[0]].unsqueeze(1))
        squares.index_add_(0, rows, sums.square_())


# -- the rules ----------------------------------------------------------------------------------------------------

Split = Callable[[Tensor], Tensor]
Rule = Callable[[Call, Tensor, Split], dict[str, Part]]
"""A function of a call, the gradients d that arrive at its output, (examples, rows of each, ...), and what splits other
tensors in the same way; it returns the gradients of the call's parameters by attribute."""


def example_dim(shape: torch.Size, count: int) -> int:
    """Return which dimension the examples must be in: 0 (perhaps several rows each) or 1.

    This is a guess by the shape, which the sums of a `Part` prove or disprove.
    """
    if shape and shape[0] != count and len(shape) > 1 and shape[1] == count:
        return 1
    if not shape or shape[0] % count or not shape[0]:
        raise NoRuleError
    return 0


def parts_of(call: Call, grad: Tensor, count: int) -> dict[str, Part]:
    """Return the gradients of a call's parameters by attribute, from that of its output, for `count` examples.

    Raises:
        NoRuleError: There is no rule, or the shapes do not tell the examples apart.
    """
    dim = example_dim(grad.shape, count)

    def split(tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim or tensor.shape[dim] % count:
            raise NoRuleError
        return torch.unflatten(tensor.movedim(dim, 0), 0, (count, -1))

    return rule_of(call)(call, split(grad.to(state_dtype(grad))), split)


def rule_of(call: Call) -> Rule:
    """Return the rule of a call's layer."""
    rule = next((rule for kind, rule in RULES.items() if _is(call.module, kind)), None)
    if rule is None:
        is_turned(call)  # raises unless it is a linear map
    return rule or _linear


def has_rule(call: Call, role: str) -> bool:
    """Return whether a rule gives the gradients of a parameter, the attribute `role` of a call's module."""
    with suppress(NoRuleError):
        return role in ("weight", "bias", "") and rule_of(call) is not None
    return False


def _is(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module computes what one of torch's layers does: a subclass may do more in its forward."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def _token(call: Call, d: Tensor, split: Split) -> dict[str, Part]:
    """Rule for a parameter of shape (1, ...) that the recorder expanded over the examples."""
    return {"": Part(d)}


def _embedding(call: Call, d: Tensor, split: Split) -> dict[str, Part]:
    """Rule for an embedding; the padding row has no gradient."""
    module: Any = call.module
    if module.scale_grad_by_freq or module.max_norm is not None:
        raise NoRuleError
    shared = call.inputs.numel() * d.shape[-1] != d.numel()  # positions, say, which the recorder expanded
    rows = call.inputs.expand(len(d), *d.shape[2:-1]) if shared else split(call.inputs)
    rows, d = rows.reshape(len(d), -1), d.reshape(len(d), -1, d.shape[-1])
    if module.padding_idx is not None:
        d = d * (rows != module.padding_idx).unsqueeze(-1)
    return {"weight": Lookup(rows, d, module.weight.shape)}


def _convolution(call: Call, d: Tensor, split: Split) -> dict[str, Part]:
    """Rule for a convolution; a 1 x 1 convolution is a linear map at every place."""
    module: Any = call.module
    if len(call.shape) != len(module.kernel_size) + 2 or call.kwargs or len(call.args) > 1:
        raise NoRuleError
    weight = module.weight.detach()
    x, padding = _padded(module, call.inputs.to(d.dtype))
    x, bias = split(x), Part(_sum_to(d.movedim(2, -1), d.shape[2:3]))
    plain = weight[0, 0].numel() == 1 and module.groups == 1 and not module.transposed and not any(padding)
    if plain and all(s == 1 for s in module.stride):
        left, right = (t.movedim(2, -1).flatten(1, -2) for t in (d, x))
        return {"weight": Product(left, right, weight.shape), "bias": bias}
    setting = (module.stride, padding, module.dilation, module.transposed, module.output_padding, module.groups)
    return {"weight": Convolved(x, d, weight.to(d.dtype), setting), "bias": bias}


def _padded(module: Any, x: Tensor) -> tuple[Tensor, Any]:
    """Return a convolution's inputs and the zero padding that is left to do."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return x, module.padding
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0,) * len(module.kernel_size)


def _batch_norm(module: Any, x: Tensor) -> Tensor:
    mean, variance = module.running_mean, module.running_var
    if module.training or mean is None or variance is None:
        raise NoRuleError  # the examples see each other
    return F.batch_norm(x, mean.to(x.dtype), variance.to(x.dtype), eps=module.eps)


SCALED: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.LayerNorm: lambda m, x: F.layer_norm(x, m.normalized_shape, eps=m.eps),
    nn.RMSNorm: lambda m, x: F.rms_norm(x, m.normalized_shape, eps=m.eps),
    nn.GroupNorm: lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    nn.PReLU: lambda m, x: x.clamp(max=0),
}
"""What a layer multiplies by its weight, element by element."""


def _scaling(call: Call, d: Tensor, split: Split) -> dict[str, Part]:
    """Rule for a normalization or PReLU."""
    module: Any = call.module
    scaled = next(f for kind, f in SCALED.items() if isinstance(module, kind))(module, call.inputs.to(d.dtype))
    both = {"weight": split(scaled) * d, "bias": d}
    if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):  # the weight is per channel
        both = {role: values.movedim(2, -1) for role, values in both.items()}
    return {role: Part(_sum_to(values, module.weight.shape)) for role, values in both.items()}


def _sum_to(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum (examples, rows, ..., *shape) over all but the examples and the parameter's shape."""
    return values.reshape(len(values), -1, *shape).sum(1)


def _linear(call: Call, d: Tensor, split: Split) -> dict[str, Part]:
    """Rule for a linear map."""
    x = split(call.inputs.to(d.dtype))
    left, right = (t.reshape(len(t), -1, t.shape[-1]) for t in (d, x))
    if left.shape[1] != right.shape[1]:
        raise NoRuleError
    weight = (right, left) if is_turned(call) else (left, right)
    return {"weight": Product(*weight, call.module.weight.shape), "bias": Part(left.sum(1))}  # type: ignore[arg-type]


RULES: dict[type[nn.Module], Rule] = {
    ParametrizationList: _token,
    nn.Embedding: _embedding,
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(SCALED, _scaling),
}


def is_turned(call: Call) -> bool:
    """Return whether a linear map's weight is of (inputs, outputs), as in x @ W; raise unless it is a linear map."""
    module: Any = call.module
    weight = getattr(module, "weight", None)
    if _is(module, nn.Linear):
        return False
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not call.inputs.is_floating_point():
        raise NoRuleError
    row, out = call.inputs.reshape(-1, call.inputs.shape[-1])[:1], call.row
    bias = getattr(module, "bias", None)
    for turned, matrix in ((False, weight.detach().T), (True, weight.detach())):
        if matrix.shape == (row.shape[1], out.shape[1]):
            found = row.to(matrix.dtype) @ matrix + (0 if bias is None else bias.detach())
            if torch.allclose(found.float(), out.float(), rtol=1e-2, atol=1e-3 * float(out.abs().max())):
                return turned
    raise NoRuleError


# -- rows, for Kronecker factors ----------------------------------------------------------------------------------


class Rows(NamedTuple):
    """One call of a linear map or convolution as rows."""

    inputs: Callable[[], Tensor]  # (rows, in), made when they are needed
    read: Callable[[Tensor], Tensor]  # reads the gradient that arrives as (rows, out)
    inputs_first: bool  # whether the weight is of (in, out)


def rows_of(call: Call) -> Rows:
    """Return the rows of inputs that a weight is applied to: a convolution's are its patches (Grosse & Martens 2016).

    Raises:
        NoRuleError: It is neither a linear map nor a plain convolution.
    """
    module: Any = call.module
    if rule_of(call) is _linear:
        return Rows(
            lambda: call.inputs.reshape(-1, call.inputs.shape[-1]),
            lambda d: d.reshape(-1, d.shape[-1]),
            is_turned(call),
        )
    places = len(module.kernel_size) if _is(module, nn.Conv1d, nn.Conv2d) else 0
    if not places or module.groups != 1 or len(call.shape) != places + 2:
        raise NoRuleError

    def patches() -> Tensor:
        x, padding = _padded(module, call.inputs)
        setting = [tuple(v) for v in (module.kernel_size, module.dilation, padding, module.stride)]
        if places == 1:  # a row of one pixel's height
            x, setting = x.unsqueeze(2), [(first, *v) for first, v in zip((1, 1, 0, 1), setting, strict=True)]
        return F.unfold(x, *setting).mT.flatten(0, 1)

    return Rows(patches, lambda d: d.flatten(2).mT.flatten(0, 1), False)
