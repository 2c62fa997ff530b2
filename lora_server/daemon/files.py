"""Copies adapters' files from node 0 to a shard of another node. A broken transfer resumes where it stopped."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import grpc
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from lora_server.errors import AdapterSourceError, ServerUnavailableError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.proofs import sign
from lora_server.wire.rpc import call, open_channel, translate

MIN_PAUSE = 0.1
FILES_SECONDS, READ_SECONDS = 30.0, 600.0  # a file may have to wait for others
_T = TypeVar("_T")


@dataclass(frozen=True)
class Node0:
    """The controller as a shard's source of files; `instance` is what the shard registered as."""

    address: str
    credentials: Credentials
    shard: int
    instance: str
    timings: Timings = DEFAULTS
    _calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @contextlib.contextmanager
    def files(self, version: str) -> Iterator[Node0Files]:
        """Open an adapter's files, on a connection apart from the one for reports."""
        with open_channel(self.address, self.credentials, apart=True) as channel:
            yield Node0Files(self, rpc.ShardsStub(channel), version)

    def sign(self, request: pb.FilesRequest | pb.ReadRequest) -> None:
        """Prove that a call is this shard's; for one call only."""
        sign(request, pb.ShardProof(shard=self.shard, count=next(self._calls)), self.instance.encode())


class Node0Files:
    """An adapter's files on node 0; see sources.remote.RemoteAdapter. Methods raise AdapterSourceError."""

    def __init__(self, node: Node0, shards: rpc.ShardsStub, version: str) -> None:
        self._node, self._shards, self._version = node, shards, version

    def sizes(self, check: Callable[[], None]) -> dict[str, int]:
        """Return the size of each of the adapter's files, in bytes."""
        request = pb.FilesRequest(version=self._version)

        def ask() -> pb.FilesReply:
            self._node.sign(request)
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
        """Append the bytes of one call to the file. A call that breaks after it delivered some counts as success."""
        began = have = target.stat().st_size
        request = pb.ReadRequest(version=self._version, name=name, begin=began)
        self._node.sign(request)
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
        """Retry while the controller is away or overloaded."""
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
