"""Parts of pages that commands write, from result files: between `<!-- name -->` and `<!-- /name -->`."""

import re


def with_section(page, name, text):
    """Return a page with a text between the marks of a name."""
    marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    new, count = re.subn(marks, lambda found: found[1] + text.strip("\n") + "\n" + found[2], page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} parts <!-- {name} --> ... <!-- /{name} -->, and should have one")
    return new


def write_section(path, name, text):
    """Write a text between the marks of a name in a page."""
    path.write_text(with_section(path.read_text(), name, text))
