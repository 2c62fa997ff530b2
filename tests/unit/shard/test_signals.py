"""A process that is asked to stop does, also in the middle of a wait for that."""

import signal
import subprocess
import sys

from tests.support.serving import HANG_SECONDS

WAITS = """
import signal, sys, threading
from lora_server.daemon.signals import on_signals
stop = threading.Event()
on_signals((signal.SIGTERM,), stop.set)
print("up", flush=True)
for _ in range(int(sys.argv[1])):
    while not stop.wait(1e-6):
        pass
    stop.clear()
    print("asked", flush=True)
"""
TIMES = 3000


def test_a_signal_in_the_middle_of_a_wait_is_heard():
    """Handlers that set the event themselves hang here after some hundred signals."""
    command = [sys.executable, "-c", WAITS, str(TIMES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "up\n"
            for _ in range(TIMES):
                process.send_signal(signal.SIGTERM)
                assert process.stdout.readline() == "asked\n"
            assert process.wait(HANG_SECONDS) == 0
        finally:
            process.kill()
