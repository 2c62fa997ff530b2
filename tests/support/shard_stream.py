"""A shard's stream to a controller, without the shard."""

import contextlib
import threading

from lora_server.daemon.stream import ControllerStream
from lora_server.timings import DEFAULTS
from lora_server.wire.credentials import Credentials
from tests.support.controllers import registration
from tests.support.serving import HANG_SECONDS


@contextlib.contextmanager
def shard_of(address, digest, secret, timings=DEFAULTS):
    """(its stream, what it was told to do, a function that waits for its end and returns why it ended)."""
    told, stopping, ended = [], threading.Event(), []

    def execute(command, done):
        told.append(command)
        done(None)

    def register():
        return registration(0, agreement_digest=digest)

    stream = ControllerStream(address, Credentials(node_secret=secret), register, execute, lambda handle: 0, timings)
    thread = threading.Thread(target=lambda: ended.append(stream.run(stopping)), daemon=True)
    thread.start()

    def end():
        thread.join(HANG_SECONDS)
        return ended[0]

    try:
        yield stream, told, end
    finally:
        stopping.set()
        stream.leave(HANG_SECONDS)
