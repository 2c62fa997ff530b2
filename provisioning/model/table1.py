"""The paper's Table 1: what the four ways to spread adapters over the LoRA Server move and compute.

Symbols: b batch of one LLM instance, k experts per token, p GPUs of the instance, m of the server,
x and y of EPx-PPy. Volumes count expert activations of one layer.

Text and table disagree on the peers of EP and hybrid: the table has max(m/p, 1) and max(x/p, 1), the
text of section 4.1 max(p/m, 1) and max(p/x, 1). Both occur, seen from the two ends. With aligned
blocks of experts a client GPU talks to max(x/p, 1) servers and a server GPU hears max(p/x, 1)
clients; the pairs are then p * max(x/p, 1) = x * max(p/x, 1) = max(p, x), which is the only count that
fits the volume both give, (b k) / max(p, x) per pair. Section 4.1 defines the metric as "number of
client GPUs communicating with a server GPU", which is the text's formula; the table's column is the
same metric from the client (its DP row, m, is too: by the text's definition it would be p). So
`peers_of_server` is the metric as defined, and `peers_of_client` is the column as printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from provisioning.inputs import InputError, count

Strategy = Literal["dp", "pp", "ep", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class Volumes:
    """One row of Table 1, with the peers seen from both ends."""

    peer_volume: float
    peers_of_client: float
    peers_of_server: float
    compute_volume: float
    sync_scope: int


def volumes(strategy: Strategy, *, b: int, k: int, p: int, x: int, y: int = 1) -> Volumes:
    """Compute Table 1 for a server of m = x * y GPUs; DP, PP and EP use m alone."""
    for name, value in (("b", b), ("k", k), ("p", p), ("x", x), ("y", y)):
        count(value, name, 1)
    m = x * y
    if strategy == "dp":  # adapters are spread over all GPUs; every client GPU may need every server GPU
        return Volumes(
            peer_volume=b * k / (p * m), peers_of_client=m, peers_of_server=p, compute_volume=b * k / m, sync_scope=m
        )
    shards = {"pp": 1, "ep": m, "hybrid": x}  # of a stage
    if strategy not in shards:
        raise InputError(f"strategy: got {strategy!r}, expected one of dp, pp, ep, hybrid")
    return hybrid(b=b, k=k, p=p, x=shards[strategy])


def hybrid(*, b: int, k: int, p: int, x: int) -> Volumes:
    """Compute EPx-PPy. It does not depend on y: one stage of x GPUs serves a layer. PP is x = 1, EP is x = m."""
    return Volumes(
        peer_volume=b * k / max(p, x),
        peers_of_client=max(x / p, 1),
        peers_of_server=max(p / x, 1),
        compute_volume=b * k / x,
        sync_scope=x,
    )
