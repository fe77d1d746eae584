"""Say which pip command is missing, where an optional library is."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(package: str, *libraries: str) -> Iterator[None]:
    """Turn a failed import of an optional library into the command that installs it.

    Args:
        package: What pip installs.
        *libraries: The modules that it brings.

    Raises:
        ImportError: One of them is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in libraries:
            raise
        raise ImportError(f"this needs {error.name}: pip install '{package}'", name=error.name) from error
