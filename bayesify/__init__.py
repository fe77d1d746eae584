"""Honest uncertainty for any pretrained PyTorch model, in one line."""

from bayesify import methods
from bayesify.core import bayesify, mean, named_posteriors, penalty, sample, samples, unbayesify

__version__ = "0.1.0"
