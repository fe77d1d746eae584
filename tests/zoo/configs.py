"""Shrink a Transformers config: the same model, with few layers, narrow ones and a small vocabulary.

Widths and heads are divided by one number throughout, so that what fits together still does.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

LAYERS = 2
VOCABULARY = 512
FIRST_SPECIAL = 400  # where token ids beyond the vocabulary go; ordinary inputs stay below
EXPERTS = 16
TINY = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "out_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 128),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_kv_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim"), 16),
}
MISSING = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size"), 64),
    **dict.fromkeys(("prediction_length", "context_length"), 8),
}

# What "uniform" gives to what has no value, or is not there at all though the model reads it.
UNSET: dict[str, Any] = {
    **MISSING,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "deepstack_layer_map": [],
    "downsample_rate": "1/2",
    "backbone": "resnet18",
    "clip_qkv": 8.0,
    "sliding_window": 8,
    **dict.fromkeys(("image_token_index", "image_token_id", "video_token_index"), FIRST_SPECIAL + 99),
    "vocabulary_map": {"<image>": 400, "<|extra_200|>": 401, "IMGIMGA": 402, "<|visual token 000000|>": 403},
    **dict.fromkeys(("indexer_n_heads", "indexer_compress_ratio"), 4),
    **dict.fromkeys(("indexer_head_dim", "indexer_budget"), 16),
    "indexer_kv_heads": 1,
}
ABSENT: dict[str, Any] = {
    "rope_theta": 10_000.0,
    "num_key_value_heads": 4,
    "dropout_rate": 0.0,
    "shared_expert_intermediate_size": 64,
    "pad_token_id": 0,
    "vocab_size": VOCABULARY,
    "spatial_merge_size": 2,
    "initializer_range": 0.02,
}
UNIFORM = {"num_kv_shared_layers": 0, "attention_hidden_size": 128, "attention_head_dim": 32, "output_channels": 64}
UNIFORM_LISTS = {"intermediate_layers_indices": [0]}
TIMM: dict[str, dict[str, Any]] = {
    "vit_": {"embed_dim": 64, "num_heads": 4, "depth": LAYERS, "img_size": 112},
    "fastvit_": {"layers": (1,) * 5},
    "mobilenetv5_": {"channel_multiplier": 0.25},
}

WIDTH = re.compile(
    r"hidden_size|hidden_dim|d_model|d_ff|n_embd|n_inner|embed_dim|emb_dim|embedding_size|embedding_dim|embed_size|"
    r"projection_dim|proj_dim|intermediate_size|intermediate_dim|ffn_dim|ffn_hidden|mlp_dim|mlp_hidden|lora_rank|"
    r"^dim$|^dim_ff$|^width$|output_dim|out_dim|pooler_output_size|expert_dim|inner_dim|d_embed|codevector_dim"
)
HEADS = re.compile(r"(heads?|n_head|n_heads|_kv_heads|num_heads)$")
DEPTH = re.compile(r"(layers?|n_layer|^depth|_depth|num_blocks|_blocks|attends_per_block)$")
INNER = re.compile(r"intermediate|ffn|mlp|inner|d_ff|dim_ff")
FILTERS = re.compile(r"(^|_)(n|num)_filters$|^upsample_initial_channel$|^base_channels$")
FIXED_DEPTH = re.compile(r"feat_extract|adapter|window_layers|feature_layer|skip|out_layers|nextn|cross_layers|select")
TOKEN = re.compile(r"(token_id|token_ids|token_index|token_idx|_token)$")


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and the configs inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)


def shrink(config: PreTrainedConfig, how: str) -> PreTrainedConfig:
    """Shrink a config in place, and its parts: depths, vocabularies and experts always, more by `how`.

    Args:
        config: The config.
        how: "narrow" divides widths and heads and makes images a few patches wide; "images kept" leaves the images;
            "tiny" gives widths and heads fixed values, and a value to what has none; "deep" leaves all of these;
            "uniform" is "tiny" for every width that has a name like one, in lists and dicts also; "whole" changes
            nothing.

    Returns:
        The same config.
    """
    if how == "whole":
        return config
    parts = list(parts_of(config))
    factor = math.gcd(*(_factor(part) for part in parts)) if how in ("narrow", "images kept") else 1
    tokens: dict[int, int] = {}
    for part in parts:
        _shrink_depth(part, of_each=2 if how == "uniform" else 1)
        if how in ("narrow", "tiny", "uniform"):
            _shrink_images(part)
        if how == "uniform":
            _make_uniform(part)
        for name, value in list(vars(part).items()):
            new = TINY.get(name, value) if how == "tiny" and isinstance(value, int) else value
            new = MISSING.get(name, new) if how == "tiny" and value is None else new
            new = _smaller(name, new, factor, tokens)
            if new is not value:
                setattr(part, name, new)
    return config


def _factor(config: PreTrainedConfig) -> int:
    """Return what a config's widths can be divided by, so that a few heads are left; 0 for any number."""
    heads = [v for n, v in _integers(config) if _counts_heads(n) and "key_value" not in n and "kv" not in n and v > 1]
    most = math.gcd(*heads) if heads else 0
    return next((most // left for left in (4, 2) if most % left == 0 and most > left), 1) if most else 0


def _counts_heads(name: str) -> bool:
    return bool(HEADS.search(name)) and not re.search(r"(^|_)d_head$|dim", name)


def _integers(config: PreTrainedConfig) -> list[tuple[str, int]]:
    return [(n, v) for n, v in vars(config).items() if isinstance(v, int) and not isinstance(v, bool)]


def _make_uniform(config: PreTrainedConfig) -> None:
    """Give every width the same value, all heads another; set what is unset; lists for tuples, as in a saved config."""
    lists = [n.removesuffix("_per_stage") for n, v in vars(config).items() if isinstance(v, (list, tuple))]
    staged = any(map(_counts_heads, lists))
    for name, value in list(vars(config).items()):
        kept = value if staged and isinstance(value, int) and "proj" not in name else _uniform(name, value)
        new = UNSET.get(name) if value is None else kept
        if new is not None and new is not value:
            setattr(config, name, new)
    for name, value in ABSENT.items():
        if not hasattr(config, name):
            setattr(config, name, value)
    if getattr(config, "architecture", "") == "resnet50":
        features_only = (config.model_args or {}).get("features_only")
        config.architecture = "repvit_m1" if features_only else "vit_pe_core_tiny_patch16_384"
    if "qk_rope_head_dim" in vars(config) and "head_dim" in vars(config):
        config.head_dim = config.qk_rope_head_dim
    for start, arguments in TIMM.items():
        if str(getattr(config, "architecture", "")).startswith(start):
            config.model_args = {**(config.model_args or {}), **arguments}
    depth = getattr(config, "num_hidden_layers", LAYERS)
    for name, kinds in (("layer_types", ("full_attention",)), ("mlp_layer_types", ("dense", "sparse"))):
        if getattr(config, name, ()) is None:
            setattr(config, name, [kinds[min(i, len(kinds) - 1)] for i in range(depth)])
    _fit_rotation(config)


def _uniform(name: str, value: Any) -> Any:
    """Return the small value of an attribute in the uniform model, or the value itself."""
    if isinstance(value, tuple):
        return _uniform(name, list(value))
    if name in UNIFORM_LISTS and isinstance(value, list):
        return list(UNIFORM_LISTS[name])
    if name == "depths" and isinstance(value, list):
        return [min(v, 1) for v in value]
    if isinstance(value, list) and value and all(v == value[0] for v in value):
        return [_uniform(name, v) for v in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name in ("head_dim", "global_head_dim", "d_kv", "rotary_dim"):
        return min(value, 16)
    if name in UNIFORM:
        return UNIFORM[name]
    if re.search(r"mamba|linear|ssm|conv", name):
        return value
    if name.endswith("_groups"):
        return min(value, 64)
    if FILTERS.search(name):
        return max(32 if "base" in name else 4, value // 8)
    if _counts_heads(name):
        return max(n for n in (0, 1, 2, 4) if n <= value)
    if WIDTH.search(name) and "head_dim" not in name:
        return min(value, 128 if INNER.search(name) else 64)
    return value


def _fit_rotation(config: PreTrainedConfig) -> None:
    """Let rotary embeddings have parameters for each kind of layer, and sections that add up to the head's width."""
    rotation = getattr(config, "rope_parameters", None)
    if not isinstance(rotation, dict):
        return
    if not rotation:
        rotation.update(rope_type="default", rope_theta=10_000.0)
    kinds = [k for k in dict.fromkeys(getattr(config, "layer_types", None) or ()) if "rope_type" in rotation]
    rotation.update({kind: dict(rotation) for kind in kinds if kind not in rotation})
    width = vars(config).get("head_dim") or TINY["head_dim"]
    entries = [rotation, *(v for v in rotation.values() if isinstance(v, dict))]
    for entry in [e for e in entries if "rope_type" in e]:
        sections = entry.get("mrope_section") or [22, 22, 20]
        half = int(width * entry.get("partial_rotary_factor", 1)) // 2
        fitted = [max(1, s * half // sum(sections)) for s in sections]
        entry["mrope_section"] = [*fitted[:-1], half - sum(fitted[:-1])]


def _shrink_depth(config: PreTrainedConfig, of_each: int) -> None:
    """Cut every number of layers, and the lists with one entry per layer; keep some layers of every kind."""
    for name, depth in _integers(config):
        if not DEPTH.search(name) or FIXED_DEPTH.search(name) or depth <= LAYERS:
            continue
        per_layer = [n for n, v in vars(config).items() if isinstance(v, (list, tuple)) and len(v) == depth]
        if of_each > 1 and "depths" in per_layer:
            continue  # stages, which a backbone has names for
        kinds = [getattr(config, n) for n in per_layer if isinstance(getattr(config, n)[0], str)]
        stages = vars(config).get("_out_indices") or [] if of_each > 1 else []
        new = max([LAYERS, len(stages), *(_enough(list(k), of_each) for k in kinds)])
        setattr(config, name, new)
        if stages and len(getattr(config, "stage_names", None) or ()) == depth + 1:  # a backbone, and its stem
            config.stage_names = config.stage_names[: new + 1]
            config.out_indices = list(range(new + 1))[-len(stages) :]
        for listed in per_layer:
            setattr(config, listed, getattr(config, listed)[:new])
    for name in ("layer_types", "layers_block_type"):  # where the depth is that of the list
        kinds = vars(config).get(name)
        if kinds and len(kinds) not in dict(_integers(config)).values():
            setattr(config, name, list(kinds)[: max(LAYERS, _enough(list(kinds), of_each))])


def _enough(kinds: list[str], of_each: int) -> int:
    """Return how many of the first layers have that many of every kind, where there are as many."""
    return max([i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < of_each]) + 1


def _shrink_images(config: PreTrainedConfig) -> None:
    """Let an image be four patches wide, or 64 pixels."""
    patch = getattr(config, "patch_size", None)
    side = 4 * patch if isinstance(patch, int) and patch > 1 else 64
    for name, value in list(vars(config).items()):
        if name in ("image_size", "img_size", "input_size"):
            if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) and v > side for v in value):
                setattr(config, name, type(value)(side for _ in value))
            elif isinstance(value, int) and value > side:
                setattr(config, name, side)
        elif name == "image_embedding_size" and isinstance(value, int):
            setattr(config, name, 4)
        elif name == "backbone_feature_sizes" and value:
            setattr(config, name, [[4 * 2**i] * 2 for i in reversed(range(len(value)))])


def _smaller(name: str, value: Any, factor: int, tokens: dict[int, int]) -> Any:
    """Return the small value of an attribute, or the value itself."""
    if isinstance(value, list) and TOKEN.search(name) and all(isinstance(v, int) for v in value):
        return [_smaller(name, v, factor, tokens) for v in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if TOKEN.search(name) and value >= FIRST_SPECIAL:
        return tokens.setdefault(value, FIRST_SPECIAL + len(tokens))
    if re.search(r"vocab(_size)?(_per_layer_input)?$", name) and value > VOCABULARY:
        return VOCABULARY
    if re.search(r"num_(local_)?experts$|routed_experts$|moe_num_experts$", name) and value > EXPERTS:
        return EXPERTS
    if re.search(r"experts_per_tok|top_?k_experts|moe_top_?k|moe_k$", name):
        return min(value, EXPERTS // 2)
    if re.search(r"max_position_embeddings|n_positions|max_source_positions", name) and value > 2048:
        return 2048
    if _counts_heads(name):
        return max(1, value // factor) if factor else value
    if WIDTH.search(name) and "head_dim" not in name and factor and value % factor == 0 and value // factor >= 8:
        return value // factor
    return value
