"""The rank of a node with `--node-rank auto`: leased from the controller, and renewed as long as the node runs."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable

import structlog

from lora_server.access.tls import node_credentials
from lora_server.config import ServeConfig
from lora_server.daemon.checks import node_secret
from lora_server.daemon.node_calls import NodeCall
from lora_server.errors import LeaseError, LoraServerError, ServerUnavailableError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import open_channel

ID_BYTES = 16
ANY_NODE = 1  # in a hello, of a node that has no rank yet: none above 0 differs from another there
log = structlog.get_logger()


class LeasedRank:
    """A node's lease of a rank."""

    def __init__(self, config: ServeConfig) -> None:
        self._config, self._secret = config, node_secret(config)
        self._address, self._node = str(config.controller), secrets.token_bytes(ID_BYTES)
        self._channel = open_channel(self._address, node_credentials(config, self._secret))
        self._lease = pb.RankLease()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, stop: threading.Event) -> int:
        """Wait for a rank and return it. Raises ServerUnavailableError if no controller answers within
        --controller-seconds or `stop` is set, ConfigError if the controller was started with other settings."""
        seconds, said = self._config.controller_seconds, ""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._lease = self._ask()
                reason, deadline = "no rank is free", math.inf  # a spare waits for good
            except ServerUnavailableError as error:
                reason = str(error)
            if self._lease.rank:
                log.info("leased a rank", rank=self._lease.rank, epoch=self._lease.epoch)
                return self._lease.rank
            if reason != said:
                log.warning("no rank yet; standing by for one", controller=self._address, reason=reason)
                said = reason
            if time.monotonic() > deadline:
                raise ServerUnavailableError(
                    f"--controller {self._address}: not reached within {seconds:g} s ({reason}); expected node 0's "
                    "--listen: check the address, that node 0 runs, and the network between"
                )
            if stop.wait(self._config.timings.rank_beat):
                raise ServerUnavailableError("stopped while it stood by for a rank")

    def keep(self, fail: Callable[[LoraServerError], None]) -> None:
        """Renew the lease until `close`; call `fail` once the rank is another node's."""
        self._thread = threading.Thread(target=self._keep, args=(fail,), daemon=True, name="rank")
        self._thread.start()

    def close(self) -> None:
        """End the lease, if the controller answers. Idempotent."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._lease.rank:
            try:
                self._ask(leaves=True)
            except LoraServerError as error:
                log.info("the lease of this node's rank runs out by itself", rank=self._lease.rank, reason=str(error))
            self._lease = pb.RankLease()
        self._channel.close()

    def _keep(self, fail: Callable[[LoraServerError], None]) -> None:
        said = ""
        while not self._closed.wait(self._config.timings.rank_beat):
            try:
                self._ask()
                said = ""
            except LeaseError:
                rank = self._lease.rank
                self._lease = pb.RankLease()
                fail(
                    LeaseError(
                        f"--node-rank auto: rank {rank} was leased to another node while this one was away; start this "
                        "node again: it takes a free rank, or stands by for one"
                    )
                )
                return
            except ServerUnavailableError as error:  # shards serve on, and say so
                log.debug("cannot renew the lease of this node's rank", reason=str(error))
            except LoraServerError as error:
                if str(error) != said:
                    log.error("cannot renew the lease of this node's rank", reason=str(error))
                    said = str(error)

    def _ask(self, leaves: bool = False) -> pb.RankLease:
        """Ask for a rank, or renew or end the lease of one. Raises what the controller says."""
        method, held = rpc.ShardsStub(self._channel).LeaseRank, self._lease
        call = NodeCall(method, self._config, self._secret, ANY_NODE, "auto")
        with contextlib.closing(call), call.in_time():
            nodes = self._config.nodes
            call.claim(pb.RankClaim(node=self._node, rank=held.rank, epoch=held.epoch, nodes=nodes, leaves=leaves))
            return next(call.answers, pb.NodeCommand()).lease
