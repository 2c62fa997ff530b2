"""Screenshots of the documents: small, for light and dark, and of the program as it is now (`make screenshots`)."""

import re
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

from docs import screenshots
from lora_server.cli import status
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
