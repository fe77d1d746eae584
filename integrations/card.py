"""The model card of a saved folder: what the posterior is, how it scored, and how to load it.

Our part of `README.md` stands between two marks, and is replaced when the folder is written again; what others wrote
there is left alone.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bayesify.core.posterior import Posterior
from bayesify.core.reading import Scope

CARD = "README.md"
BEGIN, END = "<!-- bayesify -->", "<!-- end of bayesify -->"
HEAD = """\
---
library_name: {library}
tags:
- bayesify
- uncertainty
---

# {name}

"""
LOADING = """\
## How to load it

```python
from bayesify import predict
from bayesify.integrations.huggingface import from_pretrained

model = from_pretrained("this folder or repository")
out = predict(model, inputs)  # out.probs, out.entropy, out.mutual_information
```

Without bayesify the folder loads as {plain}.
"""


def write_card(folder: Path, scopes: Sequence[Scope], scores: Mapping[str, float], *, name: str, library: str) -> None:
    """Write our part of the card of a folder, and the whole card where there is none.

    Args:
        folder: The folder.
        scopes: The scope of the model; those of all members of a mixture.
        scores: What is known of its quality, by name.
        name: The model's, for a new card's title.
        library: The library that loads the plain model, for a new card.
    """
    path = folder / CARD
    part = f"{BEGIN}\n{described(scopes, scores)}{END}\n"
    before = path.read_text(encoding="utf-8") if path.is_file() else HEAD.format(library=library, name=name)
    ours = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}\n?", re.DOTALL)
    after = ours.sub(lambda _: part, before, count=1) if ours.search(before) else f"{before.rstrip()}\n\n{part}"
    path.write_text(after, encoding="utf-8")


def described(scopes: Sequence[Scope], scores: Mapping[str, float]) -> str:
    """Return our part of a card."""
    kinds = list(dict.fromkeys(repr(scope.method) for scope in scopes))
    posteriors = [p for scope in scopes for p in scope.posteriors]
    weights = sum(p.original.numel() for p in scopes[0].posteriors)
    lines = ["## Posterior", ""]
    if len(scopes) > 1:
        lines.append(f"- a mixture of {len(scopes)} members")
    lines += [f"- method: `{kind}`" for kind in kinds]
    lines.append(f"- Bayesian weights: {weights:,}" + (" in each member" if len(scopes) > 1 else ""))
    lines.append(f"- prior: {_prior(posteriors)}")
    factors = sorted({round(p.calibration, 4) for p in posteriors})
    if factors != [1]:
        lines.append(f"- spread calibrated by a factor of {', '.join(f'{f:g}' for f in factors)}")
    if scores:
        lines += ["", "## Scores", "", "| score | value |", "|---|---|"]
        lines += [f"| {name} | {value:.6g} |" for name, value in scores.items()]
    plain = "its first member, at the posterior mean" if len(scopes) > 1 else "the posterior mean"
    return "\n".join(lines) + "\n\n" + LOADING.format(plain=plain)


def _prior(posteriors: Sequence[Posterior]) -> str:
    """Describe the priors of all weights in one line."""
    kinds = {p.constant for p in posteriors}
    around = "the weights that training began with" if None in kinds else "zero"
    if None in kinds and len(kinds) > 1:
        around += " (zero for some)"
    low, high = (f(p.prior_sig for p in posteriors) for f in (min, max))
    spread = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    by_size = ", by each tensor's own size" if all(p.relative for p in posteriors) else ""
    return f"Gaussian around {around}, standard deviation {spread}{by_size}"
