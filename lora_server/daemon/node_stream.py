"""A node's stream from its controller, which says of which layouts the node runs shards.

While the controller is away the shards serve on. One that starts names the layout that it serves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import structlog

from lora_server.access.tls import own_credentials
from lora_server.config import ProcessConfig
from lora_server.daemon.node_calls import NodeCall
from lora_server.daemon.placements import NodeShards
from lora_server.errors import ConfigError, LoraServerError
from lora_server.logs import Repeats
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import open_channel

MOST_REASON = bounds.BOUNDS["ShardsFailed.reason"].length
log = structlog.get_logger()


class NodeStream:
    """Has a node's shards follow the controller, in a thread of its own, until `close`."""

    def __init__(
        self, process: ProcessConfig, digest: str, shards: NodeShards, fail: Callable[[LoraServerError], None]
    ) -> None:
        """`digest`: of the agreement by the node's flags. `fail` is called where the controller refuses a node that it
        has not taken yet: the shards of any other serve on."""
        self._process, self._digest, self._shards, self._fail = process, digest, shards, fail
        self._closed, self._was_up = threading.Event(), False
        self._call: NodeCall | None = None
        self._claimed: NodeCall | None = None  # the call once it takes reports
        shards.on_failed = self._tell_failed
        self._thread = threading.Thread(target=self._run, daemon=True, name="layouts")
        self._thread.start()

    def close(self) -> None:
        """Follow it no longer."""
        self._closed.set()
        if (call := self._call) is not None:
            call.close()
        self._thread.join()

    def _run(self) -> None:
        said = Repeats(log.warning)
        while not self._closed.is_set():
            try:
                self._follow()
            except ConfigError as error:  # of a node that was up: other flags, or another process has the port for now
                if not self._was_up:
                    self._fail(error)
                    return
                said("refused", "the controller refuses this node; its shards serve on", reason=str(error))
            except LoraServerError as error:  # `Startup` and the shards say that the controller is away
                log.debug("no stream from the controller; trying again", reason=str(error))
            self._claimed = None
            self._closed.wait(self._process.timings.controller_retry)

    def _follow(self) -> None:
        """Follow one stream until it ends. Raises what ended it: ConfigError where the controller refuses the node."""
        process = self._process
        with open_channel(str(process.controller), own_credentials(process)) as channel:
            method = rpc.ShardsStub(channel).FollowLayouts
            with contextlib.closing(NodeCall(method, process, process.secret, process.node_rank)) as call:
                self._call = call
                if self._closed.is_set():
                    return
                with call.in_time():
                    call.claim(pb.RankClaim(rank=process.node_rank, nodes=process.nodes, agreement_digest=self._digest))
                    command = next(call.answers, None)
                self._was_up = True
                with call.translated():
                    while command is not None:
                        self._shards.run({one.generation: one.layout for one in command.layouts.layouts})
                        self._tell_earlier(call)
                        command = next(call.answers, None)

    def _tell_earlier(self, call: NodeCall) -> None:
        """Report what failed before this call could take a report, of layouts that its controller named."""
        if self._claimed is not call:
            self._claimed = call
            for generation, reason in list(self._shards.failed.items()):
                self._tell_failed(generation, reason)

    def _tell_failed(self, generation: int, reason: LoraServerError) -> None:
        if (call := self._claimed) is not None:
            text = " ".join(str(reason).split())[:MOST_REASON]
            call.send(pb.NodeReport(failed=pb.ShardsFailed(generation=generation, reason=text)))
