"""The face of each room: its `__init__` says what the room is for, what it imports, and what is in each file.

The page docs/inside/architecture.md shows the rooms in the order of their imports; it is compared with the tree.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.architecture.test_imports import (
    LEVELS,
    PACKAGE,
    SOURCES,
    imports_of,
    is_package,
    nodes_of,
    parsed,
    part_of,
)

import syncline

ROOMS = sorted(module for module in SOURCES if module != "syncline" and is_package(module, SOURCES))
_FILE = re.compile(r"^(\w+)\.py  *(\S.*)$", re.MULTILINE)
_ORDER = [part for level in LEVELS for part in level]


def face_of(room: str) -> str:
    return ast.get_docstring(parsed(SOURCES[room])) or ""


def files_in(room: str) -> set[str]:
    """Return the modules right in a room."""
    return {
        m.rpartition(".")[2] for m in SOURCES if m.rpartition(".")[0] == room and not is_package(m, SOURCES)
    }


def rooms_imported_by(room: str) -> list[str]:
    """Return the other rooms and modules below syncline that a room imports, low to high."""
    modules = [m for m in SOURCES if m == room or m.startswith(f"{room}.")]
    found = {
        part_of(imported)
        for m in modules
        for _, imported, _ in imports_of(m, SOURCES)
        if "syncline." in imported
    }
    return sorted(found - {part_of(room)}, key=_ORDER.index)


@pytest.mark.parametrize("room", ROOMS)
def test_a_face_names_each_file_of_its_room_once(room: str) -> None:
    named = [name for name, _ in _FILE.findall(face_of(room))]
    assert sorted(named) == sorted(files_in(room))


@pytest.mark.parametrize(
    "room", [room for room in ROOMS if room.count(".") == 1 and room != "syncline.tools"]
)
def test_a_face_names_what_its_room_imports(room: str) -> None:
    stated = re.search(r"^Imports: ([^.]*)\.$", face_of(room), re.MULTILINE)
    assert stated is not None
    expected = rooms_imported_by(room) or ["nothing of ours"]
    assert re.split(r",\s+", stated.group(1).replace("nothing of\nours", "nothing of ours")) == expected


def test_the_page_shows_the_rooms_in_the_order_of_their_imports() -> None:
    page = (Path(__file__).parents[2] / "docs" / "inside" / "architecture.md").read_text()
    tree = page.partition("src/syncline/\n")[2].partition("```")[0]
    shown = [name.rstrip("/").removesuffix(".py") for name in re.findall(r"^  (\S+)", tree, re.MULTILINE)]
    assert shown == ["__init__", *_ORDER]
    assert PACKAGE.name == "syncline"


# ---------------------------------------------------------------------- what tests import

TESTS = Path(__file__).parents[1]


def insides_imported_by(source: str) -> set[str]:
    """The rooms whose modules a source imports directly, and not by way of the room's face."""
    found = set()
    for node in nodes_of(source):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("syncline"):
            continue
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            module = inner if inner in SOURCES else str(node.module)
            if not is_package(module, SOURCES) and module.count(".") > 1:
                found.add(part_of(module))
    return found


def test_a_test_imports_the_inside_of_one_room_at_most() -> None:
    """The room that it is about. What it needs of others it gets from their faces, so that they can be rearranged."""
    several = {
        str(path.relative_to(TESTS)): sorted(rooms)
        for path in sorted(TESTS.rglob("*.py"))
        if len(rooms := insides_imported_by(path.read_text())) > 1
    }
    assert several == {}


def test_an_import_of_an_inside_is_seen() -> None:
    source = (
        "from syncline import nn, errors\nfrom syncline.transport import Transport, base\n"
        "from syncline.gradients.riders.base import Rider\nfrom syncline.errors import SynclineError\n"
    )
    assert insides_imported_by(source) == {"transport", "gradients"}


def test_an_abbreviation_of_a_public_name_is_explained() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'DDP'\. Did you mean DistributedDataParallel\?$"):
        _ = syncline.DDP  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'D'$"):
        _ = syncline.D  # type: ignore[attr-defined]
