"""Predictions as tables: for a notebook's eyes, and for pandas."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bayesify.core.notebook import html_table

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 5


def frame(columns: Mapping[str, Tensor | None], shape: Sequence[int]) -> "DataFrame":
    """Return a DataFrame with one row per item; items of more than one dimension have an index of as many levels.

    Args:
        columns: Tensors of this shape by name; None is left out.
        shape: (N, ...).

    Raises:
        ImportError: There is no pandas.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("to_pandas needs pandas, which is missing: pip install pandas") from error
    index: Any = pd.RangeIndex(shape[0], name="example")
    if len(shape) > 1:
        names = ["example", *(f"position_{i}" for i in range(1, len(shape)))]
        index = pd.MultiIndex.from_product([range(n) for n in shape], names=names)
    arrays = {name: value.flatten().numpy() for name, value in columns.items() if value is not None}
    return pd.DataFrame(arrays, index=index)


def shown(said: str, columns: Mapping[str, Tensor | None], doubt: Tensor) -> str:
    """Return HTML with what a prediction says of itself and its most doubtful items.

    Args:
        said: Its `repr`.
        columns: One tensor of (N,) per column; None is left out.
        doubt: The uncertainty to sort by, (N,).
    """
    worst = doubt.argsort(descending=True, stable=True)[:SHOWN].tolist()
    kept = {name: value for name, value in columns.items() if value is not None}
    rows = [[str(i), *(_cell(value[i].item()) for value in kept.values())] for i in worst]
    below = f"the {len(worst)} most doubtful of {len(doubt):,}" if len(doubt) > SHOWN else ""
    return html_table(("", *kept), rows, above=said, below=below)


def _cell(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
