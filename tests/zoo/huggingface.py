"""The model types of Transformers, each from a small config, with inputs made up from its forward's arguments."""

import importlib.util
import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .checks import Case, PlainModelError, tensors
from .configs import parts_of, shrink
from .special import SPECIAL, ids, noise

WANTED = ("bbox", "past_time_features", "past_observed_mask", "future_time_features")  # optional by name only
WANTED += ("visual_feats", "visual_pos", "last_hidden_state")
COMPANIONS = ("encoder_hidden_states", "decoder_input_ids")
MODALITIES = ("input_ids", "pixel_values", "input_features", "input_values", "inputs", "inputs_embeds")
BINS = ("num_mel_bins", "input_feat_size", "input_size", "feature_size", "input_dim", "model_in_dim", "n_mels")
EMBEDDED = ("hidden_states", "inputs_embeds", "encoder_hidden_states", "query_embeds", "x", "context", "visual_feats")
EMBEDDED += ("noise_embeds", "context_hidden_states", "patch_embeds", "image_features", "latents")
EMBEDDED += ("last_hidden_state", "mel_spectrogram")
IMAGE = 450  # stands for an image among the token ids of a model that has no token for it
LARGEST = 200_000_000  # parameters
PATIENCE = 15  # seconds of processor time for the inputs of one model; a smaller one may be quicker
LENGTH = 16
SHRINKINGS = ("narrow", "images kept", "tiny", "uniform", "deep")


def transformers_names() -> list[str]:
    """Return the model types: those of configs that a model is built from, not only a part of one."""
    return [name for name in sorted(CONFIG_MAPPING_NAMES) if _has_model(name)]


def _has_model(name: str) -> bool:
    try:
        return bool(_classes(name))
    except ImportError:  # there is one, which needs a package that is not here
        return True


def transformers_case(name: str) -> Case:
    """Return the first model class of a type, config and inputs with which the plain model trains.

    Raises:
        PlainModelError: There is none.
    """
    problems: list[str] = []
    special = SPECIAL.get(name)
    for cls in _classes(name):
        for how in (special.how,) if special else SHRINKINGS:
            build = _builder(name, cls, how)
            try:
                model = build()
            except Exception as error:
                problems.append(f"{cls.__name__} cannot be built: {type(error).__name__}: {error}")
                continue
            inputs, problem = _inputs_that_run(model, [special.inputs(model.config)] if special else _candidates(model))
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
    classes = [getattr(transformers, n) for n in found if isinstance(n, str) and hasattr(transformers, n)]
    path = config.__module__.replace(".configuration_", ".modeling_")
    if importlib.util.find_spec(path):
        module = importlib.import_module(path)
        classes += [c for c in vars(module).values() if isinstance(c, type) and _takes(c, config)]
    return [c for c in dict.fromkeys(classes) if c.forward is not nn.Module.forward][:4]


def _takes(cls: type, config: type[PreTrainedConfig]) -> bool:
    """Return whether a class is a model that is built from a config class."""
    if not issubclass(cls, PreTrainedModel) or "forward" not in vars(cls):
        return False
    argument = inspect.signature(cls.__init__).parameters.get("config")
    annotated = getattr(argument, "annotation", None)
    named = cls.__name__.removesuffix("Model") == config.__name__.removesuffix("Config")
    half = cls.__name__.endswith(("Encoder", "Decoder")) and argument is not None and annotated is argument.empty
    unsaid = half and config in getattr(cls.config_class, "sub_configs", {}).values()
    return config in (cls.config_class, annotated) or annotated == config.__name__ or named or unsaid


def _builder(name: str, cls: type[PreTrainedModel], how: str) -> Callable[[], nn.Module]:
    def config() -> PreTrainedConfig:
        small = shrink(CONFIG_MAPPING[name](), how)
        for attribute, value in (SPECIAL[name].config if name in SPECIAL else {}).items():
            setattr(small, attribute, value)
        return small

    def build() -> nn.Module:
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(config()).parameters())
        if size > LARGEST:
            raise ValueError(f"{size:,} parameters, too many to try here")
        return cls(config())

    return build


def _inputs_that_run(model: nn.Module, candidates: Iterable[dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
    """Return the first inputs on which a model trains, or why the most promising do not."""
    first, start = "", time.process_time()
    for inputs in candidates:
        if time.process_time() - start > PATIENCE:
            break
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
    sets = [[*([main] if isinstance(main, str) else main), *required], required]
    sets += [[*required, n] for n in MODALITIES if n in parameters]
    sets += [[*required, n, "input_ids"] for n in MODALITIES if n in parameters]
    for companion in COMPANIONS:
        if companion in parameters:
            sets = [[*s, companion] for s in sets] + sets
    further = [n for n in (*FEW, *FITTED) if n in parameters and n not in required]
    fitted = [n for n in further if n in FITTED]
    rounds = [[*s, *fitted] for s in sets] + [[*s, *further] for s in sets]
    sets += rounds + [[*s, n] for s in sets[:4] for n in further]
    fixed = {n: v for n, v in (("use_cache", False), ("return_dict", True)) if n in parameters}
    tried: set[tuple[str, ...]] = set()
    for names in sets:
        key = tuple(sorted(set(names)))
        if not key or key in tried or any(n not in parameters for n in key):
            continue
        tried.add(key)
        free = [n for n in key if n not in FITTED]
        if any(FITTED[n][0] not in free for n in key if n in FITTED):
            continue
        options = [list(_values(n, model)) for n in free]
        for values in itertools.islice(itertools.product(*options), 48):
            given = dict(zip(free, values, strict=True))
            yield {**given, **{n: make(given[of]) for n, (of, make) in FITTED.items() if n in key}, **fixed}


def _first_widths(model: nn.Module) -> list[int]:
    """Return how wide the inputs of a model's first layers are."""
    linear = next((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), 0)
    norm = next((m.normalized_shape[-1] for m in model.modules() if isinstance(m, nn.LayerNorm)), 0)
    convolution = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv1d)), 0)
    return [n for n in dict.fromkeys((linear, norm, convolution)) if n]


def _values(name: str, model: nn.Module) -> Iterator[Any]:
    """Yield possible values of one argument."""
    get, widths = Lookup(model.config), _first_widths(model)
    if name in FEW:
        yield FEW[name](get)
    elif "input_ids" in name or name in ("input", "inputs", "task_inputs"):
        yield ids(2, LENGTH)
        if "qformer" in name:
            return
        images = get("num_query_tokens") or get("latent_query_num")
        if images and name == "input_ids":
            token = get("image_token_index") or get("video_token_index") or IMAGE
            yield torch.cat([torch.full((2, images), token), ids(2, LENGTH)], dim=1)
        books = get("num_codebooks") or get("num_channels", 4)
        yield from (ids(2, LENGTH, books), ids(2, books, LENGTH), ids(2, books), ids(2, LENGTH) % 32)
    elif "pixel_values" in name or name in ("image", "flattened_patches", "prompt_masks"):
        channels = get("num_channels", 0) or get("in_channels", 0) or get("in_chans", 3)
        sizes = list(dict.fromkeys([*get.image_sizes(), (64, 64), (128, 128), (224, 224), (112, 112)]))
        yield from (noise(2, channels, *size) for size in sizes)
        patch = get("patch_size", 14)
        for frames in dict.fromkeys((get("temporal_patch_size", 1), 1)):
            yield noise(16, channels * frames * patch * patch)
            yield noise(2, 16, channels * frames * patch * patch)
            yield noise(16, channels, *(() if frames == 1 else (frames,)), patch, patch)
        yield noise(1, 16, channels, patch, patch)
        yield from (noise(2, 16, n + 2).abs() for n in widths)  # the numbers of a row and a column come first
        yield noise(1, channels, patch, 16 * patch)
        yield from (noise(*shape, n) for n in widths for shape in ((16,), (2, 16)))
        yield from (noise(2, 1, channels, *size) for size in sizes)
        yield from (noise(2, 1, get("max_num_tiles"), channels, *size) for size in sizes if get("max_num_tiles"))
        yield from (noise(2, get("num_frames", 8), channels, *size) for size in sizes)
        yield noise(2, 2, channels, 64, 64)
    elif name == "past_values":
        yield noise(2, get.history())
        yield noise(2, get.history(), get("num_input_channels", 1))
    elif name in ("input_features", "audio_mel", "spectrogram", "audio_input_features"):
        for bins in [n for n in dict.fromkeys(map(get, BINS)) if n] or [80]:
            for length in (2 * get("max_source_positions", 1500), 128, 1024) if name[0] == "i" else (LENGTH, 128):
                yield noise(2, bins, length)
                yield noise(2, length, bins)
                yield noise(2, 1, length, bins)
        yield from (noise(2, 128, n) for n in widths)
        yield noise(get("num_mel_bins", 80), 200)
    elif name in ("input_values", "audio_values"):
        yield noise(2, 4000)
        yield noise(2, 1, 4000)
        yield noise(2, 16000)
        yield noise(2, 1024, 128)
        yield noise(2, 9600)
    elif name in EMBEDDED:
        for width in ("hidden_size", "d_model", "encoder_hidden_size", "input_dim", "visual_feat_dim"):
            yield noise(2, LENGTH, get(width, 32))
        yield from (noise(2, LENGTH, n) for n in widths)
        yield from (noise(2, n, 3200 if n == 1 else LENGTH) for n in widths)
        yield noise(2, 1, 3200)
        yield noise(2, 3, 64, 64)
        # Patches of an image, flattened, as many as grid_thw says.
        channels, patch = get("in_channels", 0) or get("in_chans", 0) or get("num_channels", 3), get("patch_size", 14)
        for frames in (get("temporal_patch_size", 1), 1):
            yield noise(16, channels * frames * patch * patch)


class Lookup:
    """Look numbers up in a config, then in its parts."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.parts = list(parts_of(config))

    def __call__(self, name: str, default: int = 0) -> int:
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
    "past_time_features": lambda get: noise(2, get.history(), get("num_time_features", 0)),
    "future_values": lambda get: noise(2, get("prediction_length", 8)),
    "future_time_features": lambda get: noise(2, get("prediction_length", 8), get("num_time_features", 0)),
    "image_attention_mask": lambda get: torch.ones(2, LENGTH, 1, dtype=torch.long),
    "num_patches": lambda get: LENGTH,
    "is_longer": lambda get: torch.zeros(2, 1, dtype=torch.bool),
    "mm_token_type_ids": lambda get: torch.zeros(2, LENGTH, dtype=torch.long),
    "visual_pos": lambda get: noise(2, LENGTH, 4),
    "spatial_shapes": lambda get: torch.tensor([[4, 4], [4, 4]]),
    "pixel_attention_mask": lambda get: torch.ones(2, 16, dtype=torch.long),
    "merge_sizes": lambda get: torch.tensor([1]),
    "target_sizes": lambda get: torch.tensor([[4, 4]]),
    "duration_labels": lambda get: torch.ones(2, LENGTH, dtype=torch.long),
    "pitch_labels": lambda get: noise(2, LENGTH, 1),
    "energy_labels": lambda get: noise(2, LENGTH, 1),
    "spectrogram_labels": lambda get: noise(2, LENGTH, get("num_mel_bins", 80)),
    "aspect_ratio_ids": lambda get: torch.ones(2, 1, dtype=torch.long),
    "aspect_ratio_mask": lambda get: torch.ones(2, 1, get("max_num_tiles", 4), dtype=torch.long),
    "pixel_position_ids": lambda get: torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1),
    "pooled_patches_idx": lambda get: torch.arange(LENGTH).view(1, -1, 4).expand(2, -1, -1),
}
# Of the shape of another argument.
FITTED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "past_observed_mask": ("past_values", torch.ones_like),
    "input_features_mask": ("input_features", lambda features: _frames(features)),
    "audio_mel_mask": ("audio_mel", lambda features: ~_frames(features)),
    "feature_lens": ("input_features", lambda features: torch.tensor([features.shape[-1]])),
    "aftercnn_lens": ("input_features", lambda features: torch.tensor([(features.shape[-1] + 1) // 2])),
    "pixel_mask": ("pixel_values", lambda pixels: torch.ones(2, *pixels.shape[-2:], dtype=torch.long)),
    "image_embeds_position_mask": ("input_ids", lambda tokens: (tokens >= IMAGE).long()),
}


def _frames(features: Tensor) -> Tensor:
    """Return a mask that keeps all frames of a spectrogram, the longer of its last two dimensions."""
    return torch.ones(len(features), max(features.shape[-2:]), dtype=torch.bool)
