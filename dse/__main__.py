"""`python -m dse`."""

import sys

from dse.cli import main

if __name__ == "__main__":
    sys.exit(main())
