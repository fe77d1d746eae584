"""The code of docs/mixtures.md runs, and prints the lines that stand there."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "mixtures.md"
SHORTER = {"STEPS = 500": "STEPS = 60", "length=400": "length=40"}  # other numbers, the same words


def words(text):
    return re.sub(r"[\d.]+", "#", text).split()


def test_the_page_prints_what_it_says(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    for long, short in SHORTER.items():
        assert long in page
        page = page.replace(long, short)
    space = {}
    parts = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, flags=re.DOTALL)
    assert len(parts) == len(re.findall("```python", page)) == 6
    for code, expected in parts:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, space)
        assert words(printed.getvalue()) == words(expected)
