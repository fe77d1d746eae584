"""Small random models of Hugging Face, one per architecture, each with a batch that gives a loss."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

with warnings.catch_warnings():
    # Transformers scripts functions of DeBERTa when it is imported, which torch calls deprecated.
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
    import transformers
    import transformers.models.deberta_v2.modeling_deberta_v2
    from transformers import utils as hf_utils

hf_utils.logging.disable_progress_bar()

TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
DECODER = {**TEXT, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
}
SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(seed))


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def classified(**inputs: Tensor) -> dict[str, Tensor]:
    return {**inputs, "labels": torch.tensor([0, 1])}


def continued() -> dict[str, Tensor]:
    tokens = ids(2, 7)
    labels = tokens.clone()
    labels[1, 4:] = -100
    return {"input_ids": tokens, "labels": labels}


@dataclass(frozen=True)
class Architecture:
    """A model class, its small configuration, and a batch."""

    name: str
    model: str
    config: str
    options: dict[str, Any]
    batch: Callable[[], dict[str, Any]]
    auto: str = "AutoModelForSequenceClassification"
    extra: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        return getattr(transformers, self.model)(config).eval()


def _classifier(name: str, **options: Any) -> Architecture:
    shape = {**TEXT, **options}
    return Architecture(
        name, f"{name}ForSequenceClassification", f"{name}Config", shape, lambda: classified(input_ids=ids(2, 7))
    )


def _decoder(name: str, **options: Any) -> Architecture:
    return Architecture(
        name, f"{name}ForCausalLM", f"{name}Config", {**DECODER, **options}, continued, "AutoModelForCausalLM"
    )


def _image(name: str, **options: Any) -> Architecture:
    return Architecture(
        name,
        f"{name}ForImageClassification",
        f"{name}Config",
        options,
        lambda: classified(pixel_values=floats(2, 3, 16, 16)),
        "AutoModelForImageClassification",
    )


ARCHITECTURES = [
    _classifier("Bert"),
    _classifier("Roberta", max_position_embeddings=40, pad_token_id=1),
    Architecture(
        "DistilBert",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 40},
        lambda: classified(input_ids=ids(2, 7)),
    ),
    _classifier("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    _classifier("Albert", embedding_size=8, num_hidden_layers=3),
    _classifier("Electra", embedding_size=8),
    Architecture(
        "GPT2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32}
        | dict.fromkeys(("bos_token_id", "eos_token_id"), 1),
        continued,
        "AutoModelForCausalLM",
    ),
    _decoder("Llama"),
    _decoder("Mistral", num_key_value_heads=1),
    _decoder("Qwen2", num_key_value_heads=1, tie_word_embeddings=True),
    _decoder("Gemma", num_key_value_heads=1, head_dim=8),
    _decoder("OPT", ffn_dim=24, word_embed_proj_dim=16),
    Architecture(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
        lambda: {"input_ids": ids(2, 7), "labels": ids(2, 5, seed=3)},
        "AutoModelForSeq2SeqLM",
    ),
    Architecture(
        "Bart",
        "BartForConditionalGeneration",
        "BartConfig",
        {**SEQ2SEQ, "max_position_embeddings": 32, "forced_eos_token_id": 2},
        lambda: {"input_ids": ids(2, 7), "labels": ids(2, 5, seed=3)},
        "AutoModelForSeq2SeqLM",
    ),
    _image("ViT", **VISION, patch_size=8),
    _image("DeiT", **VISION, patch_size=8),
    _image("Swin", image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4),
    _image("ConvNext", hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, image_size=16),
    Architecture(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        {
            "projection_dim": 8,
            "text_config": {
                **TEXT,
                "max_position_embeddings": 16,
                "eos_token_id": 2,
                "bos_token_id": 1,
                "pad_token_id": 0,
            },
            "vision_config": {**VISION, "patch_size": 8},
        },
        lambda: {"input_ids": ids(2, 7), "pixel_values": floats(2, 3, 16, 16), "return_loss": True},
        "AutoModel",
    ),
    Architecture(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
        lambda: {"input_features": floats(2, 8, 20), "labels": ids(2, 5, seed=3)},
        "AutoModelForSpeechSeq2Seq",
    ),
    Architecture(
        "Wav2Vec2",
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {**TEXT, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (4, 4), "num_feat_extract_layers": 2}
        | {
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "classifier_proj_size": 8,
            "mask_time_prob": 0.0,
        },
        lambda: classified(input_values=floats(2, 160)),
        "AutoModelForAudioClassification",
    ),
    Architecture(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "state_size": 4, "time_step_rank": 2}
        | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        continued,
        "AutoModelForCausalLM",
    ),
]
BY_NAME = {a.name: a for a in ARCHITECTURES}


def main_output(output: Any) -> Tensor:
    """Return the output that is compared: the logits, or CLIP's similarities."""
    return output.logits if hasattr(output, "logits") else output.logits_per_image


@contextmanager
def no_warning() -> Iterator[None]:
    """Fail where Transformers logs a warning."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not records, [r.getMessage() for r in records]
