"""The page at the HTTP port: what it asks for is what the server says, and a browser shows it."""

import contextlib
import http.client
import json
import re
import shutil
import subprocess

import pytest

from client_connector.transformers import attach
from lora_server.access.store import Store, Tenant
from lora_server.demo.launch import running_server
from lora_server.registry.database import FILE, Database
from tests.support.serving import HANG_SECONDS, cli, status, until
from tests.support.workload import workload

pytestmark = pytest.mark.usefixtures("forked")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OWN = "acme/law"
FILES = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript", "/status.json": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    load = workload("mixtral")
    data = tmp_path_factory.mktemp("data")
    database = Database(f"sqlite:///{data / FILE}")
    Store(database).set_tenant(Tenant("acme"))
    database.close()
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--layout", "ep2-pp2"]
    flags += ["--data-dir", str(data), "--adapter-root", str(load.adapters)]
    with running_server(tmp_path_factory.mktemp("server") / "log", flags) as running:
        with attach(load.model, server=running.address) as lora, lora.adapters([min(load.paths)]):
            pass
        added = cli("adapters", "add", OWN, str(load.paths[min(load.paths)]), "--server", running.address)
        assert added.returncode == 0, added.stderr
        yield running


def get(server, path):
    with contextlib.closing(http.client.HTTPConnection(server.http, timeout=HANG_SECONDS)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer, answer.read()


@pytest.mark.parametrize("path", FILES)
def test_files_come_from_here_alone(server, path):
    answer, content = get(server, path)
    assert (answer.status, answer.headers["Content-Type"].split(";")[0]) == (200, FILES[path])
    assert b"http://" not in content and b"https://" not in content
    if path != "/status.json":
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]


def test_the_document_is_what_the_server_says(server):
    load = workload("mixtral")
    held, pinned, *_ = sorted(load.paths)
    names = sorted([*load.paths, OWN])
    cli("adapters", "pin", pinned, "--server", server.address)
    with attach(load.model, server=server.address) as lora, lora.adapters([held]):
        until(lambda: all(one.stats.attached for one in status(server.address).shards), "it is reported")
        document = json.loads(get(server, "/status.json")[1])
    cli("adapters", "unpin", pinned, "--server", server.address)
    assert (document["adapters"], document["active"], document["ready"]) == (len(names), 2, True)
    assert [(one["stage"], one["ep_rank"]) for one in document["shards"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    hottest = {one["name"]: one for one in document["hottest"]}
    assert sorted(hottest) == names and document["hottest"][0]["name"] == held
    assert hottest[pinned]["pinned"] and not hottest[held]["pinned"]
    assert document["joined"][0]["adapters"] == [held]
    rows = {one["tenant"]: one for one in document["tenants"]}
    assert rows["acme"] == {"tenant": "acme", "engines": 0, "adapters": 1, "in use": 0}
    assert rows["(operator)"] == {"tenant": "(operator)", "engines": 1, "adapters": len(names) - 1, "in use": 1}
    assert document["hits"] + document["misses"] >= 1


def look(server, directory, *flags):
    """What a browser makes of the page: its elements, and the size of its picture, which stays in `directory`."""
    picture = directory / "page.png"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom", *flags]
    command += [f"--user-data-dir={directory}", f"--screenshot={picture}", "--virtual-time-budget=9000"]
    command += [f"http://{server.http}/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout, picture.read_bytes()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: make browser")
@pytest.mark.parametrize("flags", [["--window-size=1200,1500"], ["--window-size=390,2400"]], ids=["desk", "phone"])
def test_a_browser_shows_it(server, tmp_path, flags):
    elements, picture = look(server, tmp_path, *flags)
    assert all(f">{name}</td>" in elements for name in workload("mixtral").paths)
    assert elements.count('class="shard"') == 4 and elements.count('class="state up"') == 5
    assert ">acme</td>" in elements and ">(operator)</td>" in elements
    assert re.search(r"there when asked for</dt><dd>[0-9.]+ %</dd>", elements)
    assert elements.count("<span>loads from disk</span>") == 4
    assert "refused</dt><dd>0</dd>" in elements and "NaN" not in elements and "undefined" not in elements
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
