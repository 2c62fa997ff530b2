"""A served, sharded LoRA server in real processes gives PEFT's tokens, in every layout, transport and mode."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from structlog.testing import capture_logs

from client_connector.directory import AdapterDirectory
from client_connector.remote import RemoteServer
from client_connector.routing import Batch, Run
from client_connector.serving.leases import AdapterLeases
from client_connector.serving.settings import Settings
from client_connector.transformers import attach
from lora_server import errors
from lora_server.address import Address
from lora_server.demo import tiny
from lora_server.demo.engine import generate
from lora_server.demo.launch import RunningServer, free_ports, launch, running_server
from lora_server.demo.serve_vllm import refusals_of
from lora_server.placement import Layout
from lora_server.ports import DataPorts
from lora_server.wire.rpc import open_channel
from tests.support import serving
from tests.support.serving import ANYWHERE, HANG_SECONDS, Nodes, answers, cli, flags, kill_controller, status, until
from tests.support.workload import NEW_TOKENS, Workload, workload

LONG = pytest.mark.long
CONFIGURATIONS = [  # layout, coordination, model
    ("ep2-pp2", "independent", "mixtral"),
    ("ep3-pp2", "leader", "mixtral"),
    *(
        pytest.param(layout, mode, "mixtral", marks=LONG)
        for mode in ("independent", "leader")
        for layout in ("ep1-pp1", "ep4-pp1", "ep2-pp2", "ep3-pp2", "ep1-pp4")
        if (layout, mode) not in (("ep2-pp2", "independent"), ("ep3-pp2", "leader"), ("ep1-pp4", "leader"))
    ),
    *(pytest.param("ep2-pp2", "independent", kind, marks=LONG) for kind in ("qwen3_moe", "gpt_oss", "llama")),
]


def check(load: Workload, address: str, transport: str) -> None:
    with attach(load.model, server=address, transport=transport) as lora, lora.adapters(load.names):
        said = {"server": address, "transport": transport.replace("auto", "shm"), "adapters": len(load.paths)}
        assert lora.client.described().items() >= said.items()
        load.check(generate(load.model, load.batch, NEW_TOKENS))


@pytest.mark.parametrize(("layout", "coordination", "kind"), CONFIGURATIONS)
def test_tokens_equal_peft(tmp_path, layout, coordination, kind):
    load = workload(kind)
    more = ("--layout", layout, "--coordination", coordination, "--max-step-rows", "32")
    with running_server(tmp_path / "log", flags(load, *more)) as server:
        for transport in ("auto", "shm", "tcp"):
            check(load, server.address, transport)


@pytest.mark.long
def test_two_nodes_with_fixed_ports_listen_nowhere_else(load, tmp_path):
    """A killed controller's and a killed shard's successors use the same ports again."""
    ports = DataPorts(free_ports(7), Layout(2, 2))
    token = tmp_path / "token"
    token.write_text("the same on all nodes\n")
    common = flags(load, "--layout", "ep2-pp2", "--coordination", "leader", "--join-token-file", str(token))
    with Nodes(tmp_path, *common, "--data-port-base", str(ports.base)) as nodes:
        first, second = nodes.start(), nodes.start("--http", "127.0.0.1:0")
        first.wait_ready()
        until(lambda: '"serving"' in second.tail(), "the second node says where it is")
        (said,) = [line for line in map(json.loads, second.log.read_text().splitlines()) if line["event"] == "serving"]
        second.http = said["http"]
        assert second.get("/readyz") == (200, "ok\n")
        check(load, first.address, "tcp")
        check(load, first.address, "auto")
        _check_ports(ports, first, second)
        with attach(load.model, server=first.address, transport="tcp") as lora, lora.adapters(load.names):
            load.check(generate(load.model, load.batch, NEW_TOKENS))
            reply = status(first.address)
            killed = [psutil.Process(pid) for pid in (reply.pid, reply.shards[2].pid)]
            for process in killed:
                process.kill()
            serving.all_gone(killed)
            first.wait_ready()
            load.check(generate(load.model, load.batch, NEW_TOKENS))
        _check_ports(ports, first, second)


def _check_ports(ports: DataPorts, first: RunningServer, second: RunningServer) -> None:
    """Each process listens where the rule says, the controller and nodes at their flags' too, and nowhere else."""
    listen, http, others_http = (Address.parse(text).port for text in (first.address, first.http, second.http))
    reply = status(first.address)
    found = {psutil.Process(reply.pid): {listen, http}}
    for shard in reply.shards:
        orders = {ports.orders(shard.stage).number} if shard.ep_rank == 0 else set()
        found[psutil.Process(shard.pid)] = {ports.data(shard.shard).number} | orders
    found[psutil.Process(second.process.pid)] = {others_http}
    family = [psutil.Process(node.process.pid) for node in (first, second)]
    family += [one for node in family for one in node.children(recursive=True)]
    assert {one: serving.listening(one) for one in family if serving.listening(one)} == found


def test_nodes_with_different_settings_do_not_serve(tmp_path):
    with Nodes(tmp_path, *flags(workload("mixtral"), "--layout", "ep1-pp2")) as nodes:
        first, second = nodes.start(), nodes.start("--max-step-rows", "99")
        until(lambda: "other settings than the controller's" in second.tail(), "the second node says why")
        assert first.get("/readyz")[0] == 503


def test_adapters_come_and_go_while_the_server_serves(load, tmp_path):
    paths, only = load.paths, ["--base-model", str(load.base), "--layout", "ep2-pp1", *ANYWHERE]
    with running_server(tmp_path / "log", only) as server:
        at = ("--server", server.address)
        added = cli("adapters", "add", "law", str(paths["fused"]), *at, "--json")
        assert json.loads(added.stdout)["state"] == "ready", added.stderr
        again = cli("adapters", "add", "law", str(paths["fused"]), *at)
        assert again.returncode == 0, "the same content under the same name is no error"
        clash = cli("adapters", "add", "law", str(paths["qv"]), *at)
        assert clash.returncode == 1 and "adapters update" in clash.stderr
        law = rows(server)["law"]
        assert (law["lora_rank"], law["resident_layers"]) == (8, 4)

        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["law"]):
                removed = cli("adapters", "remove", "law", *at, "--json")
                assert json.loads(removed.stdout) == {"name": "law", "holders": 1}
                assert serving.generates(load, "fused"), "what a request holds stays until it ends"
            until(lambda: not rows(server), "the weights are gone")
            with pytest.raises(errors.UnknownAdapterError, match="law"), lora.adapters(["law"]):
                pass
        until(lambda: sum(shard.stats.weight_bytes for shard in status(server.address).shards) == 0, "memory is free")
        for process in [*serving.descendants(server.process.pid), psutil.Process(server.process.pid)]:
            process.terminate()  # all at once, as who stops a service does
        assert server.process.wait(HANG_SECONDS) == 0
    _check_log([json.loads(line) for line in server.log.read_text().splitlines()])


def _check_log(lines: list[dict]) -> None:
    """Check the log of a server whose adapter was added twice, refused once and removed; it was stopped in order."""
    events = [line["event"] for line in lines]
    assert events[0] == "starting"
    assert events.index("serving") > max(index for index, event in enumerate(events) if event == "shard up")
    mine = [line for line in lines if line.get("name") == "law"]
    assert [line["event"] for line in mine] == ["adapter added", "adapter added again", "adapter removed"]
    assert (mine[0]["lora_rank"], len(mine[0]["version"]), mine[2]["holders"]) == (8, 12, 1)
    assert mine[0]["bytes"] > 0 and mine[0]["seconds"] > 0
    (refused,) = [line for line in lines if line["event"] in ("audit", "refused") and line.get("reason")]
    assert (refused["subject"], "adapters update" in refused["reason"]) == ("name=law", True)
    assert events.count("shard left") == 2
    assert not [line for line in lines if line["level"] == "error" or "restarting" in line["event"]]


def rows(server: RunningServer) -> dict[str, dict]:
    """Adapters by name, as the CLI shows them."""
    found = json.loads(cli("adapters", "list", "--server", server.address, "--json").stdout)
    return {row["name"]: row for row in found}


def copy_with(source: Path, target: Path, **fields: object) -> None:
    config = shutil.copytree(source, target) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def test_a_bad_adapter_is_refused_and_nothing_else_suffers(load, tmp_path):
    adapters = tmp_path / "adapters"
    tiny.make_adapter(tiny.make_model("mixtral", hidden_size=32), adapters / "other-base", lora_rank=4, seed=1)
    copy_with(load.paths["qv"], adapters / "dora", use_dora=True)
    copy_with(load.paths["qv"], adapters / "alike", base_model_name_or_path="Other-7B")
    (adapters / "fused").symlink_to(load.paths["fused"])
    (adapters / "notes.txt").write_text("ignored")
    served = ["--base-model", str(load.base), "--adapters", str(adapters), *ANYWHERE]
    with running_server(tmp_path / "log", served) as server:
        at = ("--server", server.address)
        found = rows(server)
        assert [found[name]["state"] for name in ("dora", "other-base")] == ["refused", "refused"]
        assert "Other-7B" in found["alike"]["warnings"][0] and found["fused"]["error"] == ""
        for command in (["adapters", "list"], ["adapters", "show", "dora"], ["status"]):
            done = cli(*command, *at)
            assert done.returncode == 0, done.stderr
            assert "DoRA rescales" in " ".join(done.stdout.split()), command
        assert "warning: alike: base_model_name_or_path is 'Other-7B'" in cli("adapters", "list", *at).stdout
        reply = status(server.address)
        assert (reply.ready, reply.reason, reply.warned >= 1) == (True, "", True)
        assert [one.name for one in reply.refused] == ["dora", "other-base"]
        with contextlib.closing(AdapterDirectory(server.address)) as directory:
            dora, other = refusals_of(directory)  # what `make serve-vllm` prints
        assert dora.startswith("refused: dora: ") and "DoRA" in dora and other.startswith("refused: other-base: ")
        assert 'lora_server_adapters_refused{code="adapter_format"} 2.0' in server.get("/metrics")[1]
        with attach(load.model, server=server.address) as lora:
            assert answers(lora, load, "fused")
            with pytest.raises(errors.UnknownAdapterError, match="expected"), lora.adapters(["other-base"]):
                pass
        assert cli("adapters", "remove", "other-base", *at).returncode == 0
        kill_controller(server)
        assert [one.name for one in status(server.address).refused] == ["dora"]
        assert cli("adapters", "add", "dora", str(load.paths["qv"]), *at).returncode == 0
        assert rows(server)["dora"]["state"] == "ready"
        assert status(server.address).refused == []


ENDS = [signal.SIGKILL, *(pytest.param(one, marks=LONG) for one in (signal.SIGINT, signal.SIGTERM))]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("number", ENDS)
def test_a_server_that_ends_leaves_nothing_behind_and_clients_get_typed_errors(load, tmp_path, number):
    server = launch(tmp_path / "log", *flags(load, "--layout", "ep2-pp2"))
    server.wait_ready()
    with attach(load.model, server=server.address, transport="shm", timeout_seconds=5) as lora:
        with lora.adapters(["fused"]):
            processes = serving.descendants(server.process.pid)
            assert len(processes) == 6, "a fork server, a controller and four shards"
            maps = "".join(Path(f"/proc/{one.pid}/maps").read_text() for one in serving.shard_processes(server.address))
            assert "memfd:lora-client" in maps and "/dev/shm/" not in maps
            server.process.send_signal(number)
            assert server.process.wait(HANG_SECONDS) == (0 if number != signal.SIGKILL else -9)
            serving.all_gone(processes)
        with pytest.raises((errors.ServerUnavailableError, errors.StepError)), lora.adapters(["fused"]):
            load.model(torch.tensor([[5, 6]]))
    with pytest.raises(errors.ServerUnavailableError, match="is it running"):
        RemoteServer(server.address).join(2)


def test_http_and_grpc_tell_health_and_services(server):
    assert server.get("/livez") == (200, "ok\n")
    metrics = server.get("/metrics")[1]
    assert 'lora_server_shard_up{shard="0"} 1.0' in metrics and "lora_server_adapters 6.0" in metrics
    with open_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request, ready = health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse.SERVING
        until(lambda: health.Check(request, timeout=HANG_SECONDS).status == ready, "gRPC health")
        known = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"lora_server.v1.Adapters", "lora_server.v1.Clients"} <= set(known)


def test_a_client_computes_only_with_adapters_that_it_holds_or_borrows(load, server):
    """Handles count up, so any client can name them; the processes of one engine may share what one of them holds."""
    experts = load.model.model.layers[0].mlp.experts
    x, weights = torch.randn(2, load.spec.hidden), torch.tensor([[0.5, 0.5]] * 2)
    index = torch.tensor([[0, 1], [2, 3]])
    scheduler = RemoteServer(server.address, links=False).join()
    (held,) = scheduler.acquire(["fused"], time.monotonic() + HANG_SECONDS)
    with attach(load.model, server.address, timeout_seconds=HANG_SECONDS) as lora:

        def compute():
            lora._forward.batch = Batch.of([Run.of(held, 0, 2)], decode=True)
            try:
                return experts(x, index, weights)
            finally:
                lora._forward.batch = None

        with pytest.raises(errors.PermissionDeniedError, match="which this client does not hold"):
            compute()
        lora.client.recover()
        lora.client.session.borrow(scheduler.proof)
        assert not torch.allclose(compute(), experts(x, index, weights))
        scheduler.leave()

        def is_refused():
            try:
                compute()
            except errors.PermissionDeniedError:
                return True
            return False

        until(is_refused, "each shard to hear that the scheduler left")


def test_engines_learn_the_servers_wire_and_refuse_another(load, tmp_path):
    with running_server(tmp_path / "log", flags(load, "--layout", "ep2-pp2", "--wire", "e4m3")) as server:
        for transport in ("shm", "tcp"):
            with attach(load.model, server=server.address, transport=transport) as lora, lora.adapters(load.names):
                assert lora.client.described()["wire"] == "e4m3"
                found = generate(load.model, load.batch, 1)
            error = [abs(o.logprobs[0] - t.logprobs[0]) for o, t in zip(found, load.expected, strict=True)]
            assert max(error) > 1e-4, "8 bits were not exact"
            same = sum(ours.tokens[0] == theirs.tokens[0] for ours, theirs in zip(found, load.expected, strict=True))
            assert same >= len(load.names) - 1
        with pytest.raises(errors.ConfigError, match="server's is e4m3, the engine takes exact"):
            attach(load.model, server=server.address, wire="exact")
        with pytest.raises(errors.ConfigError, match="transport cuda_ipc: shard 0 computes on cpu, the engine on cpu"):
            attach(load.model, server=server.address, transport="cuda_ipc")


def engine(address: str, *names: str) -> AdapterLeases:
    return AdapterLeases(Settings(address, served_names=names), lambda text: ())


def test_a_name_is_an_engines_or_an_adapters(load, tmp_path):
    add = ("adapters", "add", "base", str(load.paths["fused"]), "--server")
    with running_server(tmp_path / "log", ["--base-model", str(load.base), *ANYWHERE]) as server:
        leases = engine(server.address, "mixtral", "base")
        refused = cli(*add, server.address)
        assert refused.returncode == 1
        assert f"'base': engine {os.uname().nodename}:{os.getpid()} serves its base model" in refused.stderr

        kill_controller(server)
        assert cli(*add, server.address).returncode == 1, "the next controller knows it too"

        leases.close()
        assert cli(*add, server.address).returncode == 0
        with pytest.raises(errors.ConfigError, match=r"served names .*'base'.*: \['base'\] are adapters of the server"):
            engine(server.address, "mixtral", "base")
        assert status(server.address).clients == 0, "it left"
        engine(server.address, "mixtral").close()


@pytest.mark.long
def test_a_server_that_comes_back_with_such_an_adapter_is_logged_as_an_error(load, tmp_path):
    """The engine stays: its other adapters, and its base model, are in use."""
    first = launch(tmp_path / "first", "--base-model", str(load.base))
    first.wait_ready()
    leases = engine(first.address, "fused")
    serving.kill(first)
    again = flags(load, "--listen", first.address)
    with running_server(tmp_path / "second", again) as second, capture_logs() as lines:
        leases.hold("r", "experts", ())
        until(lambda: not leases.state("r").is_undecided, "it has joined again")
        assert leases.state("r").held is not None
        (said,) = [line["error"] for line in lines if line["log_level"] == "error"]
        assert "['fused'] are adapters of the server" in said
        assert "hides adapters" in second.tail()
        leases.close()
