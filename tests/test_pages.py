"""The code of the site's pages runs, and prints what stands beside it."""

import pytest
import site_pages as pages


@pytest.mark.filterwarnings("ignore")  # of other libraries: exporters, trainers
@pytest.mark.parametrize("page", pages.PAGES)
def test_a_page_runs_and_prints_what_it_shows(page):
    pytest.importorskip("sklearn")
    text = (pages.DOCS / f"{page}.md").read_text()
    for block, printed in pages.run(text):
        if block["output"] is not None:
            assert pages.close(block["output"], printed), f"{block['code']}\nprints\n{printed}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("error 0.10, 5 samples", "error 0.105, 5  samples", True),
        ("error 0.10", "error 0.20", False),
        ("error 0.10", "NLL 0.10", False),
        ("tensor([1., 2.])", "tensor([1.])", False),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(shown, printed, same):
    assert pages.close(shown, printed) is same


def test_what_is_printed_is_written_where_output_stands():
    text = "a\n```python\nprint(1 + 1)\n```\n\n```text\nold\n```\nb\n```python\nprint(3)\n```\nc\n"
    assert pages.written(text) == "a\n```python\nprint(1 + 1)\n```\n\n```text\n2\n```\nb\n```python\nprint(3)\n```\nc\n"


def test_a_block_without_its_library_is_left_out():
    assert pages.missing("import torch\nfrom no_such_library.part import x") == {"no_such_library"}
    text = "```python\nimport no_such_library\n```\n\n```python\nprint(1)\n```\n"
    assert [printed for _, printed in pages.run(text)] == ["1\n"]
