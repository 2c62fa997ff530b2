"""An expert may have several owners: a client sends its rows to the first, and to no other."""

from operator import attrgetter

import torch

from client_connector.client import Client
from client_connector.forward_pass import ForwardPass
from client_connector.routing import Batch, Run
from lora_server.demo import inproc
from lora_server.placement import Placement
from lora_server.spec import Site
from tests.support.workload import workload

ROWS, LAYOUT = 6, "ep2-pp2"


class Replicated(Placement):
    """Each shard has all of its stage; the owner that an expert has without replicas is its last."""

    def owners(self, site, expert=0):
        (alone,) = super().owners(site, expert)
        return (*(shard for shard in self.layout.stage_shards(site.layer) if shard != alone), alone)

    def experts(self, site, shard):
        return range(self.spec.experts_at(site) if shard in self.layout.stage_shards(site.layer) else 0)


def answers(placement_type, monkeypatch):
    """The deltas of a dense and of an expert site, and which shards computed them."""
    monkeypatch.setattr(inproc, "Placement", placement_type)
    load, used = workload("mixtral"), []
    server = inproc.InprocServer(load.spec, load.paths, layout=LAYOUT)
    client = Client(server)
    client.placement, client.observe = server.placement, lambda times: used.append((times.site, times.shard))
    forward = ForwardPass(client)
    forward.batch = Batch.of([Run.of(server.held["fused"], 0, ROWS)], decode=True)
    x, experts_Tk = torch.linspace(-1, 1, ROWS * load.spec.hidden).view(ROWS, -1), torch.arange(ROWS)[:, None]
    deltas = []
    for layer in range(2):
        qkv, gate_up = Site(layer, "qkv"), Site(layer, "gate_up")
        for started, place in (
            (forward.start_dense(qkv, x), "rows_M"),
            (forward.start_experts(gate_up, experts_Tk, x), "pairs_P"),
        ):
            deltas.append(out := torch.zeros(ROWS, load.spec.out_width(started.site)))
            rows = attrgetter(place)
            forward.finish(started, lambda message, delta, out=out, rows=rows: out.index_add_(0, rows(message), delta))
    client.close()
    server.close()
    return deltas, used


def test_a_client_sends_rows_to_the_first_owner(monkeypatch):
    alone, alone_used = answers(Placement, monkeypatch)
    replicated, used = answers(Replicated, monkeypatch)
    assert all(torch.equal(one, other) and one.any() for one, other in zip(alone, replicated, strict=True))
    assert sorted(used) == sorted((site, shard ^ 1) for site, shard in alone_used), "the other shard of each stage"
