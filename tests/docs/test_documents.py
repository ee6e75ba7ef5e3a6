"""The code in the documents runs, alone and on two ranks, and prints what stands below it; what they name exists."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import syncline
from syncline.tools.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """Python in a document."""

    where: str
    code: str
    output: str | None
    """What the block of text right below it says: printed by rank 0; `...` stands for anything."""

    @property
    def brings_its_ranks(self) -> bool:
        return "run_ranks(" in self.code or "init_process_group(" in self.code

    @property
    def needs_init(self) -> bool:
        """Whether `syncline run` stops the code: it wraps a module or calls a verb, and has not joined the ranks."""
        joins = self.brings_its_ranks or re.search(r"\bsl\.(init|launch)\(|pytest\.mark\.ranks\(", self.code)
        return not joins and re.search(r"\bsl\.(DistributedDataParallel|[a-z]\w*)\(", self.code) is not None


def blocks_of(text: str, name: str) -> list[Block]:
    found = re.findall(r"^```python\n(.*?)^```\n(?:\n```(?:text)?\n(.*?)^```\n)?", text, re.M | re.S)
    return [
        Block(f"{name}:{number}", code, output or None)
        for number, (code, output) in enumerate(found)
        if not code.startswith(
            "--8<--"
        )  # a file of examples/, which the site puts here; its own test runs it
    ]


BLOCKS = {
    block.where: block
    for path in DOCUMENTS
    for block in blocks_of(path.read_text(), str(path.relative_to(ROOT)))
}
ON_TWO_RANKS = [where for where, block in BLOCKS.items() if not block.brings_its_ranks]


def printed_by(block: Block) -> str:
    printed = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
        pytest.MonkeyPatch.context() as patch,
    ):
        # Some pages put another class under this name. It is restored.
        patch.setattr(torch.nn.parallel, "DistributedDataParallel", torch.nn.parallel.DistributedDataParallel)
        try:
            exec(compile(block.code, block.where, "exec"), {"__name__": "__main__"})
        finally:
            syncline.shutdown()
    return printed.getvalue()


def assert_prints(output: str, printed: str) -> None:
    flags = doctest.ELLIPSIS | doctest.REPORT_NDIFF
    if not doctest.OutputChecker().check_output(output, printed, flags):
        pytest.fail(
            doctest.OutputChecker().output_difference(doctest.Example("", output), printed, flags),
            pytrace=False,
        )


@pytest.mark.parametrize("where", BLOCKS)
def test_python_in_documents_runs(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some blocks write files
    printed = printed_by(BLOCKS[where])
    output = BLOCKS[where].output
    if output is not None and BLOCKS[where].brings_its_ranks:
        assert_prints(output, printed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ON_TWO_RANKS)
def test_python_in_documents_runs_on_two_ranks(where: str, tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # data of its own
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # one directory for all ranks
        printed = printed_by(BLOCKS[where])
    output = BLOCKS[where].output
    if output is not None and rank == 0:
        assert_prints(output, printed)


def test_each_block_joins_the_ranks_that_syncline_run_starts() -> None:
    assert [where for where, block in BLOCKS.items() if block.needs_init] == []
    wraps = "ddp = sl.DistributedDataParallel(module)\n"
    assert Block("", wraps, None).needs_init
    assert Block("", "sl.broadcast_(module)\n", None).needs_init
    assert not Block("", f"sl.init()\n{wraps}", None).needs_init
    assert not Block("", f"dist.init_process_group()\n{wraps}", None).needs_init


def test_there_is_code_to_run_and_output_to_compare() -> None:
    assert any(where.startswith("README.md") for where in ON_TWO_RANKS)
    assert any(block.output for block in BLOCKS.values() if block.brings_its_ranks)
    assert any(block.output for block in BLOCKS.values() if not block.brings_its_ranks)


def test_output_that_differs_is_found() -> None:
    (block, other) = blocks_of("```python\nprint(1)\n```\n\n```\n2\n```\n\n```python\npass\n```\n", "made up")
    assert (block.output, other.output) == ("2\n", None)
    with pytest.raises(pytest.fail.Exception):
        assert_prints("2\n", printed_by(block))
    assert_prints("...\n", printed_by(block))


# ---------------------------------------------------------------------- Python that would not be run


def is_python(text: str) -> bool:
    """Whether a text is a piece of a program: it can be parsed, and does something."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return False
    doing = (ast.Assign, ast.Call, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Raise)
    return any(isinstance(node, doing) for node in ast.walk(tree))


def hidden_python(text: str) -> list[str]:
    """The blocks of a document that are Python, although they do not say so. What a program prints is none."""
    without_output = re.sub(
        r"^```python\n.*?^```\n(?:\n```(?:text)?\n.*?^```\n)?", "", text, flags=re.M | re.S
    )
    found = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", without_output, re.M | re.S)
    return [block for language, block in found if language not in ("diff", "python") and is_python(block)]


def test_scripts_in_documents_are_files_of_examples() -> None:
    """These files have tests of their own."""
    for path in DOCUMENTS:
        for code in re.findall(r"^ *```(?:bash|sh|yaml)\n(.*?)^ *```$", path.read_text(), re.M | re.S):
            assert re.fullmatch(r'--8<-- "examples/[^"]+"\n', code), f"{path.name}: {code}"


def test_no_python_is_hidden_in_blocks_of_text() -> None:
    assert [f"{path}: {block}" for path in DOCUMENTS for block in hidden_python(path.read_text())] == []
    output = "```python\nprint(f(1))\n```\n\n```\nf(1)\n```\n"
    assert hidden_python(f"{output}```text\nrank 0: x = 1\n```\n```console\n$ python train.py\n```\n") == []
    assert hidden_python("```text\nx = 1\n```\n```\nf()\n```\n") == ["x = 1\n", "f()\n"]


# ---------------------------------------------------------------------- links and names


def anchors_of(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *$", without_code, re.M):
        words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        same = sum(1 for one in anchors if re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", one))
        anchors.add(f"{anchor}-{same}" if same else anchor)
    return anchors


def dead_links(path: Path) -> list[str]:
    found = []
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\((?![a-z]+:)([^)\s]+)", text):
        name, _, anchor = target.partition("#")
        other = path.parent / name if name else path
        from_code = anchor.startswith("syncline.")  # the site makes it; test_site.py follows it
        if not other.exists() or (anchor and not from_code and anchor not in anchors_of(other.read_text())):
            found.append(f"{path.name} links to {target}")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_names_in_documents_exist(path: Path) -> None:
    assert dead_links(path) == []
    for name in re.findall(r"\bsl\.([A-Za-z_]+)", path.read_text()):
        assert hasattr(syncline, name), f"{path.name} names sl.{name}"


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `heading`, and *more*\n\n## Twice\n\n## Twice\n")
    links = "[](other.md) [](#here) [](other.md#a-heading-and-more) [](other.md#twice-1) [](https://a.b/c#d)"
    (tmp_path / "page.md").write_text(f"## Here\n{links}\n```\n[](no.md)\n```\n")
    assert dead_links(tmp_path / "page.md") == []
    (tmp_path / "page.md").write_text("[](no.md) [](other.md#twice-2) [](#nowhere)\n")
    assert dead_links(tmp_path / "page.md") == [
        f"page.md links to {target}" for target in ("no.md", "other.md#twice-2", "#nowhere")
    ]


# ---------------------------------------------------------------------- reference


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").rglob("*.md"))
    listed = set(re.findall(r"^::: syncline\.(\S+)$", pages, re.M))
    rooms = (syncline.compression, syncline.debug, syncline.exporters, syncline.testing, syncline.nn)
    for package in (syncline, *rooms):
        prefix = package.__name__.removeprefix("syncline").lstrip(".")
        for name in package.__all__:
            full = f"{prefix}.{name}".lstrip(".")
            assert full in listed or full in ("compression", "debug", "exporters", "nn"), (
                f"no page has syncline.{full}"
            )


@pytest.mark.parametrize("command", ["run", "bench", "doctor"])
def test_the_reference_has_the_help_of_every_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    assert f"$ syncline {command} --help\n{capsys.readouterr().out.rstrip()}\n```" in page


def test_the_reference_has_every_variable_that_is_read() -> None:
    source = "".join(
        (ROOT / "src" / "syncline" / name).read_text() for name in ("environment.py", "launchers.py")
    )
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    for name in set(re.findall(r'"((?:[A-Z]+_)+[A-Z]+|RANK)"', source)):
        assert f"`{name}`" in page, f"no line about {name}"
