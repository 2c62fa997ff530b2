"""The pages as a reader sees them: the site of `make docs` in a browser, at three widths, light and dark."""

import json
import os
import re
import subprocess
from html import unescape

import pytest

from tests.support.browser import CONTRAST, look, needs_browser
from tests.support.serving import HANG_SECONDS
from tests.support.sources import ROOT

MKDOCS = ROOT / ".venv-docs/bin/mkdocs"
WIDTHS = (390, 1280, 1920)
PARTS, FRAMES = 4, "frames.html"
LEGIBLE = 4.5  # contrast of text: WCAG 2, AA
MEASURE = """
const WIDTHS = %s;
function over([r, g, b, a = 1], ground) { return [r, g, b].map((value, i) => a * value + (1 - a) * ground[i]); }
function ground(element) {
  if (!element) return [255, 255, 255];
  return over(numbers(getComputedStyle(element).backgroundColor), ground(element.parentElement));
}
function contrastOf(element) {
  const below = ground(element);
  return contrast(over(numbers(getComputedStyle(element).color), below), below);
}
const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
function columns(page, width) {
  for (const table of page.querySelectorAll("article table")) {
    const [flag, initial, meaning] = table.querySelectorAll("th");
    if (flag?.textContent !== "Flag") continue;
    const names = [flag, initial, meaning].map((one) => one.textContent).join();
    const left = meaning.getBoundingClientRect().left;
    if (names !== "Flag,Default,Meaning" || left + 100 > width) return `${names}: Meaning begins at ${left}`;
  }
  return "";
}
function measure(name, frame) {
  const page = frame.contentDocument, result = { name, wide: [], faint: [], hidden: [], columns: [] };
  page.head.insertAdjacentHTML("beforeend", "<style>* { transition: none !important }</style>");
  for (const width of WIDTHS) {
    frame.style.width = `${width}px`;
    if (page.documentElement.scrollWidth > width) {
      const over = [...page.querySelectorAll("*")].filter((one) => one.getBoundingClientRect().right > width);
      result.wide.push([width, page.documentElement.scrollWidth, over.map((one) => `${one.tagName} ${one.className}`)]);
    }
    const said = columns(page, width);
    if (said) result.columns.push([width, said]);
    for (const picture of page.querySelectorAll("article img")) {
      const box = picture.getBoundingClientRect();
      if (!picture.naturalWidth || box.left < 0 || box.right > width) result.hidden.push([width, picture.src]);
    }
  }
  const all = page.querySelectorAll("article *:not(.headerlink)");
  const kinds = new Map();  // of texts that look alike one is enough
  for (const one of all) {
    const kind = [one.tagName, one.className, one.parentElement.tagName, one.parentElement.className].join();
    if (!kinds.has(kind) && own(one) && one.offsetParent) kinds.set(kind, one);
  }
  const texts = [...kinds.values()];
  for (const scheme of ["default", "slate"]) {
    page.body.setAttribute("data-md-color-scheme", scheme);
    const faint = texts.filter((one) => contrastOf(one) < %s);
    result.faint.push(...faint.slice(0, 3).map((one) => [scheme, one.className, one.textContent]));
  }
  result.texts = texts.length;
  return result;
}
window.onload = () => {
  const frames = [...document.querySelectorAll("iframe")];
  document.title = JSON.stringify(frames.map((frame) => measure(frame.getAttribute("src"), frame)));
};
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built into a directory of its own; without its scripts (search, palette), which load for minutes."""
    made = tmp_path_factory.mktemp("site") / "site"
    command = [MKDOCS, "build", "--quiet", "--site-dir", made]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=HANG_SECONDS)
    for page in made.rglob("*.html"):
        page.write_text(re.sub("<script.*?</script>", "", page.read_text(), flags=re.DOTALL))
    return made


@pytest.mark.long
@needs_browser
@pytest.mark.skipif(not MKDOCS.exists(), reason="no mkdocs here: make docs")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_page_fits_every_width_and_is_legible_in_light_and_dark(site, tmp_path, part):
    """Nothing makes a page wider than its window; a table of settings shows flag, default and meaning first."""
    files = (file for file in site.rglob("*.html") if file.name not in ("404.html", FRAMES))
    pages = sorted(str(file.relative_to(site)) for file in files)[part::PARTS]
    script = CONTRAST + MEASURE % (json.dumps(WIDTHS), LEGIBLE)
    shown = "".join(f'<iframe src="{page}" width="1280" height="100" style="border: 0"></iframe>' for page in pages)
    (frames := site / FRAMES).write_text(f"<!doctype html><meta charset=utf-8><script>{script}</script>{shown}")
    elements, _ = look(frames.as_uri(), tmp_path, "--allow-file-access-from-files", size=(2000, 1000))
    found = json.loads(unescape(re.search("<title>(.*)</title>", elements)[1]))
    assert [one["name"] for one in found] == pages
    assert min(one["texts"] for one in found) >= 3
    wrong = [one for one in found if one["wide"] or one["faint"] or one["hidden"] or one["columns"]]
    assert wrong == []
