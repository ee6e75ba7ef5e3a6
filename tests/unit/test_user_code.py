"""Words for the user's code."""

from __future__ import annotations

import pytest

from syncline.user_code import warn_user


def test_a_program_without_a_name_is_warned_at_its_own_line() -> None:
    """As one that `exec` runs. Python leaves out a warning of a module that is None."""
    with pytest.warns(RuntimeWarning, match="on all ranks") as caught:
        exec(compile("\nwarn_user('on all ranks')", "program.py", "exec"), {"warn_user": warn_user})
    assert [(one.filename, one.lineno) for one in caught] == [("program.py", 2)]
