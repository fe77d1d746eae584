"""Run the examples whose output stands in a page, and keep what they print: in docs/results, and in the page.

    BAYESIFY_DATA=... python -m tests.printed    # all of them (minutes)
    python -m tests.printed lora

What an example prints is in `docs/results/<name>.txt`, and in its page between marks of that name. The picture of the
first page is what `bayesify demo` draws (`python -m tests.printed picture`, seconds).
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.sections import write_section

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {"lora": DOCS / "lora.md"}
PICTURE = DOCS / "images" / "before_after.svg"


def section(name):
    """Return a page's part, from what was kept."""
    return f"```text\n{(DOCS / 'results' / f'{name}.txt').read_text()}```"


def keep(name):
    """Run an example in a folder of its own; lines that say where its files are do not count."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
        printed = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
        lines = [line for line in printed.strip().splitlines() if not line.startswith("see ")]
        (DOCS / "results" / f"{name}.txt").write_text("\n".join(lines) + "\n")


def draw():
    """Draw the picture of the first page: what `bayesify demo` shows."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "bayesify", "demo", "--out", folder], check=True)
        shutil.copyfile(Path(folder) / PICTURE.name, PICTURE)


if __name__ == "__main__":
    for name in sys.argv[1:] or [*PAGES, "picture"]:
        if name == "picture":
            draw()
            continue
        keep(name)
        write_section(PAGES[name], name, section(name))
