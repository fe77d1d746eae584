"""What cannot be made Bayesian, and arguments that make no sense, are refused before anything is changed."""

import warnings

import pytest
import torch
from cases import MLP, tensor
from torch import nn
from torch.nn.parameter import is_lazy

from bayesify import bayesify, mean, named_posteriors, penalty, sample, samples, unbayesify

X = tensor(5, 4)


def fingerprint(model: nn.Module) -> list:
    """Return what a refused call must leave alone."""
    return [
        (
            name,
            id(m),
            type(m),
            list(m._parameters.keys()),
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
            sorted(vars(m)),
        )
        for name, m in model.named_modules()
    ] + [(name, p.data_ptr() if p.is_leaf and not is_lazy(p) else 0) for name, p in model.named_parameters()]


class Keys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.keys = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))


class Twice(nn.Module):
    """A good layer, and then a bad one."""

    def __init__(self, bad: nn.Module) -> None:
        super().__init__()
        self.good, self.bad = nn.Linear(3, 3), bad


def compiled_in_place() -> nn.Module:
    model = nn.Linear(3, 3)
    model.compile()
    return model


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear})


def distributed() -> nn.Module:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(3, 3)
    return wrapped


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.jit.script(nn.Linear(3, 3))


BAD_MODULES = {
    "ddp": (distributed, "is wrapped in DistributedDataParallel; call bayesify first"),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(3, 3)), "is wrapped in DataParallel"),
    "compiled": (lambda: torch.compile(nn.Linear(3, 3)), "is compiled; call bayesify on the plain model"),
    "compiled in place": (compiled_in_place, "is compiled; call bayesify on the plain model"),
    "scripted": (scripted, "is scripted, and TorchScript has no parametrizations"),
    "quantized": (quantized, "is a quantized module"),
    "lazy": (lambda: nn.LazyLinear(3), "is not initialized yet .a lazy module.; run one forward pass first"),
    "sparse": (lambda: nn.Embedding(4, 3, sparse=True), "has sparse gradients.*set sparse=False.*exclude="),
    "sparse bag": (lambda: nn.EmbeddingBag(4, 3, sparse=True), "has sparse gradients"),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), "is on the meta device; load the weights first"),
    "reserved name": (Keys, r"torch cannot parametrize a parameter that is called 'keys'.*exclude="),
    "bayesified": (lambda: bayesify(nn.Linear(3, 3)), "is bayesified already; call unbayesify"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", BAD_MODULES)
def test_what_cannot_be_wrapped_is_refused_untouched(kind: str, inside: bool):
    make, message = BAD_MODULES[kind]
    model = Twice(make()) if inside else make()
    before, rng = fingerprint(model), torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        bayesify(model)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), rng)


def test_not_a_module():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got dict"):
        bayesify({})


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match=r"no parameter is left to become Bayesian .the model has no parameters"):
        bayesify(nn.ReLU())
    with pytest.raises(ValueError, match=r"no parameter is left .*frozen.*requires_grad_\(True\)"):
        bayesify(MLP().requires_grad_(False))


@pytest.mark.parametrize("kind", ["sparse", "reserved name", "meta"])
def test_what_is_excluded_is_not_refused(kind: str):
    model = Twice(BAD_MODULES[kind][0]())
    bayesify(model, include="good.*")
    assert [n for n, _ in named_posteriors(model)] == ["good.weight", "good.bias"]


@pytest.mark.parametrize(
    "call",
    [mean, sample, lambda m: samples(m, 2), lambda m: penalty(m, 3), unbayesify],
    ids=["mean", "sample", "samples", "penalty", "unbayesify"],
)
def test_functions_refuse_a_plain_model(call):
    with pytest.raises(ValueError, match=r"MLP has no posteriors; call bayesify\(model, ...\) first"):
        call(MLP())
    assert list(named_posteriors(MLP())) == []


@pytest.mark.parametrize("seed", [1.5, "1", True])
def test_bad_seeds(seed):
    model = bayesify(MLP())
    with pytest.raises(TypeError, match="seed must be an integer or None"):
        sample(model, seed=seed)
    with pytest.raises(TypeError, match="seed must be an integer or None"):
        samples(model, 2, seed=seed)


@pytest.mark.parametrize("n", [-1, 1.5, True, None])
def test_bad_counts(n):
    with pytest.raises(ValueError, match="n must be an integer >= 0"):
        samples(bayesify(MLP()), n)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int):
    model = bayesify(MLP(), init_sig=0.3)
    with sample(model, seed=seed):
        assert torch.equal(model(X), model(X))


def test_arguments_in_the_wrong_place():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        bayesify("vi", nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        penalty([1], 3)
    with pytest.raises(ValueError, match=r"got a list; pass len\(...\), 2"):
        penalty(bayesify(nn.Linear(2, 2)), [1, 2])


@pytest.mark.parametrize(("method", "hint"), [("VI", "vi"), ("laplace", "la"), ("Dropout", "mc_dropout")])
def test_hints_at_methods(method, hint):
    with pytest.raises(ValueError, match=f"unknown method '{method}', did you mean '{hint}'?"):
        bayesify(nn.Linear(2, 2), method)
    with pytest.raises(ValueError, match=r"did you mean 'prior_sig'\?"):
        bayesify(nn.Linear(2, 2), prior_sigma=0.1)
