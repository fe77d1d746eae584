"""The methods: one file each, with its options, its posterior and its formulas."""

from bayesify.methods.base import Method
from bayesify.methods.la import Laplace
from bayesify.methods.mc_dropout import MCDropout
from bayesify.methods.sgld import SGLD
from bayesify.methods.vanilla import Vanilla
from bayesify.methods.vi import VI

__all__ = ["Laplace", "MCDropout", "Method", "SGLD", "VI", "Vanilla"]
