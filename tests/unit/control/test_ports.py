"""The ports of --data-port-base, and the firewall rules of the documents."""

import itertools
import re

import yaml
from hypothesis import given
from hypothesis import strategies as st

from lora_server import spec
from lora_server.config import ServeConfig, load
from lora_server.control.members.agreement import Agreement
from lora_server.placement import Layout, share
from lora_server.ports import ANY_PORT, DataPorts
from tests.support.doc_commands import blocks


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
