"""Files of adapters that lie on node 0, for a shard of another node. After a break they go on behind what came."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import grpc
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from lora_server.errors import AdapterSourceError, ServerUnavailableError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.rpc import call, open_channel, translate

MIN_PAUSE = 0.1
FILES_SECONDS, READ_SECONDS = 30.0, 600.0  # a file may have to wait for others
_T = TypeVar("_T")


@dataclass(frozen=True)
class Node0:
    """How a shard asks its controller; `instance` is what it registered as."""

    address: str
    credentials: Credentials
    shard: int
    instance: str
    timings: Timings = DEFAULTS

    @contextlib.contextmanager
    def files(self, version: str) -> Iterator[Node0Files]:
        """Of a registered adapter; by a connection beside the one that reports go through."""
        with open_channel(self.address, self.credentials, apart=True) as channel:
            yield Node0Files(self, rpc.ShardsStub(channel), version)

    @property
    def proof(self) -> pb.ShardProof:
        """Of each call."""
        return pb.ShardProof(shard=self.shard, instance=self.instance)


class Node0Files:
    """As sources.remote.RemoteAdapter of a URL. Methods raise AdapterSourceError, and what the controller raises."""

    def __init__(self, node: Node0, shards: rpc.ShardsStub, version: str) -> None:
        self._node, self._shards, self._version = node, shards, version

    def sizes(self, check: Callable[[], None]) -> dict[str, int]:
        """Of each file that the adapter has there, in bytes."""
        request = pb.FilesRequest(proof=self._node.proof, version=self._version)

        def ask() -> pb.FilesReply:
            method, server = self._shards.Files, self._node.address
            reply: pb.FilesReply = call(method, request, server=server, seconds=FILES_SECONDS)
            return reply

        found = {one.name: one.bytes for one in self._patiently(ask, check).files}
        for name in found:
            if Path(name).name != name:
                raise AdapterSourceError(f"node 0 sends a file {name[:80]!r}, expected a name without a directory")
        return found

    def get(self, name: str, target: Path, size: int, check: Callable[[], None]) -> None:
        """Copy one file; `check` is called between pieces, and may raise."""
        target.touch(mode=0o600)
        while (have := target.stat().st_size) < size:
            self._patiently(lambda: self._read(name, target, size, check), check)
            if target.stat().st_size == have:
                raise AdapterSourceError(f"{name}: got {have} of {size} bytes; was it changed on node 0?")

    def _read(self, name: str, target: Path, size: int, check: Callable[[], None]) -> None:
        """Put what one call brings behind what is there; one that breaks after it brought something is no failure."""
        began = have = target.stat().st_size
        request = pb.ReadRequest(proof=self._node.proof, version=self._version, name=name, begin=began)
        pieces = self._shards.Read(request, timeout=READ_SECONDS)
        with target.open("ab") as file:
            try:
                for piece in pieces:
                    have += len(piece.data)
                    if have > size:
                        raise AdapterSourceError(f"{name}: got more than {size} bytes; was it changed on node 0?")
                    file.write(piece.data)
                    check()
            except grpc.RpcError as error:
                failure = translate(cast(grpc.Call, error), self._node.address, READ_SECONDS)
                if have == began or not isinstance(failure, ServerUnavailableError):
                    raise failure from None
            finally:
                pieces.cancel()

    def _patiently(self, request: Callable[[], _T], check: Callable[[], None]) -> _T:
        """What fails because the controller is away, or has too much to do, is tried again."""
        timings = self._node.timings
        retrying = Retrying(
            retry=retry_if_exception_type(ServerUnavailableError),
            stop=stop_after_delay(timings.node0_away),
            wait=wait_random_exponential(MIN_PAUSE, max=timings.node0_pause),
            before=lambda _: check(),
            reraise=True,
        )
        try:
            return retrying(request)
        except ServerUnavailableError as error:
            raise AdapterSourceError(
                f"node 0 did not send its files within {timings.node0_away:g} s ({error}); they are asked for again "
                "with the next request for it, once node 0 runs and this node reaches it"
            ) from error
