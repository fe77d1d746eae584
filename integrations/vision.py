"""timm and torchvision: build a Bayesian model with a new head and its transforms; `update_bn` for batch statistics.

The prior mean of the body is the pretrained weights, that of a new head is zero.
"""

import difflib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.method import ARGUMENTS, Method, resolve
from bayesify.core.wrap import bayesify
from bayesify.prediction.calibrate import update_bn

from .extras import extra

__all__ = ["BayesianVision", "create_bayesian", "update_bn"]

LIBRARIES = ("timm", "torchvision")
CLASSIFIERS = ("fc", "classifier", "heads", "head")  # where torchvision's models keep theirs

Transform = Callable[[Any], Tensor]


class BayesianVision(NamedTuple):
    """What `create_bayesian` returns.

    Attributes:
        model: The bayesified model.
        train_transform: From a PIL image to an augmented input of the model.
        eval_transform: From a PIL image to an input of the model.
        head: The full name of each classifier layer, for `param_groups(model, lr, lr_head=..., head=head)`.
    """

    model: nn.Module
    train_transform: Transform
    eval_transform: Transform
    head: tuple[str, ...]


@extra("bayesify[vision]", *LIBRARIES)
def create_bayesian(
    name_or_model: str | nn.Module,
    method: str | Method = "vi",
    *,
    num_classes: int | None = None,
    pretrained: "bool | str | os.PathLike[str]" = False,
    prior_sig: Any = 1.0,
    **options: Any,
) -> BayesianVision:
    """Build a Bayesian image classifier on a pretrained body.

    The classifier is replaced by the library's own means where `num_classes` differs from what the model has (for timm
    `reset_classifier`, which starts it as `nn.Linear` does: an EfficientNet that timm builds anew starts far off).
    Prior means: zero for a new head; for everything else the pretrained weights, or zero (1 for normalization scales)
    where the weights are random because a name was given without `pretrained`. `prior_mean=...` overrides them.

    Args:
        name_or_model: A timm or torchvision name; "timm/resnet50" and "torchvision/resnet50" tell apart what both
            have, and a bare name is timm's where both have it. Or a model with the weights that it should keep.
        method: As in `bayesify`.
        num_classes: Classes of the head; None keeps the head.
        pretrained: True for the library's default weights, or the path of a weights file (.safetensors, .pth).
        prior_sig: As in `bayesify`.
        **options: Anything else that `bayesify` takes.

    Returns:
        The model, the transforms for training and evaluation that fit it, and the names of its head's layers.

    Raises:
        ValueError: The name is unknown, the file does not exist or does not fit, or no classifier is found.

    Example:
        >>> from bayesify import param_groups
        >>> from bayesify.integrations.vision import create_bayesian
        >>> model, train_transform, eval_transform, head = create_bayesian("torchvision/resnet18", num_classes=2)
        >>> head, [g["name"] for g in param_groups(model, 0.01, lr_head=0.1, head=head)]
        (('fc',), ['body', 'head', 'sig'])
    """
    if isinstance(num_classes, bool) or not (num_classes is None or (isinstance(num_classes, int) and num_classes > 0)):
        raise ValueError(f"num_classes must be a positive integer or None, got {num_classes!r}")
    if isinstance(name_or_model, nn.Module):
        if pretrained is not False:
            raise ValueError("pretrained goes with a name; load the weights into the model before passing it")
        model, transforms, random = name_or_model, _transforms_of_model(name_or_model), False
    elif isinstance(name_or_model, str):
        model, transforms = _build(name_or_model, pretrained)
        random = pretrained is False
    else:
        raise TypeError(f"create_bayesian takes a name or a torch.nn.Module, got {type(name_or_model).__name__}")
    resolve(method, options.get("bias"), {k: v for k, v in options.items() if k not in ARGUMENTS})
    with _unchanged_on_error(model):
        head, new = _set_classes(model, num_classes)
        if "prior_mean" not in options:
            zero = {f"{name}.*": "zero" for name in head}
            options["prior_mean"] = "zero" if random else zero if new else None
        bayesify(model, method, prior_sig=prior_sig, **options)
    return BayesianVision(model, *transforms, head)


@contextmanager
def _unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Put the modules and attributes of a model back where an error came between: its head may be new by then."""
    before = [(module, {**module.__dict__, "_modules": dict(module._modules)}) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, state in before:
            module.__dict__.clear()
            module.__dict__.update(state)
        raise


# -- models ---------------------------------------------------------------------------------------------------------


def _build(name: str, pretrained: "bool | str | os.PathLike[str]") -> tuple[nn.Module, tuple[Transform, Transform]]:
    """Build a model by name, with its weights and transforms."""
    file = None if isinstance(pretrained, bool) else os.fspath(pretrained)
    if file is not None and not os.path.isfile(file):
        raise ValueError(f"pretrained must be True, False or a weights file, got {file!r}, which is no file")
    library, bare = _library_of(name)
    if library == "timm":
        import timm

        with _reading(file, bare):
            overlay = None if file is None else _timm_weights(file)
            model: nn.Module = timm.create_model(bare, pretrained=bool(pretrained), pretrained_cfg_overlay=overlay)
        if overlay is not None:
            model.pretrained_cfg.pop("state_dict", None)  # type: ignore[operator,union-attr]
        return model, _transforms_of_model(model)
    from torchvision.models import get_model, get_model_weights

    weights = get_model_weights(bare).DEFAULT
    # These train with auxiliary outputs beside the logits by default.
    auxiliary = {"aux_logits": False} if bare in ("googlenet", "inception_v3") else {}
    model = get_model(bare, weights=weights if pretrained is True else None, **auxiliary)
    if file is not None:
        with _reading(file, bare):
            _load_file(model, file)
    return model, _torchvision_transforms(weights.transforms())


def _library_of(name: str) -> tuple[str, str]:
    """Split "library/name", or find which library knows a bare name."""
    prefix, slash, rest = name.partition("/")
    bare = rest if slash and prefix in LIBRARIES else name
    for library in (prefix,) if bare != name else LIBRARIES:
        if _known(library, bare):
            return library, bare
    where = prefix if bare != name else " or ".join(LIBRARIES)
    raise ValueError(
        f"no model {bare!r} in {where}{_closest(bare)}; see timm.list_models(), torchvision.models.list_models()"
    )


def _known(library: str, name: str) -> bool:
    """Return whether a library has a model of that name."""
    if library == "timm":
        import timm

        return name.startswith(("hf-hub:", "hf_hub:")) or timm.is_model(name)
    from torchvision.models import list_models

    return name in list_models()


def _closest(name: str) -> str:
    """Return a hint at the closest names."""
    import timm
    from torchvision.models import list_models

    near = difflib.get_close_matches(name, [*timm.list_models(), *list_models()], n=3)
    return f" (closest: {', '.join(near)})" if near else ""


def _timm_weights(file: str) -> dict[str, Any]:
    """Return what makes timm take the weights of a file, which is never unpickled: some of its releases would."""
    if file.endswith(".npz"):
        return {"file": file}
    from timm.models import load_state_dict

    state = load_state_dict(file, weights_only=True)
    if not state:
        raise ValueError("the file has no weights")
    return {"state_dict": state}


def _load_file(model: nn.Module, path: str) -> None:
    """Load a state dict from a file into a torchvision model."""
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        state = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state)


@contextmanager
def _reading(file: str | None, name: str) -> Iterator[None]:
    """Say which weights file is to blame, if there is one: it may be of another model, or none at all."""
    try:
        yield
    except Exception as error:
        if file is None:
            raise
        raise ValueError(f"{file} does not fit {name}; give the model that it was saved from") from error


# -- heads ----------------------------------------------------------------------------------------------------------


def _set_classes(model: nn.Module, num_classes: int | None) -> tuple[tuple[str, ...], bool]:
    """Give a model a head of that many classes.

    Returns:
        The names of the head's layers, and whether they are new.
    """
    by_library = hasattr(model, "reset_classifier") and hasattr(model, "get_classifier")
    head = _timm_head(model) if by_library else _attribute_head(model)
    if num_classes is None:
        return head, False
    if not head:
        raise ValueError(
            f"{type(model).__name__} has no classifier to replace: neither get_classifier() nor a linear layer under "
            f"{', '.join(CLASSIFIERS)}; set the head yourself and leave num_classes out"
        )
    if all(_classes(model.get_submodule(name)) == num_classes for name in head):
        return head, False
    if by_library:
        model.reset_classifier(num_classes)  # type: ignore[operator]
        return _timm_head(model), True
    for name in head:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _resized(model.get_submodule(name), num_classes))
    if hasattr(model, "num_classes"):
        model.num_classes = num_classes  # type: ignore[assignment]
    return head, True


def _timm_head(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that timm calls the classifier; a distilled model has two."""
    found = model.get_classifier()  # type: ignore[operator]
    modules = found if isinstance(found, (tuple, list)) else (found,)
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(names[id(m)] for m in modules if id(m) in names and any(True for _ in m.parameters()))


def _attribute_head(model: nn.Module) -> tuple[str, ...]:
    """Return the name of the last layer under the attribute that torchvision's models keep their classifier in."""
    for attribute in CLASSIFIERS:
        if isinstance(module := getattr(model, attribute, None), nn.Module):
            layers = [n for n, m in module.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
            return (f"{attribute}.{layers[-1]}".rstrip("."),) if layers else ()
    return ()


def _classes(layer: nn.Module) -> int | None:
    """Return how many classes a layer has."""
    found = getattr(layer, "out_features", getattr(layer, "out_channels", None))
    return found if isinstance(found, int) else None


def _resized(layer: nn.Module, num_classes: int) -> nn.Module:
    """Return a fresh layer like another, with that many outputs."""
    where = {"device": layer.weight.device, "dtype": layer.weight.dtype, "bias": layer.bias is not None}
    if isinstance(layer, nn.Conv2d):
        return nn.Conv2d(layer.in_channels, num_classes, layer.kernel_size, layer.stride, layer.padding, **where)  # type: ignore[arg-type]
    assert isinstance(layer, nn.Linear)
    return nn.Linear(layer.in_features, num_classes, **where)  # type: ignore[arg-type]


# -- transforms -----------------------------------------------------------------------------------------------------


def _transforms_of_model(model: nn.Module) -> tuple[Transform, Transform]:
    """Return the transforms that a model's own config asks for, or ImageNet's."""
    if hasattr(model, "pretrained_cfg"):
        from timm.data.config import resolve_model_data_config
        from timm.data.transforms_factory import create_transform

        config = resolve_model_data_config(model)  # type: ignore[no-untyped-call]
        return create_transform(**config, is_training=True), create_transform(**config, is_training=False)
    from torchvision.models import ResNet18_Weights

    size = getattr(model, "image_size", 224)
    imagenet = ResNet18_Weights.DEFAULT.transforms(crop_size=size, resize_size=round(size * 256 / 224))
    return _torchvision_transforms(imagenet)


def _torchvision_transforms(preset: Any) -> tuple[Transform, Transform]:
    """Return a training transform beside the evaluation preset of torchvision weights."""
    from torchvision import transforms

    crop = getattr(preset, "crop_size", [224])[0]
    train = transforms.Compose(
        [
            transforms.RandomResizedCrop(crop, interpolation=preset.interpolation),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(preset.mean, preset.std),
        ]
    )
    return train, preset
