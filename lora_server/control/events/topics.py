"""Which topics a caller may read."""

from __future__ import annotations

from lora_server.access.identity import OPERATOR, Identity
from lora_server.wire.events import ADAPTER, ADMISSION, RESIDENCY, SHARD, topic_of


def topics_of_tenant(tenant: str) -> frozenset[str]:
    """Return what a tenant may read: its own adapters and requests, the operator's adapters, and shards."""
    own = {topic_of(kind, tenant) for kind in (ADAPTER, RESIDENCY, ADMISSION)}
    return frozenset(own | {topic_of(kind, OPERATOR) for kind in (ADAPTER, RESIDENCY, SHARD)})


def may_read(who: Identity, topic: str) -> bool:
    """Return whether a caller may read a topic. The operator's may read all: its engines serve any tenant."""
    return who.is_operator or topic in topics_of_tenant(who.tenant)
