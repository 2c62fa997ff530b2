"""Settings: flags before the environment before a file before the default; the ports that they lead to."""

import itertools
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lora_server import config, spec
from lora_server.config import ServeConfig, load
from lora_server.control.members.agreement import Agreement
from lora_server.errors import ConfigError
from lora_server.placement import Layout, share
from lora_server.ports import ANY_PORT, DataPorts
from lora_server.slo import Slo
from tests.support.doc_commands import blocks


def test_precedence_is_flag_env_file_default(tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text("base-model: from-file\nlayout: ep2-pp2\nmax_step_rows: 64\nslots: 8\n")
    monkeypatch.setenv("LORA_SERVER_LAYOUT", "ep3-pp1")
    monkeypatch.setenv("LORA_SERVER_MAX_STEP_ROWS", "65")
    loaded = config.load({"max_step_rows": 66}, file)
    assert (loaded.base_model, loaded.layout, loaded.max_step_rows, loaded.slots) == ("from-file", "ep3-pp1", 66, 8)
    assert loaded.coordination == "independent"
    assert config.load({"base_model": "x"}).slots == 4, "a file is not remembered"


@pytest.mark.parametrize(("flags", "words"), [
    ({}, "--base-model: missing"),
    ({"layout": "2x2"}, "layout"),
    ({"device": "tpu"}, "--device"),
    ({"dtype": "int8"}, "--dtype"),
    ({"listen": "7400"}, "HOST:PORT"),
    ({"http": "localhost:99999"}, "HOST:PORT"),
    ({"max_step_rows": 0}, "--max-step-rows"),
    ({"coordination": "chaos"}, "--coordination"),
    ({"node_rank": 1}, "^--node-rank: got 1"),
    ({"nodes": 2, "data_port_base": 7500}, "fewer shards, and a server with --data-port-base 7500 cannot be resized"),
    ({"node_rank": "auto"}, "--node-rank: got auto with --nodes 1, expected 0"),
    ({"node_rank": "last"}, "--node-rank: got 'last', expected a rank from 0 on, or auto"),
    ({"node_rank": "-1"}, "--node-rank: got '-1', expected a rank"),
    ({"nodes": 2, "node_rank": "auto", "layout": "ep2-pp1"}, "--controller: got none with --node-rank auto"),
    ({"nodes": 2, "node_rank": 1, "layout": "ep2-pp1"}, "controller"),
    ({"standby": True, "controller": "a:1"}, "--standby: got --node-rank 0 and --controller a:1, expected .* of both"),
    ({"controller": "a:1,b:1"}, "--controller: got a:1,b:1 and no --registry, expected the postgresql://"),
    ({"controller": "a:1,b:1", "registry": "postgresql://x"}, "a:1,b:1 and no --join-token-file, expected the same"),
    ({"controller": "a:1,a:1"}, "--controller: got 'a:1,a:1', expected each address once"),
    ({"replicas": 3, "nodes": 2, "layout": "ep2-pp1"}, "--replicas: got 3 with --nodes 2, expected at most as many"),
    ({"replicas": 2, "nodes": 2}, "--replicas: got 2 with --device-pool 80%, a share .* bytes such as 40GiB"),
    ({"replicas": 2, "nodes": 2, "device_pool": "1GiB", "coordination": "leader"}, "--coordination leader, expected 1"),
    ({"sloots": 2}, "sloots: no such setting"),
    ({"watch": True}, "--watch: got no --adapters"),
    ({"listen": "127.0.0.1:65536"}, "--listen: got '127.0.0.1:65536', expected HOST:PORT such as .*65535$"),
    ({"http": "[::1:80"}, "--http: got .* HOST:PORT"),
    ({"listen": "a b:80"}, "--listen: got 'a b:80', .* HOST:PORT"),
    ({"http": "127.0.0.1:7400"}, "--http: got 127.0.0.1:7400, expected another port than that of --listen"),
    ({"listen": "0.0.0.0:7401"}, "--http: got 127.0.0.1:7401, expected another port than that of --listen"),
    ({"advertise": "10.0.0.1:7400"}, "--advertise: got '10.0.0.1:7400', expected .* without a port"),
    ({"advertise": "0.0.0.0"}, "--advertise: got '0.0.0.0', expected the name or address of one host"),
    ({"advertise": "foo bar"}, "--advertise: got"),
    ({"advertise": "10.0.0.256"}, "--advertise: got"),
    ({"data_port_base": 0}, "--data-port-base: .*greater than or equal to 1, got 0"),
    ({"data_port_base": 65531, "layout": "ep2-pp2"}, "got 65531, expected at most 65530: ep2-pp2 needs 6 ports"),
    ({"data_port_base": 7399}, "--listen: got 127.0.0.1:7400, .* 7399 to 7400, .* for ep1-pp1: choose"),
    ({"data_port_base": 7401}, "--http: got 127.0.0.1:7401, expected a port outside 7401 to 7402"),
])  # fmt: skip
def test_bad_settings_are_named(flags, words):
    base = {"base_model": "mixtral-8x7b"} if flags else {}
    with pytest.raises(ConfigError, match=words):
        config.load(base | flags)


def test_every_kind_of_setting_comes_from_the_environment(monkeypatch):
    given = {"listen": "10.0.0.1:7400", "http": "[::1]:80", "controller": "node-0:7400", "advertise": "[fe80::1%eth0]"}
    given |= {"adapters": "/adapters", "lease_seconds": "2.5", "data_port_base": "7500"}
    for name, value in given.items():
        with monkeypatch.context() as patch:
            patch.setenv(f"LORA_SERVER_{name.upper()}", value)
            read = str(getattr(config.load({"base_model": "x"}), name))
            assert read == ("fe80::1%eth0" if name == "advertise" else value)


def test_processes_of_a_node_take_nothing_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LORA_SERVER_SHARD", "3")
    monkeypatch.setenv("LORA_SERVER_SLOTS", "9")
    node = config.load({"base_model": "x", "slots": 5})
    found = {"spec_json": "{}", "bind_host": "h", "run_dir": tmp_path, "secret": "s"}
    child = config.ProcessConfig.model_validate(node.model_dump() | found)
    assert (child.shard, child.slots) == (-1, 5)
    assert config.ProcessConfig.model_validate_json(child.model_dump_json()) == child


def test_bad_files_are_refused(tmp_path):
    for text in ("[1, 2]", "layout: [", "layouts: ep1-pp1"):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError):
            config.load({"base_model": "x"}, tmp_path / "c.yaml")


@given(st.integers(1, 60000), st.integers(1, 40), st.integers(1, 40), st.data())
def test_ports_are_distinct_on_every_node_of_every_layout(base, ep, pp, data):
    """All nodes may be on one host; together they take all of the span."""
    layout = Layout(ep, pp)
    ports, nodes = DataPorts(base, layout), data.draw(st.integers(1, layout.num_shards))
    taken = []
    for shard in itertools.chain.from_iterable(share(layout.num_shards, nodes, node) for node in range(nodes)):
        taken.append(ports.data(shard))
        if layout.ep_rank(shard) == 0:
            taken.append(ports.orders(layout.stage(shard)))
    assert sorted(port.number for port in taken) == list(ports.span())
    assert len({port.owner for port in taken}) == len(taken)
    assert ports.span()[0] == base


def test_all_nodes_must_have_the_same_base():
    """A node without it would listen where no firewall lets anybody in."""
    ports = DataPorts(None, Layout(2, 2))
    assert {ports.data(3), ports.orders(1)} == {ANY_PORT} and not ports.span(), "without a base every port is any"
    nodes = [load({"base_model": "mixtral-8x7b", "data_port_base": base}) for base in (7500, 7500, 7600, None)]
    digests = [Agreement.of(node, spec.load(node.base_model)).digest() for node in nodes]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def let_in(text):
    """The ports of `7400, 7500-7504`."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {port for first, last in ranges for port in range(int(first), int(last or first) + 1)}


def test_the_documented_firewalls_open_these_ports():
    rule, node = DataPorts(7500, Layout(2, 2)), ServeConfig(base_model="M")
    orders = {rule.orders(stage).number for stage in range(2)}
    expected = {"nodes": {node.listen.port} | orders, "engines": {node.listen.port} | set(rule.span()) - orders}
    expected |= {"monitoring": {node.http.port}}
    found = {block.language: block.text for block in blocks("docs/ports.md")}
    accepted = re.findall(r'dport \{(.+)\} accept comment "(\w+)"', found["nft"])
    assert {who: let_in(ports) for ports, who in accepted} == expected
    (dropped,) = re.findall(r"dport \{(.+)\} drop", found["nft"])
    assert let_in(dropped) == set.union(*expected.values())
    ingress = yaml.safe_load(found["yaml"])["spec"]["ingress"]
    ranges = [{(one["port"], one.get("endPort", one["port"])) for one in rule["ports"]} for rule in ingress]
    allowed = [{port for low, high in some for port in range(low, high + 1)} for some in ranges]
    assert allowed == list(expected.values())


GOLD = "gold: {slo: 'ttft_p99=100ms,tpot_avg=40ms', adapters: [law, 'medical-*']}"


def test_classes_are_a_file_or_a_mapping_of_the_config_file(tmp_path, monkeypatch):
    (tmp_path / "classes.yaml").write_text(GOLD)
    (tmp_path / "plan.yaml").write_text(f"base_model: mixtral-8x7b\nclasses:\n  {GOLD}\n")
    monkeypatch.setenv("LORA_SERVER_CLASSES", str(tmp_path / "classes.yaml"))
    (gold,) = load({"base_model": "mixtral-8x7b"}).classes.classes
    assert (gold.name, gold.slo, gold.adapters) == ("gold", Slo(100_000, 99, 40_000), ("law", "medical-*"))
    monkeypatch.delenv("LORA_SERVER_CLASSES")
    config = load({}, tmp_path / "plan.yaml")
    assert config.classes.classes == (gold,)
    assert type(config).model_validate(config.model_dump()).classes == config.classes, "as its processes are told"
    assert config.classes.of_adapter("medical-7") == gold and config.classes.of_adapter("Law") is None


@pytest.mark.parametrize(("text", "says"), [
    ("gold", "got str, expected a name"), ("{}", "got dict, expected a name"),
    ("gold: {slo: fast}", "gold: got 'fast', expected such as"),
    ("others: {slo: 'ttft_p99=1s,tpot_avg=1s'}", "others: got"),
    ("a b: {slo: 'ttft_p99=1s,tpot_avg=1s'}", "'a b': expected a name of 1 to 64"),
    ("gold: {slo: 'ttft_p99=1s,tpot_avg=1s', adapters: law}", "gold: adapters: got 'law', expected a list"),
    ("gold: [", "cannot be read"),
])  # fmt: skip
def test_bad_classes_are_one_line_that_names_the_flag(tmp_path, text, says):
    (tmp_path / "classes.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({"base_model": "mixtral-8x7b", "classes": tmp_path / "classes.yaml"})
    told = str(caught.value)
    assert told.startswith(f"--classes: {tmp_path / 'classes.yaml'}") and says in told and "\n" not in told
