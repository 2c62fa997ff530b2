"""Calls of a node to its controller: each side proves first that it knows the nodes' token."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, cast

import grpc

from lora_server.config import ServeConfig
from lora_server.errors import ConfigError, ServerUnavailableError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.leader import leader_of, leave
from lora_server.wire.messages import NONCE_BYTES, proof, proves
from lora_server.wire.rpc import translate

_Reports: TypeAlias = "queue.SimpleQueue[pb.NodeReport | None]"


class NodeCall:
    """One call under way. Thread-safe, but for `claim`."""

    def __init__(self, method: Callable[..., Any], config: ServeConfig, secret: str, node: int, name: str = "") -> None:
        """`node`: shown as the caller's rank; `name`: of the node in errors, its rank where it is empty."""
        self._seconds, self._key, self._node = config.timings.handshake, secret.encode(), node
        self._address, self._name = str(config.controller), name or str(node)
        self._reports: _Reports = queue.SimpleQueue()
        self._leader, self._is_late = leader_of(self._address), False
        self.answers: Iterator[pb.NodeCommand] = method(iter(self._reports.get, None))

    @contextlib.contextmanager
    def in_time(self) -> Iterator[None]:
        """End the call if the block takes too long; with a standby the next goes to the other controller. Turns gRPC's
        errors in the block into ours."""
        late = threading.Timer(self._seconds, self._give_up)
        late.daemon = True
        late.start()
        try:
            with self.translated():
                yield
        finally:
            late.cancel()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turn gRPC's errors in the block into ours."""
        try:
            yield
        except grpc.RpcError as error:
            if self._is_late:
                raise ServerUnavailableError(f"server {self._leader}: no answer within {self._seconds:g} s") from None
            raise translate(cast(grpc.Call, error), self._address, self._seconds) from None

    def _give_up(self) -> None:
        self._is_late = True
        leave(self._address, self._leader)
        self.close()

    def claim(self, claim: pb.RankClaim) -> None:
        """Send a claim, with a proof of the token. Raises ConfigError if the controller does not know that."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.send(pb.NodeReport(hello=pb.ShardHello(node=self._node, nonce=nonce)))
        challenge = next(self.answers, pb.NodeCommand()).challenge
        if not proves(challenge.proof, self._key, b"controller", nonce, challenge.nonce):
            raise ConfigError(
                f"controller {self._address}: its token is not that of node {self._name}; give every node a "
                "--join-token-file with the same text"
            )
        claim.proof = proof(self._key, b"node", challenge.nonce, nonce)
        self.send(pb.NodeReport(claim=claim))

    def send(self, report: pb.NodeReport) -> None:
        """Send a report."""
        self._reports.put(report)

    def close(self) -> None:
        """End the call. Idempotent."""
        self._reports.put(None)
        cast(Any, self.answers).cancel()
