"""What the documents point at exists, and pages that repeat the code say what the code says."""

import ast
import importlib
import re
from operator import attrgetter

import pytest
import typer

from docs import configuration
from lora_server import spec
from lora_server.config import ServeConfig, load
from lora_server.config.groups import ESSENTIAL, GROUPS
from lora_server.errors import BY_CODE, ConfigError
from lora_server.placement import Layout
from lora_server.wire.region import RegionLayout
from provisioning.model import memory
from tests.support.sources import FILES, ROOT, TEXTS, names_in

WITHOUT_CODE = {page: re.sub(r"^```.*?^```", "", text, flags=re.M | re.S) for page, text in TEXTS.items()}
TROUBLE = TEXTS["docs/troubleshooting.md"]


def in_pages(pattern):
    """(page, groups) of every match."""
    return [(page, *match.groups()) for page, text in TEXTS.items() for match in re.finditer(pattern, text)]


def test_functions_and_files_that_are_named_exist():
    functions = in_pages(r"`([\w/]+\.py):([\w.]+)`")
    assert [found for found in functions if found[2] not in names_in(found[1])] == []
    assert len([page for page, *_ in functions if page == "docs/step.md"]) > 25, "the step is told by its functions"
    files = in_pages(r"`((?:lora_server|client_connector|kernels_cuda|provisioning|bench|tests)/[\w./]*)`")
    assert [found for found in files if not (ROOT / found[1]).exists()] == []


def test_constants_have_the_values_that_pages_give():
    """Written as `folder/file.py:NAME = value`."""
    for page, path, name, value in in_pages(r"`([\w/]+\.py):([\w.]+) = ([^`]+)`"):
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert attrgetter(name)(module) == ast.literal_eval(value), f"{page}: {path}:{name}"


def anchors(page):
    """As a repository's web view makes them."""
    headings = re.findall(r"^#+ (.+)$", WITHOUT_CODE[page], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_nowhere(page, link):
    path, _, anchor = link.partition("#")
    target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
    return not target.exists() or (anchor and anchor not in anchors(str(target.relative_to(ROOT))))


def test_links_lead_somewhere():
    """Pictures and anchors, too; `make docs` asks the same of the site."""
    links = in_pages(r"""(?:\]\(|src(?:set)?=")(?!https?:)([^)"]+)[)"]""")
    assert [found for found in links if leads_nowhere(*found)] == []


VLLM_METRICS = {"lora_server_requests_total", "lora_server_name_seconds"}  # at vLLM's own /metrics


def test_metrics_that_are_named_are_in_the_table_of_operations():
    """With all of their suffixes; tests/served/test_monitoring.py compares the table with a server."""
    table = set(re.findall(r"^\| `(lora_server_\w+)` \|", TEXTS["docs/operations.md"], re.MULTILINE))
    table |= {f"{name}_{part}" for name in table for part in ("bucket", "sum", "count")} | VLLM_METRICS
    table |= {"lora_server_node_restarts_total"}  # of nodes above rank 0
    named = in_pages(r"\b(lora_server_[a-z_]+)(\*?)(?![\w.])")
    known = [name in table or (star and any(one.startswith(name) for one in table)) for _, name, star in named]
    assert [one for one, is_known in zip(named, known, strict=True) if not is_known] == []


QUESTIONS = re.findall(r"^\| ([^|]+\?[^|]*) \| [^|]+ \| ([^|]+) \|$", TEXTS["docs/faq.md"], re.MULTILINE)


def test_fifteen_questions_of_operators_name_the_sections_that_answer_them():
    """That the sections exist: test_links_lead_somewhere."""
    assert len(QUESTIONS) == 15
    assert [question for question, where in QUESTIONS if not re.search(r"\]\([^)]+\.md(#[\w-]+)?\)", where)] == []


def test_the_readme_is_short_and_names_operations_and_memory():
    readme = TEXTS["README.md"]
    assert readme.count("\n") <= 125
    assert all(f"](docs/{page}.md)" in readme for page in ("operations", "memory", "faq"))


def test_the_readme_s_race_is_that_of_a_result():
    """Each row as `make race` wrote it."""
    named, table = re.search(r"<!-- from (\S+) -->\n((?:\|.*\n)+)", TEXTS["README.md"]).groups()
    written = (ROOT / named).read_text().splitlines()
    assert len(table.splitlines()) > 4 and set(table.splitlines()) <= set(written)


def test_the_orders_of_an_engine_s_queue_are_those_of_a_result():
    """docs/memory.md, as `bench.engine_queue` wrote them."""
    page = TEXTS["docs/memory.md"].partition("## Resident first")[2].partition("\n## ")[0]
    (header, _, *rows) = ([cell.strip() for cell in line[1:-1].split("|")] for line in re.findall(r"^\|.+", page, re.M))
    written = (ROOT / "bench/results/resident_first-cpu-2026-11.md").read_text()
    cells = {(trace, order): times for trace, *each in rows for order, times in zip(header[1:], each, strict=True)}
    assert len(cells) == 20
    for (trace, order), times in cells.items():
        assert f"| {trace} | disk | {order} | {times.replace(' / ', ' | ')} |" in written


def test_every_page_leads_to_the_glossary_in_one_click():
    words = set(re.findall(r"^\| ([^|]+) \|", TEXTS["docs/glossary.md"], re.MULTILINE))
    known = {word for entry in words for word in entry.split(", ")}
    assert known >= {"site", "step", "slot", "handle", "lease", "stage", "segment", "shard", "generation", "pin"}
    assert [page for page, text in TEXTS.items() if "glossary.md)" not in text] == ["docs/glossary.md"]


def test_the_sizing_example_is_what_the_code_computes():
    text = TEXTS["docs/memory.md"].partition("## Sizing")[2].partition("\n## ")[0]
    model, layout = spec.load("mixtral-8x7b"), Layout.parse("ep2-pp2")
    whole, part = memory.adapter_bytes(model, 64) / 2**30, memory.fullest_shard_bytes(model, layout, 64) / 2**30
    slots = RegionLayout.for_model(model, 256, 4).nbytes
    said = [f"{whole:.2f} GiB", f"{part:.2f} GiB", f"{120 * part:.0f} GiB", f"{slots / 2**20:.0f} MiB"]
    said += [f"{4 * slots / 2**30:.1f} GiB", f"{500 * whole:.0f} GiB"]
    assert [one for one in said if one not in text] == []


def commands():
    """Every command of the two programs as it is typed, and the flags of those that run something."""
    for name, app in (("lora-server", configuration.server.app), ("provision", configuration.provision.app)):
        yield from configuration.commands(typer.main.get_command(app), name)


def test_commands_that_are_named_exist():
    """In pages and in docstrings. Prose may go on after the program's name; code, in backticks or at the start of a
    line, may not."""
    known, groups, stray = {path for path, _ in commands()}, {"lora-server", "lora-server adapters"}, []
    for text in [*TEXTS.values(), *(file.read_text() for file in FILES)]:
        for words in re.findall(r"\blora-server((?: [a-z]+)+)", text):
            typed = "lora-server"
            for word in words.split():
                if typed not in groups or not re.search(rf"(`|^|\n *){re.escape(f'{typed} {word}')}\b", text):
                    break
                typed = f"{typed} {word}"
                stray += [] if typed in known else [typed]
    assert stray == []


def test_serve_help_groups_every_setting_once_and_shows_fifteen():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(ServeConfig.model_fields.keys() - {"timings"})  # which is no flag
    assert set(grouped) >= ESSENTIAL and len(ESSENTIAL) + 1 == 15, "with --config"


@pytest.mark.parametrize("name", [name for names in GROUPS.values() for name in names])
def test_every_setting_is_read_from_the_variable_that_help_promises(name, monkeypatch):
    """`no such value` is a text to some settings, and an error that names the flag to all others."""
    monkeypatch.setenv(f"LORA_SERVER_{name.upper()}", "no such value")
    try:
        found = getattr(load({} if name == "base_model" else {"base_model": "x"}), name)
    except ConfigError as error:
        assert f"--{name.replace('_', '-')}" in str(error)
    else:
        assert "no such value" in str(found)


def test_the_reference_is_made_of_the_code():
    assert configuration.PAGE.read_text() == configuration.page(), "stale; run: python -m docs.configuration"


def test_every_link_of_a_transport_is_in_the_life_of_a_step():
    files = (ROOT / "lora_server/transport").glob("*.py")
    links = {name for file in files for name in re.findall(r"^class (\w+Link)\(", file.read_text(), re.MULTILINE)}
    assert {name for name in links if name not in TEXTS["docs/step.md"]} <= {"InprocLink"}


def test_a_package_names_what_is_in_it():
    missing = []
    for init in [file for file in FILES if file.name == "__init__.py"]:
        docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
        modules = {file.stem for file in init.parent.glob("*.py") if "_pb2" not in file.name}
        modules |= {file.parent.name for file in init.parent.glob("*/__init__.py")}
        words = set(re.findall(r"\w+", docstring))
        missing += [(str(init.parent.relative_to(ROOT)), name) for name in modules - words if not name.startswith("__")]
    assert missing == []


def test_every_error_has_an_entry():
    entries = re.findall(r"^### `(\w+)`: (\w+)$", TROUBLE, re.MULTILINE)
    assert sorted(entries) == sorted((code, kind.__name__) for code, kind in BY_CODE.items())


def test_messages_on_the_page_of_errors_are_those_of_the_code():
    """`...` stands for what is filled in; an f-string's constant parts are compared on their own."""
    trees = [ast.walk(ast.parse(file.read_text())) for file in FILES]
    constants = [node.value for tree in trees for node in tree if isinstance(node, ast.Constant)]
    texts = "\n".join(value for value in constants if isinstance(value, str))
    rows = re.findall(r"^\| `([^`]+)` \|", TROUBLE, re.MULTILINE)
    assert len(rows) > 30
    assert {row: part for row in rows for part in row.split("...") if part.strip() not in texts} == {}
