"""timm and torchvision: heads, priors, weights from files, transforms, batch statistics."""

import copy
import functools
import os

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from bayesify import bayesify, mean, named_posteriors, param_groups, sample, samples
from bayesify.integrations import vision
from bayesify.integrations.vision import create_bayesian, update_bn

SMALL_TIMM = "test_resnet"
SMALL_TORCHVISION = "mnasnet0_5"
PICTURE = Image.fromarray(np.arange(300 * 260 * 3, dtype=np.uint8).reshape(300, 260, 3))


def priors(model):
    return {name: posterior.prior_mean for name, posterior in named_posteriors(model)}


# -- models and heads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "package", "head"),
    [
        (SMALL_TIMM, "timm", ("fc",)),
        (SMALL_TORCHVISION, "torchvision", ("classifier.1",)),
        ("resnet18", "timm", ("fc",)),
        ("timm/resnet18", "timm", ("fc",)),
        ("torchvision/resnet18", "torchvision", ("fc",)),
        ("torchvision/squeezenet1_1", "torchvision", ("classifier.1",)),
        ("test_convnext", "timm", ("head.fc",)),
        ("deit_tiny_distilled_patch16_224", "timm", ("head", "head_dist")),
    ],
)
def test_a_name_gives_a_model_with_a_head_of_that_many_classes(name, package, head):
    built = create_bayesian(name, num_classes=3)
    assert type(built.model).__bases__[0].__module__.startswith(package) or built.model.__module__.startswith(package)
    assert built.head == head
    size = built.eval_transform(PICTURE).shape
    with torch.no_grad():
        assert built.model.eval()(torch.randn(2, *size)).shape == (2, 3)


TORCHVISION_FAMILIES = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s maxvit_t mnasnet0_5 mobilenet_v2 "
    "mobilenet_v3_small regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_0 swin_t swin_v2_t "
    "vgg11 vgg11_bn vit_b_16 wide_resnet50_2"
)


@pytest.mark.parametrize("name", TORCHVISION_FAMILIES.split())
def test_the_classifier_of_every_torchvision_family_is_found(name):
    with torch.device("cpu" if "regnet" in name else "meta"):  # RegNet computes its widths from tensors
        model = torchvision.models.get_model(name)
    before = dict(model.named_modules())
    (head,), new = vision._set_classes(model, 7)
    assert new
    assert vision._classes(before[head]) == 1000
    assert vision._classes(model.get_submodule(head)) == 7
    assert {n for n, m in model.named_modules() if m is not before[n]} == {head}


def test_the_head_has_a_learning_rate_of_its_own():
    model, _, _, head = create_bayesian("deit_tiny_distilled_patch16_224", num_classes=3)
    groups = {g["name"]: g for g in param_groups(model, 0.01, lr_head=0.1, head=head)}
    assert groups["head"]["lr"] == 0.1
    wanted = {id(p) for name in head for p in model.get_submodule(name).parameters()}
    in_sig = {id(p) for p in groups["sig"]["params"]}
    assert {id(p) for p in groups["head"]["params"]} == wanted - in_sig


def test_a_model_keeps_its_weights_as_prior_mean_and_a_new_head_has_zero():
    plain = timm.create_model(SMALL_TIMM, num_classes=10)
    weights = {n: p.detach().clone() for n, p in plain.named_parameters()}
    model, _, _, head = create_bayesian(plain, num_classes=3)
    assert model is plain
    for name, value in priors(model).items():
        expected = torch.zeros_like(value) if name.startswith(head) else weights[name]
        assert torch.equal(value, expected), name


def test_an_unchanged_head_keeps_its_weights():
    for classes in (None, 10):
        plain = timm.create_model(SMALL_TIMM, num_classes=10)
        weight = plain.fc.weight.detach().clone()
        model = create_bayesian(plain, num_classes=classes).model
        assert torch.equal(priors(model)["fc.weight"], weight)


def test_from_scratch_the_prior_mean_is_zero():
    model = create_bayesian(SMALL_TIMM, "mc_dropout", num_classes=3, p_drop=0.2).model
    for name, value in priors(model).items():
        is_scale = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.BatchNorm2d) and name.endswith("weight")
        assert bool((value == is_scale).all()), name


def test_the_callers_prior_mean_comes_first():
    model = create_bayesian(SMALL_TIMM, num_classes=3, prior_mean=None, prior_sig=0.5).model
    for _, posterior in named_posteriors(model):
        assert torch.equal(posterior.prior_mean, posterior.mean)
        assert posterior.prior_sig == 0.5


def test_weights_from_a_file(tmp_path):
    torch.manual_seed(3)
    donor = timm.create_model(SMALL_TIMM)
    save_file(donor.state_dict(), tmp_path / "weights.safetensors")
    model = create_bayesian(SMALL_TIMM, num_classes=3, pretrained=tmp_path / "weights.safetensors").model
    assert torch.equal(priors(model)["conv1.0.weight"], donor.conv1[0].weight)
    assert not priors(model)["fc.weight"].any()

    donor = torchvision.models.shufflenet_v2_x0_5()
    save_file(donor.state_dict(), tmp_path / "weights.safetensors")
    torch.save(donor.state_dict(), tmp_path / "weights.pth")
    for file in ("weights.safetensors", "weights.pth"):
        model = create_bayesian("shufflenet_v2_x0_5", num_classes=3, pretrained=tmp_path / file).model
        assert torch.equal(priors(model)["conv1.0.weight"], donor.conv1[0].weight)


def test_pretrained_true_asks_the_library(monkeypatch):
    asked = {}
    real = timm.create_model

    def create_model(name, pretrained, **kwargs):
        asked["timm"] = pretrained
        return real(name)

    monkeypatch.setattr(timm, "create_model", create_model)
    create_bayesian(SMALL_TIMM, pretrained=True)

    def get_model(name, *, weights, **kwargs):
        asked["torchvision"] = weights
        return torchvision.models.mnasnet0_5()

    monkeypatch.setattr(torchvision.models, "get_model", get_model)
    create_bayesian("torchvision/mnasnet0_5", pretrained=True)
    assert asked == {"timm": True, "torchvision": torchvision.models.MNASNet0_5_Weights.DEFAULT}


@pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet:FutureWarning")
def test_auxiliary_outputs_are_left_out():
    model = create_bayesian("torchvision/googlenet", "vanilla", num_classes=3).model
    assert isinstance(model.train()(torch.randn(2, 3, 64, 64)), torch.Tensor)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("resnet18x",), {}, r"no model 'resnet18x' in timm or torchvision \(closest: .*resnet18"),
        (("torchvision/test_resnet",), {}, "no model 'test_resnet' in torchvision"),
        ((SMALL_TIMM,), {"pretrained": "nowhere.pth"}, "nowhere.pth', which is no file"),
        ((SMALL_TIMM,), {"num_classes": 0}, "num_classes must be a positive integer"),
        ((SMALL_TIMM,), {"num_classes": True}, "num_classes must be a positive integer"),
        ((SMALL_TIMM,), {"colour": 1}, "unknown option 'colour'"),
        ((nn.Linear(3, 2),), {"pretrained": True}, "pretrained goes with a name"),
        ((nn.Linear(3, 2),), {"num_classes": 2}, "Linear has no classifier to replace"),
    ],
)
def test_errors_name_the_fix(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        create_bayesian(*arguments, **options)


def test_neither_a_name_nor_a_model():
    with pytest.raises(TypeError, match=r"takes a name or a torch.*, got int"):
        create_bayesian(3)


def test_a_file_of_another_model(tmp_path):
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="does not fit shufflenet_v2_x0_5; give the model that it was saved from"):
        create_bayesian("shufflenet_v2_x0_5", pretrained=tmp_path / "other.pth")


# -- transforms -----------------------------------------------------------------------------------------------------


def test_transforms_are_the_librarys():
    _, train, evaluate, _ = create_bayesian("tf_efficientnet_lite0", "vanilla")
    assert train(PICTURE).shape == evaluate(PICTURE).shape == (3, 224, 224)
    assert evaluate.transforms[-1].mean.tolist() == [0.5, 0.5, 0.5]

    _, train, evaluate, _ = create_bayesian("torchvision/efficientnet_b1", "vanilla")
    assert train(PICTURE).shape == evaluate(PICTURE).shape == (3, 240, 240)
    expected = torchvision.models.EfficientNet_B1_Weights.DEFAULT.transforms()(PICTURE)
    assert torch.equal(evaluate(PICTURE), expected)


def test_a_model_without_a_config_gets_imagenets_transforms():
    model = torchvision.models.VisionTransformer(64, 32, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)
    built = create_bayesian(model, num_classes=3)
    assert built.head == ("heads.head",)
    assert built.train_transform(PICTURE).shape == built.eval_transform(PICTURE).shape == (3, 64, 64)


# -- batch statistics -----------------------------------------------------------------------------------------------


def normed(spread=0.5):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3), nn.BatchNorm1d(3))
    return bayesify(model, "vi", init_sig=spread)


BATCHES = [torch.randn(32, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def statistics(model, layer=0):
    """The average over batches of mean and variance of a linear layer's output, by hand."""
    with torch.no_grad():
        outputs = [model[layer](x) for x in BATCHES]
    return torch.stack([o.mean(0) for o in outputs]).mean(0), torch.stack([o.var(0) for o in outputs]).mean(0)


def test_statistics_of_the_mean():
    model = normed()
    update_bn(model, [(x, torch.zeros(32)) for x in BATCHES])
    with mean(model):
        expected_mean, expected_var = statistics(model)
    torch.testing.assert_close(model[1].running_mean, expected_mean)
    torch.testing.assert_close(model[1].running_var, expected_var)
    assert model.training
    assert model[1].momentum == 0.1


def test_statistics_averaged_over_draws():
    model = normed()
    update_bn(model, BATCHES, samples=4, seed=7)
    found = [statistics(model) for _ in samples(model, 4, seed=7)]
    torch.testing.assert_close(model[1].running_mean, torch.stack([m for m, _ in found]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([v for _, v in found]).mean(0))


def test_statistics_of_each_pinned_draw():
    model = normed()
    with sample(model, seed=3):
        update_bn(model, BATCHES, samples=None)
        expected_mean, expected_var = statistics(model)
        torch.testing.assert_close(model[1].running_mean, expected_mean)
        torch.testing.assert_close(model[1].running_var, expected_var)
        # With statistics of its own the draw's output is normalized.
        output = torch.cat([model.eval()(x) for x in BATCHES])
        torch.testing.assert_close(output.mean(0), model[4].bias, atol=1e-4, rtol=0)


def test_training_statistics_follow_the_draws():
    model = normed()
    before = model[1].running_mean.clone()
    with sample(model, seed=3):
        model(BATCHES[0])
        drawn = model[0](BATCHES[0]).mean(0)
    torch.testing.assert_close(model[1].running_mean, 0.9 * before + 0.1 * drawn)


def test_statistics_are_as_before_after_an_error():
    model = normed().eval()
    before = copy.deepcopy({n: b for n, b in model.named_buffers() if "running" in n or "tracked" in n})
    with pytest.raises(ValueError, match="no batches"):
        update_bn(model, [])
    with pytest.raises(RuntimeError):
        update_bn(model, [BATCHES[0], torch.ones(2, 9)])
    for name, buffer in before.items():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert not model[1].training
    for samples_ in (-1, True, 1.5):
        with pytest.raises(ValueError, match="samples must be an integer >= 0"):
            update_bn(model, BATCHES, samples=samples_)


def test_a_model_without_batch_norm_or_posteriors():
    model = bayesify(nn.Linear(4, 3))
    assert update_bn(model, BATCHES) is model
    with pytest.raises(ValueError, match="has no posteriors"):
        update_bn(nn.BatchNorm1d(4), BATCHES)


def test_update_bn_needs_batches_for_every_sample():
    model = bayesify(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    with pytest.raises(ValueError, match="no batches are left for sample 2"):
        update_bn(model, (torch.randn(8, 3) for _ in range(2)), samples=3)


def test_a_wrong_option_leaves_the_head():
    model = timm.create_model(SMALL_TIMM, num_classes=7)
    with pytest.raises(ValueError, match="did you mean 'kld'"):
        create_bayesian(model, "vi", num_classes=3, kldd=1.0)
    assert model.get_classifier().out_features == 7


@pytest.mark.parametrize("options", [{"prior_sig": -1}, {"include": "nothing*"}, {"prior_mean": {"nothing*": "zero"}}])
@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_an_error_of_bayesify_leaves_the_head(name, options):
    model = timm.create_model(SMALL_TIMM) if name == "timm" else torchvision.models.get_model(SMALL_TORCHVISION)
    before, classes = dict(model.named_modules()), getattr(model, "num_classes", None)
    with pytest.raises(ValueError):
        create_bayesian(model, num_classes=3, **options)
    assert dict(model.named_modules()) == before
    assert getattr(model, "num_classes", None) == classes


@pytest.mark.parametrize("name", [f"timm/{SMALL_TIMM}", f"torchvision/{SMALL_TORCHVISION}"])
@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_a_file_that_holds_no_weights(name, ending, tmp_path):
    path = tmp_path / f"weights.{ending}"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=f"weights.{ending} does not fit"):
        create_bayesian(name, pretrained=path)


def test_update_bn_takes_one_batch():
    model = normed()
    other, batch = copy.deepcopy(model), torch.randn(32, 4)
    update_bn(model, batch)
    update_bn(other, [batch])
    assert torch.equal(model[1].running_mean, other[1].running_mean)


class Trap:
    """What a pickle does when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [SMALL_TIMM, "shufflenet_v2_x0_5"])
def test_a_weights_file_is_never_unpickled(name, tmp_path, monkeypatch):
    # As releases of timm do that open files of their own accord.
    real = timm.models._builder.load_state_dict
    monkeypatch.setattr(timm.models._builder, "load_state_dict", functools.partial(real, weights_only=False))
    torch.save({"state_dict": {}, "trap": Trap(tmp_path / "sprung")}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="does not fit"):
        create_bayesian(name, pretrained=tmp_path / "weights.pth")
    assert not (tmp_path / "sprung").exists()


def test_a_weights_file_is_not_kept_in_memory(tmp_path):
    torch.save(timm.create_model(SMALL_TIMM).state_dict(), tmp_path / "weights.pth")
    model = create_bayesian(SMALL_TIMM, pretrained=tmp_path / "weights.pth").model
    assert not any(isinstance(value, dict) for value in model.pretrained_cfg.values())
