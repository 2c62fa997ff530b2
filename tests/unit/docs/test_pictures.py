"""Pictures of the documents. Screenshots are small, for light and dark, and of the program as it is now (`make
screenshots`); drawings are readable in light and dark, at any width of a page."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

from docs import screenshots
from lora_server.cli import status
from tests.support.browser import CONTRAST, look, needs_browser
from tests.support.sources import ROOT

IMAGES = ROOT / "docs/img"
MOST_BYTES = 120_000
SOURCES = {"page": "lora_server/control/http/page", "report": "provisioning/report"}
NAMES = {f"{name}-{scheme}.png" for name in SOURCES for scheme in screenshots.SCHEMES} | {"status.svg"}


@pytest.mark.parametrize("name", SOURCES)
def test_a_screenshot_is_small_and_has_the_labels_of_now(name):
    code = "".join(file.read_text() for file in (ROOT / SOURCES[name]).iterdir() if file.is_file())
    shown = {}
    for scheme in screenshots.SCHEMES:
        file = IMAGES / f"{name}-{scheme}.png"
        assert file.stat().st_size < MOST_BYTES
        with Image.open(file) as picture:
            brightness = picture.convert("L").resize((1, 1)).getpixel((0, 0))
            shown[scheme] = picture.size, picture.info["Description"], brightness
    (size, labels, light), (*dark_picture, dark) = shown["light"], shown["dark"]
    assert [size, labels] == dark_picture and light > 128 > dark
    assert len(labels.splitlines()) > 8
    assert [label for label in labels.splitlines() if label not in code] == [], "stale; run: make screenshots"


def test_the_drawn_status_has_the_columns_of_now():
    text = (IMAGES / "status.svg").read_text()
    assert len(text) < MOST_BYTES and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    lines = [unescape(line).split() for line in re.findall(r"<text[^>]*>([^<]+)<", text)]
    shown = [word for line in lines for word in line]
    assert {*status.WORK, *status.MEMORY, *status.CLIENTS} <= set(shown), "stale; run: make screenshots"


@pytest.mark.parametrize("name", ["iar_over_load", "iar_over_slots", "iar_errors"])
def test_a_plot_of_the_models_spells_out_what_its_axes_are(name):
    with Image.open(IMAGES / f"{name}.png") as picture:
        labels = picture.info["Description"]
    assert "immediate admission rate" in labels and "IAR" not in labels


def test_every_screenshot_is_shown():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {Path(name).name for page in pages for name in re.findall(r"img/([\w-]+\.\w+)", page.read_text())}
    assert shown >= NAMES


# -- drawings

DRAWINGS = sorted((ROOT / "docs/img").glob("*.svg"))
WIDTHS = (390, 1280, 1920)
PAPER = {"light": "#ffffff", "dark": "#0d1117"}  # of the web view of a repository
MEASURE = """
function inside(box, outer) {
  return box.left >= outer.left && box.right <= outer.right && box.top >= outer.top && box.bottom <= outer.bottom;
}
const found = [];
for (const drawing of document.querySelectorAll("svg")) {
  const whole = drawing.getBoundingClientRect(), texts = [...drawing.querySelectorAll("text")];
  const boxes = texts.map((text) => text.getBoundingClientRect());
  const parts = [...drawing.querySelectorAll("rect")];
  const cut = texts.filter((text, i) => !inside(boxes[i], whole) || parts.some((part) => {
    const area = part.getBoundingClientRect(), y = (boxes[i].top + boxes[i].bottom) / 2;
    const begins = boxes[i].left > area.left && boxes[i].left < area.right && y > area.top && y < area.bottom;
    return begins && boxes[i].right > area.right;
  }));
  const over = texts.filter((_, i) => boxes.some((box, j) => j < i && box.left + 2 < boxes[i].right
    && boxes[i].left + 2 < box.right && box.top + 2 < boxes[i].bottom && boxes[i].top + 2 < box.bottom));
  const fill = (one) => numbers(getComputedStyle(one).fill);
  const grounds = [numbers(getComputedStyle(document.body).backgroundColor), ...parts.map(fill)];
  const faint = texts.filter((text) => grounds.some((one) => contrast(fill(text), one) < 4.5));
  const said = (list) => list.map((text) => text.textContent);
  const width = Math.round(whole.width);
  found.push({ texts: texts.length, width, cut: said(cut), over: said(over), faint: said(faint) });
}
document.title = JSON.stringify(found);
"""


@needs_browser
@pytest.mark.parametrize("scheme", PAPER)
def test_every_drawing_is_readable_at_every_width(tmp_path, scheme):
    drawn = "".join(f'<div style="width: {width}px">{one.read_text()}</div>' for width in WIDTHS for one in DRAWINGS)
    page = tmp_path / "page.html"
    style = f"<style>body {{ margin: 0; background: {PAPER[scheme]} }} svg {{ display: block }}</style>"
    page.write_text(f"<!doctype html><meta charset=utf-8>{style}{drawn}<script>{CONTRAST}{MEASURE}</script>")
    elements, _ = look(page.as_uri(), tmp_path, scheme=scheme)
    found = json.loads(re.search("<title>(.*)</title>", elements)[1].replace("&gt;", ">").replace("&amp;", "&"))
    assert [one["width"] for one in found] == [width for width in WIDTHS for _ in DRAWINGS]
    assert min(one["texts"] for one in found) > 8
    assert [one for one in found if one["cut"] or one["over"] or one["faint"]] == []


def test_no_page_draws_with_characters():
    """A drawing of characters is cut in half on a narrow screen."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md")]
    assert [page.name for page in pages if re.search("[┌└│▼▲]", page.read_text())] == []
