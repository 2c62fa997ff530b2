"""A served directory that is followed, in real processes: what is asked for is answered by what lies there."""

from __future__ import annotations

import json
import shutil

import psutil

from client_connector.transformers import attach
from lora_server.demo.engine import generate
from lora_server.demo.launch import running_server
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import open_channel
from tests.support.serving import HANG_SECONDS, cli, status, until
from tests.support.workload import NEW_TOKENS, workload


def listing(address):
    with open_channel(address) as channel:
        return rpc.AdaptersStub(channel).List(pb.ListAdaptersRequest(), timeout=10, wait_for_ready=True)


def states(address):
    """By name, in the order of handles."""
    return [(one.name, one.state) for one in listing(address).adapters]


def test_a_directory_is_followed(tmp_path):
    load, directory = workload("mixtral"), tmp_path / "adapters"
    directory.mkdir()
    flags = ["--base-model", str(load.base), "--adapters", str(directory), "--watch", "--layout", "ep2-pp1"]

    def put(kind, **fields):
        new = directory / ".new"
        shutil.copytree(load.paths[kind], new)
        config = new / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        if (directory / "law").exists():
            (directory / "law").rename(tmp_path / f"old-{kind}-{len(fields)}")
        new.rename(directory / "law")

    def is_answered_by(kind):
        index = load.names.index(kind)
        return generate(load.model, [load.batch[index]], NEW_TOKENS)[0].tokens == load.expected[index].tokens

    with running_server(tmp_path / "log", flags) as server:
        at = ("--server", server.address)
        put("fused")
        until(lambda: states(server.address) == [("law", "ready")], "it is served", HANG_SECONDS)
        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["law"]):
                put("qv")
                both = [("law", "draining"), ("law", "ready")]
                until(lambda: states(server.address) == both, "another version is, too", HANG_SECONDS)
                assert is_answered_by("fused"), "what holds the earlier one goes on with it"
            with lora.adapters(["law"]):
                assert is_answered_by("qv")
            put("fused", use_dora=True)
            until(lambda: status(server.address).refused, "newer content is refused", HANG_SECONDS)
            shown = cli("adapters", "list", *at).stdout
            assert "warning: law:" in shown and "DoRA" in shown and "serves on" in " ".join(shown.split())
            (before,) = listing(server.address).adapters

            controller = psutil.Process(status(server.address).pid)
            controller.kill()
            controller.wait(HANG_SECONDS)
            server.wait_ready()
            until(lambda: states(server.address) == [("law", "ready")], "it is as it was", HANG_SECONDS)
            with lora.adapters(["law"]):
                assert is_answered_by("qv")
        put("fused")
        until(lambda: not status(server.address).refused, "good content is taken", HANG_SECONDS)
        (after,) = listing(server.address).adapters
        assert after.handle > before.handle
        assert after.version != before.version
        shutil.rmtree(directory / "law")
        until(lambda: not states(server.address), "it is gone", HANG_SECONDS)
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    mine = [line["event"].removeprefix("adapter ") for line in lines if line.get("name") == "law"]
    expected = ["registered", "replaced", "refused", "not refused any more", "replaced", "removed"]
    assert [event for event in mine if event in expected] == expected
