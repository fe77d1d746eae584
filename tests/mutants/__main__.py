"""Apply the mutants of the table one by one to a copy of the repository, and run the tests that should notice.

`python -m tests.mutants [patterns of names] [--again] [--list]`. What build/mutants.json has a verdict for, with the
same sources and tests, is not run again. Ends with 1 where a mutant survives, or an entry fits the sources no more.
"""

import argparse
import fnmatch
import sys
from collections import Counter
from pathlib import Path

from .running import Workshop
from .table import MUTANTS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "mutants.json"
LIBRARIES = ("torch", "pytest", "hypothesis", "safetensors.torch", "scipy.stats", "timm", "torchvision", "transformers")


def main(arguments=None):
    """Run the chosen mutants and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="glob patterns of mutants' names; all by default")
    parser.add_argument("--again", action="store_true", help="run what has a verdict already, too")
    parser.add_argument("--list", action="store_true", help="only list the names")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.names or any(fnmatch.fnmatch(m.name, p) for p in options.names)]
    if not chosen:
        parser.error(f"no mutant is called {' or '.join(options.names)}; --list shows them")
    if options.list:
        print(*(m.name for m in chosen), sep="\n")
        return 0
    settings = {"plugins": ["tests.mutants.quick"], "libraries": LIBRARIES, "again": options.again}
    with Workshop(ROOT, RESULTS, **settings) as workshop:
        verdicts = {}
        for i, mutant in enumerate(chosen, 1):
            verdict = verdicts[mutant] = workshop.verdict(mutant)
            print(f"{i:3}/{len(chosen)} {verdict.word:9} {verdict.seconds:5.1f} s  {mutant.name}", flush=True)
    print(", ".join(f"{n} {word}" for word, n in Counter(v.word for v in verdicts.values()).most_common()))
    for mutant, verdict in verdicts.items():
        if verdict.word != "noticed":
            print(f"\n{verdict.word}: {mutant.name} ({mutant.place}): {verdict.why}")
            print(f"  - {mutant.fragment}\n  + {mutant.replacement}\n  {mutant.command}")
    return int(any(v.word != "noticed" for v in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
