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
EXPERTS = 8

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


def shrink(config: PreTrainedConfig, *, narrow: bool) -> PreTrainedConfig:
    """Shrink a config in place, and its parts.

    Args:
        config: The config.
        narrow: Whether widths and heads shrink, not only depths, vocabularies and experts.

    Returns:
        The same config.
    """
    parts = list(parts_of(config))
    factor = math.gcd(*(_factor(part) for part in parts)) if narrow else 1
    tokens: dict[int, int] = {}
    for part in parts:
        _shrink_depth(part)
        for name, value in list(vars(part).items()):
            new = _smaller(name, value, factor, tokens)
            if new is not value:
                setattr(part, name, new)
    return config


def _factor(config: PreTrainedConfig) -> int:
    """Return what a config's widths can be divided by, so that at least two heads are left."""
    heads = [v for n, v in _integers(config) if HEADS.search(n) and "key_value" not in n and "kv" not in n and v > 1]
    most = math.gcd(*heads) if heads else 0
    return most // 2 if most % 2 == 0 and most > 2 else (1 if most else 0)


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
        return min(value, 2)
    if re.search(r"^n_group$|^topk_group$", name):
        return 1
    if re.search(r"max_position_embeddings|n_positions|max_source_positions", name) and value > 2048:
        return 2048
    if HEADS.search(name) and "dim" not in name:
        return max(1, value // factor) if factor else value
    if WIDTH.search(name) and "head_dim" not in name and factor and value % factor == 0 and value // factor >= 8:
        return value // factor
    return value
