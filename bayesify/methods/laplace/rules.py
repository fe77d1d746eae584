"""Per-example gradients of a layer's parameters, from its inputs and the gradients that arrive at its outputs.

Each rule is for one kind of layer. A `Part` holds the gradients of all examples in factors, and sums them and their
squares in chunks, so that they are never in memory all at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

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
Rule = Callable[[Call, str, Tensor, Split], Part]
"""A function of a call, the attribute of a parameter, the gradients d that arrive at the call's output, (examples, rows
of each, ...), and what splits other tensors in the same way; it returns the parameter's gradients.

Which layers a rule is right for need not be sure: sums that are wrong, and errors, are found out."""


def example_dim(shape: torch.Size, count: int) -> int:
    """Return which dimension the examples must be in by the shape: 0 (perhaps several rows each) or 1."""
    if shape and shape[0] != count and len(shape) > 1 and shape[1] == count:
        return 1
    if not shape or shape[0] % count or not shape[0]:
        raise NoRuleError
    return 0


def part_of(call: Call, role: str, grad: Tensor, count: int) -> Part:
    """Return the gradients of a parameter, the attribute `role` of a call's module, from that of the call's output.

    Raises:
        NoRuleError: There is no rule, or the shapes do not tell the `count` examples apart.
    """
    dim = example_dim(grad.shape, count)

    def split(tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim or tensor.shape[dim] % count:
            raise NoRuleError
        return torch.unflatten(tensor.movedim(dim, 0), 0, (count, -1))

    return rule_of(call)(call, role, split(grad.to(state_dtype(grad))), split)


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


def _token(call: Call, role: str, d: Tensor, split: Split) -> Part:
    """Rule for a parameter of shape (1, ...) that the recorder expanded over the examples."""
    return Part(d)


def _embedding(call: Call, role: str, d: Tensor, split: Split) -> Part:
    """Rule for an embedding; the padding row has no gradient."""
    module: Any = call.module
    shared = call.inputs.numel() * d.shape[-1] != d.numel()  # positions, say, which the recorder expanded
    rows = call.inputs.expand(len(d), *d.shape[2:-1]) if shared else split(call.inputs)
    rows, d = rows.reshape(len(d), -1), d.reshape(len(d), -1, d.shape[-1])
    if module.padding_idx is not None:
        d = d * (rows != module.padding_idx).unsqueeze(-1)
    return Lookup(rows, d, module.weight.shape)


def _convolution(call: Call, role: str, d: Tensor, split: Split) -> Part:
    """Rule for a convolution; a 1 x 1 convolution is a linear map at every place."""
    module: Any = call.module
    if role == "bias":
        return Part(_sum_to(d.movedim(2, -1), d.shape[2:3]))
    weight = module.weight.detach()
    x, padding = _padded(module, call.inputs.to(d.dtype))
    x = split(x)
    plain = weight[0, 0].numel() == 1 and module.groups == 1 and not module.transposed and not any(padding)
    if plain and all(s == 1 for s in module.stride):
        left, right = (t.movedim(2, -1).flatten(1, -2) for t in (d, x))
        return Product(left, right, weight.shape)
    setting = (module.stride, padding, module.dilation, module.transposed, module.output_padding, module.groups)
    return Convolved(x, d, weight.to(d.dtype), setting)


def _padded(module: Any, x: Tensor) -> tuple[Tensor, Any]:
    """Return a convolution's inputs and the zero padding that is left to do."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return x, module.padding
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0,) * len(module.kernel_size)


def _batch_norm(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, m.running_mean.to(x.dtype), m.running_var.to(x.dtype), eps=m.eps)


SCALED: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.LayerNorm: lambda m, x: F.layer_norm(x, m.normalized_shape, eps=m.eps),
    nn.RMSNorm: lambda m, x: F.rms_norm(x, m.normalized_shape, eps=m.eps),
    nn.GroupNorm: lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    nn.PReLU: lambda m, x: x.clamp(max=0),
}
"""What a layer multiplies by its weight, element by element."""


def _scaling(call: Call, role: str, d: Tensor, split: Split) -> Part:
    """Rule for a normalization or PReLU."""
    module: Any = call.module
    if role == "weight":
        scaled = next(f for kind, f in SCALED.items() if isinstance(module, kind))
        d = split(scaled(module, call.inputs.to(d.dtype))) * d
    if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):  # the weight is per channel
        d = d.movedim(2, -1)
    return Part(_sum_to(d, module.weight.shape))


def _sum_to(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum (examples, rows, ..., *shape) over all but the examples and the parameter's shape."""
    return values.reshape(len(values), -1, *shape).sum(1)


def _linear(call: Call, role: str, d: Tensor, split: Split) -> Part:
    """Rule for a linear map."""
    left = d.reshape(len(d), -1, d.shape[-1])
    if role == "bias":
        return Part(left.sum(1))
    x = split(call.inputs.to(d.dtype))
    right = x.reshape(len(x), -1, x.shape[-1])
    shape: Any = call.module.weight.shape
    return Product(right, left, shape) if is_turned(call) else Product(left, right, shape)


RULES: dict[type[nn.Module], Rule] = {
    ParametrizationList: _token,
    nn.Embedding: _embedding,
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(SCALED, _scaling),
}


def is_turned(call: Call) -> bool:
    """Return whether a linear map's weight is of (inputs, outputs), as in x @ W; raise unless it is a linear map."""
    module: Any = call.module
    if _is(module, nn.Linear, *CONVOLUTIONS):
        return False
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not call.inputs.is_floating_point():
        raise NoRuleError
    row, out = call.inputs.reshape(-1, call.inputs.shape[-1])[:1], call.row
    for turned, matrix in ((False, weight.detach().T), (True, weight.detach())):
        if matrix.shape == (row.shape[1], out.shape[1]):
            found = row.to(matrix.dtype) @ matrix + (0 if bias is None else bias.detach())
            if torch.allclose(found.float(), out.float(), rtol=1e-2, atol=1e-3 * float(out.abs().max())):
                return turned
    raise NoRuleError


# -- rows, for Kronecker factors ----------------------------------------------------------------------------------


def has_rows(call: Call) -> bool:
    """Return whether a call is a linear map or a plain convolution."""
    with suppress(NoRuleError):
        if _is(call.module, nn.Conv1d, nn.Conv2d):
            module: Any = call.module
            return bool(module.groups == 1 and len(call.shape) == module.weight.dim())
        return rule_of(call) is _linear
    return False


def input_rows(call: Call) -> Tensor:
    """Return the inputs of a weight, (rows, in): of a convolution its patches (Grosse & Martens 2016)."""
    module: Any = call.module
    if not isinstance(module, CONVOLUTIONS):
        return call.inputs.reshape(-1, call.inputs.shape[-1])
    x, padding = _padded(module, call.inputs)
    setting = [tuple(v) for v in (module.kernel_size, module.dilation, padding, module.stride)]
    if len(module.kernel_size) == 1:  # a row of one pixel's height
        x, setting = x.unsqueeze(2), [(first, *v) for first, v in zip((1, 1, 0, 1), setting, strict=True)]
    return F.unfold(x, *setting).mT.flatten(0, 1)


def output_rows(call: Call, d: Tensor) -> Tensor:
    """Return the gradient at a call's output as (rows, out)."""
    return d.flatten(2).mT.flatten(0, 1) if isinstance(call.module, CONVOLUTIONS) else d.reshape(-1, d.shape[-1])
