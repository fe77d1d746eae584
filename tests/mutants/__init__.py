"""Does a test notice? Every formula of the package is broken once, in a copy: `python -m tests.mutants`."""
