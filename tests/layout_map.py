"""The map of folders in CONTRIBUTING.md: `python -m tests.layout_map` writes it anew."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKS = "<!-- map -->", "<!-- end of map -->"
ROOMS = {
    "bayesify": "the public names",
    "bayesify/engine": "random numbers as a function of (seed, name, element), and formulas over whole tensors",
    "bayesify/core": "what posteriors and methods are; wrapping; which theta a read sees; the penalty; files",
    "bayesify/quality": "metrics, temperature, diagnostics, plots, the report: functions of predictions",
    "bayesify/prediction": "batches, likelihoods, predictions and what they hold",
    "bayesify/methods": "one file or folder per method: options, posterior, formulas, its optimizer or fit",
    "bayesify/cli": "the command line",
    "integrations": "everything that knows another library; imported as `bayesify.integrations`",
}


def table() -> str:
    """Return the map: every folder with its modules, sub-folders after a slash."""
    lines = ["| folder | what it knows | modules |", "|---|---|---|"]
    for folder, about in ROOMS.items():
        top = ROOT / folder
        files = top.glob("*.py") if folder == "bayesify" else top.rglob("*.py")
        names = [p.relative_to(top).with_suffix("").as_posix() for p in files]
        shown = ", ".join(f"`{name}`" for name in sorted(names) if not name.endswith("__init__"))
        lines.append(f"| `{folder}/` | {about} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Write the map into its page."""
    page = ROOT / "CONTRIBUTING.md"
    before, _, rest = page.read_text().partition(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n\n{table()}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


if __name__ == "__main__":
    main()
