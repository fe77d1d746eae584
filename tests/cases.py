"""The case table of models: a small instance of each architecture, with an input.

`build()` gives a fresh model in eval mode; `call(model)` runs it and returns one floating point tensor.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    call: Callable[[nn.Module], Any]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval()

    def output(self, model: nn.Module) -> Tensor:
        return first_float(self.call(model))


def first_float(output: Any) -> Tensor:
    """Return the first floating point tensor of a model's output."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(*shape: int, vocabulary: int = 50) -> Tensor:
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(1))


class MLP(nn.Module):
    """Linear layers, a norm, and a bare parameter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))
        self.inp = nn.Linear(4, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.inp(x + self.token))))


class Tied(nn.Module):
    """An embedding with a padding row, tied to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=2)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids))))


class Bare(nn.Module):
    """Parameters in lists and dictionaries, one module under two names, one parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.shifts = nn.ParameterDict({"a": torch.randn(4)})
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.other = nn.Linear(4, 4)
        self.other.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return self.other(self.again(self.first(x + self.shifts["a"])))


def torchvision_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=5, **options)

    return make


def small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 16, num_layers=2, num_heads=2, hidden_dim=24, mlp_dim=48, num_classes=5)


def small_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 24, depths=[2, 2], num_heads=[2, 2], window_size=[2, 2], num_classes=5)


def small_convnext() -> nn.Module:
    from torchvision.models import ConvNeXt
    from torchvision.models.convnext import CNBlockConfig

    return ConvNeXt([CNBlockConfig(16, 24, 2), CNBlockConfig(24, None, 2)], num_classes=5)


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=5, **options)

    return make


def hf_model(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind.partition('For')[0].removesuffix('LMHeadModel')}Config")(**options)
        return getattr(transformers, kind)(config)

    return make


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IMAGE = tensor(2, 3, 32, 32)
IDS = tokens(2, 7)

CASES = [
    Case("mlp", MLP, lambda m: m(tensor(5, 4))),
    Case("tied", Tied, lambda m: m(tokens(2, 7, vocabulary=11))),
    Case("bare", Bare, lambda m: m(tensor(5, 4))),
    Case("lstm", lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True), lambda m: m(tensor(5, 2, 4))),
    Case("gru", lambda: nn.GRU(4, 6, num_layers=2), lambda m: m(tensor(5, 2, 4))),
    Case(
        "transformer",
        lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        lambda m: m(tensor(2, 5, 16), tensor(2, 4, 16)),
    ),
    Case(
        "weight_norm",
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3)),
        lambda m: m(tensor(2, 4, 9)),
    ),
    Case("resnet18", torchvision_model("resnet18"), lambda m: m(IMAGE)),
    Case("vit_b_32", small_vit, lambda m: m(IMAGE)),
    Case("swin_t", small_swin, lambda m: m(IMAGE)),
    Case("convnext_tiny", small_convnext, lambda m: m(IMAGE)),
    Case("mobilenet_v3_small", torchvision_model("mobilenet_v3_small"), lambda m: m(IMAGE)),
    Case("vit_tiny", timm_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24), lambda m: m(IMAGE)),
    Case("efficientnet", timm_model("efficientnet_b0"), lambda m: m(IMAGE)),
    Case(
        "beit",
        timm_model("beit_base_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2),
        lambda m: m(IMAGE),
    ),
    Case("deit", timm_model("deit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24), lambda m: m(IMAGE)),
    Case("levit", timm_model("levit_128s", img_size=64), lambda m: m(tensor(2, 3, 64, 64))),
    Case("bert", hf_model("BertForMaskedLM", vocab_size=50, **SIZES), lambda m: m(IDS)),
    Case(
        "gpt2",
        hf_model(
            "GPT2LMHeadModel",
            vocab_size=50,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
        ),
        lambda m: m(IDS),
    ),
    Case(
        "t5",
        hf_model("T5ForConditionalGeneration", vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
        lambda m: m(input_ids=IDS, decoder_input_ids=IDS[:, :4]),
    ),
    Case("llama", hf_model("LlamaForCausalLM", vocab_size=50, num_key_value_heads=1, **SIZES), lambda m: m(IDS)),
    Case("hf_vit", hf_model("ViTForImageClassification", image_size=32, patch_size=8, **SIZES), lambda m: m(IMAGE)),
    Case(
        "wav2vec2",
        hf_model(
            "Wav2Vec2ForCTC",
            vocab_size=12,
            conv_dim=(8, 8),
            conv_kernel=(10, 3),
            conv_stride=(5, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            apply_spec_augment=False,
            **SIZES,
        ),
        lambda m: m(tensor(2, 400)),
    ),
]

BY_NAME = {case.name: case for case in CASES}
