"""Measure the distances of every method and write docs/results/exactness.json and docs/exactness.md."""

from .pages import PAGE, RESULTS, measure, page, write

if __name__ == "__main__":
    write(RESULTS, measure())
    PAGE.write_text(page())
    print(PAGE.read_text())
