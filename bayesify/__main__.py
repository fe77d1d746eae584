"""Run the command line: `python -m bayesify`."""

import sys

from bayesify.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
