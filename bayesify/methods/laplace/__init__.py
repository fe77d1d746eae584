"""Laplace: the options and posterior, the fit, its curvature and the tuning of its prior."""

from bayesify.methods.laplace.method import Laplace, LaplacePosterior

__all__ = ["Laplace", "LaplacePosterior"]
