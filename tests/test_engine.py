"""A formula written once: the same words on every engine, the same numbers to rounding."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import engine_cases
import pytest
import torch
from engine_cases import DOUBLE, EVERYWHERE, FULL, SHARDS, SIZES, cases, exact, sizes, stream_of

from bayesify.engine import dispatch, writing
from bayesify.engine.noise import Stream

EPS = {torch.float32: torch.finfo(torch.float32).eps, torch.float64: torch.finfo(torch.float64).eps}
NAMES = list(cases(1))
NO_TRITON = "triton is not installed; it comes with torch for CUDA"


@pytest.fixture(scope="module", params=["torch", "numba", "triton"])
def results(request, tmp_path_factory):
    """What an engine makes of all cases, in a process of its own."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(NO_TRITON if request.param == "triton" else f"{request.param} is not installed")
    file = tmp_path_factory.mktemp(request.param) / "results.pt"
    env = {**os.environ, "BAYESIFY_ENGINE": request.param, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "error", engine_cases.__file__, str(file)], env=env, check=True)
    return torch.load(file)


def test_words_are_equal(results):
    for n, start in SIZES + SHARDS:
        assert torch.equal(results["words", n, start][0], stream_of(n, start).words())


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_within_five_eps(results, name, dtype):
    places = FULL + [p for p in SIZES + SHARDS if p not in FULL] * (name in EVERYWHERE)
    if dtype == torch.float64:
        places = [(4097, 0)] * (name in DOUBLE)
    for n, start in places:
        found = results[name if dtype == torch.float32 else f"{name}, float64", n, start]
        case, stream = cases(n)[name], stream_of(n, start)
        for got, wanted, size in zip(found, exact(case, stream), sizes(case, stream), strict=True):
            error = (got.double() - wanted).abs() / size.abs().clamp(min=1e-30)
            assert error.max() < 5 * EPS[dtype], f"{n} elements from {start}"


def test_many_tensors_at_once_are_what_each_is_alone(results):
    assert not torch.equal(results["many", 0][1], results["many", 1][1])  # of another seed
    for key in results:
        if key[0] == "many, alone":
            assert torch.equal(*results[key])
    assert torch.equal(results["many sums"][0], results["many sums, alone"][0])
    assert len({y.untyped_storage().data_ptr() for y in results["many", 0]}) in (1, len(results["many", 0]))


def scale(x, factor):
    return factor * x


def copy(x):
    return x


def wrong(x):
    return x.fft()


def branching(x):
    return x if x > 0 else -x


@pytest.mark.parametrize("engine", ["torch", "numba"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_parameters_of_any_shape(engine, shape, monkeypatch):
    monkeypatch.setenv("BAYESIFY_ENGINE", engine)
    x = torch.randn(shape)
    out = torch.empty_like(x)
    dispatch.run(scale, None, (x, 2.0), (out,))
    assert torch.equal(out, 2 * x)
    torch.testing.assert_close(dispatch.total(scale, (x, 2.0)), 2 * x.double().sum().view(1))


def test_tensors_in_any_order_of_memory():
    x, out = torch.randn(5, 3).t(), torch.empty(5, 3).t()
    dispatch.run(scale, None, (x, torch.tensor(2.0)), (out,))
    assert torch.equal(out, 2 * x)


@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_an_input_that_is_overwritten_has_a_new_version(engine, monkeypatch):
    monkeypatch.setenv("BAYESIFY_ENGINE", engine)
    x = torch.ones(5, requires_grad=True)
    dispatch.run(scale, None, (x, 2.0), (x,))
    assert x._version > 0 and torch.equal(x.detach(), torch.full((5,), 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_widened_and_rounded_to_the_nearest(dtype):
    x, out = torch.randn(100).to(dtype), torch.empty(100, dtype=dtype)
    dispatch.run(scale, None, (x, 1.001), (out,))
    assert torch.equal(out, (x.float() * 1.001).to(dtype))


def test_large_tensors_are_done_in_pieces(monkeypatch):
    """Temporaries stay bounded, and the numbers are those of the whole."""
    monkeypatch.setenv("BAYESIFY_ENGINE", "torch")
    whole, out, x = Stream(1, 2, (20_000,)).normal(), torch.empty(20_000), torch.zeros(20_000)
    seen = []

    def draw(eps, m):
        seen.append(len(eps))
        return m + eps

    monkeypatch.setitem(dispatch.PIECE, "cpu", 3000)
    dispatch.run(draw, Stream(1, 2, (20_000,)), (x,), (out,))
    assert max(seen) == 3000 and torch.equal(out, whole)
    found = dispatch.total(draw, (x,), Stream(1, 2, (20_000,)))
    torch.testing.assert_close(found, whole.double().sum().view(1))


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "device", "message"),
    [
        ("fast", "cpu", "must be one of"),
        ("numba", "cuda", "serves tensors of a CPU"),
        ("triton", "cpu", "TRITON_INTERPRET=1 in the environment before"),
    ],
)
def test_an_engine_that_cannot_be_forced(engine, device, message, monkeypatch):
    monkeypatch.setenv("BAYESIFY_ENGINE", engine)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        dispatch.chosen(device)


def test_the_device_chooses(monkeypatch):
    monkeypatch.delenv("BAYESIFY_ENGINE", raising=False)
    devices = ("cpu", "cuda", "xpu", "mps")
    assert [dispatch.chosen(d) for d in devices] == ["numba", "triton", "triton", "torch"]


def test_an_engine_that_does_not_work_is_named_once_with_what_to_install(monkeypatch):
    monkeypatch.setattr(dispatch, "ready", dispatch.ready.__wrapped__)
    monkeypatch.setitem(sys.modules, "bayesify.engine.gpu", None)
    with pytest.warns(UserWarning, match="a C compiler"):
        assert dispatch.ready("triton") is None
    monkeypatch.setitem(dispatch.MODULES, "numba", "bayesify.engine.missing")
    with pytest.warns(UserWarning, match="pip install numba"):
        assert dispatch.ready("numba") is None


def test_wrong_numbers_of_a_first_kernel_are_noticed():
    class Broken:
        @staticmethod
        def run(formula, stream, inputs, outputs, size, p_drop):
            outputs[0].zero_()

    with pytest.raises(RuntimeError, match="wrong numbers"):
        dispatch._probe(Broken)


@pytest.mark.parametrize(
    ("formula", "error", "message"),
    [(wrong, TypeError, "cannot use 'fft'; use operators and"), (branching, TypeError, "use torch.where")],
)
def test_a_formula_that_cannot_be_written(formula, error, message):
    with pytest.raises(error, match=message):
        dispatch.run(formula, None, (torch.ones(3),), (torch.empty(3),))


def test_a_formula_with_a_tensor_of_its_own():
    held = torch.ones(3)
    with pytest.raises(TypeError, match="got a Tensor; make it an input"):
        dispatch.run(lambda x: x + held, None, (torch.ones(3),), (torch.empty(3),))


def test_tensors_of_other_sizes():
    with pytest.raises(ValueError, match=r"one size, got \[3, 4\]"):
        dispatch.run(copy, None, (torch.ones(3),), (torch.empty(4),))


# -- files -------------------------------------------------------------------------------------------------------------


def test_programs_lie_in_a_private_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = writing.folder.__wrapped__()
    assert found == tmp_path / "bayesify" and found.stat().st_mode & 0o777 == 0o700
    found.chmod(0o777)  # now anybody may have left a program there
    other = writing.folder.__wrapped__()
    assert other != found and writing.is_private(other)


def test_a_damaged_program_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "folder", lambda: tmp_path)
    assert writing.imported("answer = 42\n", __file__).answer == 42
    (file,) = tmp_path.glob("*.py")
    file.write_text("answer = 7\n")
    assert writing.imported("answer = 42\n", __file__).answer == 42


def test_machine_code_is_found_again_by_another_process(tmp_path):
    script = """
import torch
from bayesify.engine import cpu
from bayesify.engine.noise import Stream
from bayesify.engine.writing import noise_of
torch.set_num_threads(2)
x = Stream(1, 2, (200_000,)).normal()
loops = [f for module in list(__import__("sys").modules.values()) for f in map(vars(module).get, ("serial", "several"))
         if hasattr(f, "stats")]
print(*(sum(sum(getattr(f.stats, what).values()) for f in loops) for what in ("cache_hits", "cache_misses")))
"""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    env.pop("NUMBA_CACHE_DIR", None)
    runs = [subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True) for _ in range(2)]
    (hits, misses), again = (r.stdout.decode().split() for r in runs)
    assert hits == "0" and int(misses) > 0 and int(again[0]) > 0 and again[1] == "0"


# -- graphics cards ----------------------------------------------------------------------------------------------------

AHEAD = """
import re, subprocess, sys, tempfile
from pathlib import Path
import triton, triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import create_function_from_signature
import torch
from bayesify.engine import gpu
from engine_cases import DRAWS, PULLS

CARDS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
target = GPUTarget(*CARDS[sys.argv[1]])
POINTERS = {"f32": "*fp32", "bf16": "*bf16"}


def signature(kernel, kinds, targets):
    found = {}
    for name in kernel.arg_names:
        if name[1:].isdigit():
            kind = (kinds if name[0] == "x" else targets)[int(name[1:])]
            found[name] = "fp64" if kind == "number" else POINTERS[kind.strip("&")]
        else:
            found[name] = {"table": "*i64", "owners": "*i64", "held": "*i64", "totals": "*fp64"}.get(name, "i64")
    return {**found, "HELD": "constexpr"}


def compiled(kernel, kinds, targets):
    names = signature(kernel, kinds, targets)
    multiples = [i for i, (k, v) in enumerate(names.items()) if v[0] == "*" or k in ("n", "start")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in multiples}
    source = triton.compiler.ASTSource(fn=kernel, signature=names, constexprs={"HELD": True}, attrs=aligned)
    return triton.compile(source, target=target, options=gpu.OPTIONS)


def used(found):
    if target.backend == "hip":
        text = found.asm["amdgcn"]
        spills = [int(n) for n in re.findall(r"gpr_spill_count:\\s*(\\d+)", text)]
        return int(re.search(r"\\.vgpr_count:\\s*(\\d+)", text)[1]), sum(spills)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        ran = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    text = ran.stdout + ran.stderr
    stack, local = (int(re.search(what + r":(\\d+)", text)[1]) for what in ("STACK", "LOCAL"))
    return int(re.search(r"REG:(\\d+)", text)[1]), stack + local


draw = gpu.program(DRAWS["softplus"], ("f32", "f32"), ("f32",))
pull = gpu.program(PULLS["softplus"], ("bf16", "bf16", "f32", "f32", "&f32", "number"), ("bf16", "f32"))
print(*used(compiled(draw.kernel, ("f32", "f32"), ("f32",))))
print(*used(compiled(draw.grouped, (), ())))
print(*used(compiled(pull.kernel, ("bf16", "bf16", "f32", "f32", "&f32", "number"), ("bf16", "f32"))))
bind = create_function_from_signature(draw.kernel.signature, draw.kernel.params, triton.compiler.make_backend(target))
x = torch.empty(64)
ways = [bind(x, x, x, n, 0, key, seed, 5, x, x, HELD=False)[1]
        for n in (64, 8192, 1 << 40) for key, seed in ((1, 0), (16, 2**40), (-(2**63), 7))]
assert all(way == ways[0] for way in ways), ways
"""


@pytest.mark.parametrize("card", ["sm_80", "sm_90", "gfx942"])
def test_kernels_are_compiled_ahead_of_time_without_spills(card):
    """And one binding serves all keys, seeds and multiples of 16 in size."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    env.pop("TRITON_INTERPRET", None)
    ran = subprocess.run([sys.executable, "-c", AHEAD, card], env=env, check=False, capture_output=True, text=True)
    if re.search("cuobjdump.*No such file|cannot find ptxas", ran.stderr, re.IGNORECASE):
        pytest.skip("the tools of NVIDIA that come with triton are not here")
    assert ran.returncode == 0, ran.stderr
    for line in ran.stdout.splitlines():
        registers, spills = map(int, line.split())
        assert spills == 0 and registers <= 128


def test_noise_of_a_host_seed_is_not_captured(monkeypatch):
    """Every replay of the graph would repeat it."""
    pytest.importorskip("triton", reason=NO_TRITON)
    from bayesify.engine import gpu

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="every replay would repeat one noise"):
        gpu._seed(Stream(5, 2, (4,)), torch.device("cuda"))
    assert gpu._seed(None, torch.device("cuda")) == (0, None)


def test_kinds_of_arguments():
    x, y = torch.ones(3), torch.ones(3, dtype=torch.float64)
    found = writing.sort((x, 2, torch.tensor(3.0)), (x, y))
    assert found.kinds == ("f32", "number", "number") and found.targets == (0, "f64")
    assert found.numbers == [2.0, 3.0] and found.arrays[0] is x
