"""The command lines in the documents can be typed: each option, target of make, package and file in them exists."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from syncline.tools.cli import main
from syncline.tools.cli.options import parse_run

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()
YOUR_SCRIPT = "train.py"
"""The reader's own script, in every document."""


class WrongCommand(Exception):
    """A command that would not work."""


def expect(is_right: object, text: str) -> None:
    if not is_right:
        raise WrongCommand(text)


# ---------------------------------------------------------------------- programs of Python


def check_script(words: list[str]) -> None:
    """Check a script and its options."""
    name, *arguments = words
    if name == YOUR_SCRIPT:
        return
    path = ROOT / name if "/" in name else ROOT / "examples" / name
    expect(path.is_file(), f"there is no script {name}")
    text = path.read_text()
    for module in re.findall(r"^from (\w+) import", text, re.M):  # beside it
        beside = path.with_name(f"{module}.py")
        text += beside.read_text() if beside.is_file() else ""
    for word in arguments:
        option = word.partition("=")[0]
        expect(
            not option.startswith("--") or option == "--" or f'"{option}"' in text, f"{name} has no {option}"
        )


def check_python(words: list[str]) -> None:
    if words[0] != "-m":
        check_script(words)


def check_syncline(words: list[str]) -> None:
    command, *arguments = words
    if arguments == ["--help"] and command in ("run", "bench", "doctor"):
        return
    if command == "run":
        found = parse_run(arguments)
        check_script([found.training_script, *found.training_script_args])
        return
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        expect(main([command, "--help"]) == 0, f"syncline has no command {command}")
    scripts = [place for place, word in enumerate(arguments) if word.endswith(".py")]
    end = scripts[0] if scripts else len(arguments)
    for word in arguments[:end]:
        expect(
            not word.startswith("-") or f" {word}" in printed.getvalue(), f"syncline {command} has no {word}"
        )
    if scripts:
        check_script(arguments[end:])


def check_torchrun(words: list[str]) -> None:
    try:
        found = get_args_parser().parse_args(words)
    except SystemExit:
        raise WrongCommand("torchrun does not accept these options") from None
    check_script([found.training_script, *found.training_script_args])


def check_starter(words: list[str]) -> None:
    """Check the script that a launcher starts: with `python`, or itself."""
    scripts = [place for place, word in enumerate(words) if word.endswith(".py")]
    expect(scripts, "there is no script")
    check_script(words[scripts[0] :])


# ---------------------------------------------------------------------- other programs


def check_make(words: list[str]) -> None:
    for word in words:
        name, sign, _ = word.partition("=")
        pattern = rf"^(?:override )?{name} [:?]?=" if sign else rf"^{name}( \S+)*:"
        expect(re.search(pattern, MAKEFILE, re.M) or name == "PYTHON", f"the Makefile has no {name}")


def check_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = "".join((ROOT / f"requirements-{name}.txt").read_text() for name in ("frameworks", "dev")).split()
    expect(words[0] in ("install", "wheel"), f"there is no pip {words[0]}")
    for word in words[1:]:
        if word == "--no-deps":
            continue
        name, extra = re.fullmatch(r"([\w./-]+)(?:\[(\w+)\])?", word).groups()  # type: ignore[union-attr]
        if name in ("syncline", "./syncline", "."):
            expect(
                extra is None or extra in project["optional-dependencies"], f"syncline has no extra {extra}"
            )
        else:
            expect(word in known, f"no test installs {word}")


def check_sbatch(words: list[str]) -> None:
    scripts = [place for place, word in enumerate(words) if word.endswith(".sbatch")]
    expect(scripts and (ROOT / words[scripts[0]]).is_file(), "there is no such batch script")
    check_script(words[scripts[0] + 1 :])


def check_kubectl(words: list[str]) -> None:
    if "-f" in words:
        expect((ROOT / words[words.index("-f") + 1]).is_file(), "there is no such manifest")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "accelerate": check_starter,
    "kubectl": check_kubectl,
    "make": check_make,
    "mpirun": check_starter,
    "pip": check_pip,
    "python": check_python,
    "sbatch": check_sbatch,
    "syncline": check_syncline,
    "torchrun": check_torchrun,
}
OTHERS = {
    "FOLDER/impi/bin/pip",
    "FOLDER/mpich/bin/pip",
    "FOLDER/openmpi/bin/pip",
    "export",
    "git",
    "tensorboard",
}
"""Programs whose arguments are not checked."""


def check(line: str) -> None:
    """Check one command line: environment variables, `sudo`, and commands joined by `&&`."""
    for command in re.split(r" && ", line):
        words = shlex.split(command, comments=True)
        while words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        expect(words[0] in CHECKS or words[0] in OTHERS, f"{words[0]} is not known to this test")
        if words[0] in CHECKS:
            CHECKS[words[0]](words[1:])


# ---------------------------------------------------------------------- in the documents


def commands_of(text: str) -> list[str]:
    """The command lines of the blocks of a document, and those in a sentence that have a script or a target."""
    blocks = re.findall(r"^ *```console\n(.*?)^ *```$", text, re.M | re.S)
    lines = re.findall(r"^ *\$ ((?:.*\\\n)*.*)", "\n".join(blocks), re.M)
    in_sentences = re.findall(r"`((?:syncline|torchrun) [^`]*\.py\b[^`]*|make [^`]+)`", text)
    return [line.replace("\\\n", "") for line in lines] + in_sentences


def wrong_commands(text: str) -> list[str]:
    found = []
    for line in commands_of(text):
        try:
            check(line)
        except Exception as error:
            found.append(f"{line}: {error}")
    return found


def test_commands_in_documents_can_be_typed() -> None:
    wrong = {path.name: wrong_commands(path.read_text()) for path in DOCUMENTS}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_options_in_sentences_exist() -> None:
    """`syncline run --max-restarts 3`, without a script."""
    for path in DOCUMENTS:
        for words in re.findall(r"`syncline run ([^`]+)`", path.read_text()):
            try:
                parse_run([*shlex.split(words), *([] if ".py" in words else [YOUR_SCRIPT])])
            except Exception as error:
                pytest.fail(f"{path.name}: syncline run {words}: {error}", pytrace=False)


WRONG = [
    "syncline run -n 2 --no-such-option train.py",
    "syncline run -n 2",
    "syncline run examples/gone.py",
    "syncline run examples/mnist_cnn.py --no-such-option",
    "syncline bench --no-such-option",
    "syncline doctor --no-such-option train.py",
    "syncline gone",
    "torchrun --no-such-option train.py",
    "torchrun --nproc-per-node 2 gone.py",
    "python gone.py",
    "make gone",
    "make test GONE=1",
    "pip install syncline[gone]",
    "pip install gone",
    "sbatch examples/slurm/gone.sbatch train.py",
    "kubectl apply -f examples/kubernetes/gone.yaml",
    "mpirun -n 2 python gone.py",
    "OMP_NUM_THREADS=1 gone",
    "make setup && make gone",
]


def test_a_wrong_command_is_found() -> None:
    for line in WRONG:
        found = wrong_commands(f"```console\n$ {line}  # a comment\nits output\n```\n")
        assert len(found) == 1, line


def test_commands_are_found() -> None:
    block = "  ```console\n  $ torchrun \\\n      train.py\n  printed\n  $ make a\n  ```\n"
    text = f"- a list\n\n{block}\n`make b`, `syncline run`"
    assert commands_of(text) == ["torchrun       train.py", "make a", "make b"]
