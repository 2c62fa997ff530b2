"""Log lines of a node's start: why it does not serve yet, that its controller is missing, and that it serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from lora_server.access.tls import own_credentials
from lora_server.address import ControllerList
from lora_server.config import ProcessConfig
from lora_server.errors import LoraServerError
from lora_server.placement import share
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import call, open_channel

POLL_SECONDS, CALL_SECONDS = 0.3, 2.0
REMIND_SECONDS = 30.0  # before the first line about a start that takes long; then twice as long each time
log = structlog.get_logger()


def ask(server: ControllerList, config: ProcessConfig) -> tuple[pb.StatusReply, str]:
    """Ask the controller; return its answer and why this node does not serve, or ''. Raises ServerUnavailableError."""
    with open_channel(str(server), own_credentials(config)) as channel:
        request = pb.StatusRequest()
        reply = call(rpc.ServerStub(channel).Status, request, server=str(server), seconds=CALL_SECONDS)
    if not config.node_rank:
        return reply, reply.reason
    own = share(len(reply.shards), config.nodes, config.node_rank)
    down = [one.shard for one in reply.shards if one.shard in own and one.state != "up"]
    return reply, f"shards not up: {down}" if down else ""


class Startup:
    """A thread that ends when the node serves or stops; it calls `fail` if the controller is never reached."""

    def __init__(
        self,
        config: ProcessConfig,
        server: ControllerList,
        stopped: threading.Event,
        fail: Callable[[LoraServerError], None],
    ) -> None:
        self._config, self._server, self._stopped, self._fail = config, server, stopped, fail
        self._began = time.monotonic()
        self._reached = config.node_rank == 0  # the node watches its own controller
        self._said, self._pause = self._began, REMIND_SECONDS
        self._thread = threading.Thread(target=self._run, name="startup", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the thread's end; call it once `stopped` is set."""
        self._thread.join(2 * CALL_SECONDS)

    @property
    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 1)

    def _run(self) -> None:
        first = True
        while not self._stopped.wait(POLL_SECONDS):
            try:
                reply, reason = ask(self._server, self._config)
            except LoraServerError as error:
                if not self._reached:
                    self._say_unreached(str(error), first)
                first, reason = False, str(error)
            else:
                self._reached = True
                if not reason:
                    self._say_serving(reply)
                    return
            self._remind(reason)

    def _say_serving(self, reply: pb.StatusReply) -> None:
        config, refused = self._config, [one.name for one in reply.refused]
        log.info(
            "serving",
            model=reply.model,
            layout=reply.layout,
            node=config.node_rank,
            listen=str(config.listen) if not config.node_rank else "",
            http=str(config.http),
            adapters=reply.adapters,
            refused=refused,
            seconds=self._seconds,
        )

    def _say_unreached(self, reason: str, first: bool) -> None:
        limit = self._config.controller_seconds
        if first:
            event = "--controller cannot be reached; trying again"
            log.warning(event, controller=str(self._server), reason=reason, gives_up_after=limit)
        if self._seconds > limit:
            text = (
                f"--controller {self._server}: not reached within {limit:g} s ({reason}); expected node 0's --listen: "
                "check the address, that node 0 runs, and the network between"
            )
            self._fail(LoraServerError(text))

    def _remind(self, reason: str) -> None:
        if time.monotonic() - self._said > self._pause:
            log.warning("not serving yet", reason=reason, seconds=self._seconds)
            self._said, self._pause = time.monotonic(), 2 * self._pause
