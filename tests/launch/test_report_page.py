"""The page of a report in a real browser: what it shows, its keys, its widths; and what is left without scripts."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.made_traces import MadeRank, MadeRun, rows

from syncline.tools.plan.machine import UNMEASURED
from syncline.tools.report.document import document_of
from syncline.tools.report.load import ProcessTrace
from syncline.tools.report.page import page
from syncline.tools.report.run import run_of

Page = Any


def document(**settings: Any) -> dict[str, Any]:
    processes = []
    for process, *found in MadeRun(**settings).rows():
        assert isinstance(process, rows.ProcessRow)
        processes.append(ProcessTrace(process=process, found=found))
    return document_of(run_of(processes), UNMEASURED)


def sick(num_ranks: int = 3) -> dict[str, Any]:
    """The last rank loads its data slowly."""
    return document(ranks=[*[MadeRank() for _ in range(num_ranks - 1)], MadeRank(data=5100)])


# ---------------------------------------------------------------------- without a browser


def test_the_page_needs_no_network_and_no_script() -> None:
    text = page(sick())
    assert "default-src 'none'" in text
    assert not re.findall(r"""(?:src|href)=["']?(?!#|data:)[a-z/]""", text)
    static = text.partition("<script")[0]
    for words in ("for rank 2, whose data loading", "DataLoader(num_workers=", "layer0.weight", "5.10 ms"):
        assert words in static


def test_names_are_text_and_nothing_else() -> None:
    found = document(ranks=[MadeRank()], unused=["</script><b>&\u2028"], looks_for_unused=True)
    found["title"] = "<img src=x onerror=alert(1)>"
    text = page(found)
    assert "<img" not in text
    assert text.count("</script>") == text.count("<script")
    data = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', text, re.S)
    assert data is not None
    assert json.loads(data[1])["title"] == found["title"]


# ---------------------------------------------------------------------- in a browser


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A function that opens a page with some data. Nothing may be written to the console."""
    said: list[str] = []
    pages = []

    def open_page(data: dict[str, Any], *, width: int = 1280, scheme: str = "light") -> Page:
        path = tmp_path / "report.html"
        path.write_text(page(data), encoding="utf-8")
        made = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        made.on("console", lambda message: said.append(message.text))
        made.on("pageerror", lambda error: said.append(str(error)))
        made.goto(path.as_uri())
        made.wait_for_selector("html[data-ready=true]")
        pages.append(made)
        return made

    yield open_page
    for made in pages:
        made.close()
    assert not said


def text_of(page: Page, selector: str) -> str:
    return " ".join(str(page.locator(selector).first.text_content()).split())


pytestmark = pytest.mark.real


def test_the_first_screen_names_the_illness_and_its_cure(opened: Any) -> None:
    made = opened(sick())
    assert "for rank 2, whose data loading" in text_of(made, "#finding-0")
    assert made.locator("#findings .finding").first.get_attribute("data-kind") == "problem"
    assert "num_workers" in text_of(made, "#findings .cure")
    box = made.locator("#finding-0").bounding_box()
    assert box["y"] + box["height"] < 900
    facts = [one.get_attribute("data-fact") for one in made.locator(".fact").all()]
    assert facts[:2] == ["a step", "steps a second"]


def test_the_picture_has_every_span_of_every_rank(opened: Any) -> None:
    data = sick()
    made = opened(data)
    number = data["choices"]["typical"]
    assert made.locator("#picture-svg").get_attribute("data-step") == str(number)
    for rank, step in data["steps"][str(number)].items():
        drawn = made.locator(f"rect.span[data-rank='{rank}']").all()
        length = sum(int(one.get_attribute("data-us")) for one in drawn)
        assert length == pytest.approx(step["ended"] - step["began"], abs=2)
    late = made.locator("rect.span[data-rank='0'][data-kind='late']").all()
    assert sum(int(one.get_attribute("data-us")) for one in late) == pytest.approx(5000, abs=50)
    assert made.locator("g.bucket[data-rank='0'][data-waits-for='2']").count() == 4


def test_the_keys_zoom_move_and_read_the_picture(opened: Any) -> None:
    made = opened(sick())
    picture = made.locator("#picture-svg")

    def view() -> tuple[float, float]:
        made.wait_for_timeout(60)
        return tuple(float(picture.get_attribute(f"data-{end}")) for end in ("from", "to"))  # type: ignore[return-value]

    picture.focus()
    whole = view()
    made.keyboard.press("+")
    closer = view()
    assert closer[1] - closer[0] < whole[1] - whole[0]
    made.keyboard.press("ArrowRight")
    assert view()[0] > closer[0]
    made.keyboard.press("0")
    assert view() == pytest.approx(whole)
    made.keyboard.press(".")
    made.wait_for_timeout(60)
    assert "data" in text_of(made, "#said")
    step = int(picture.get_attribute("data-step"))
    made.locator("#step-next").click()
    made.wait_for_timeout(60)
    assert int(picture.get_attribute("data-step")) == step + 1
    made.locator("[data-choice=slowest]").click()
    made.wait_for_timeout(60)
    assert made.locator("[data-choice=slowest]").get_attribute("aria-pressed") == "true"


def test_nothing_is_wider_than_the_window(opened: Any) -> None:
    for width, scheme in itertools.product((380, 1280, 2560), ("light", "dark")):
        made = opened(sick(), width=width, scheme=scheme)
        assert made.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, scheme)
        background = made.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
        assert (brightness > 128) == (scheme == "light"), (width, scheme)


def test_many_ranks_are_shown_in_pages(opened: Any) -> None:
    made = opened(sick(40))
    assert made.locator("g.row").count() == 16
    assert "39" in [one.get_attribute("data-rank") for one in made.locator("g.row").all()]
    assert made.locator("#rank-page").is_visible()


def test_without_a_step_there_is_a_page(opened: Any) -> None:
    made = opened(document(ranks=[MadeRank()], num_steps=0))
    assert "No complete step" in text_of(made, "#finding-0")
    assert not made.locator("#picture").is_visible()
