"""Write the table of docs/comparison.md from docs/results/libraries.json: python examples/libraries.py."""

import json
from pathlib import Path

if __package__:
    from .sections import write_section
else:
    from sections import write_section

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs/results/libraries.json", ROOT / "docs/comparison.md"


def table(found):
    """Return what each library has, a row for each feature."""
    names = [f"{name} {version}" for name, version in found["libraries"].items()]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    lines += [f"| {row} | " + " | ".join(cells) + " |" for row, cells in found["rows"].items()]
    return "\n".join([*lines, "", f"Read from the source of each release on {found['date']}."])


if __name__ == "__main__":
    write_section(PAGE, "libraries", table(json.loads(RESULTS.read_text())))
