"""SGLD and SGHMC: the options and posterior, and the optimizer that moves the chain."""

from bayesify.methods.sgld.method import SGLD, SGLDPosterior

__all__ = ["SGLD", "SGLDPosterior"]
