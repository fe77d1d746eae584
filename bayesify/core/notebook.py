"""Tables that a notebook shows."""

from collections.abc import Sequence
from html import escape

_CELL = "text-align:left; padding:0.15em 0.9em 0.15em 0; font-variant-numeric:tabular-nums"


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, above: str = "", below: str = "") -> str:
    """Return a table with a line of text above and lines below it; all of it is escaped.

    Example:
        >>> html_table(("a",), [("<1",)], above="x & y").count("&")
        2
    """

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in cells) + "</tr>"

    head = f"<thead>{line(header, 'th')}</thead>"
    body = "".join(line(row, "td") for row in rows)
    texts = [f'<div style="white-space:pre-line">{escape(text)}</div>' if text else "" for text in (above, below)]
    return f"<div>{texts[0]}<table>{head}<tbody>{body}</tbody></table>{texts[1]}</div>"
