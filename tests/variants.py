"""Every method with options that change its formulas."""

import torch

from bayesify.methods.vi import LINKS

N, SIG = 50, 0.7
VARIANTS = [
    *(("vi", {"link": link, "bias": bias, "kld": 0.5}) for link in LINKS for bias in ("informative", "uninformative")),
    *(("mc_dropout", {"p_drop": 0.3, "bias": bias, "kld": 0.5}) for bias in ("spikymix", "gaussian", "ignore")),
    *(("vanilla", {"wd": 0.3, "bias": bias}) for bias in ("penalty", "ignore")),
]


LINK_FUNCTIONS = {
    "softplus": lambda rho: torch.log1p(torch.exp(rho)),
    "exp": torch.exp,
    "clamp": lambda rho: torch.where(rho >= 1e-8, rho, torch.full_like(rho, 1e-8)),
}
