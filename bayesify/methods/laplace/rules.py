"""Per-example gradients of a layer's parameters, from its inputs and the gradients that arrive at its outputs.

Each rule is for one kind of layer. A `Part` holds the gradients of all examples in factors, and sums them and their
squares in chunks, so that they are never in memory all at once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import ParametrizationList

from bayesify.core.prior import state_dtype
from bayesify.methods.laplace.recorder import Call, NoRuleError

BLOCK = 1 << 19
"""Elements of per-example gradients that are worked on at a time: about what a cache holds."""
ROWS = 1 << 24  # elements of unfolded patches at a time

Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *BatchNorm)


class Part:
    """The gradients of each example through one call, (examples, *shape)."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.batch = values, len(values)

    def grads(self, start: int, stop: int) -> Tensor:
        """Return the gradients of some examples."""
        return self.values[start:stop]

    def add(self, squares: Tensor, weighted: Tensor, weights: Tensor) -> None:
        """Add sum_n g_n^2 and sum_n w_n g_n."""
        add_in_chunks([self], squares, weighted, weights)


def add_in_chunks(parts: Sequence[Part], squares: Tensor, weighted: Tensor, weights: Tensor) -> None:
    """Add sum_n g_n^2 and sum_n w_n g_n, where g_n is the sum of an example's gradients through several calls."""
    for start, stop in chunks(parts[0].batch, squares.numel()):
        found = reduce(torch.add, (part.grads(start, stop) for part in parts)).to(squares.dtype)
        squares += found.square().sum(0)
        weighted += torch.tensordot(weights[start:stop].to(found), found, 1)


def chunks(batch: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut the examples so that their gradients of `size` elements need little memory."""
    step = max(1, BLOCK // max(size, 1))
    return ((start, min(start + step, batch)) for start in range(0, batch, step))


class Product(Part):
    """g_n = sum_r left[n, r] right[n, r]^T: the gradients of a matrix, one row for every place it is applied to."""

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size) -> None:
        self.left, self.right, self.shape, self.batch = left, right, shape, len(left)

    def grads(self, start: int, stop: int) -> Tensor:
        """Return the products in the shape of the parameter."""
        return (self.left[start:stop].mT @ self.right[start:stop]).view(stop - start, *self.shape)

    def add(self, squares: Tensor, weighted: Tensor, weights: Tensor) -> None:
        """Add the sums; for one row per example that of squares is (left^2)^T (right^2)."""
        left, right = self.left, self.right
        flat = squares.view(left.shape[2], right.shape[2])
        scaled = (left * weights.to(left).view(-1, 1, 1)).flatten(0, 1)
        weighted.view_as(flat).addmm_(scaled.T, right.flatten(0, 1))
        if left.shape[1] == 1:
            flat.addmm_(left.squeeze(1).square().T, right.squeeze(1).square())
            return
        if flat.numel() <= BLOCK:
            for start, stop in chunks(self.batch, flat.numel()):
                flat += (left[start:stop].mT @ right[start:stop]).square_().sum(0)
            return
        # One matrix at a time, in bands that stay in the cache for all the examples.
        rows = max(1, BLOCK // flat.shape[1])
        scratch = torch.empty_like(flat[:rows])
        for band, columns in zip(torch.split(flat, rows), torch.split(left.mT, rows, 1), strict=True):
            for a, b in zip(columns, right, strict=True):
                grad = torch.mm(a, b, out=scratch[: len(band)])
                band.addcmul_(grad, grad)


class Convolved(Part):
    """A convolution's weight gradients, one example at a time by the convolution's own backward."""

    def __init__(self, inputs: Tensor, outputs: Tensor, weight: Tensor, setting: tuple[Any, ...]) -> None:
        self.inputs, self.outputs, self.weight, self.setting = inputs, outputs, weight, setting
        self.batch = len(inputs)

    def grads(self, start: int, stop: int) -> Tensor:
        """Return the weight's gradients."""
        backward, which = torch.ops.aten.convolution_backward, [False, True, False]
        found = [
            backward(d, x, self.weight, None, *self.setting, which)[1]
            for x, d in zip(self.inputs[start:stop], self.outputs[start:stop], strict=True)
        ]
        return torch.stack(found)


class Looked(Part):
    """An embedding's gradients: rows that were looked up get the sum of what arrives for them."""

    def __init__(self, rows: Tensor, outputs: Tensor, shape: torch.Size) -> None:
        self.rows, self.outputs, self.shape, self.batch = rows, outputs, shape, len(rows)

    def grads(self, start: int, stop: int) -> Tensor:
        """Return dense gradients, for tables that are tied to another use."""
        rows, outputs = self.rows[start:stop], self.outputs[start:stop]
        out = outputs.new_zeros(stop - start, *self.shape)
        return out.scatter_add_(1, rows.unsqueeze(-1).expand_as(outputs), outputs)

    def add(self, squares: Tensor, weighted: Tensor, weights: Tensor) -> None:
        """Add the sums, row by row of what was looked up; a row that an example looks up twice is summed before."""
        keys = self.rows + torch.arange(self.batch, device=self.rows.device).unsqueeze(1) * self.shape[0]
        found, place = torch.unique(keys, return_inverse=True)
        sums = squares.new_zeros(len(found), self.shape[1])
        sums.index_add_(0, place.flatten(), self.outputs.flatten(0, 1).to(squares.dtype))
        rows = found % self.shape[0]
        weighted.index_add_(0, rows, sums * weights.to(sums)[found // self.shape[0]].unsqueeze(1))
        squares.index_add_(0, rows, sums.square_())


# -- where the examples are ---------------------------------------------------------------------------------------


def example_dim(shape: torch.Size, count: int) -> int:
    """Return where the examples must be if they can be told apart: dimension 0 (perhaps several rows each) or 1.

    It is a guess by the shape, which the sums of a `Part` prove or disprove.
    """
    if shape and shape[0] != count and len(shape) > 1 and shape[1] == count:
        return 1
    if not shape or shape[0] % count or not shape[0]:
        raise NoRuleError
    return 0


def examples_first(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Return a view (examples, rows of each, ...)."""
    if tensor.dim() <= dim or tensor.shape[dim] % count:
        raise NoRuleError
    return torch.unflatten(tensor.movedim(dim, 0), 0, (count, -1))


# -- the rules ----------------------------------------------------------------------------------------------------


def _is(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module computes what one of torch's layers does: a subclass may do more in its forward."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def has_rule(call: Call, role: str) -> bool:
    """Return whether a parameter's gradients may follow from a call: of a layer known here, or of a linear map."""
    module: Any = call.module
    if isinstance(module, ParametrizationList):
        return role == ""
    if _is(module, nn.Embedding, *Convolution, nn.PReLU, *NORMS):
        return role in ("weight", "bias")
    try:
        return role in ("weight", "bias") and is_turned(call) is not None
    except NoRuleError:
        return False


def parts_of(call: Call, grad: Tensor, count: int) -> dict[str, Part]:
    """Return the gradients of a call's weight and bias.

    Args:
        call: The call.
        grad: The gradient that arrives at its output.
        count: How many examples there are.

    Raises:
        NoRuleError: There is no rule, or the examples cannot be told apart by the shapes.
    """
    module: Any = call.module
    if isinstance(module, ParametrizationList):
        return {"": Part(grad.unsqueeze(1))}  # a token (1, ...), spread over the examples
    dim = example_dim(grad.shape, count)
    grad = grad.to(state_dtype(grad))
    d = examples_first(grad, count, dim)
    if isinstance(module, nn.Embedding):
        ids = call.inputs
        shared = ids.numel() * d.shape[-1] != d.numel()  # positions, say, which the recorder spread over the examples
        rows = ids.expand(count, *d.shape[2:-1]) if shared else examples_first(ids, count, dim)
        return {"weight": _looked(module, rows.reshape(count, -1), d.reshape(count, -1, d.shape[-1]))}
    x = call.inputs.to(grad.dtype)
    if isinstance(module, Convolution):
        return _convolved(module, call, x, d)
    if isinstance(module, nn.PReLU):
        slopes = examples_first(x.clamp(max=0), count, dim) * d
        return {"weight": Part(_per_channel(slopes) if len(module.weight) > 1 else slopes.flatten(1).sum(1, True))}
    if (normal := normalized(module, x)) is not None:
        per_channel = isinstance(module, (*BatchNorm, nn.GroupNorm))
        shape = tuple(module.weight.shape)
        both = {"weight": examples_first(normal, count, dim) * d, "bias": d}
        return {k: Part(_per_channel(v) if per_channel else _sum_to(v, shape)) for k, v in both.items()}
    inputs_first = is_turned(call)
    left, right = (t.reshape(count, -1, t.shape[-1]) for t in (d, examples_first(x, count, dim)))
    if left.shape[1] != right.shape[1]:
        raise NoRuleError
    shape = module.weight.shape
    weight = Product(right, left, shape) if inputs_first else Product(left, right, shape)
    return {"weight": weight, "bias": Part(left.sum(1))}


def normalized(module: Any, x: Tensor) -> Tensor | None:
    """Return what a normalization multiplies by its weight; None where the module is no normalization."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    if isinstance(module, BatchNorm):
        mean, variance = module.running_mean, module.running_var
        if module.training or mean is None or variance is None:
            raise NoRuleError  # the examples see each other
        return F.batch_norm(x, mean.to(x.dtype), variance.to(x.dtype), eps=module.eps)
    return None


def _sum_to(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum (examples, rows, ..., *shape) over all but the examples and the parameter's shape."""
    return values.reshape(len(values), -1, *shape).sum(1)


def _per_channel(values: Tensor) -> Tensor:
    """Sum (examples, rows, channels, ...) over all but the examples and the channels."""
    return values.movedim(2, -1).flatten(1, -2).sum(1)


def _looked(module: nn.Embedding, rows: Tensor, d: Tensor) -> Looked:
    """Rule for an embedding; the padding row has no gradient."""
    if module.scale_grad_by_freq or module.max_norm is not None:
        raise NoRuleError
    if module.padding_idx is not None:
        d = d * (rows != module.padding_idx).unsqueeze(-1)
    return Looked(rows, d, module.weight.shape)


def _padded(module: Any, x: Tensor) -> tuple[Tensor, Any]:
    """Return a convolution's inputs and the zero padding that is left to do."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return x, module.padding
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0,) * len(module.kernel_size)


def _convolved(module: Any, call: Call, x: Tensor, d: Tensor) -> dict[str, Part]:
    """Rule for a convolution; a 1 x 1 convolution is a linear map at every place."""
    if len(call.shape) != len(module.kernel_size) + 2 or call.kwargs or len(call.args) > 1:
        raise NoRuleError
    weight = module.weight.detach()
    x, padding = _padded(module, x)
    bias = Part(_per_channel(d))
    x = examples_first(x, len(d), 0)
    plain = weight[0, 0].numel() == 1 and module.groups == 1 and not module.transposed and not any(padding)
    if plain and all(s == 1 for s in module.stride):
        left, right = (t.movedim(2, -1).flatten(1, -2) for t in (d, x))
        return {"weight": Product(left, right, weight.shape), "bias": bias}
    setting = (module.stride, padding, module.dilation, module.transposed, module.output_padding, module.groups)
    return {"weight": Convolved(x, d, weight.to(d.dtype), setting), "bias": bias}


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
    """One call of a linear map or convolution as rows: its inputs in pieces, and how to read a gradient as rows."""

    inputs: Callable[[], Iterator[Tensor]]
    number: int
    read: Callable[[Tensor], Tensor]
    inputs_first: bool


def rows_of(call: Call) -> Rows:
    """Return the rows of inputs that a weight is applied to: a convolution's are its patches (Grosse & Martens 2016).

    Raises:
        NoRuleError: It is neither a linear map nor a plain convolution.
    """
    module: Any = call.module
    x = call.inputs
    if not _is(module, *Convolution):
        if isinstance(module, (nn.Embedding, nn.PReLU, *NORMS)):
            raise NoRuleError
        inputs_first, flat = is_turned(call), x.reshape(-1, x.shape[-1])
        return Rows(lambda: iter([flat]), len(flat), lambda d: d.reshape(-1, d.shape[-1]), inputs_first)
    places = len(module.kernel_size)
    if module.groups != 1 or module.transposed or places > 2 or len(call.shape) != places + 2:
        raise NoRuleError
    x, padding = _padded(module, x)
    setting = [tuple(v) for v in (module.kernel_size, module.dilation, padding, module.stride)]
    if places == 1:  # a row of one pixel's height
        x, setting = x.unsqueeze(2), [(first, *v) for first, v in zip((1, 1, 0, 1), setting, strict=True)]

    def patches() -> Iterator[Tensor]:
        step = max(1, ROWS // max(1, x[0].numel() * setting[0][0] * setting[0][1]))
        for piece in torch.split(x, step):
            yield F.unfold(piece, *setting).mT.flatten(0, 1)

    number = call.shape.numel() // call.shape[1]
    return Rows(patches, number, lambda d: d.flatten(2).mT.flatten(0, 1), False)
