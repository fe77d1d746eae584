"""Honest uncertainty for any pretrained PyTorch model, in one line."""

import sys
from types import ModuleType

from bayesify import methods
from bayesify.core import VERSION, wrap
from bayesify.core.checkpoint import ATTACHABLE, load, save
from bayesify.core.mixture import components, mix
from bayesify.core.penalty import penalty
from bayesify.core.scopes import mean, named_posteriors, param_groups, prior, sample, samples
from bayesify.core.summary import summary
from bayesify.core.wrap import bayesify, unbayesify
from bayesify.integrations import eval_caches, folders
from bayesify.methods.cycles import Cycles
from bayesify.methods.ivon import IVONOptimizer
from bayesify.methods.laplace.fit import fit_laplace
from bayesify.methods.sgld import SGLDOptimizer
from bayesify.prediction import active
from bayesify.prediction.calibrate import calibrate
from bayesify.prediction.deploy import deploy
from bayesify.prediction.novelty import Novelty, fit_novelty
from bayesify.prediction.predict import predict
from bayesify.quality import diagnostics, metrics, plots

__version__ = VERSION
IVON, SGLD = IVONOptimizer, SGLDOptimizer  # bayesify.methods.IVON and SGLD are the options

ATTACHABLE["novelty"] = Novelty  # saved with the model
wrap.extensions.extend([eval_caches, folders])  # what core must not know of other libraries

__all__ = [
    "Cycles",
    "IVON",
    "SGLD",
    "active",
    "bayesify",
    "calibrate",
    "components",
    "deploy",
    "diagnostics",
    "fit_laplace",
    "fit_novelty",
    "load",
    "mean",
    "methods",
    "metrics",
    "mix",
    "named_posteriors",
    "param_groups",
    "penalty",
    "plots",
    "predict",
    "prior",
    "sample",
    "samples",
    "save",
    "summary",
    "unbayesify",
]


class _Package(ModuleType):
    """A module that can be called: `import bayesify; bayesify(model)`."""

    __call__ = staticmethod(bayesify)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    """List the public names; the folders are open to whoever knows them."""
    return [*__all__, "__version__"]
