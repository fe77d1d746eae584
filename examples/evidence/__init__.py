"""Evidence: every method on the same tasks, beside the baselines that it must beat.

    python -m examples.evidence --list                 # tasks, rows, and what is left to run
    python -m examples.evidence --dry --tasks digits   # one seed on validation data: what a run takes; writes nothing
    python -m examples.evidence --minutes 60           # the runs that have no result yet, then the page

A run is one row of the table on one task with one seed, in a process of its own. Whatever is chosen in it (a
temperature, the factor of `calibrate`, a prior's scale) is chosen on a fifth of the training data that was held out.
The test data is read by one function, which writes the result and refuses to do so twice. Results are in
`docs/results/evidence`, the page is `docs/evidence.md`, trained members and preprocessed data are kept in
`runs/evidence`. BAYESIFY_DATA names the folder with the data; the digits come with scikit-learn.
"""
