"""A followed directory and its watcher, which runs by the test's clock."""

import itertools
import json
import os
import shutil
import threading
from pathlib import Path

from lora_server.adapters import validate_adapter
from lora_server.control.adapters.watch import DirectoryWatch
from lora_server.timings import Timings
from tests.support.controllers import ToldShard, make_tiny_controller
from tests.support.workload import spec_of

SETTLE = 1.5


def make_contents(root: Path, good: dict[str, Path]) -> dict[str, Path]:
    """Directories by kind: good ones, one that is refused, and one of which only the config is there."""
    contents = {name: shutil.copytree(path, root / name) for name, path in good.items()}
    some = next(iter(good.values()))
    bad, half = shutil.copytree(some, root / "dora"), shutil.copytree(some, root / "half")
    config = bad / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    (half / "adapter_model.safetensors").unlink()
    return contents | {"dora": bad, "half": half}


class Followed:
    """A controller, one shard, a directory and its watcher; `look` polls once, `pass_time` lets it settle before."""

    def __init__(self, root: Path, contents: dict[str, Path], **settings: object) -> None:
        self.directory, self.contents, self.settings = root / "adapters", contents, settings
        self.directory.mkdir()
        self.now, self.first_done = 100.0, 0
        self._names = itertools.count()
        good = [kind for kind in contents if kind not in ("dora", "half")]
        self.versions = {}
        for kind in good:
            adapter, self.versions[kind] = validate_adapter(contents[kind], spec_of("mixtral"))
            adapter.close()
        self.kinds = {version: kind for kind, version in self.versions.items()}
        self.shard = None
        self.start()

    def start(self) -> None:
        """A controller, which takes over what the shard of an earlier one kept."""
        memory = self.shard.memory if self.shard else None
        self.controller = make_tiny_controller(restarted=memory is not None, **self.settings)
        self.shard = ToldShard(self.controller, memory)
        self.adapters = self.controller.adapters
        source, start, timings = self.adapters.directory, self.controller.start, Timings(watch_settle=SETTLE)
        self.watcher = DirectoryWatch(source, start, self.directory, threading.Event(), timings)

    def restart(self) -> None:
        """kill -9 of the controller, and the next one."""
        self.shard.close()
        self.start()

    def put(self, name: str, kind: str) -> None:
        """Renamed into place, as one should."""
        hidden = self.directory.parent / f"new-{next(self._names)}"
        shutil.copytree(self.contents[kind], hidden)
        self.delete(name)
        hidden.rename(self.directory / name)

    def link(self, name: str, kind: str) -> None:
        """A link that is flipped."""
        hidden = self.directory.parent / f"link-{next(self._names)}"
        hidden.symlink_to(self.contents[kind])
        if not (self.directory / name).is_symlink():
            self.delete(name)
        hidden.replace(self.directory / name)

    def touch(self, name: str) -> None:
        file = self.directory / name / "adapter_config.json"
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))

    def delete(self, name: str) -> None:
        path = self.directory / name
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            path.rename(self.directory.parent / f"old-{next(self._names)}")

    def look(self) -> None:
        self.shard.lives()
        registered = self.controller.start.registered.is_set()
        self.watcher.poll(self.now)
        if not registered and self.controller.start.registered.is_set():
            self.first_done += 1
            self.controller.arrivals.announce()

    def settle(self, **kinds: str) -> None:
        """Put these into place by name; seen, and seen again when it has settled."""
        for name, kind in kinds.items():
            self.put(name, kind)
        self.look()
        self.now += SETTLE
        self.look()

    def served(self) -> dict[str, str]:
        """Kind by name."""
        found = [one.record for one in self.adapters.listings.all() if one.state != "draining"]
        assert len({one.name for one in found}) == len(found), "no name twice"
        return {one.name: self.kinds[one.version] for one in found}

    def refused(self) -> dict[str, str]:
        """Reason by name."""
        return {one.name: one.reason for one in self.adapters.catalog.refusals.listed()}

    def close(self) -> None:
        self.shard.close()
