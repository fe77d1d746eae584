"""The noise: a pure function, with the distribution that it claims."""

import hashlib
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bayesify import noise as noises
from bayesify.noise import CHUNK, Job, chunk_seed, fill, keep_mask_, mix, name_key, normal_


def normal(*shape: int, seed: int = 0, name: str = "weight", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    fill([Job(out, normal_, seed, name_key(name))])
    return out


def mask(n: int, p: float, seed: int = 0) -> torch.Tensor:
    out = torch.empty(n, dtype=torch.bool)
    fill([Job(out, lambda piece, generator: keep_mask_(piece, generator, p), seed, name_key("weight"))])
    return out


def assert_within(value: float, exact: float, standard_error: float) -> None:
    assert abs(value - exact) < 4 * standard_error, f"{value} is {abs(value - exact) / standard_error:.1f} s.e. off"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3 * CHUNK + 5,), (1 << 17, 5)])
def test_moments(shape: tuple[int, ...], dtype: torch.dtype):
    x = normal(*shape, dtype=dtype).double()
    n = x.numel()
    assert_within(x.mean(), 0, 1 / math.sqrt(n))
    assert_within(x.var(), 1, math.sqrt(2 / n))
    assert_within((x**3).mean(), 0, math.sqrt(15 / n))
    assert_within((x**4).mean(), 3, math.sqrt(96 / n))
    tail = math.erfc(3 / math.sqrt(2))
    assert_within((x.abs() > 3).double().mean(), tail, math.sqrt(tail / n))


@pytest.mark.parametrize("n", [1, 3, 15, 16, 17])
def test_small_tensors_have_the_same_distribution(n: int):
    x = torch.stack([normal(n, seed=seed) for seed in range(4000)]).double()
    assert_within(x.mean(), 0, 1 / math.sqrt(x.numel()))
    assert_within(x.var(), 1, math.sqrt(2 / x.numel()))
    for i, j in itertools.islice(itertools.combinations(range(n), 2), 20):
        assert_within((x[:, i] * x[:, j]).mean(), 0, 1 / math.sqrt(len(x)))


def correlation(x: torch.Tensor, y: torch.Tensor) -> None:
    """Check that two noises are uncorrelated, and their squares too."""
    x, y = x.double().flatten(), y.double().flatten()
    assert_within((x * y).mean(), 0, 1 / math.sqrt(len(x)))
    assert_within(((x**2 - 1) * (y**2 - 1)).mean(), 0, 2 / math.sqrt(len(x)))


def test_independence():
    base = normal(2 * CHUNK)
    correlation(base, normal(2 * CHUNK, seed=1))  # draws
    correlation(base, normal(2 * CHUNK, seed=1 << 32))
    correlation(base, normal(2 * CHUNK, seed=(1 << 63) + 1))
    correlation(base, normal(2 * CHUNK, name="bias"))  # parameters
    correlation(base[:CHUNK], base[CHUNK:])  # chunks
    for lag in (1, 2, 8, 16, 624):  # elements
        correlation(base[:-lag], base[lag:])


def test_first_elements_of_consecutive_draws_are_independent():
    x = torch.stack([normal(2, seed=seed) for seed in range(5000)])
    correlation(x[:-1, 0], x[1:, 0])
    correlation(x[:, 0], x[:, 1])
    assert_within(x.double().var(), 1, math.sqrt(2 / x.numel()))


def test_a_pure_function_of_seed_name_and_element():
    alone = normal(CHUNK + 7, seed=5, name="b")
    torch.manual_seed(123)
    torch.rand(10)
    together = {name: torch.empty(CHUNK + 7) for name in "abc"}
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            state = torch.get_rng_state()
            fill(Job(out, normal_, 5, name_key(name)) for name, out in together.items())
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.equal(together["b"], alone)
            assert not torch.equal(together["a"], alone)
    finally:
        torch.set_num_threads(threads)


def test_a_whole_chunk_does_not_depend_on_what_follows():
    assert torch.equal(normal(CHUNK), normal(2 * CHUNK + 3)[:CHUNK])


def test_name_keys_are_stable_and_distinct():
    digest = hashlib.blake2b(b"weight", digest_size=8).digest()
    assert name_key("weight") == int.from_bytes(digest, "little")
    assert len({name_key(f"layers.{i}.weight") for i in range(10_000)}) == 10_000


def test_consecutive_draws_never_share_a_generator_seed():
    """A CPU generator knows 32 bits: the seeds of one chunk must differ over all nearby draws."""
    base = mix(17)
    seeds = {chunk_seed(base + i, name_key("weight"), 0) for i in range(50_000)}
    assert len(seeds) == 50_000
    assert all(0 <= s < 1 << 32 for s in itertools.islice(seeds, 100))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_mix_is_64_bits_and_sensitive(seed: int, word: int):
    mixed = mix(seed, word)
    assert 0 <= mixed < 1 << 64
    assert mixed != mix(seed, (word + 1) % 2**64)
    assert mixed != mix((seed + 1) % 2**64, word)


@pytest.mark.parametrize("p", [0.5, 0.1, 0.25, 1 / 3, 0.9, 0.999, 1e-3, 1e-5, 2**-16])
def test_bernoulli_frequency(p: float):
    n = 4 * CHUNK + 3
    kept = mask(n, p)
    assert_within(kept.double().mean(), 1 - p, math.sqrt(p * (1 - p) / n))
    dropped = ~kept
    pairs = (dropped[1:] & dropped[:-1]).double().mean()
    assert_within(pairs, p * p, math.sqrt(max(p * p * (1 - p * p), 1 / n) / n))
    again = ~mask(n, p, seed=1)
    assert_within((dropped & again).double().mean(), p * p, math.sqrt(max(p * p * (1 - p * p), 1 / n) / n))


@pytest.mark.parametrize(("p", "everything"), [(1e-12, True), (1 - 1e-7, False), (1 - 1e-12, False)])
def test_bernoulli_extremes(p: float, everything: bool):
    assert bool(mask(CHUNK, p).all() if everything else not mask(CHUNK, p).any())


@pytest.mark.parametrize("p", [1e-4, 0.1, 1 - 1e-4, 1e-7])
def test_bernoulli_threshold_is_as_fine_as_p_needs(p: float, monkeypatch: pytest.MonkeyPatch):
    """Compare against the exact share of the integers that pass, instead of waiting for rare events."""
    seen = []
    monkeypatch.setattr(torch, "ge", lambda words, bound, out: seen.append((words.dtype, bound)))
    keep_mask_(torch.empty(8, dtype=torch.bool), torch.Generator(), p)
    ((dtype, bound),) = seen
    dropped = (bound - torch.iinfo(dtype).min) / (torch.iinfo(dtype).max - torch.iinfo(dtype).min + 1)
    assert dropped == pytest.approx(p, rel=2e-3)
    assert 1 - dropped == pytest.approx(1 - p, rel=2e-3)


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, CHUNK - 1, CHUNK, CHUNK + 1])
def test_every_size_is_filled(n: int):
    out = torch.full((n,), torch.nan)
    fill([Job(out, normal_, 0, 0)])
    assert torch.isfinite(out).all()
    assert mask(n, 0.5).shape == (n,)


def test_an_error_in_a_helper_thread_is_raised():
    def fail(out: torch.Tensor, generator: torch.Generator) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fill([Job(torch.empty(3 * CHUNK), fail, 0, 0)])


def test_the_global_seed_comes_from_the_cpu_generator_whatever_the_default_device():
    torch.manual_seed(1)
    seed = noises.global_seed()
    torch.manual_seed(1)
    with torch.device("meta"):
        assert noises.global_seed() == seed
