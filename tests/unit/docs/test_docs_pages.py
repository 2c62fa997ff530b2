"""Pages that repeat the code say what the code says: the reference, the errors, the site's list of pages."""

from __future__ import annotations

import ast
import itertools
import re

import pytest
import typer
import yaml

from docs import configuration
from lora_server.errors import BY_CODE
from tests.support.sources import FILES, ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "deploy/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
LISTED = re.compile(r"^ *(?:[-*]|\d+\.) ")


def test_the_reference_is_the_codes():
    """Stale? python -m docs.configuration"""
    assert configuration.PAGE.read_text() == configuration.page(), "stale; run: python -m docs.configuration"


def options():
    for name, app in (("lora-server", configuration.server.app), ("provision", configuration.provision.app)):
        for path, command in configuration.commands(typer.main.get_command(app), name):
            if command.callback is not None:
                yield from ((path, one) for one in command.params if one.param_type_name == "option")


TYPERS = ("help", "install_completion", "show_completion")


def test_help_says_every_default():
    """typer says it where it is no None and no switch; else the text does."""
    said = re.compile(r"\((default: .+|required.*)\)")
    silent = [
        f"{path} {one.opts[0]}"
        for path, one in options()
        if one.default is None and not one.required and one.name not in TYPERS and not said.search(one.help or "")
    ]
    assert silent == []


def test_help_says_every_variable():
    of_serve = {one.name: one.help for path, one in options() if path == "lora-server serve"}
    for name in configuration.ServeConfig.model_fields:
        assert f"LORA_SERVER_{name.upper()})" in of_serve[name]


TROUBLE = (ROOT / "docs/troubleshooting.md").read_text()


def test_every_error_has_an_entry():
    entries = re.findall(r"^### `(\w+)`: (\w+)$", TROUBLE, re.MULTILINE)
    assert sorted(entries) == sorted((code, kind.__name__) for code, kind in BY_CODE.items())


def texts_of_the_code():
    """Every string, the constant parts of f-strings on their own."""
    trees = [ast.walk(ast.parse(file.read_text())) for file in FILES]
    return "\n".join(
        node.value for tree in trees for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_what_errors_look_like_is_what_they_say():
    """`...` stands for what is filled in."""
    texts, rows = texts_of_the_code(), re.findall(r"^\| `([^`]+)` \|", TROUBLE, re.MULTILINE)
    assert len(rows) > 30
    assert {row: part for row in rows for part in row.split("...") if part.strip() not in texts} == {}


def anchors(page):
    """As a repository's web view makes them."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Pictures and anchors, too; `make docs` asks the same of the site."""
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / page).read_text()):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target.resolve().relative_to(ROOT)), f"{page}: {link}"


@pytest.mark.parametrize("page", PAGES)
def test_lists_begin_after_an_empty_line(page):
    """Else the site shows them as one paragraph; the web view does not mind."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = text.splitlines()
    for before, line in itertools.pairwise(lines):
        glued = LISTED.match(line) and before.strip() and not before.startswith(" ") and not LISTED.match(before)
        assert not glued, f"{page}: {line}"


def listed(nav):
    for one in nav:
        for value in one.values():
            yield from [value] if isinstance(value, str) else listed(value)


def test_the_site_has_every_page_once():
    text = re.sub(r"!!python/\S+ ", "", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed(yaml.safe_load(text)["nav"])) == sorted(PAGES)
