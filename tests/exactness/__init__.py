"""Every method against posteriors that are known exactly: `python -m tests.exactness` writes docs/exactness.md."""
