"""`python -m syncline.cli` is `syncline`."""

from __future__ import annotations

import sys

from syncline.cli import main

if __name__ == "__main__":
    sys.exit(main())
