"""The models of torchvision and timm, each with the smallest input that it takes."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from torchvision.models import get_model_builder, list_models

from .checks import Case, tensors

SIZES = (32, 64, 96, 128, 160, 192, 224, 256, 288, 299, 384, 448, 512)
TORCHVISION = ("classification", "segmentation", "detection", "video", "optical_flow")
DETECTION_SIZE = 96


def torchvision_names() -> list[str]:
    """Return "detection/ssd300_vgg16" and the like."""
    models = torchvision.models
    return [
        f"{part}/{name}"
        for part in TORCHVISION
        for name in list_models(module=models if part == "classification" else getattr(models, part))
    ]


def torchvision_case(name: str) -> Case:
    """Return the case of one torchvision builder, without pretrained weights."""
    part, _, builder_name = name.partition("/")
    builder = get_model_builder(builder_name)
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    if part == "detection":
        options |= _detection_options(builder_name)
        return Case(name, lambda: builder(**options), _detection_inputs)
    if part == "optical_flow":
        return Case(
            name, lambda: builder(**options), lambda m, t: ((_noise(1, 3, 128, 128), _noise(1, 3, 128, 128)), {})
        )
    if part == "video":
        return _image_case(name, lambda: builder(**options), [(2, 3, 16, s, s) for s in SIZES])
    if part == "segmentation" and "lraspp" not in builder_name:
        options["aux_loss"] = True
    return _image_case(name, lambda: builder(**options), [(2, 3, s, s) for s in SIZES])


def _detection_options(name: str) -> dict[str, Any]:
    """Keep every box, as a fresh detector is sure of nothing and would return none; but only the first few."""
    if name.startswith("ssd"):
        return {"score_thresh": 0.0, "detections_per_img": 5}
    sizes = {"min_size": DETECTION_SIZE, "max_size": DETECTION_SIZE}
    if "rcnn" in name:
        return {**sizes, "box_score_thresh": 0.0, "box_detections_per_img": 5, "rpn_post_nms_top_n_test": 20}
    return {**sizes, "score_thresh": 0.0, "detections_per_img": 5}


def _detection_inputs(model: nn.Module, training: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return two images, with a box, a mask and keypoints each where training asks for them."""
    images = [_noise(3, DETECTION_SIZE, DETECTION_SIZE).abs() for _ in range(2)]
    mask = torch.zeros(1, DETECTION_SIZE, DETECTION_SIZE, dtype=torch.uint8)
    mask[:, 20:70, 10:60] = 1
    target = {
        "boxes": torch.tensor([[10.0, 20.0, 60.0, 70.0]]),
        "labels": torch.tensor([1]),
        "masks": mask,
        "keypoints": torch.tensor([[[30.0, 40.0, 1.0]] * 17]),
    }
    return ((images, [dict(target) for _ in images]) if training else (images,)), {}


def timm_names() -> list[str]:
    """Return timm's families, as "module/word": a module's models whose names begin with the same word."""
    return sorted({f"{module}/{word}" for module in timm.list_modules() for word in _families(module)})


def _families(module: str) -> dict[str, list[str]]:
    families: dict[str, list[str]] = {}
    for name in timm.list_models(module=module):
        word = re.match(r"(tf_|test_)?[a-z]+", name)
        families.setdefault(word[0] if word else name, []).append(name)
    return families


def timm_case(family: str) -> Case:
    """Return the case of the smallest model of a timm family, with a ten-class head."""
    module, _, word = family.partition("/")
    name = min(_families(module)[word], key=_parameters)
    size = timm.get_pretrained_cfg(name).input_size
    shapes = [(2, size[0], s, s) for s in SIZES if s < size[-1]] + [(2, *size)]
    return _image_case(name, lambda: timm.create_model(name, num_classes=10), shapes)


def _parameters(name: str) -> float:
    """Count a timm model's parameters without making them."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in timm.create_model(name, num_classes=10).parameters())
    except Exception:  # not every model can be built without data
        return float("inf")


def _image_case(name: str, build: Callable[[], nn.Module], shapes: list[tuple[int, ...]]) -> Case:
    """Return a case with the first of several input shapes on which the model trains (the last one untried)."""
    model = build()
    shape = next((shape for shape in shapes[:-1] if _trains(model, shape)), shapes[-1])
    return Case(name, build, lambda model, training: ((_noise(*shape),), {}))


def _trains(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether a model takes an input, in both modes and backwards."""
    try:
        model.eval()(_noise(*shape))
        outputs = [t for t in tensors(model.train()(_noise(*shape))) if t.requires_grad]
        torch.stack([t.sum() for t in outputs]).sum().backward()
    except Exception:  # whatever a model says to an image that is too small
        return False
    return True


def _noise(*shape: int) -> torch.Tensor:
    """Return the same noise for the same shape, every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
