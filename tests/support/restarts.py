"""A controller with a database that is killed and started again; its shard lives on."""

from lora_server.registry.database import FILE, Database
from lora_server.registry.versions import Ledger
from lora_server.timings import DEFAULTS
from tests.support.controllers import ToldShard, make_tiny_controller
from tests.support.workload import spec_of, workload

SECONDS = 60.0


class Killed(BaseException):
    """A SIGKILL within this process: no handler of ours catches it."""


def dies(server, monkeypatch, where, method, after):
    """Kill the controller at the first call of a method: before it begins, or `after` it is done."""
    original = getattr(where, method)

    def last(*arguments, **named):
        if after:
            original(*arguments, **named)
        raise Killed

    monkeypatch.setattr(where, method, last)


class Server:
    """A controller with a ledger, and one shard that lives on when it is killed."""

    def __init__(self, directory, paths=None, url="", timings=DEFAULTS, spec=None, **settings):
        self.directory, self.shard, self.database = directory, None, None
        self.url, self.timings, self.settings = url or f"sqlite:///{directory / FILE}", timings, settings
        self.paths, self.spec = paths or workload("mixtral").paths, spec or spec_of("mixtral")
        self.start()

    def start(self):
        self.database = Database(self.url, self.timings)
        ledger = Ledger(self.database, self.spec.to_json())
        memory = self.shard.memory if self.shard is not None else None
        self.controller = make_tiny_controller(restarted=memory is not None, ledger=ledger, **self.settings)
        self.adapters = self.controller.adapters
        self.adapters.rollout.allowed = self.adapters.rollout.allowed._replace(roots=("/",))
        self.shard = ToldShard(self.controller, memory)

    def kill(self):
        self.shard.close()
        self.database.close()
        self.start()

    def close(self):
        self.shard.close()
        self.database.close()

    def served(self):
        return {one.record.name: one.record.version for one in self.adapters.listings.all() if one.state != "draining"}
