"""The page in a real browser: filters, keys, light and dark, print, and scripts in findings that do not run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.report.html import render
from fuzz.report.model import Report
from suites.fuzz.report.browser import Browser, browser, installed
from suites.fuzz.report.samples import finding_objects, run_object
from suites.fuzz.report.test_report import hostile

PROGRAM = installed()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium"),
]
SHOWN = "[...document.querySelectorAll('article:not([hidden])')].map(a => [a.dataset.target, a.dataset.check])"
COUNT = "document.getElementById('count').textContent"
FOCUS = "document.activeElement.closest('article')?.id ?? document.activeElement.name ?? document.activeElement.tagName"


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    assert PROGRAM is not None
    with browser(PROGRAM) as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = finding_objects()
    data[0]["known"] = "a-known-defect"
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(Report.of(run_object(), data, [run_object()])))
    return path


def choose(tab: Browser, name: str, value: str) -> None:
    control = f"document.getElementById('filters').elements[{json.dumps(name)}]"
    tab.run(f"{control}.value = {json.dumps(value)}; {control}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def test_the_page_loads_without_a_complaint_and_asks_for_nothing(tab: Browser, page: Path) -> None:
    tab.messages.clear()
    tab.show(page)
    assert tab.run("document.querySelectorAll('svg').length") > 5
    assert tab.messages == []


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("target", "planted.extend.key", 2),
        ("verdict", "crash", 1),
        ("check", "lse", 1),
        ("state", "known", 1),
        ("state", "new", 2),
        ("text", "sigsegv", 1),
        ("text", "no such words", 0),
        ("text", "", 3),
    ],
)
def test_each_filter_leaves_what_it_names(tab: Browser, page: Path, name: str, value: str, wanted: int) -> None:
    tab.show(page)
    choose(tab, name, value)
    assert len(tab.run(SHOWN)) == wanted
    assert tab.run(COUNT) == f"{wanted} of 3 findings shown"
    if name in ("target", "check", "verdict", "state"):
        assert set(tab.run(SHOWN.replace("[a.dataset.target, a.dataset.check]", f"a.dataset.{name}"))) == {value}


def test_filters_add_up_and_are_reset(tab: Browser, page: Path) -> None:
    tab.show(page)
    choose(tab, "target", "planted.extend.key")
    choose(tab, "state", "new")
    assert len(tab.run(SHOWN)) == 1
    tab.run("document.querySelector('form button[type=reset]').click()")
    tab.wait(f"{SHOWN}.length === 3")


def test_an_address_carries_the_filters(tab: Browser, page: Path) -> None:
    tab.show(page)
    choose(tab, "check", "crash")
    fragment = tab.run("location.hash")
    assert fragment == "#check=crash"
    tab.show(page, fragment=fragment)
    assert [check for _, check in tab.run(SHOWN)] == ["crash"]
    tab.run("document.querySelector('#targets a[href^=\"#target=planted.extend.key\"]').click()")
    tab.wait(f"{SHOWN}.length === 2")


def test_everything_is_reached_by_keyboard(tab: Browser, page: Path) -> None:
    tab.show(page)
    tab.press("Tab")
    assert tab.run("document.activeElement.className") == "skip"
    tab.press("Enter")
    assert tab.run("location.hash") == "#findings"
    reached = []
    for _ in range(12):
        tab.press("Tab")
        reached.append(tab.run(FOCUS))
        if reached[-1] == "finding-1":
            break
    assert reached[:5] == ["target", "verdict", "check", "state", "text"]
    assert reached[-1] == "finding-1"
    tab.press("j")
    assert tab.run(FOCUS) == "finding-2"
    tab.press("End")
    assert tab.run(FOCUS) == "finding-3"
    tab.press("k")
    assert tab.run(FOCUS) == "finding-2"
    before = tab.run("document.querySelector('#finding-2 details').open")
    tab.press("Enter")
    assert tab.run("document.querySelector('#finding-2 details').open") is not before


def test_typing_filters(tab: Browser, page: Path) -> None:
    tab.show(page)
    tab.run("document.querySelector('form').elements.text.focus()")
    for letter in "crash":
        tab.press(letter)
    assert [check for _, check in tab.run(SHOWN)] == ["crash"]


def test_focus_passes_over_what_is_hidden(tab: Browser, page: Path) -> None:
    tab.show(page)
    choose(tab, "target", "planted.extend.key")
    shown = tab.run("[...document.querySelectorAll('article:not([hidden])')].map(a => a.id)")
    tab.run(f"document.querySelector('#{shown[0]} summary').focus()")
    tab.press("j")
    assert tab.run(FOCUS) == shown[1]


BACK = "getComputedStyle(document.body).backgroundColor"


def test_light_and_dark_follow_the_system_and_the_button(tab: Browser, page: Path) -> None:
    colours = {}
    for dark in (False, True):
        tab.show(page, dark=dark)
        tab.run("localStorage.clear()")
        tab.show(page, dark=dark)
        colours[dark] = tab.run(BACK)
        assert tab.run("document.getElementById('theme').getAttribute('aria-pressed')") == str(dark).lower()
    assert colours[True] != colours[False]
    tab.run("document.getElementById('theme').click()")
    assert tab.run(BACK) == colours[False]
    tab.show(page, dark=True)
    assert tab.run(BACK) == colours[False]
    tab.run("localStorage.clear()")


LUMINANCE = """(() => {
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const poor = [];
  let seen = 0;
  for (let node; (node = walk.nextNode());) {
    const owner = node.parentElement;
    if (!node.textContent.trim() || !owner.getClientRects().length || owner.matches("script, style, title")) continue;
    const style = getComputedStyle(owner);
    const [a, b] = [parse(owner.closest("svg") ? style.fill : style.color), behind(owner)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    seen += 1;
    if (ratio < 4.5) poor.push([node.textContent.slice(0, 40), ratio]);
  }
  return [seen, poor];
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_stands_out_from_what_is_behind_it(tab: Browser, page: Path, dark: bool) -> None:
    """WCAG 2.2, 1.4.3: a contrast of at least 4.5."""
    tab.show(page, dark=dark)
    tab.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    seen, poor = tab.run(LUMINANCE)
    assert seen > 150
    assert poor == []


def test_the_measure_of_contrast_can_fail(tab: Browser, page: Path) -> None:
    tab.show(page)
    tab.run("document.querySelector('h1').style.setProperty('color', '#999')")
    assert len(tab.run(LUMINANCE)[1]) == 1


def test_controls_and_pictures_have_names(tab: Browser, page: Path) -> None:
    tab.show(page)
    tree = tab.call("Accessibility.getFullAXTree")["nodes"]
    asked = ("combobox", "searchbox", "button", "image", "search", "region", "link", "navigation")
    nodes = [node for node in tree if node.get("role", {}).get("value") in asked and not node["ignored"]]
    assert {node["role"]["value"] for node in nodes} >= {"combobox", "searchbox", "button", "image", "search", "region"}
    nameless = [node["role"]["value"] for node in nodes if not node.get("name", {}).get("value")]
    assert nameless == []


def test_scripts_in_findings_do_not_run(tab: Browser, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(render(hostile()))
    tab.messages.clear()
    tab.show(path)
    assert tab.run("document.title").startswith("attn-oracle: ")
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert tab.messages == []


def test_the_policy_stops_a_script_that_would_get_in(tab: Browser, page: Path, tmp_path: Path) -> None:
    path = tmp_path / "struck.html"
    path.write_text(page.read_text().replace("</main>", "<script>document.title = 'struck'</script></main>"))
    tab.messages.clear()
    tab.show(path)
    assert tab.run("document.title") != "struck"
    assert any("Content Security Policy" in message for message in tab.messages)


def test_on_paper_everything_is_open_and_no_control_is_there(tab: Browser, page: Path) -> None:
    tab.show(page)
    opened = tab.run("document.querySelectorAll('details[open]').length")
    pdf = tab.call("Page.printToPDF")["data"]
    assert len(pdf) > 10_000
    assert tab.run("document.querySelectorAll('details[open]').length") == opened
    tab.run("dispatchEvent(new Event('beforeprint'))")
    assert tab.run("document.querySelectorAll('details:not([open])').length") == 0
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.run("getComputedStyle(document.getElementById('filters')).display") == "none"
    tab.call("Emulation.setEmulatedMedia", media="")


def test_a_narrow_window_needs_no_sideways_scrolling(tab: Browser, page: Path) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
    tab.show(page)
    wide, room = tab.run("[document.documentElement.scrollWidth, innerWidth]")
    tab.call("Emulation.clearDeviceMetricsOverride")
    assert wide <= room


def test_screenshots_are_of_different_colours(tab: Browser, page: Path, tmp_path: Path) -> None:
    taken = []
    for dark in (False, True):
        tab.show(page, dark=dark)
        tab.screenshot(tmp_path / f"{dark}.png")
        taken.append((tmp_path / f"{dark}.png").read_bytes())
    assert taken[0] != taken[1]
    assert all(re.match(rb"\x89PNG", one) and len(one) > 20_000 for one in taken)
