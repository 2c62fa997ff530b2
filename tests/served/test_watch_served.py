"""A served directory that is followed, in real processes: what is asked for is answered by what lies there."""

import itertools
import json
import shutil

from client_connector.transformers import attach
from lora_server.demo.launch import running_server
from tests.support.serving import answers, ask, cli, generates, kill_controller, status, until
from tests.support.workload import workload


def states(address):
    """Name and state of each adapter, in the order of handles."""
    return [(one.name, one.state) for one in ask(address, "List").adapters]


def test_a_directory_is_followed(tmp_path):
    """Its entry is a link that is flipped at once: no look finds it missing."""
    load, directory, count = workload("mixtral"), tmp_path / "adapters", itertools.count()
    directory.mkdir()
    flags = ["--base-model", str(load.base), "--adapters", str(directory), "--watch", "--layout", "ep2-pp1"]

    def put(kind, **fields):
        new = shutil.copytree(load.paths[kind], tmp_path / f"content-{next(count)}")
        config = new / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        link = tmp_path / "link"
        link.symlink_to(new)
        link.replace(directory / "law")

    with running_server(tmp_path / "log", flags) as server:
        put("fused")
        until(lambda: states(server.address) == [("law", "ready")], "it is served")
        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["law"]):
                put("qv")
                both = [("law", "draining"), ("law", "ready")]
                until(lambda: states(server.address) == both, "another version is, too")
                assert generates(load, "fused"), "a request that holds the earlier one goes on with it"
            assert answers(lora, load, "law", "qv")
            put("fused", use_dora=True)
            until(lambda: status(server.address).refused, "newer content is refused")
            shown = cli("adapters", "list", "--server", server.address).stdout
            assert "warning: law:" in shown and "DoRA" in shown and "serves on" in " ".join(shown.split())
            until(lambda: states(server.address) == [("law", "ready")], "what drained is gone")
            (before,) = ask(server.address, "List").adapters
            kill_controller(server)
            until(lambda: states(server.address) == [("law", "ready")], "it is as it was")
            assert answers(lora, load, "law", "qv")
        put("fused")
        until(lambda: not status(server.address).refused, "good content is taken")
        until(lambda: states(server.address) == [("law", "ready")], "it serves alone")
        (after,) = ask(server.address, "List").adapters
        assert after.handle > before.handle
        assert after.version != before.version
        (directory / "law").unlink()
        until(lambda: not states(server.address), "it is gone")
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    mine = [line["event"].removeprefix("adapter ") for line in lines if line.get("name") == "law"]
    expected = ["registered", "replaced", "refused", "not refused any more", "replaced", "removed"]
    assert [event for event in mine if event in expected] == expected
