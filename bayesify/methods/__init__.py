"""The methods: one file each, with its options, its posterior and its formulas."""

from bayesify.core.method import Method
from bayesify.core.penalty import noise
from bayesify.methods.ensemble import Ensemble
from bayesify.methods.ivon import IVON
from bayesify.methods.laplace.method import Laplace
from bayesify.methods.mc_dropout import MCDropout
from bayesify.methods.sgld import SGLD
from bayesify.methods.swag import SWAG
from bayesify.methods.vanilla import Vanilla
from bayesify.methods.vi import VI

__all__ = ["Ensemble", "IVON", "Laplace", "MCDropout", "Method", "SGLD", "SWAG", "VI", "Vanilla", "noise"]
