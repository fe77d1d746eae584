"""IVON: the options and posterior, and the optimizer that moves both mean and spread."""

from bayesify.methods.ivon.method import IVON, IVONPosterior

__all__ = ["IVON", "IVONPosterior"]
