"""The table of mutants.

A fragment must occur exactly once in its place, a file or a folder: a short formula rather than a whole line, so that
it lasts. Where a formula is rewritten, amend its row; where one is new, add a row. The last column is pytest's -k, and
keeps a mutant to a few seconds; it looks at the names of files as well, so that "sgld" is all of test_sgld.py.
"""

from . import engine, laplace, mixtures, posteriors, quality, ranks

MUTANTS = [
    *quality.MUTANTS,
    *posteriors.MUTANTS,
    *laplace.MUTANTS,
    *engine.MUTANTS,
    *mixtures.MUTANTS,
    *ranks.MUTANTS,
]
