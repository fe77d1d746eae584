"""bayesify for Hugging Face: train with the Trainer, save and load folders, generate text."""

from .extras import extra

with extra("bayesify[hf]", "transformers", "accelerate"):
    from .hf_adapters import export_adapters
    from .hf_generation import Generations, generate
    from .hf_hub import from_pretrained, save_pretrained
    from .hf_pipeline import pipeline
    from .hf_trainer import BayesTrainer, BayesTrainerMixin

__all__ = [
    "BayesTrainer",
    "BayesTrainerMixin",
    "Generations",
    "export_adapters",
    "from_pretrained",
    "generate",
    "pipeline",
    "save_pretrained",
]
