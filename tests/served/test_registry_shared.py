"""Several servers of one PostgreSQL: each lists what any of them added, and goes on while the database is away."""

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from lora_server.control.controller import Controller
from lora_server.control.members.agreement import Agreement
from lora_server.demo.launch import running_server
from lora_server.errors import ServerUnavailableError
from lora_server.placement import Layout
from lora_server.registry import database as databases
from lora_server.registry.database import Database
from lora_server.registry.versions import Ledger
from lora_server.sources.copies import Copies
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import open_channel
from tests.support.controllers import ToldShard
from tests.support.postgres import running_postgres
from tests.support.serving import ANYWHERE, HANG_SECONDS, cli, command_of, until
from tests.support.workload import workload

SECONDS = 60.0
pytestmark = pytest.mark.long


class Server:
    """A controller of its own, with a shard that answers."""

    def __init__(self, url, directory, timings=DEFAULTS):
        self.load, self.database = workload("mixtral"), Database(url, timings)
        spec = self.load.spec
        copies = Copies(directory, spec)
        agreement = Agreement(spec, Layout(1, 1), "float32", "independent", 64)
        self.controller = Controller(agreement, ledger=Ledger(self.database, spec.to_json()), copies=copies)
        self.adapters = self.controller.adapters
        self.adapters._allowed = self.adapters._allowed._replace(roots=("/",))
        self.shard = ToldShard(self.controller)
        self.shard.lives()

    def served(self):
        found = [one.record for one in self.adapters.listings() if one.state != "draining"]
        return {one.name: (one.version, one.handle, one.pinned) for one in found}

    def close(self):
        self.shard.close()
        self.database.close()


@pytest.fixture(scope="module")
def postgres():
    with running_postgres() as url:
        yield url


@pytest.fixture
def pair(postgres, tmp_path):
    both = [Server(postgres, tmp_path / f"copies-{number}") for number in range(2)]
    yield both
    for name in both[0].served():
        both[0].adapters.remove(name)
    for one in both:
        one.close()


def test_what_one_adds_changes_and_removes_the_other_serves(pair, tmp_path):
    mine, other = pair
    source = shutil.copytree(mine.load.paths["fused"], tmp_path / "source")
    mine.adapters.add("law", str(source), SECONDS)
    other.adapters.add("code", str(mine.load.paths["qv"]), SECONDS)
    for one in pair:
        one.adapters.refresh()
    assert mine.served() == other.served() and set(mine.served()) == {"law", "code"}
    record = other.adapters.get("law").record
    assert Path(record.path).parent == tmp_path / "copies-1", "each has files of its own"
    shutil.rmtree(source)
    mine.adapters.pin("law", SECONDS)
    mine.adapters.update("law", str(mine.load.paths["attention"]), SECONDS)
    other.adapters.refresh()
    assert mine.served() == other.served() and other.served()["law"][0] != record.version
    assert other.served()["law"][2], "the pin stays"
    mine.adapters.rollback("law", "", SECONDS)
    other.adapters.refresh()
    assert other.served()["law"][0] == record.version
    other.adapters.remove("law")
    mine.adapters.refresh()
    assert set(mine.served()) == {"code"}
    listed = {one.record.handle for one in mine.adapters.listings()}
    until(lambda: set(mine.shard.memory.loads) == listed, "its shard drops the rest", HANG_SECONDS)


@pytest.fixture
def hasty(postgres, tmp_path):
    one = Server(postgres, tmp_path / "hasty", Timings(database=0.5))
    yield one
    one.close()


def test_what_is_served_goes_on_while_the_database_is_away(pair, postgres, hasty):
    mine, other = pair
    hasty.adapters.add("law", str(mine.load.paths["fused"]), SECONDS)
    mine.adapters.refresh()
    directory = postgres.partition("host=")[2]
    pid = int((Path(directory) / "data" / "postmaster.pid").read_text().split()[0])
    family = [psutil.Process(pid), *psutil.Process(pid).children()]
    for process in family[1:]:
        if "lora" in " ".join(command_of(process)):  # others of them come and go
            process.kill()  # its connections break, and it makes no new ones until it has recovered
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServerUnavailableError, match=r"--registry postgresql.*not reached within"):
            hasty.adapters.add("code", str(mine.load.paths["qv"]), SECONDS)
        assert set(hasty.served()) == {"law"} and hasty.adapters.acquire(1, ["law"])[0]
    finally:
        os.kill(pid, signal.SIGCONT)
    hasty.adapters.release(1, [hasty.adapters.get("law").record.handle])
    mine.adapters.add("code", str(mine.load.paths["qv"]), SECONDS)
    other.adapters.refresh()
    assert other.served() == mine.served()


def test_a_server_follows_what_others_do_to_its_registry(pair, postgres, tmp_path):
    mine = pair[0]
    flags = ["--base-model", str(mine.load.base), "--registry", postgres, *ANYWHERE]

    def states():
        with open_channel(server.address) as channel:
            found = rpc.AdaptersStub(channel).List(pb.ListAdaptersRequest(), timeout=SECONDS).adapters
        return {one.name: (one.version, one.handle, one.pinned) for one in found if one.state != "draining"}

    mine.adapters.add("law", str(mine.load.paths["fused"]), SECONDS)
    with running_server(tmp_path / "log", flags) as server:
        assert states() == mine.served(), "what was there when it started"
        mine.shard.lives()
        mine.adapters.update("law", str(mine.load.paths["qv"]), SECONDS)
        until(lambda: states() == mine.served(), "it follows", HANG_SECONDS)
        added = cli("adapters", "add", "code", str(mine.load.paths["fused"]), "--server", server.address)
        assert added.returncode == 0, added.stderr
        mine.adapters.refresh()
        assert set(mine.served()) == {"law", "code"} and states() == mine.served()
        assert "postgresql" not in (tmp_path / "log").read_text()


def test_a_database_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        databases.ConfigError, match=r"postgresql.*\*\*\*.*cannot be opened: .*expected postgresql://USER@"
    ):
        Database(f"postgresql://lora:secret@/none?host={tmp_path}", Timings(database_open=0.1))
