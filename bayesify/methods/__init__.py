"""The methods: one file each, with its options, its posterior and its formulas."""

from bayesify.methods.base import Method
from bayesify.methods.mc_dropout import MCDropout
from bayesify.methods.vanilla import Vanilla
from bayesify.methods.vi import VI

__all__ = ["MCDropout", "Method", "VI", "Vanilla"]
