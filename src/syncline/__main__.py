"""The entry point of `python -m syncline`, a command that is equivalent to `syncline`."""

from __future__ import annotations

import sys

from syncline.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
