"""What the control plane does that takes a process: a killed writer, a missing driver, a taken port, --resolve."""

import contextlib
import shutil
import socket
import subprocess
import sys

import pytest
from sqlalchemy import select

from client_connector.directory import Directory
from client_connector.transformers import attach
from lora_server.demo.engine import generate
from lora_server.demo.launch import running_server
from lora_server.errors import UnknownAdapterError
from lora_server.registry.database import FILE, Database, counters
from tests.support.processes import line_of, start
from tests.support.serving import HANG_SECONDS, cli, free_base
from tests.support.workload import NEW_TOKENS, workload

pytestmark = pytest.mark.usefixtures("forked")
COUNTER = """
import sys
from lora_server.registry.database import Database, count
database = Database(sys.argv[1])
while True:
    print(database.write(lambda connection: (count(connection, "left"), count(connection, "right")))[0], flush=True)
"""


def test_a_killed_writer_leaves_complete_transactions(tmp_path):
    told, url = 0, f"sqlite:///{tmp_path / FILE}"
    for _ in range(2):
        writer = start(COUNTER, url)
        for _ in range(3):
            told = int(line_of(writer))
        writer.kill()
        lines = writer.communicate(timeout=HANG_SECONDS)[0].split()
        told = max([told, *map(int, lines[:-1])])  # the last one may be cut
        with contextlib.closing(Database(url)) as database:
            rows = dict(map(tuple, database.read(lambda connection: connection.execute(select(counters)).all())))
        assert rows["left"] == rows["right"] >= told


def test_a_missing_driver_is_named():
    script = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from lora_server.registry.database import Database\n"
        "Database('postgresql://user:secret@localhost/x')"
    )
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert "install lora-server[postgres]" in told.stderr and "secret" not in told.stderr.rpartition("ConfigError")[2]


def test_a_data_port_that_is_taken_is_named_and_ends_the_node():
    base = free_base(2)
    with socket.create_server(("127.0.0.1", base)):
        flags = ("--base-model", "mixtral-8x7b", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        done = cli("serve", *flags, "--data-port-base", str(base))
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last.startswith("error: shard 0 "), "Traceback" in done.stderr) == (1, True, False), last
    assert f"127.0.0.1:{base} for the data of shard 0 (Address already in use); expected it free" in last


def test_an_unregistered_name_is_resolved_and_served(tmp_path):
    load, root = workload("mixtral"), tmp_path / "adapters"
    shutil.copytree(load.paths["fused"], root / "acme" / "law")
    flags = ["--base-model", str(load.base), "--adapter-root", str(root)]
    flags += ["--resolve", f"file://{root}/{{tenant}}/{{name}}"]
    with running_server(tmp_path / "log", flags) as server:
        directory = Directory(server.address)
        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["acme/law"]):
                got = generate(load.model, [load.batch[load.names.index("fused")]], NEW_TOKENS)[0]
            assert got.tokens == load.expected[load.names.index("fused")].tokens
            with pytest.raises(UnknownAdapterError, match="not registered here, and not to be had from"):
                with lora.adapters(["acme/none"]):
                    pass
            with pytest.raises(UnknownAdapterError, match="not to be had from"):
                directory.get("other/law")
            shutil.copytree(load.paths["qv"], root / "default" / "code")
            assert directory.get("code").lora_rank == 4, "a look-up resolves it as well"
        directory.close()
