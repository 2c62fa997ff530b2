"""Files of registered adapters, for shards of nodes that do not have them. They are read on threads of their own, and
few are under way at once: calls of clients wait for none of it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc

from lora_server.access.identity import Identity
from lora_server.adapters import AdapterLimits, adapter_files
from lora_server.control.controller import Controller
from lora_server.control.members.shards import all_live
from lora_server.control.rpc.listener import StreamCall, Threads, Write
from lora_server.errors import (
    AdapterFormatError,
    AdapterSourceError,
    PermissionDeniedError,
    ServerBusyError,
    ServerUnavailableError,
    UnknownAdapterError,
)
from lora_server.sources.urls import is_remote
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.proofs import is_signed

PIECE_BYTES = 1 << 20
MOST_AT_ONCE, MOST_WAITING = 8, 1024  # files


class FilesService:
    """The RPCs `Files` and `Read` of Shards. A caller proves that it is a registered shard process."""

    def __init__(
        self,
        controller: Controller,
        threads: Threads,
        piece_bytes: int = PIECE_BYTES,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._shards, self._adapters, self._threads = controller.shards, controller.adapters, threads
        self._piece_seconds, self._piece_bytes = controller.timings.file_piece, piece_bytes
        self._most = MOST_AT_ONCE + most_waiting
        self._limits = AdapterLimits.of(controller.agreement.spec)
        self._places, self.under_way = asyncio.Semaphore(MOST_AT_ONCE), 0

    def files(self, request: pb.FilesRequest, _: Identity) -> pb.FilesReply:
        """List an adapter's files and their sizes."""
        self._check(request)
        found = self._found(request.version)[1]
        return pb.FilesReply(files=[pb.File(name=name, bytes=nbytes) for name, nbytes in found.items()])

    async def read(self, request: pb.ReadRequest, call: StreamCall[pb.ReadRequest]) -> None:
        """Stream a file of an adapter. Runs on the event loop; memory holds one piece of each file being sent."""
        self._check(request)
        call.prove()
        if self.under_way >= self._most:
            raise ServerBusyError(f"{self.under_way} files are on their way to shards, as many as may; try again soon")
        self.under_way += 1
        try:
            async with self._places:
                await self._send(request, call.write)
        finally:
            self.under_way -= 1

    async def _send(self, request: pb.ReadRequest, write: Write) -> None:
        file, at = await self._threads.run(self._file, request), request.begin
        while data := await self._threads.run(self.piece, file, at):
            try:
                await asyncio.wait_for(write(pb.Piece(data=data)), self._piece_seconds)
            except TimeoutError:
                raise ServerUnavailableError(
                    f"shard {request.proof.shard}: took no piece of {request.name} within {self._piece_seconds:g} s"
                ) from None
            except grpc.aio.BaseError:  # the shard is gone
                return
            at += len(data)

    def _file(self, request: pb.ReadRequest) -> Path:
        path, files = self._found(request.version)
        if request.name not in files:
            raise AdapterSourceError(f"{path}: got {request.name[:80]!r}, expected one of {', '.join(files)}")
        return path / request.name

    def _found(self, version: str) -> tuple[Path, dict[str, int]]:
        path = self._path_of(version)
        try:
            return path, adapter_files(path, self._limits)
        except (AdapterFormatError, OSError) as error:
            raise AdapterSourceError(f"{path}: cannot be read any more: {error}") from error

    def _path_of(self, version: str) -> Path:
        """Return where this host has the files of a version in the catalog. Raises UnknownAdapterError."""
        paths = (one.path for one in self._adapters.catalog.records() if one.version == version)
        found = next((path for path in paths if not is_remote(path)), None)
        if found is None or not self._adapters.sync.sends:
            raise UnknownAdapterError(f"version {version[:12]}: node 0 has no files of it to send; was it removed?")
        return Path(found)

    def _check(self, request: pb.FilesRequest | pb.ReadRequest) -> None:
        """Check that the registered process of the shard signed a request; the key is its instance id, which it gives
        to the controller only. Raises PermissionDeniedError, ServerUnavailableError."""
        proof = request.proof
        registered = [one for one in all_live(self._shards) if one.shard == proof.shard]  # two during a resize
        if not registered:
            raise ServerUnavailableError(f"shard {proof.shard} is not registered now; try again once it is")
        caller = next((one for one in registered if is_signed(request, one.registration.instance.encode())), None)
        if caller is None or not caller.calls.take(proof.count):
            raise PermissionDeniedError(
                f"files of adapters: got a call that is not of the registered process of shard {proof.shard}, "
                "expected one of that process; clients compute with adapters and do not read them"
            )

    def piece(self, file: Path, at: int) -> bytes:
        """Read up to one piece of a file from offset `at`; empty at the file's end."""
        try:
            with file.open("rb", buffering=0) as opened:
                return os.pread(opened.fileno(), self._piece_bytes, at)
        except OSError as error:
            raise AdapterSourceError(f"{file}: cannot be read: {error.strerror}; was the adapter removed?") from error
