"""The code in the documents runs, alone and on two ranks, and prints what stands below it; what they name exists."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
import textwrap
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import syncline
from syncline.testing import RankPool
from syncline.testing.pool import Task
from syncline.tools.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """Python in a document."""

    page: str
    line: int
    """The line of the page at which the code begins."""
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


def blocks_of(text: str, page: str) -> list[Block]:
    found = re.finditer(r"^```python\n(.*?)^```\n(?:\n```(?:text)?\n(.*?)^```\n)?", text, re.M | re.S)
    return [
        Block(page, text.count("\n", 0, one.start()) + 2, one[1], one[2] or None)
        for one in found
        if not one[1].startswith("--8<--")  # a file of examples/: the site puts it here, its own test runs it
    ]


BLOCKS_OF = {
    page: blocks
    for path in DOCUMENTS
    if (blocks := blocks_of(path.read_text(), page := str(path.relative_to(ROOT))))
}
BLOCKS = [block for blocks in BLOCKS_OF.values() for block in blocks]


def printed_by(block: Block) -> str:
    """Run a block. In tracebacks it has the file and the lines of its page."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.code, ROOT / block.page, "exec")
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
        pytest.MonkeyPatch.context() as patch,
    ):
        # Some pages put another class under this name. It is restored.
        patch.setattr(torch.nn.parallel, "DistributedDataParallel", torch.nn.parallel.DistributedDataParallel)
        try:
            exec(code, {"__name__": "__main__"})
        finally:
            syncline.shutdown()
    return printed.getvalue()


def assert_prints(block: Block, printed: str) -> None:
    flags = doctest.ELLIPSIS | doctest.REPORT_NDIFF
    if block.output and not doctest.OutputChecker().check_output(block.output, printed, flags):
        difference = doctest.OutputChecker().output_difference(
            doctest.Example("", block.output), printed, flags
        )
        pytest.fail(f"{block.page}, line {block.line}: {difference}", pytrace=False)


def run_alone(block: Block, folder: Path) -> None:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # some blocks write files
        printed = printed_by(block)
    if block.brings_its_ranks:
        assert_prints(block, printed)


def run_on_one_of_two_ranks(block: Block, folder: Path) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # data of its own
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # one directory for all ranks
        printed = printed_by(block)
    if rank == 0:
        assert_prints(block, printed)


@pytest.mark.parametrize("page", BLOCKS_OF)
def test_python_of_a_page_runs_alone_and_on_two_ranks(
    page: str, tmp_path: Path, rank_pool: RankPool, pytestconfig: pytest.Config
) -> None:
    filters = tuple(pytestconfig.getini("filterwarnings"))
    for block in BLOCKS_OF[page]:
        folders = [tmp_path / f"{name}-{block.line}" for name in ("alone", "ranks")]
        for folder in folders:
            folder.mkdir()
        run_alone(block, folders[0])
        if block.brings_its_ranks:
            continue
        task = Task(
            module=__name__,
            qualname=run_on_one_of_two_ranks.__name__,
            arguments={"block": block, "folder": folders[1]},
            timeout_seconds=60,
            warning_filters=filters,
        )
        bad = [
            f"rank {rank} of 2 {outcome.kind}:\n{outcome.text}"
            for rank, outcome in enumerate(rank_pool.run(2, task))
            if outcome.kind != "passed"
        ]
        assert not bad, "\n".join([f"{page}, line {block.line}", *bad])


def test_each_block_joins_the_ranks_that_syncline_run_starts() -> None:
    assert [f"{block.page}:{block.line}" for block in BLOCKS if block.needs_init] == []
    wraps = "ddp = sl.DistributedDataParallel(module)\n"
    for code, needs_init in {
        wraps: True,
        "sl.broadcast_(module)\n": True,
        f"sl.init()\n{wraps}": False,
        f"dist.init_process_group()\n{wraps}": False,
    }.items():
        assert Block("", 1, code, None).needs_init == needs_init, code


def test_there_is_code_to_run_and_output_to_compare() -> None:
    assert any(not block.brings_its_ranks for block in BLOCKS_OF["README.md"])
    assert {block.brings_its_ranks for block in BLOCKS if block.output} == {True, False}


def test_a_failure_names_the_line_of_the_page(tmp_path: Path) -> None:
    text = "# A page\n\n```python\nprint(1)\n```\n\n```\n2\n```\n\n```python\nx = 1\nx / 0\n```\n"
    prints, fails = blocks_of(text, str(tmp_path / "page.md"))
    assert (prints.line, prints.output, fails.line, fails.output) == (4, "2\n", 12, None)
    with pytest.raises(pytest.fail.Exception, match=r"page\.md, line 4"):
        assert_prints(prints, printed_by(prints))
    assert_prints(prints._replace(output="...\n"), printed_by(prints))
    with pytest.raises(ZeroDivisionError) as caught:
        printed_by(fails)
    last = traceback.extract_tb(caught.tb)[-1]
    assert (last.filename, last.lineno) == (str(tmp_path / "page.md"), 13)


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
        # The site makes the anchors of code, which test_site.py follows, and chooses pictures by the mode.
        is_heading = other.suffix == ".md" and anchor and not anchor.startswith("syncline.")
        if not other.exists() or (is_heading and anchor not in anchors_of(other.read_text())):
            found.append(f"{path.name} links to {target}")
    return found


def test_links_and_names_in_documents_exist() -> None:
    assert [dead for path in DOCUMENTS for dead in dead_links(path)] == []
    for path in DOCUMENTS:
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


def test_the_reference_has_the_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    for command in ("run", "bench", "doctor"):
        main([command, "--help"])
        assert f"$ syncline {command} --help\n{capsys.readouterr().out.rstrip()}\n```" in page, command


def test_the_glossary_has_the_words_of_the_contract() -> None:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", page, re.M)
    assert terms == sorted(set(terms), key=str.lower)
    check = syncline.ReplicaCheck(every=2)
    contract = syncline.DistributedDataParallel(torch.nn.Linear(2, 1), replica_check=check).contract
    columns = {name.replace("_", " ") for name in type(contract.rows[0]).__dataclass_fields__}
    assert columns | {row.what for row in contract.rows} <= set(terms)


def test_the_reference_has_every_variable_that_is_read() -> None:
    source = "".join(
        (ROOT / "src" / "syncline" / name).read_text() for name in ("environment.py", "launchers.py")
    )
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    for name in set(re.findall(r'"((?:[A-Z]+_)+[A-Z]+|RANK)"', source)):
        assert f"`{name}`" in page, f"no line about {name}"
