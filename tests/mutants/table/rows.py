"""Write mutants as rows: a place and its tests, then what is wrong, the fragment, its replacement, the tests' names."""

from ..running import Mutant


def of(place, tests, *rows):
    """Return the mutants of one file or folder; a row is (name, fragment, replacement, select)."""
    tests = tuple(f"tests/{t}" for t in tests.split())
    return [Mutant(f"{place}: {name}", f"bayesify/{place}", old, new, tests, select) for name, old, new, select in rows]
