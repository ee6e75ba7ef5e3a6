"""Make the pictures of the site's first page: what the first run prints, and its report.

    python docs/pictures/make.py [FOLDER]     # the default: the folder of this file

It trains `examples/mnist_cnn.py` on two ranks, so that the pictures show what a reader gets. It needs the data of
`examples/example_data.py`, Chromium, and playwright. Times differ from run to run: look at what git shows.
"""

from __future__ import annotations

import html
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
SYNCLINE = Path(sys.executable).with_name("syncline")
FIRST_WORDS = {"contract": "Contract: ", "timeline": "One step, as recorded"}
LINE_HEIGHT, CHARACTER_WIDTH, MARGIN = 19, 8.0, 14

STYLE = """\
text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #24292f; white-space: pre }
.paper { fill: #f6f8fa; stroke: #d0d7de }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .paper { fill: #161b22; stroke: #30363d } }"""


def main(folder: Path) -> None:
    """Write all pictures into this folder."""
    with tempfile.TemporaryDirectory() as trace:
        run = ("run", "-n", "2", "--trace", trace, "examples/mnist_cnn.py", "--epochs", "3")
        printed = syncline(*run).splitlines()
        for name, words in FIRST_WORDS.items():
            (folder / f"{name}.svg").write_text(picture_of(list(block(printed, words))))
        syncline("report", trace)
        take_report(Path(trace) / "report.html", folder)


def syncline(*arguments: str) -> str:
    """Run a command, and return what it prints."""
    done = subprocess.run([SYNCLINE, *arguments], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    return done.stdout


def block(lines: Sequence[str], words: str) -> Iterator[str]:
    """The lines from the one that begins with these words up to an empty one."""
    of_rank_0 = [line.removeprefix("[rank 0] ").rstrip() for line in lines]
    first = next(number for number, line in enumerate(of_rank_0) if line.startswith(words))
    for line in of_rank_0[first:]:
        if not line:
            return
        yield line


def picture_of(lines: Sequence[str]) -> str:
    """Lines of a terminal as an SVG that follows the reader's light or dark mode."""
    width = max(map(len, lines)) * CHARACTER_WIDTH + 2 * MARGIN
    height = len(lines) * LINE_HEIGHT + 2 * MARGIN
    texts = [
        f'<text x="{MARGIN}" y="{MARGIN + 14 + number * LINE_HEIGHT}">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
    label = html.escape(lines[0], quote=True)
    box = f'<rect class="paper" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="6"/>'
    size = f"0 0 {width:g} {height:g}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", box, *texts, "</svg>\n"])


def take_report(page: Path, folder: Path) -> None:
    """Photograph a report's picture of a step, in light and in dark."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            tab = browser.new_page(viewport={"width": 1100, "height": 760}, color_scheme=scheme)
            tab.goto(page.as_uri())
            tab.locator("#picture").screenshot(path=folder / f"report-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
