"""Transformers types whose sizes or inputs no general rule finds: what they need, by type."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Special(NamedTuple):
    """How a type is made small, and what it is run on.

    Attributes:
        how: Of `shrink`.
        config: Attributes that are set afterwards.
        inputs: The arguments of the model's forward, from its config.
    """

    how: str
    config: dict[str, Any]
    inputs: Callable[[Any], dict[str, Any]]


def ids(*shape: int) -> Tensor:
    """Return token ids, always the same."""
    return torch.randint(5, 60, shape, generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    """Return normal numbers, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _levels(c: Any, *sides: int) -> list[Tensor]:
    return [noise(2, c.hidden_size, side, side) for side in sides]


SAM_ENCODER = Special(
    "tiny",
    {},
    lambda c: {
        "vision_features": _levels(c, 4),
        "vision_pos_embeds": _levels(c, 4),
        "text_features": noise(2, 5, c.hidden_size),
    },
)
SAM_DECODER = Special(
    "tiny",
    {},
    lambda c: {
        "vision_features": noise(2, 16, c.hidden_size),
        "vision_pos_encoding": noise(2, 16, c.hidden_size),
        "text_features": noise(2, 5, c.hidden_size),
        "spatial_shapes": torch.tensor([[4, 4]]),
    },
)
SAM_MASKS = Special(
    "tiny",
    {},
    lambda c: {
        "decoder_queries": noise(2, 5, c.hidden_size),
        "backbone_features": _levels(c, 16, 8, 4),
        "encoder_hidden_states": noise(2, 16, c.hidden_size),
        "prompt_features": noise(2, 5, c.hidden_size),
    },
)
SPECIAL = {
    "blt_local_decoder": Special(
        "tiny",
        {},
        lambda c: {
            "inputs_embeds": noise(2, 16, c.hidden_size),
            "patch_embeds": noise(2, 4, c.hidden_size_global),
        },
    ),
    "blt_local_encoder": Special(
        "tiny",
        {},
        lambda c: {
            "input_ids": ids(2, 16),
            "num_patches": 4,
            "patch_ids": (torch.arange(16) // 4).expand(2, -1),
        },
    ),
    "efficientloftr": Special("whole", {}, lambda c: {"pixel_values": noise(1, 2, 3, 64, 64)}),
    "flava_image_codebook": Special("narrow", {"freeze": False}, lambda c: {"pixel_values": noise(2, 3, 64, 64)}),
    "inkling_vision": Special(
        "deep", {"text_hidden_size": 64}, lambda c: {"pixel_values": noise(4, 2, c.patch_size, c.patch_size, 3)}
    ),
    "janus_vqgan": Special("uniform", {"num_patches": 4}, lambda c: {"pixel_values": noise(2, 3, 64, 64)}),
    "llama4_vision_model": Special(
        "tiny",
        {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64},
        lambda c: {"pixel_values": noise(2, 3, c.image_size, c.image_size)},
    ),
    "mamba2": Special("narrow", {"n_groups": 1}, lambda c: {"input_ids": ids(2, 16), "use_cache": False}),
    "molmo2_adapter": Special(
        "tiny",
        {"text_hidden_size": 64},
        lambda c: {
            "image_features": noise(2, 16, c.hidden_size * len(c.vision_feature_layer)),
            "pooled_patches_idx": torch.arange(32).view(8, 4),
        },
    ),
    "molmo2_vision": Special(
        "tiny",
        {"num_position_embeddings": 16},
        lambda c: {"pixel_values": noise(2, 16, c.num_channels * c.patch_size**2)},
    ),
    "moshi_depth": Special(
        "tiny",
        {"input_size": 64},
        lambda c: {"input_ids": ids(2, 8), "last_hidden_state": noise(2, 1, 64), "use_cache": False},
    ),
    "muse_glimmer_assistant": Special(
        "tiny",
        {},
        lambda c: {
            "noise_embeds": noise(2, 16, c.hidden_size),
            "context_hidden_states": noise(2, 16, 2 * c.hidden_size),
            "use_cache": False,
        },
    ),
    "oneformer": Special(
        "narrow",
        {},
        lambda c: {"pixel_values": noise(2, 3, 64, 64), "task_inputs": ids(2, c.task_seq_len)},
    ),
    "phi4_multimodal_audio": Special(
        "deep", {}, lambda c: {"hidden_states": noise(2, 128, c.input_size), "mask": None}
    ),
    "rag": Special(
        "narrow",
        {},
        lambda c: {
            "context_input_ids": ids(4, 16),
            "context_attention_mask": torch.ones(4, 16, dtype=torch.long),
            "decoder_input_ids": ids(2, 16),
            "doc_scores": noise(2, 2),
            "n_docs": 2,
            "use_cache": False,
        },
    ),
    "reformer": Special(  # without its random hashes and dropout, for which it seeds the global generator anew
        "deep",
        {
            "axial_pos_shape": (4, 4),
            "hash_seed": 0,
            "hidden_dropout_prob": 0.0,
            "lsh_attention_probs_dropout_prob": 0.0,
            "local_attention_probs_dropout_prob": 0.0,
        },
        lambda c: {"input_ids": ids(2, 16)},
    ),
    "sam3_detr_decoder": SAM_DECODER,
    "sam3_detr_encoder": SAM_ENCODER,
    "sam3_lite_text_detr_decoder": SAM_DECODER,
    "sam3_lite_text_detr_encoder": SAM_ENCODER,
    "sam3_lite_text_mask_decoder": SAM_MASKS,
    "sam3_mask_decoder": SAM_MASKS,
    "seggpt": Special(
        "tiny",
        {
            "image_size": [128, 64],
            "num_hidden_layers": 4,
            "merge_index": 1,
            "intermediate_hidden_state_indices": [2, 3],
        },
        lambda c: {n: noise(2, 3, 64, 64) for n in ("pixel_values", "prompt_pixel_values", "prompt_masks")},
    ),
    "tvp": Special(
        "narrow",
        {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
        lambda c: {
            "input_ids": ids(1, 16),
            "pixel_values": noise(1, 2, 3, 64, 64),
            "attention_mask": torch.ones(1, 16, dtype=torch.long),
        },
    ),
    "rf_detr": Special("whole", {"num_queries": 8}, lambda c: {"pixel_values": noise(2, 3, 224, 224)}),
    "xclip_vision_model": Special(
        "narrow", {}, lambda c: {"pixel_values": noise(2 * c.num_frames, 3, c.image_size, c.image_size)}
    ),
    "xmod": Special("narrow", {"default_language": "en_XX"}, lambda c: {"input_ids": ids(2, 16)}),
    "unlimited_ocr_vision_encoder": Special("tiny", {}, lambda c: {"patch_embeds": noise(2, c.hidden_size, 4, 4)}),
}
