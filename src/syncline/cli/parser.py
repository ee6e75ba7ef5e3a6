"""What commands with options of their own have in common: a help to be read, and errors in one line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from syncline.cli.options import UsageError

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """Parses the options of one command.

    Args:
        command: its name, "syncline bench".
        text: its help.
    """

    def __init__(self, command: str, text: str) -> None:
        super().__init__(prog=command, allow_abbrev=False)
        self._text = text

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def format_help(self) -> str:
        return self._text

    def parse_all(self, argv: Sequence[str], *, what: str = "argument", hint: str = "") -> argparse.Namespace:
        """Parse arguments of which none may be left.

        Args:
            argv: what was given.
            what: what one that is not known is called.
            hint: what is said of it besides.

        Raises:
            UsageError: one is not known, or not what it should be.
        """
        args, unknown = self.parse_known_args(list(argv))
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            raise UsageError(f"unknown {what} {unknown[0]}: {remedy}{hint}")
        return args
