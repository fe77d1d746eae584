"""Ensembles in one training: the options and posterior, what happens at the ends of cycles, buffers of members."""

from bayesify.methods.ensemble.method import Ensemble, EnsemblePosterior

__all__ = ["Ensemble", "EnsemblePosterior"]
