"""bayesify for Hugging Face: train with the Trainer, save and load folders, generate text."""

from bayesify.integrations.hf_hub import from_pretrained, save_pretrained

__all__ = ["from_pretrained", "save_pretrained"]
