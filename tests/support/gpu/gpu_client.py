"""An engine process that dies in the middle of a put: python -m tests.support.gpu.gpu_client SERVER ADAPTER ROUNDS.

It takes a step of its own, says so, and puts the next one as far as ROUNDS of its kernel's turns; then it says that,
and waits to be killed.
"""

from __future__ import annotations

import sys
import threading

import torch

from client_connector.remote import RemoteServer
from tests.support.gpu import emulated_gpu
from tests.support.gpu.gpu_steps import Steps


def main() -> None:
    server, adapter, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    emulated_gpu.use()
    torch.set_grad_enabled(False)
    session = RemoteServer(server, "gpu").join()
    (held,) = session.acquire([adapter])
    steps = Steps(session, held.handle)
    steps.step()
    print("step", flush=True)
    emulated_gpu.EmulatedQueue.stop_after = rounds
    steps.push()
    assert emulated_gpu.EmulatedQueue.stopped.wait(60)
    print("in the middle", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
