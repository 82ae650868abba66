# SPDX-License-Identifier: Apache-2.0
"""The page in a headless Chromium: it opens cleanly, filters, leads to what failed, fits a phone, is fast."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_suite.report.page import render
from tests.report.browser import DESKTOP, PHONE, Browser, program
from tests.report.nights import night

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium on this machine (apt-get install chromium)"
)

# Well above what a quiet machine needs: this one may be busy. The measured figures are printed.
MOST_SECONDS = 2.0
MOST_BYTES = 6_000_000
SCHEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
SIZES = pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of a night of 30 cases."""
    file: Path = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render(night()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    """One browser for all tests."""
    with Browser(tmp_path_factory.mktemp("profile")) as each:
        yield each


@SIZES
@SCHEMES
def test_it_opens_without_a_word_and_asks_for_nothing(browser, page, size, dark):
    browser.resize(size, dark=dark)
    browser.open(page)
    assert browser.console == []
    assert browser.requests == [page.as_uri()]


@SIZES
def test_nothing_is_wider_than_the_window(browser, page, size):
    browser.resize(size)
    browser.open(page)
    browser.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
    seen = "[...document.querySelectorAll('body *')].filter(e => !e.closest('thead'))"
    wide = f"{seen}.filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
    assert browser.ask(f"{wide}.map(e => e.outerHTML.slice(0, 80))") == []


@SCHEMES
def test_texts_stand_out_from_their_ground(browser, page, dark):
    """WCAG AA: a contrast of 4.5 between every text and what it stands on."""
    browser.resize(DESKTOP, dark=dark)
    browser.open(page)
    browser.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.ask(_FAINT) == []


class TestFilters:
    """The form above the tables."""

    @pytest.fixture(autouse=True)
    def opened(self, browser, page):
        browser.resize(DESKTOP)
        browser.open(page)

    def choose(self, browser, text: str = "", state: str = "") -> str:
        """Fill the form in and return what it says."""
        browser.ask(
            f"(() => {{ const [t, s] = ['filter-text', 'filter-state'].map(i => document.getElementById(i));"
            f"t.value = {text!r}; s.value = {state!r}; t.dispatchEvent(new Event('input'));"
            "s.dispatchEvent(new Event('change')); })()"
        )
        said: str = browser.ask("document.getElementById('filter-count').value")
        return said

    def shown(self, browser, what: str) -> list[str]:
        """Names of the elements that are seen."""
        names: list[str] = browser.ask(
            f"[...document.querySelectorAll('{what}')].filter(e => e.offsetParent).map(e => e.dataset.name)"
        )
        return names

    def test_everything_is_shown_at_first(self, browser):
        assert self.choose(browser) == "45 rows"
        assert len(self.shown(browser, "tr[data-name]")) == 45
        assert len(self.shown(browser, "details")) == 45

    def test_by_name(self, browser):
        assert self.choose(browser, "QWEN3-0.6b-1n8g-fsdp2tp2") == "3 of 45 rows"
        assert self.shown(browser, "details") == [
            "qwen3-0.6b-1n8g-fsdp2tp2",
            "sft-qwen3-0.6b-1n8g-fsdp2tp2",
            "sft-qwen3-0.6b-1n8g-fsdp2tp2-lora",
        ]

    def test_by_state(self, browser):
        assert self.choose(browser, state="FAIL") == "2 of 45 rows"
        assert self.choose(browser, state="!PASS") == "4 of 45 rows"
        assert all(
            "llama3.1-8b-1n8g-fsdp2" in each or "gemma3n" in each for each in self.shown(browser, "details")
        )

    def test_by_both(self, browser):
        assert self.choose(browser, "gemma3n", "FAIL") == "0 of 45 rows"
        assert self.choose(browser) == "45 rows"


class TestLinks:
    """Whatever did not pass is one step from the top."""

    @SIZES
    def test_each_problem_leads_to_its_place(self, browser, page, size):
        browser.resize(size)
        browser.open(page)
        links = browser.ask("[...document.querySelectorAll('.problems a')].map(each => each.hash.slice(1))")
        assert len(links) == 4
        for anchor in links:
            browser.ask("document.querySelectorAll('details').forEach(each => each.open = false)")
            browser.ask(f"document.querySelector('.problems a[href=\"#{anchor}\"]').click()")
            browser.wait(_IN_SIGHT.format(anchor))

    def test_a_link_opens_what_is_filtered_away(self, browser, page):
        browser.resize(DESKTOP)
        browser.open(page)
        browser.ask("document.getElementById('filter-text').value = 'no such case'")
        browser.ask("document.getElementById('filter-text').dispatchEvent(new Event('input'))")
        anchor = browser.ask("document.querySelector('.problems a').hash.slice(1)")
        browser.ask("document.querySelector('.problems a').click()")
        browser.wait(_IN_SIGHT.format(anchor))
        assert browser.ask("document.getElementById('filter-count').value") == "45 rows"

    def test_a_link_from_elsewhere_leads_there_too(self, browser, page):
        browser.open(page)
        anchor = browser.ask("document.querySelector('tr[data-state=PASS] a').hash.slice(1)")
        browser.open(page, anchor)
        browser.wait(_IN_SIGHT.format(anchor))
        assert browser.ask(f"document.getElementById({anchor!r}).open")


@pytest.mark.parametrize(
    ("chart", "told"),
    [
        ("Each step: lora against full", r"^repeat \d, step \d+: full \(s\) 0\.\d+, lora \(s\) 0\.\d+$"),
        ("Repeat 1: lora/full by step", r"^lora/full, step \d+: 0\.\d+ *$"),
        (
            "Memory of the arms (in use on the fullest device)",
            r"^(full|lora) run 1-4, s since the start \d+: [\d.]+ GiB$",
        ),
        ("timing/train/step_time (s) over 60 runs", r"^timing.*2026-0\d-\d\dT03:00 \w+: 0\.2\d+ *$"),
    ],
)
def test_a_chart_tells_the_value_under_the_pointer(browser, page, chart, told):
    browser.resize(DESKTOP)
    browser.open(page)
    figure = (
        f"[...document.querySelectorAll('details[open] figure')].find(f => f.innerText.startsWith({chart!r}))"
    )
    browser.ask(f"{figure}.scrollIntoView({{block: 'center'}})")
    box = browser.ask(
        f"(r => [r.x, r.y, r.width, r.height])({figure}.querySelector('svg').getBoundingClientRect())"
    )
    x, y = box[0] + box[2] * 0.4, box[1] + box[3] * 0.6
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.wait(f"/{told.replace('/', chr(92) + '/')}/.test({figure}.querySelector('.readout').textContent)")


def test_it_reads_without_script(browser, page, tmp_path):
    """Tables, texts and charts are in the page itself."""
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=page.as_uri())
        browser.wait(
            "document.readyState === 'complete' && document.querySelectorAll('svg path.curve').length > 100"
        )
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_a_night_of_thirty_cases_is_small_and_soon_ready(browser, page):
    """From the start of the navigation until the script has run and a frame is drawn."""
    size = page.stat().st_size
    browser.resize(DESKTOP)
    seconds = []
    for _ in range(5):
        browser.open(page)
        after_frame = (
            "new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
        )
        seconds.append(browser.ask(after_frame) / 1000)
    print(f"30 cases: {size / 1e6:.2f} MB, interactive after {statistics.median(seconds):.2f} s")
    assert size < MOST_BYTES
    assert min(seconds) < MOST_SECONDS


_IN_SIGHT = """(() => {{
  const box = document.getElementById("{}").getBoundingClientRect();
  return box.height > 0 && box.top >= -1 && box.top < innerHeight;
}})()"""

_FAINT = """(() => {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (color) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = color;
    probe.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].map((c) => {
      c /= 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
    return "white";
  };
  const faint = new Set();
  for (const e of document.querySelectorAll("body *")) {
    const said = [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!said || !e.getClientRects().length || e.tagName === "SCRIPT") continue;
    const style = getComputedStyle(e);
    const ink = light(e.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const paper = light(ground(e));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) faint.add(`${e.tagName}.${e.className.baseVal ?? e.className} ${ratio.toFixed(2)}`);
  }
  return [...faint];
})()"""
