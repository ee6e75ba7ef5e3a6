"""The site that `make docs` builds: its links lead somewhere, a phone can show it, its search answers questions."""

from __future__ import annotations

import contextlib
import functools
import http.server
import itertools
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest

import hangs

pytestmark = pytest.mark.real
pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    built = hangs.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stderr
    return folder


# ---------------------------------------------------------------------- links


class Links(HTMLParser):
    """The anchors of a page, and what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            if name in ("href", "src") and value and tag != "form":
                self.targets.add(value)


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = links = Links()
        links.feed(path.read_text())
    dead = []
    for path, links in pages.items():
        here = "http://site/" + str(path.relative_to(site))
        for target in links.targets:
            url = urlsplit(urljoin(here, target))
            if url.scheme not in ("http", "https") or url.netloc != "site":
                continue
            other = site / unquote(url.path).lstrip("/")
            if other.is_dir():
                other /= "index.html"
            known = pages[other].anchors if other in pages else set()
            if not other.exists() or (url.fragment and unquote(url.fragment) not in known):
                dead.append(f"{path.relative_to(site)} links to {target}")
    assert len(pages) > 30
    assert dead == []


# ---------------------------------------------------------------------- in a browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def pages_of(site: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(site)) + "/" for path in site.rglob("index.html"))


@needs_browser
def test_pages_fit_phone_tablet_and_desk(site: Path, address: str, browser: Any) -> None:
    # Each page would load the index of all pages, most of the time of this test.
    index = json.loads((site / "search" / "search_index.json").read_text()) | {"docs": []}
    asked: list[str] = []
    said: list[str] = []
    for width, scheme in itertools.product((360, 820, 1440), ("light", "dark")):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.route("**/search_index.json", lambda route: route.fulfill(json=index))
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        every = 1 if (width, scheme) == (360, "light") else 12
        for name in pages_of(site)[::every]:
            where = f"{name}, {width} pixels wide, {scheme}"
            page.goto(address + name, wait_until="domcontentloaded")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, where
            shown = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
            assert shown == ("slate" if scheme == "dark" else "default"), where
        assert len(page.screenshot()) > 10_000
        page.close()
    assert said == []
    assert [url for url in asked if not url.startswith(address)] == []  # nothing comes from another site


QUESTIONS = {
    "when are gradients synchronized": "answers/gradients/",
    "is the loss averaged": "answers/loss/",
    "how are buffers synchronized": "answers/buffers/",
    "broadcast parameters on demand": "answers/without-a-backward/|guides/verbs/",
    "sync gradients without another batch": "answers/without-a-backward/|guides/verbs/",
    "which parameters were unused": "answers/|answers/gradients/|guides/troubleshooting/",
    "uneven inputs hang": "answers/data-and-samplers/|guides/troubleshooting/|reference/errors/",
    "average over tokens unequal batches": "answers/gradients/|answers/loss/|guides/accumulate/",
    "evaluation without duplicated samples": "guides/evaluation/|answers/data-and-samplers/",
    "forgot set_epoch": "answers/data-and-samplers/",
    "ignore parameters by pattern": "answers/parameters/",
    "recover from a lost rank": "answers/failures/|guides/lost-ranks/",
    "faster recovery": "answers/failures/|guides/lost-ranks/",
    "change the group while training": "answers/failures/|guides/lost-ranks/",
    "abort when a peer is gone": "answers/failures/",
    "which rank is missing": "answers/failures/|guides/troubleshooting/",
    "fast CPU all_reduce on one host": "answers/memory-and-speed/",
    "several ranks in one DiLoCo worker": "answers/without-a-backward/|guides/strategies/",
    "why does my training hang": "guides/troubleshooting/|answers/failures/",
    "module. prefix in checkpoint": "answers/parameters/|guides/checkpoints/",
    "no second copy of all gradients": "answers/memory-and-speed/|guides/tuning/|guides/sharded/",
    "resume in the middle of an epoch": "guides/checkpoints/|answers/data-and-samplers/",
    "gather predictions of all ranks": "guides/evaluation/|answers/without-a-backward/|reference/api/verbs/",
    "requeue slurm job": "guides/engines/|guides/checkpoints/",
    "learning rate and batch size": "guides/batch-size-and-learning-rate/",
    "notebook": "recipes/notebook/",
    "ContractMismatch": "guides/troubleshooting/|reference/errors/",
}
"""What a user types, and how the address of a right page begins."""


def hits_of(page: Any, address: str, question: str) -> list[str]:
    """The addresses of the search's results, the best first."""
    slow = pytest.importorskip("playwright.sync_api").TimeoutError
    found = ".md-search-result__item > a.md-search-result__link"
    deadline = time.monotonic() + 180  # a busy machine
    links: list[Any] = []
    while not links and time.monotonic() < deadline:
        page.goto(address)
        page.fill("input.md-search__input", question)  # the page may not hear it before it is ready
        with contextlib.suppress(slow):
            page.wait_for_selector(found, state="attached", timeout=30_000)
        links = page.query_selector_all(found)
    return [urlsplit(link.get_attribute("href")).path.lstrip("/") for link in links]


@needs_browser
def test_search_answers_questions(address: str, browser: Any) -> None:
    page = browser.new_page()
    missed = {}
    for question, right in QUESTIONS.items():
        hits = hits_of(page, address, question)
        if not any(re.fullmatch(right, hit) for hit in hits[:3]):
            missed[question] = hits[:3]
    page.close()
    assert missed == {}
