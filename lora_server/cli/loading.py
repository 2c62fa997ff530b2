"""Progress of an adapter that is being added, on stderr if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lora_server import terminal
from lora_server.errors import LoraServerError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

POLL_SECONDS, CALL_SECONDS = 0.2, 2.0


@contextlib.contextmanager
def loading(server: str, name: str) -> Iterator[None]:
    """Show bars until the block ends: first for validation, then one per shard."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    with terminal.progress(transient=True) as progress:
        thread = threading.Thread(target=follow, args=(server, name, progress, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(2 * CALL_SECONDS)


def follow(server: str, name: str, progress: Progress, ended: threading.Event) -> None:
    """Poll the controller until `ended` is set."""
    from lora_server.wire import lora_server_pb2 as pb
    from lora_server.wire import lora_server_pb2_grpc as rpc
    from lora_server.wire.rpc import call, open_channel

    shards: dict[int, TaskID] = {}
    validating = progress.add_task("validating", total=None)
    with open_channel(server) as channel:
        while not ended.wait(POLL_SECONDS):
            try:
                request = pb.GetAdapterRequest(name=name, registered=True)
                adapter = call(rpc.AdaptersStub(channel).Get, request, server=server, seconds=CALL_SECONDS)
            except LoraServerError:  # it is listed once it is validated
                continue
            progress.update(validating, visible=False)
            for one in adapter.shards:
                if one.shard not in shards:
                    shards[one.shard] = progress.add_task(f"loading on shard {one.shard}", total=one.layers)
                progress.update(shards[one.shard], completed=one.ready)
