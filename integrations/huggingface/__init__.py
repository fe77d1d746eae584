"""bayesify for Hugging Face: train with the Trainer, save and load folders, generate text."""

from ..extras import extra

with extra("bayesify[hf]", "transformers", "accelerate"):
    from .adapters import export_adapters
    from .generation import Generations, generate
    from .hub import from_pretrained, save_pretrained
    from .pipeline import pipeline
    from .scoring import Scored, score, semantic_entropy
    from .trainer import BayesTrainer, BayesTrainerMixin

__all__ = [
    "BayesTrainer",
    "BayesTrainerMixin",
    "Generations",
    "Scored",
    "export_adapters",
    "from_pretrained",
    "generate",
    "pipeline",
    "save_pretrained",
    "score",
    "semantic_entropy",
]
