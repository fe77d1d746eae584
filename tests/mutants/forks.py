"""A process that has imported the large libraries once, and runs pytest in forks of itself.

`python forks.py [libraries]`: a script, so that nothing of the repository is imported, and forks import its copy. A
line of JSON comes in with pytest's arguments, a folder, an environment and seconds; one goes out with the exit code and
what was printed.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time

PAUSE = 0.02  # seconds between two looks at a fork


def run(arguments, folder, environment):
    """Be the fork: run pytest in a folder as if Python had been started there."""
    import pytest

    os.setsid()  # whatever the tests start goes with them
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder
    sys.dont_write_bytecode = True
    return int(pytest.main(arguments))


def forked(request):
    """Run one request; return the exit code, None where it took too long, and what was printed."""
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            code = 3  # pytest's own for what it did not expect
            try:
                for stream in (1, 2):
                    os.dup2(said.fileno(), stream)
                code = run(request["arguments"], request["folder"], request["environment"])
                sys.stdout.flush()
            finally:
                os._exit(code)
        end = time.monotonic() + request["patience"]
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(PAUSE)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(ended[1]) if ended[0] else os.waitpid(pid, 0) and None
        said.seek(0)
        return code, said.read().decode(errors="replace")


def main():
    """Answer requests until there are no more."""
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
