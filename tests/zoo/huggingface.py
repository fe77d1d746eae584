"""The model types of Transformers, each from a small config, with inputs made up from its forward's arguments."""

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .checks import Case, PlainModelError, tensors
from .configs import parts_of, shrink

WANTED = ("bbox", "past_time_features", "past_observed_mask", "future_time_features")  # optional by name only
COMPANIONS = ("encoder_hidden_states", "decoder_input_ids")
MODALITIES = ("input_ids", "pixel_values", "input_features", "input_values", "inputs", "inputs_embeds")
LARGEST = 120_000_000
LENGTH = 16
SHRINKINGS = ("narrow", "images kept", "tiny", "deep")


def transformers_names() -> list[str]:
    """Return the model types."""
    return sorted(CONFIG_MAPPING_NAMES)


def transformers_case(name: str) -> Case:
    """Return the first model class of a type, config and inputs with which the plain model trains.

    Raises:
        PlainModelError: There is none.
    """
    problems: list[str] = []
    for cls in _classes(name):
        for how in SHRINKINGS:
            build = _builder(name, cls, how)
            try:
                model = build()
            except Exception as error:
                problems.append(f"{cls.__name__} cannot be built: {type(error).__name__}: {error}")
                continue
            inputs, problem = _inputs_that_run(model)
            if inputs is not None:
                return Case(cls.__name__, build, lambda model, training, inputs=inputs: ((), _copy(inputs)))
            problems.append(f"{cls.__name__}: {problem}")
    raise PlainModelError(problems[0] if problems else "no model class belongs to this config")


def _classes(name: str) -> list[type[PreTrainedModel]]:
    """Return the model classes of a type: the base model first, then those with heads."""
    config = CONFIG_MAPPING[name]
    found = [modeling_auto.MODEL_MAPPING_NAMES.get(name)]
    found += [
        getattr(modeling_auto, m).get(name)
        for m in dir(modeling_auto)
        if m.startswith("MODEL_") and m.endswith("_NAMES")
    ]
    module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    classes = [getattr(module, n) for n in found if isinstance(n, str) and hasattr(module, n)]
    classes += [c for c in vars(module).values() if isinstance(c, type) and _takes(c, config)]
    return list(dict.fromkeys(classes))[:4]


def _takes(cls: type, config: type[PreTrainedConfig]) -> bool:
    """Tell whether a class is a model that is built from a config class."""
    if not issubclass(cls, PreTrainedModel) or "forward" not in vars(cls):
        return False
    argument = inspect.signature(cls.__init__).parameters.get("config")
    annotated = getattr(argument, "annotation", None)
    return config in (cls.config_class, annotated) or annotated == config.__name__


def _builder(name: str, cls: type[PreTrainedModel], how: str) -> Callable[[], nn.Module]:
    config_class = CONFIG_MAPPING[name]

    def build() -> nn.Module:
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(shrink(config_class(), how)).parameters())
        if size > LARGEST:
            raise ValueError(f"{size:,} parameters, too many to try here")
        return cls(shrink(config_class(), how))

    return build


def _inputs_that_run(model: nn.Module) -> tuple[dict[str, Any] | None, str]:
    """Return the first inputs on which a model trains, or why the most promising do not."""
    first = ""
    for inputs in _candidates(model):
        try:
            _try(model, inputs)
        except Exception as error:
            first = first or f"{type(error).__name__}: {error} (inputs {_describe(inputs)})"
            continue
        return inputs, ""
    return None, first or "no inputs known for its forward"


def _try(model: nn.Module, inputs: dict[str, Any]) -> None:
    model.eval()
    with torch.no_grad():
        model(**_copy(inputs))
    model.train()
    outputs = [t for t in tensors(model(**_copy(inputs))) if t.requires_grad]
    torch.stack([t.float().square().mean() for t in outputs]).sum().backward()
    model.zero_grad(set_to_none=True)


def _describe(inputs: dict[str, Any]) -> str:
    return ", ".join(f"{k} {tuple(v.shape)}" if isinstance(v, Tensor) else k for k, v in inputs.items())


def _copy(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def _candidates(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield inputs, the most likely first: what forward requires, then each modality, alone and with text."""
    parameters = {
        n: p
        for n, p in inspect.signature(model.forward).parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    required = [n for n, p in parameters.items() if p.default is p.empty]
    required += [n for n in WANTED if n in parameters]
    main = getattr(model, "main_input_name", "input_ids")
    sets = [[main, *required], required]
    sets += [[*required, n] for n in MODALITIES if n in parameters]
    sets += [[*required, n, "input_ids"] for n in MODALITIES if n in parameters]
    for companion in COMPANIONS:
        if companion in parameters:
            sets = [[*s, companion] for s in sets] + sets
    fixed = {n: v for n, v in (("use_cache", False), ("return_dict", True)) if n in parameters}
    tried: set[tuple[str, ...]] = set()
    for names in sets:
        key = tuple(sorted(set(names)))
        if not key or key in tried or any(n not in parameters for n in key):
            continue
        tried.add(key)
        options = [list(_values(n, model.config)) for n in key]
        for values in itertools.islice(itertools.product(*options), 24):
            yield {**dict(zip(key, values, strict=True)), **fixed}


def _values(name: str, config: PreTrainedConfig) -> Iterator[Any]:
    """Yield possible values of one argument."""
    get = Lookup(config)
    if name in FEW:
        yield FEW[name](get)
    elif "input_ids" in name or name in ("input", "inputs"):
        yield _ids(2, LENGTH)
        yield _ids(2, LENGTH, get("num_codebooks", 4))
        yield _ids(2, get("num_codebooks", 4), LENGTH)
    elif name.startswith("pixel_values"):
        channels = get("num_channels", 0) or get("in_channels", 0) or get("in_chans", 3)
        sizes = list(dict.fromkeys([*get.image_sizes(), (64, 64), (128, 128), (224, 224)]))
        yield from (_noise(2, channels, *size) for size in sizes)
        patch = get("patch_size", 14)
        for frames in (get("temporal_patch_size", 1), 1):
            yield _noise(16, channels * frames * patch * patch)
        yield from (_noise(2, get("num_frames", 8), channels, *size) for size in sizes)
        yield _noise(2, 2, channels, 64, 64)
    elif name == "past_values":
        yield _noise(2, get.history())
        yield _noise(2, get.history(), get("num_input_channels", 1))
    elif name == "input_features":
        bins = get("num_mel_bins", 80)
        for length in (2 * get("max_source_positions", 1500), 128, 1024):
            yield _noise(2, bins, length)
            yield _noise(2, length, bins)
            yield _noise(2, 1, length, bins)
    elif name in ("input_values", "audio_values"):
        yield _noise(2, 4000)
        yield _noise(2, 1, 4000)
        yield _noise(2, 16000)
        yield _noise(2, 1024, 128)
    elif name in ("hidden_states", "inputs_embeds", "encoder_hidden_states", "query_embeds", "x"):
        for width in ("hidden_size", "d_model", "encoder_hidden_size"):
            yield _noise(2, LENGTH, get(width, 32))
        # Patches of an image, flattened, as many as grid_thw says.
        channels, patch = get("in_channels", 0) or get("in_chans", 0) or get("num_channels", 3), get("patch_size", 14)
        for frames in (get("temporal_patch_size", 1), 1):
            yield _noise(16, channels * frames * patch * patch)


class Lookup:
    """Look numbers up in a config, then in its parts."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.parts = list(parts_of(config))

    def __call__(self, name: str, default: int) -> int:
        """Return a number, the first of a list, or the default."""
        for part in self.parts:
            value = getattr(part, name, None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def image_sizes(self) -> list[tuple[int, int]]:
        """Return the sizes of images that the config speaks of."""
        found = [getattr(part, n, None) for part in self.parts for n in ("image_size", "img_size", "input_size")]
        pairs = [(v, v) if isinstance(v, int) else tuple(v)[-2:] for v in found if isinstance(v, (int, list, tuple))]
        return [pair for pair in pairs if len(pair) == 2 and min(pair) > 1]

    def history(self) -> int:
        """Return how many past values a time series model wants."""
        lags = next((p.lags_sequence for p in self.parts if getattr(p, "lags_sequence", None)), [0])
        return (self("context_length", 0) or self("prediction_length", 8)) + max(lags)


FEW: dict[str, Callable[[Lookup], Any]] = {
    "attention_mask": lambda get: torch.ones(2, LENGTH, dtype=torch.long),
    "bbox": lambda get: torch.arange(get("dim_bbox", 4)).expand(2, LENGTH, -1).contiguous(),
    "grid_thw": lambda get: torch.tensor([[1, 4, 4]]),
    "image_grid_thw": lambda get: torch.tensor([[1, 4, 4]]),
    "past_time_features": lambda get: _noise(2, get.history(), get("num_time_features", 0)),
    "past_observed_mask": lambda get: torch.ones(2, get.history()),
    "future_values": lambda get: _noise(2, get("prediction_length", 8)),
    "future_time_features": lambda get: _noise(2, get("prediction_length", 8), get("num_time_features", 0)),
}


def _ids(*shape: int) -> Tensor:
    return torch.randint(5, 60, shape, generator=torch.Generator().manual_seed(1))


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))
