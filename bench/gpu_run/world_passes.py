"""A serving engine's pass as launches in NVSHMEM's world, beside a host's exchanges over TCP, in one process.

On a GPU it is captured once, without rows of adapters, and replayed; elsewhere its launches are in no graph.
"""

from __future__ import annotations

import torch

from bench.gpu_run.passes import BATCHES, ROWS, SECONDS, SEED, Layer, answers, captured
from client_connector.client import Client
from client_connector.remote import RemoteServer
from client_connector.serving.launched import LaunchedPass
from client_connector.serving.planned import PlannedPass


def judged(server: str, transport: str, device: str) -> dict[str, bool]:
    """Compare passes with the host's: name -> whether it was right. Joins the world, and leaves it at the end."""
    host = PlannedPass(Client(RemoteServer(server, "tcp"), SECONDS), lambda: True)
    client = Client(RemoteServer(server, transport, device=device), SECONDS)
    forward = LaunchedPass(client, lambda: True, dtype=torch.bfloat16, max_rows=ROWS, max_adapters=4)
    try:
        return _judged(forward, host, device)
    finally:
        forward.close()
        host.close()


def _judged(forward: LaunchedPass, host: PlannedPass, device: str) -> dict[str, bool]:
    spec = forward.client.terms.spec
    layer, oracle = (Layer(spec, one, ROWS, its, scale=0.0) for one, its in ((forward, device), (host, "cpu")))
    plays = {"eager": layer.run}
    if device == "cuda":
        plays = {"replayed": captured(layer).replay, **plays}
    found = {}
    for how, play in plays.items():
        for seed, names in enumerate(BATCHES):
            pairs = zip(answers(layer, names, seed, play), answers(oracle, names, seed, oracle.run), strict=True)
            found[f"{how}: {names}"] = all(torch.equal(ours, theirs) for ours, theirs in pairs)
        before = forward.sent()
        found[f"{how}: base rows"] = not any(one.any() for one in answers(layer, (None,), SEED, play))
        found[f"{how}: base rows send nothing"] = forward.sent() == before
    return found
