"""Write a program by running a formula on names: what torch would do to tensors becomes lines of text.

A formula is a plain function of tensors, made of operators and torch's functions, without a branch on a value. Run on
`Value`s, it leaves a line for every operation in a `Writer`, in the dialect of numba or of Triton.
"""

import atexit
import hashlib
import importlib.util
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bayesify.engine import generator
from bayesify.engine.generator import MASK32, horner

Formula = Callable[..., Any]
Kinds = tuple[str | int, ...]

KINDS = {torch.float32: "f32", torch.float64: "f64", torch.int32: "i32", torch.bfloat16: "bf16", torch.float16: "f16"}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
WORDS = ("add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift")
OPERATORS = dict(zip(WORDS, ("+", "-", "*", "/", "&", "|", "^", "<<", ">>"), strict=True)) | COMPARISONS


class Value:
    """A variable of a program: its name, and its kind.

    Kinds are f32, f64, i32, u32, bool, and "number": a double that is the same for all elements.
    """

    def __init__(self, writer: "Writer", name: str, kind: str) -> None:
        self.writer, self.name, self.kind = writer, name, kind

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "Value":
        writer = next(a.writer for a in args if isinstance(a, Value))
        return writer.call(function.__name__, *args, **kwargs or {})  # torch.exp(x)

    def __getattr__(self, word: str) -> Callable[..., "Value"]:
        return partial(self.writer.call, word, self)  # x.exp()

    def __str__(self) -> str:
        return self.name

    def __neg__(self) -> "Value":
        return self.writer.line(f"-{self}", self.kind)

    def __abs__(self) -> "Value":
        return self.abs()

    def __pow__(self, power: int) -> "Value":
        out = self
        for _ in range(power - 1):
            out = self.writer.operation("*", self, out)
        return out

    def __bool__(self) -> bool:
        raise TypeError("a formula cannot branch on a value; use torch.where")


for _name, _operator in OPERATORS.items():
    setattr(Value, f"__{_name}__", lambda self, other, s=_operator: self.writer.operation(s, self, other))
    setattr(Value, f"__r{_name}__", lambda self, other, s=_operator: self.writer.operation(s, other, self))


class Writer:
    """The lines of a function, in a dialect."""

    mark: ClassVar[str]  # the decorator of a function
    load: ClassVar[str]  # an element of an array
    store: ClassVar[str]  # an element of an array, and a value
    constant: ClassVar[str]
    cast: ClassVar[str]
    view: ClassVar[str]
    whole: ClassVar[str] = "{x}"  # a result in whole numbers
    functions: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        self.lines: dict[str, Value] = {}

    def line(self, text: str, kind: str) -> Value:
        """Add a line, unless there is one like it, and return its variable."""
        return self.lines.setdefault(text, Value(self, f"t{len(self.lines)}", kind))

    def of(self, x: Any, kind: str) -> Any:
        """Return a value or a constant as one of a kind."""
        if isinstance(x, Value):
            return x if x.kind == kind else self.line(self.cast.format(x=x, kind=kind), kind)
        if not isinstance(x, (int, float)):
            raise TypeError(f"a formula may use numbers and its inputs, got a {type(x).__name__}; make it an input")
        return self.line(self.constant.format(x=int(x) & MASK32 if kind == "u32" else repr(x), kind=kind), kind)

    def operation(self, operator: str, a: Any, b: Any) -> Value:
        """Write a sum, a product, a comparison; a number becomes what it meets."""
        kind = _common(a, b)
        text = f"{self.of(a, kind)} {operator} {self.of(b, kind)}"
        if operator in COMPARISONS.values():
            return self.line(text, "bool")
        return self.line(self.whole.format(x=text, kind=kind) if kind in ("u32", "i32") else text, kind)

    def call(self, word: str, *args: Any, **options: Any) -> Value:
        """Write a function of torch, or a method of a tensor."""
        if word in ("to", "view"):
            kind = KINDS[args[1]]
            return self.of(args[0], kind) if word == "to" else self.line(self.view.format(x=args[0], kind=kind), kind)
        known = {**SHARED, **self.functions}
        if word not in known:
            raise TypeError(
                f"a formula cannot use {word!r}; use operators and {', '.join(sorted(known))}, "
                "or give the method `theta` and `noise` in place of a formula"
            )
        found = known[word]
        if not isinstance(found, str):
            written: Value = found(*args, **options)
            return written
        kind = _common(*args)
        return self.line(found.format(*(x if _is(x, "bool") else self.of(x, kind) for x in args)), kind)

    def function(self, name: str, arguments: Sequence[str], results: Sequence[Any]) -> str:
        """Return the text of the function that the lines are the body of."""
        body = [f"    {value} = {text}" for text, value in self.lines.items()]
        return "\n".join([f"def {name}({', '.join(arguments)}):", *body, f"    return {', '.join(map(str, results))}"])


def _is(x: Any, *kinds: str) -> bool:
    return isinstance(x, Value) and x.kind in kinds


def _common(*args: Any) -> str:
    """Return the kind of the values among some arguments, which numbers and constants take on."""
    return next((x.kind for x in args if isinstance(x, Value) and not _is(x, "bool", "number")), "number")


# -- functions made of others, in any dialect --------------------------------------------------------------------------

ATANH = (2.0000000079209395, 0.6666631468503942, 0.4002491014466255, 0.27960604732240046, 0.28178326010559573)


def _log1p(y: Any) -> Any:
    """Return log(1 + y) for y between 0 and 1: 2 atanh(y/(2 + y)); in double precision by a correction of log."""
    if y.kind != "f32":
        return torch.where(y + 1 > 1, (y + 1).log() * (y / ((y + 1) - 1)), y)
    z = y / (y + 2)
    return z * horner(ATANH, z * z)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002
    """Bound a value; NaN stays NaN."""
    x = x if min is None else torch.where(x < min, min, x)
    return x if max is None else torch.where(x > max, max, x)


SHARED: dict[str, Any] = {
    "softplus": lambda x: x.clamp(min=0) + _log1p((-abs(x)).exp()),
    "sigmoid": lambda x: torch.where(x > 0, 1, (-abs(x)).exp()) / ((-abs(x)).exp() + 1),
    "clamp": _clamp,
    "square": lambda x: x * x,
    "rsqrt": lambda x: 1 / x.sqrt(),
    "reciprocal": lambda x: 1 / x,
    "detach": lambda x: x,
}


# -- programs ----------------------------------------------------------------------------------------------------------


@cache
def noise_of(formula: Formula) -> str | None:
    """Return the kind of noise that a formula takes: the name of its first argument, "eps", "keep" or "word"."""
    first = next(iter(inspect.signature(formula).parameters), None)
    return first if first in ("eps", "keep", "word") else None


def several(found: Any) -> tuple[Any, ...]:
    """Return the results of a formula as a tuple."""
    return found if isinstance(found, tuple) else (found,)


class Sorted(NamedTuple):
    """The arguments of a program."""

    kinds: Kinds  # of each input: that of an array's elements, "number", or "&" and a kind for a 0-dim tensor in memory
    targets: Kinds  # of each output: its kind, or the place of the input that it is
    arrays: list[Tensor]  # inputs first
    numbers: list[Any]  # what is the same for all elements


def sort(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sorted:
    """Sort the arguments of a program; a device's 0-dim tensors stay in its memory, since reading them would wait."""
    kinds: list[str | int] = []
    targets: list[str | int] = []
    arrays: list[Tensor] = []
    numbers: list[Any] = []
    for x in inputs:
        if isinstance(x, Tensor) and x.dim():
            kinds.append(KINDS[x.dtype])
            arrays.append(x)
        elif isinstance(x, Tensor) and x.device.type != "cpu":
            kinds.append(f"&{KINDS[x.dtype]}")
            numbers.append(x)
        else:
            kinds.append("number")
            numbers.append(float(x))
    for y in outputs:
        targets.append(next((j for j, x in enumerate(inputs) if x is y), KINDS[y.dtype]))
        if isinstance(targets[-1], str):
            arrays.append(y)
    return Sorted(tuple(kinds), tuple(targets), arrays, numbers)


class Program(NamedTuple):
    """What the text around a formula is made of."""

    functions: str  # the texts of `element(x0, x1, ..., noise, bound)`, and for noise of `secret` and `pair`
    real: str  # the kind that the formula computes in
    noise: str | None  # "eps", "keep" or "word"
    arrays: dict[str, str]  # names and kinds, inputs first
    numbers: dict[str, str]
    all: str  # arrays and numbers, as arguments that others follow
    items: str  # the arguments of `element`, each an array's element or a number
    results: str
    stores: list[str]  # a statement for each output
    summed: list[str]  # the results beyond the outputs


def write(writer: type[Writer], formula: Formula, kinds: Kinds, targets: Kinds) -> Program:
    """Write the functions of a formula in a dialect; `Sorted` says what kinds and targets are."""
    real = "f64" if "f64" in (*kinds, *targets) else "f32"
    own, noise = writer(), noise_of(formula)
    names = {f"x{j}": str(kind) for j, kind in enumerate(kinds)}
    numbers = {x: kind for x, kind in names.items() if kind == "number" or kind[0] == "&"}
    arrays = {x: kind for x, kind in names.items() if x not in numbers}
    arrays |= {f"y{j}": kind for j, kind in enumerate(targets) if isinstance(kind, str)}
    given: list[Any] = [
        Value(own, x, "number") if x in numbers else own.of(Value(own, x, kind), real) for x, kind in names.items()
    ]
    if noise:
        made: Any = Value(own, "noise", real if noise == "eps" else "u32")
        given.insert(0, made >= Value(own, "bound", "u32") if noise == "keep" else made)
    found = [r if _is(r, "i32") else own.of(r, real) for r in several(formula(*given))]
    texts = [own.function("element", [*names, *(("noise", "bound") if noise else ())], found)]
    if noise:
        dtype = torch.float64 if real == "f64" else torch.float32

        def pair(key: Any, counter: Any) -> Any:
            words = generator.threefry(key, counter)
            return generator.normal_pair(words, dtype) if noise == "eps" else words

        for name, function in (("secret", generator.secret), ("pair", pair)):
            own = writer()
            a, b, c, d = (Value(own, x, "u32") for x in "abcd")
            texts.append(own.function(name, list("abcd"), function((a, b), (c, d))))
    results = [f"r{j}" for j in range(len(found))]
    places = [f"y{j}" if isinstance(kind, str) else f"x{kind}" for j, kind in enumerate(targets)]
    return Program(
        functions="".join(f"{writer.mark}\n{text}\n\n" for text in texts),
        real=real,
        noise=noise,
        arrays=arrays,
        numbers=numbers,
        all="".join(f"{x}, " for x in (*arrays, *numbers)),
        items="".join(f"{x}, " if x in numbers else f"{writer.load.format(x)}, " for x in names),
        results=", ".join(results),
        stores=[writer.store.format(*pair) for pair in zip(places, results, strict=False)],
        summed=results[len(targets) :],
    )


# -- files of programs: in a folder that only the user can write to, since they are code -------------------------------


def imported(text: str, dialect: str) -> ModuleType:
    """Import a program from a file, which Triton reads, and beside which numba keeps machine code.

    Its name depends on the text and on the `dialect`, the file of the engine that it imports from.
    """
    name = "_" + hashlib.blake2b(text.encode() + Path(dialect).read_bytes(), digest_size=12).hexdigest()
    path = folder() / f"{name}.py"
    if not path.exists() or path.read_text() != text:
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(text)
        new.replace(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # numba looks for it there
    spec.loader.exec_module(module)
    return module


@cache
def folder() -> Path:
    """Return the user's folder of programs; a temporary one where there is none that belongs to the user alone."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
        path = Path(caches) / "bayesify"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(path):
            tempfile.TemporaryFile(dir=path).close()
            return path
    except (OSError, RuntimeError):  # no home, or nowhere to write
        pass
    path, owner = Path(tempfile.mkdtemp(prefix="bayesify-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(path, ignore_errors=True) if os.getpid() == owner else None)
    return path


def is_private(path: Path) -> bool:
    """Return whether a folder belongs to the user, and nobody else may write to it."""
    if not hasattr(os, "getuid"):
        return True  # Windows: a user's local folder is the user's
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022
