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

WIDTH = re.compile(
    r"hidden_size|hidden_dim|d_model|d_ff|n_embd|n_inner|embed_dim|emb_dim|embedding_size|embedding_dim|embed_size|"
    r"projection_dim|proj_dim|intermediate_size|intermediate_dim|ffn_dim|ffn_hidden|mlp_dim|mlp_hidden|lora_rank|"
    r"^dim$|^dim_ff$|^width$|output_dim|out_dim|pooler_output_size|expert_dim|inner_dim|d_embed|codevector_dim"
)
HEADS = re.compile(r"(heads?|n_head|n_heads|_kv_heads|num_heads)$")
DEPTH = re.compile(r"(layers?|n_layer|^depth|_depth|num_blocks|_blocks)$")
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
            "tiny" gives widths and heads fixed values, and a value to what has none; "deep" leaves all of these.

    Returns:
        The same config.
    """
    parts = list(parts_of(config))
    factor = math.gcd(*(_factor(part) for part in parts)) if how in ("narrow", "images kept") else 1
    tokens: dict[int, int] = {}
    for part in parts:
        _shrink_depth(part)
        if how in ("narrow", "tiny"):
            _shrink_images(part)
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


def _shrink_depth(config: PreTrainedConfig) -> None:
    """Cut every number of layers, and the lists with one entry per layer; keep one layer of every kind."""
    for name, depth in _integers(config):
        if not DEPTH.search(name) or FIXED_DEPTH.search(name) or depth <= LAYERS:
            continue
        per_layer = [n for n, v in vars(config).items() if isinstance(v, (list, tuple)) and len(v) == depth]
        kinds = [getattr(config, n) for n in per_layer if isinstance(getattr(config, n)[0], str)]
        new = max([LAYERS, *(max(k.index(kind) for kind in set(k)) + 1 for k in map(list, kinds))])
        setattr(config, name, new)
        for listed in per_layer:
            setattr(config, listed, getattr(config, listed)[:new])


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


def _smaller(name: str, value: Any, factor: int, tokens: dict[int, int]) -> Any:
    """Return the small value of an attribute, or the value itself."""
    if isinstance(value, list) and TOKEN.search(name) and all(isinstance(v, int) for v in value):
        return [_smaller(name, v, factor, tokens) for v in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if TOKEN.search(name) and value >= FIRST_SPECIAL:
        return tokens.setdefault(value, FIRST_SPECIAL + len(tokens))
    if name.endswith("vocab_size") and value > VOCABULARY:
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
