"""The ports of --data-port-base: whose each is, and what happens where one cannot be had."""

from __future__ import annotations

import itertools
import re
import socket

import yaml
from hypothesis import given
from hypothesis import strategies as st

from lora_server import spec
from lora_server.config import ServeConfig, load
from lora_server.control.members.agreement import Agreement
from lora_server.placement import Layout, share
from lora_server.ports import ANY_PORT, DataPorts
from tests.support.doc_commands import blocks
from tests.support.serving import cli, free_base


@given(st.integers(1, 60000), st.integers(1, 40), st.integers(1, 40), st.data())
def test_no_two_ports_are_the_same_on_any_node_of_any_layout(base, ep, pp, data):
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


def test_without_a_base_every_port_is_any():
    ports = DataPorts(None, Layout(2, 2))
    assert {ports.data(3), ports.orders(1)} == {ANY_PORT} and not ports.span()


def test_all_nodes_must_have_the_same_base():
    """A node without it would listen where no firewall lets anybody in."""
    nodes = [load({"base_model": "mixtral-8x7b", "data_port_base": base}) for base in (7500, 7500, 7600, None)]
    digests = [Agreement.of(node, spec.load(node.base_model)).digest() for node in nodes]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def let_in(text):
    """Of `7400, 7500-7504`."""
    return {
        port
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)
        for port in range(int(first), int(last or first) + 1)
    }


def test_the_documents_firewalls_let_in_what_the_rule_says():
    rule, node = DataPorts(7500, Layout(2, 2)), ServeConfig(base_model="M")
    orders = {rule.orders(stage).number for stage in range(2)}
    expected = {
        "nodes": {node.listen.port} | orders,
        "engines": {node.listen.port} | set(rule.span()) - orders,
        "monitoring": {node.http.port},
    }
    found = {block.language: block.text for block in blocks("docs/ports.md")}
    accepted = re.findall(r'dport \{(.+)\} accept comment "(\w+)"', found["nft"])
    assert {who: let_in(ports) for ports, who in accepted} == expected
    (dropped,) = re.findall(r"dport \{(.+)\} drop", found["nft"])
    assert let_in(dropped) == set.union(*expected.values())
    ingress = yaml.safe_load(found["yaml"])["spec"]["ingress"]
    ranges = [{(one["port"], one.get("endPort", one["port"])) for one in rule["ports"]} for rule in ingress]
    allowed = [{port for low, high in some for port in range(low, high + 1)} for some in ranges]
    assert allowed == list(expected.values())


def test_a_port_that_is_taken_is_named_and_ends_the_node():
    base = free_base(2)
    with socket.create_server(("127.0.0.1", base)):
        flags = ("--base-model", "mixtral-8x7b", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        done = cli("serve", *flags, "--data-port-base", str(base))
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last.startswith("error: shard 0 "), "Traceback" in done.stderr) == (1, True, False), last
    assert f"127.0.0.1:{base} for the data of shard 0 (Address already in use); expected it free" in last
