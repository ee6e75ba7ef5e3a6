"""The site that `make docs` builds: its links lead somewhere, a phone can show it, its search answers questions."""

from __future__ import annotations

import contextlib
import functools
import http.server
import itertools
import json
import os
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
            # Of a picture, the fragment says in which mode it is shown.
            anchor = unquote(url.fragment) if other in pages else ""
            if not other.exists() or (anchor and anchor not in pages[other].anchors):
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


@needs_browser
@pytest.mark.nightly  # it trains
def test_the_pictures_of_the_first_page_are_made(tmp_path: Path) -> None:
    made = hangs.run([sys.executable, str(ROOT / "docs" / "pictures" / "make.py"), str(tmp_path)])
    assert made.returncode == 0, made.stderr
    for name in ("contract.svg", "timeline.svg", "report-light.png", "report-dark.png"):
        assert (tmp_path / name).stat().st_size > 1000, name


QUESTIONS = {
    "guides/torch-errors/": [
        "OOM",
        "CUDA out of memory",
        "address already in use",
        "Expected to have finished reduction in the prior iteration",
        "marked ready twice",
        "Connection closed by peer",
        "unhandled system error",
        "watchdog caught collective operation timeout",
        "Timed out waiting 1800000ms for recv operation to complete",
        "Parameter indices which did not receive grad",
        "ChildFailedError",
        "Default process group has not been initialized",
    ],
    "guides/troubleshooting/": ["hangs at the end", "why does my training hang", "training stuck"],
    "guides/timeouts/": ["timeout"],
    "guides/many-hosts/": ["multi node"],
    "guides/engines/": ["torchrun", "slurm", "kubernetes", "requeue slurm job"],
    "guides/evaluation/": ["evaluation on all ranks", "evaluation without duplicated samples", "inference"],
    "guides/coming-from/": ["horovod", "deepspeed", "torchft"],
    "guides/beside/": ["comparison with FSDP", "alternatives"],
    "guides/move-from-torch/": ["migrate from DDP"],
    "guides/accumulate/": ["gradient accumulation", "no_sync"],
    "guides/mixed-precision/": ["mixed precision", "GradScaler", "bf16"],
    "guides/reproducibility/": ["seed", "deterministic"],
    "guides/checkpoints/": ["save model", "resume in the middle of an epoch"],
    "guides/lost-ranks/": ["elastic", "fault tolerance", "recover from a lost rank"],
    "guides/compression/": ["PowerSGD", "quantization"],
    "guides/strategies/": ["local SGD", "DiLoCo"],
    "guides/profiling/": ["profiler"],
    "guides/batch-size-and-learning-rate/": ["learning rate and batch size"],
    "recipes/notebook/": ["jupyter", "colab", "notebook"],
    "recipes/early-stopping/": ["early stopping"],
    "recipes/ema-and-swa/": ["EMA", "SWA"],
    "recipes/lora/": ["LoRA", "PEFT"],
    "recipes/streaming/": ["IterableDataset", "streaming dataset"],
    "recipes/transformers/": ["huggingface trainer"],
    "recipes/accelerate/": ["accelerate"],
    "recipes/lightning/": ["pytorch lightning"],
    "recipes/ray/": ["ray train"],
    "recipes/tensorboard-and-wandb/": ["wandb", "tensorboard"],
    "recipes/fsdp2-tensor-parallel-zero/": ["FSDP2", "tensor parallel"],
    "answers/gradients/": ["find_unused_parameters slow", "when are gradients synchronized"],
    "answers/buffers/": ["broadcast_buffers deprecated", "SyncBatchNorm", "how are buffers synchronized"],
    "answers/loss/": ["is the loss averaged", "average loss across GPUs"],
    "answers/data-and-samplers/": ["DistributedSampler", "forgot set_epoch", "uneven batches"],
    "answers/memory-and-speed/": ["fast CPU all_reduce on one host", "slower than one GPU"],
    "answers/parameters/": ["ignore parameters by pattern"],
    "answers/failures/": ["which rank is missing", "abort when a peer is gone"],
    "answers/without-a-backward/": ["sync gradients without another batch", "broadcast parameters on demand"],
    "start/install/": ["windows", "macOS"],
    "reference/cheat-sheet/": ["cheat sheet"],
    "reference/glossary/": ["glossary"],
    "reference/environment/": ["environment variables"],
}
"""The address of a page, and what users type to find it. The page is the first that the search shows, unless a page of
`ALSO` is. The front matter of a page has `tags` for words that it does not use much."""

ALSO = {
    "answers/without-a-backward/": ("guides/verbs/",),
    "answers/failures/": ("guides/lost-ranks/", "guides/troubleshooting/"),
    "guides/checkpoints/": ("answers/data-and-samplers/",),
}


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
    for right, question in ((right, one) for right, all_of_it in QUESTIONS.items() for one in all_of_it):
        first, *_ = hits_of(page, address, question)
        if first not in (right, *ALSO.get(right, ())):
            missed[question] = first
    page.close()
    assert missed == {}
