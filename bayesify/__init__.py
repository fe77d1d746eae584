"""Honest uncertainty for any pretrained PyTorch model, in one line."""

from bayesify import methods, metrics, plots
from bayesify.checkpoint import load, save
from bayesify.core import bayesify, mean, named_posteriors, sample, samples, unbayesify
from bayesify.groups import param_groups
from bayesify.langevin import SGLD
from bayesify.laplace import fit_laplace
from bayesify.overview import summary
from bayesify.prediction import predict
from bayesify.prior_term import penalty

__version__ = "0.1.0"

__all__ = [
    "SGLD",
    "bayesify",
    "fit_laplace",
    "load",
    "mean",
    "methods",
    "metrics",
    "named_posteriors",
    "param_groups",
    "penalty",
    "plots",
    "predict",
    "sample",
    "samples",
    "save",
    "summary",
    "unbayesify",
]
