"""The wrapped model: posteriors on its parameters, which theta a read sees, the penalty, files."""

VERSION = "0.2.0"
