"""The drawings of the documents, in a browser: whole words, readable in light and dark, at any width of a page."""

import json
import re

import pytest

from tests.support.browser import look, needs_browser
from tests.support.sources import ROOT

DRAWINGS = sorted((ROOT / "docs/img").glob("*.svg"))
WIDTHS = (390, 1280, 1920)
PAPER = {"light": "#ffffff", "dark": "#0d1117"}  # of the web view of a repository
MEASURE = """
function channels(color) { return color.match(/[0-9.]+/g).slice(0, 3).map((value) => {
  const share = value / 255;
  return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
}); }
function light(color) { const [r, g, b] = channels(color); return 0.2126 * r + 0.7152 * g + 0.0722 * b; }
function contrast(one, other) {
  const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
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
  const grounds = [getComputedStyle(document.body).backgroundColor, ...parts.map((one) => getComputedStyle(one).fill)];
  const faint = texts.filter((text) => grounds.some((one) => contrast(getComputedStyle(text).fill, one) < 4.5));
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
    page.write_text(f"<!doctype html><meta charset=utf-8>{style}{drawn}<script>{MEASURE}</script>")
    elements, _ = look(page.as_uri(), tmp_path, scheme=scheme)
    found = json.loads(re.search("<title>(.*)</title>", elements)[1].replace("&gt;", ">").replace("&amp;", "&"))
    assert [one["width"] for one in found] == [width for width in WIDTHS for _ in DRAWINGS]
    assert min(one["texts"] for one in found) > 8
    assert [one for one in found if one["cut"] or one["over"] or one["faint"]] == []


def test_no_page_draws_with_characters():
    """A drawing of characters is cut in half on a narrow screen."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md")]
    assert [page.name for page in pages if re.search("[┌└│▼▲]", page.read_text())] == []
